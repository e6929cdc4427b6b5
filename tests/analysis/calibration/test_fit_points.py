"""Points come from the middle of constant stretches only, alike from the server's log and from the client's stream."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.calibration.cost_file import DECODE, fit_runs
from harness.analysis.calibration.fit_points import (
    EDGE_STEPS,
    log_stretches,
    prefill_points,
    reported_f_ms,
    step_points,
)
from harness.errors import SpecError
from harness.measure.records.run import SealedRun
from harness.model.engine import load_cost_model
from harness.model.spec import ExperimentSpec
from harness.runner import run_experiment

MODEL = load_cost_model("context-1-2-4-8")
MS = 1e6


def fixed(value: int) -> dict[str, Any]:
    return {"distribution": "fixed", "value": value}


def runs_of(root: Path, *conditions: dict[str, Any]) -> list[SealedRun]:
    """Simulated runs of 40 generated tokens each, without waits."""
    workload = {"num_sessions": 1, "requests_per_session": 1, "waits": "none", "generate_tokens": fixed(40)}
    spec = ExperimentSpec.model_validate(
        {
            "name": "points",
            "backend": "sim",
            "replicates": 1,
            "base_seed": 3,
            "workload": workload,
            "server": {"cost_model": "context-1-2-4-8"},
            "condition": list(conditions),
        }
    )
    order = [condition["name"] for condition in conditions]
    return sorted(run_experiment(spec, runs_root=root).runs, key=lambda run: order.index(run.condition))


def constant(n: int, context: int = 600) -> dict[str, Any]:
    return {"name": f"n{n}-c{context}", "workload": {"num_sessions": n, "prompt_tokens": fixed(context)}}


# A request of 2,000 tokens arrives while three others decode; its one token ends it.
INJECTED: dict[str, Any] = {
    "name": "injected",
    "workload": {
        "group": [
            {"name": "background", "num_sessions": 3, "prompt_tokens": fixed(600)},
            {
                "name": "late",
                "num_sessions": 1,
                "start_s": 0.55,
                "prompt_tokens": fixed(2000),
                "generate_tokens": fixed(1),
            },
        ]
    },
}


def test_a_constant_run_is_one_point_at_its_own_n_bucket_and_context(tmp_path: Path) -> None:
    [point] = step_points(runs_of(tmp_path, constant(3)))
    assert (point.num_seqs, point.bucket) == (3, 4)
    # 39 decode steps of three requests that grow from 601 tokens on.
    assert 3 * 610 < point.context_tokens < 3 * 630
    assert point.period_ms == pytest.approx(MODEL.decode_step_ns(4, 3, round(point.context_tokens)) / MS, rel=1e-4)


def test_no_prefill_ever_counts_as_part_of_a_step(tmp_path: Path) -> None:
    points = step_points(runs_of(tmp_path, INJECTED))
    assert len(points) >= 2
    longest_ms = MODEL.decode_step_ns(4, 3, 3 * 640) / MS
    assert max(float(point.block_periods_ms.max()) for point in points) <= longest_ms * 1.001
    assert {point.num_seqs for point in points} == {3}


def test_both_ends_of_a_stretch_are_left_out(tmp_path: Path) -> None:
    [run] = runs_of(tmp_path, constant(2))
    [stretch] = log_stretches(run)
    assert stretch.steps[-1] == 39 - 2 * EDGE_STEPS
    assert stretch.first_context_tokens == 2 * (601 + EDGE_STEPS)


def test_prefill_times_are_those_of_the_model(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, constant(1, 128), constant(1, 2000))
    points = [point for run in runs for point in prefill_points(run)]
    assert {point.computed_tokens for point in points} == {128, 2000}
    for point in points:
        assert point.elapsed_ms == pytest.approx(MODEL.prefill_ns(point.computed_tokens) / MS, abs=2e-3)


def test_runs_without_a_constant_stretch_are_refused(tmp_path: Path) -> None:
    short = constant(1) | {"workload": {"num_sessions": 1, "prompt_tokens": fixed(300), "generate_tokens": fixed(3)}}
    with pytest.raises(SpecError, match="in a row"):
        step_points(runs_of(tmp_path, short))


def with_report(run: SealedRun, model_ms: float, sampler_ms: float) -> SealedRun:
    """The run as if its server had printed VLLM_RBLN_METRICS at its end."""
    report = {"MODEL": {"decode": {"p50_ms": model_ms}}, "SAMPLER": {"decode": {"p50_ms": sampler_ms}}}
    manifest = run.manifest.model_copy(update={"effective": {"launch": {"device_metrics": report}}})
    return replace(run, manifest=manifest)


def test_f_is_model_plus_sampler_of_full_buckets_at_the_shortest_context(tmp_path: Path) -> None:
    full, longer, padded = runs_of(tmp_path, constant(2), constant(2, 1500), constant(3))
    reported = reported_f_ms(
        [with_report(full, 10.05, 0.37), with_report(longer, 10.9, 0.37), with_report(padded, 10.36, 0.46)]
    )
    assert reported == {2: pytest.approx(10.42)}


def test_a_server_that_reports_its_own_times_separates_alpha_from_f(tmp_path: Path) -> None:
    runs = runs_of(tmp_path, constant(1), constant(2), constant(1, 1500))
    reported = [with_report(run, 9.51, 0.36) if index == 0 else run for index, run in enumerate(runs)]
    reported[1] = with_report(runs[1], 10.05, 0.37)
    fit = fit_runs(reported, seed=1, with_context=False).fits[DECODE]
    assert fit.f_ms == {1: pytest.approx(9.87), 2: pytest.approx(10.42)}
    assert fit["alpha_ms"] != 0.0
    assert "reported by the server" in fit.method
