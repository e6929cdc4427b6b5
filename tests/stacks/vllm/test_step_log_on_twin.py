"""The step logs and the recorded sessions of a real vLLM server agree with the observer of vllm-rbln, which sees the
engine core itself, and with what was planned."""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import pytest

from harness.analysis.logs.observer import load_observer
from harness.extras.twin.environment import TwinEnvironment
from harness.measure.records.run import SealedRun
from harness.stacks.vllm.launch import CORE_STEPS, STEP_LOG
from harness.stacks.vllm.step_log import StepLog, load_step_log
from tests.support.sessions_on_twin import (
    KINDS,
    cached_by_observer,
    cached_tokens,
    imported,
    num_whole,
    record,
)

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def test_the_steps_of_a_server_are_those_of_its_engine_core(twin: TwinEnvironment, tmp_path: Path) -> None:
    file, core_file = tmp_path / "steps.jsonl", tmp_path / "core_steps.jsonl"
    variables = {**STEP_LOG.variables(file), **CORE_STEPS.variables(core_file)}
    run = record(twin.version, tmp_path, KINDS["usual"], variables)
    assert run.is_valid, run.invalid_reasons
    log = load_step_log(file)
    steps = load_observer(run.file("observer.jsonl")).steps.to_pylist()
    check_core_steps(load_step_log(core_file), steps)
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
    assert "CORE STEPS" not in server_log
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


def check_core_steps(log: StepLog, steps: list[dict[str, Any]]) -> None:
    """The observer of any vLLM recorded each step of the engine core once, as that of vllm-rbln did beside it."""
    recorded = log.cores[0].steps
    assert (log.num_damaged, log.cores[0].num_missing, log.cores[0].num_unended) == (0, 0, 0)
    assert [list(step.request_ids) for step in recorded] == [step["requests"] for step in steps]
    assert [row["kind"] for row in log.steps.to_pylist()] == [step["kind"] for step in steps]
    for mine, theirs in zip(recorded, steps, strict=True):
        # Their scheduler keeps the cached tokens elsewhere: none is said rather than 0.
        assert all(entry[4] is None for entry in mine.values["admitted"])
        # One of them wraps the other, so that their stamps lie around each other.
        begins = sorted((mine.values["schedule_ns"], theirs["schedule_ns"]))
        assert begins[1] <= min(mine.values["scheduled_ns"], theirs["scheduled_ns"])
    apart_us = [
        abs(mine.values["end_ns"] - theirs["end_ns"]) / 1000 for mine, theirs in zip(recorded, steps, strict=True)
    ]
    print(f"end of a step beside the other observer's: {median(apart_us):.0f} us apart (median of {len(apart_us)})")
