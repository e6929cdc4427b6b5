"""The step log and the recorded sessions of a real vLLM server agree with the steps of its engine core, and with what
was planned."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.extras.twin.environment import TwinEnvironment
from harness.measure.records.run import SealedRun
from harness.stacks.vllm.launch import STEP_LOG
from harness.stacks.vllm.step_log import load_step_log
from tests.support.observed import observed_steps
from tests.support.sessions_on_twin import KINDS, cached_by_observer, cached_tokens, imported, num_whole, record

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_the_steps_of_a_server_are_those_of_its_engine_core(twin: TwinEnvironment, tmp_path: Path) -> None:
    file = tmp_path / "steps.jsonl"
    run = record(twin.version, tmp_path, KINDS["usual"], STEP_LOG.variables(file))
    assert run.is_valid, run.invalid_reasons
    log = load_step_log(file)
    steps = observed_steps(run)
    check_sessions(tmp_path, run)
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
    server_log = run.file("server.log").read_text(errors="replace")
    assert "STEP LOG" not in server_log
    assert server_log.count("CORE STEPS") == server_log.count("[CORE STEPS] one record per step") == 1
    # The server says that it is recorded, and nothing else went wrong there.
    about_sessions = [line for line in server_log.splitlines() if "[SESSIONS]" in line]
    assert about_sessions
    assert all("[SESSIONS] recording to" in line for line in about_sessions)


def check_sessions(folder: Path, run: SealedRun) -> None:
    """The sessions are imported as they were planned; each request has the cached tokens of its prefill."""
    trace = imported(folder)
    assert (len(trace.recordings), num_whole(run, trace)) == (len(run.plan.sessions), len(run.plan.sessions))
    assert cached_tokens(folder) == cached_by_observer(run)
    assert sum(cached_by_observer(run)) > 0
