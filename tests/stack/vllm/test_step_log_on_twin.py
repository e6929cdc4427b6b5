"""The step log in a real vLLM server agrees with the observer, which sees the engine core itself."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from harness.analysis.logs.observer import load_observer
from harness.extras.twin.environment import TwinEnvironment
from harness.stack.vllm.launch import STEP_LOG
from harness.stack.vllm.step_log import INSIDE, load_step_log
from tests.support.twin_runs import run_on_twin

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_the_steps_of_a_server_are_those_of_its_engine_core(twin: TwinEnvironment, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    workload = {"num_sessions": 6, "waits": "none"}
    variables = {"PYTHONPATH": os.fspath(INSIDE), **STEP_LOG.variables(file)}
    run = run_on_twin(tmp_path, "steps", workload, {"environment": twin.version, "env": variables})
    assert run.is_valid, run.invalid_reasons
    log = load_step_log(file)
    steps = load_observer(run.file("observer.jsonl")).steps.select(["kind", "n"]).to_pylist()
    assert [n for n in log.steps["n"].to_pylist() if n is not None] == [
        step["n"] for step in steps if step["kind"] == "decode"
    ]
    # This stack never mixes prefill and decode in a step.
    assert log.num_by_kind["prefill"] == sum(step["kind"] == "prefill" for step in steps)
    assert "mixed" not in log.num_by_kind
    assert log.effective["max_num_seqs"] == 8
    assert log.num_damaged == 0
    # Its model runner reports no padding: the step log says so and shows no batch sizes.
    assert log.steps["b"].null_count == log.steps.num_rows
    assert "padded tokens" in log.unseen[0]
    assert "STEP LOG" not in run.file("server.log").read_text(errors="replace")
