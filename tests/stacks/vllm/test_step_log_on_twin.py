"""The step log and the recorded sessions of a real vLLM server agree with the steps of its engine core, and with what
was planned."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from harness.extras.twin.environment import TwinEnvironment
from harness.measure.records.run import SealedRun
from harness.stacks.vllm.launch import STEP_LOG
from harness.stacks.vllm.step_log import INSIDE, load_step_log
from tests.support.trace_rows import imported_as_of_agents, num_whole
from tests.support.twin_runs import observed_steps, run_on_twin

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]

WORKLOAD = {
    "num_sessions": 6,
    "requests_per_session": 3,
    "waits": "none",
    "prompt_tokens": {"distribution": "uniform", "low": 150, "high": 400},
    "new_tokens": {"distribution": "uniform", "low": 50, "high": 150},
    "generate_tokens": {"distribution": "uniform", "low": 20, "high": 60},
}


def test_the_steps_of_a_server_are_those_of_its_engine_core(twin: TwinEnvironment, tmp_path: Path) -> None:
    file, sessions = tmp_path / "steps.jsonl", tmp_path / "sessions.jsonl"
    env = {"PYTHONPATH": os.fspath(INSIDE), "VLLM_SESSIONS_FILE": str(sessions), **STEP_LOG.variables(file)}
    run = run_on_twin(tmp_path, "sessions", WORKLOAD, {"environment": twin.version, "env": env})
    assert run.is_valid, run.invalid_reasons
    log = load_step_log(file)
    steps = observed_steps(run)
    check_sessions(sessions, run)
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


def check_sessions(sessions: Path, run: SealedRun) -> None:
    """The sessions are imported as they were planned; each request has the cached tokens of its prefill."""
    trace = imported_as_of_agents(sessions)
    assert len(trace.recordings) == num_whole(run.plan, trace) == len(run.plan.sessions)
    lines = [json.loads(line) for line in sessions.read_text().splitlines()]
    ended = sorted((line for line in lines if "end" in line), key=lambda line: line["end"])
    # One request a prefill, first come first served.
    prefills = [step for step in observed_steps(run) if step["kind"] == "prefill"]
    assert [line["cached_tokens"] for line in ended] == [step["cached_tokens"] for step in prefills]
    assert sum(step["cached_tokens"] for step in prefills) > 0
