"""Sealed runs whose costs are drawn: real records, and times on every channel that a test gives them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.analysis.cost.reconstruct import ChannelA
from harness.analysis.figures import RunFigures, run_figures
from harness.measure.records.run import SealedRun
from harness.model.spec import ExperimentSpec, parse_experiment
from tests.support.report_runs import Shape, seal_run

SECOND_NS = 1_000_000_000
RUN_S = 30.0


class Change(NamedTuple):
    """What a condition costs against the baseline: log ratios of A and of B, and the noise of each between runs."""

    a: float = 0.0
    b: float = 0.0
    a_sd: float = 0.0
    b_sd: float = 0.0


def spec_of(num_blocks: int, conditions: Sequence[Mapping[str, Any]], stop: Mapping[str, Any] | None) -> ExperimentSpec:
    """An experiment of these conditions, the first of which is the baseline."""
    table: dict[str, Any] = {
        "name": "drawn",
        "backend": "emulator",
        "base_seed": 7,
        "replicates": num_blocks,
        "baseline": conditions[0]["name"],
        "workload": {"num_sessions": 2},
        "condition": [dict(condition) for condition in conditions],
    }
    return parse_experiment(table | ({} if stop is None else {"stop": dict(stop)}), where="test")


def sealed_runs(
    folder: Path,
    num_blocks: int,
    conditions: Sequence[Mapping[str, Any]] = ({"name": "base"}, {"name": "more"}),
    stop: Mapping[str, Any] | None = None,
) -> list[SealedRun]:
    """Runs of every condition in every block, whose times are then given by ``draw``."""
    spec = spec_of(num_blocks, conditions, stop)
    requested = {"experiment": spec.model_dump(mode="json", exclude_none=True), "server": {"cost_model": "paper"}}
    return [
        seal_run(
            folder,
            Shape(
                experiment="drawn",
                condition=str(condition["name"]),
                replicate=block,
                baseline=str(conditions[0]["name"]),
                num_sessions=2,
                time_scale=1.0,
                manifest={"requested": requested},
            ),
        )
        for block in range(num_blocks)
        for condition in conditions
    ]


NO_CHANGE = Change()


def draw(
    runs: Sequence[SealedRun], changes: Mapping[str, Change], seed: int, *, noise: Change = NO_CHANGE
) -> Sequence[SealedRun]:
    """The same runs with drawn costs, ns; ``noise``: of the baseline. B of each lies .03 above A."""
    rng = np.random.default_rng(seed)
    size = {run.replicate: rng.normal(0.0, 0.1) for run in runs}
    for run in runs:
        change = changes.get(run.condition, noise)
        log_a = math.log(RUN_S) + size[run.replicate] + rng.normal(0.0, change.a_sd)
        log_b = log_a + 0.03 + rng.normal(0.0, change.b_sd)
        a_ns, b_ns = (round(math.exp(log) * SECOND_NS) for log in (log_a + change.a, log_b + change.b))
        drawn = replace(run_figures(run), a=ChannelA(a_ns, 0), b_ns=b_ns, parts=None, generated_tokens=100)
        set_figures(run, replace(drawn, num_requests=1, prompt_tokens=1, computed_prefill_tokens=1))
    return runs


def set_figures(run: SealedRun, figures: RunFigures) -> None:
    """Give a run figures that stand in for those of its records."""
    run._values[run_figures.__wrapped__] = figures  # type: ignore[attr-defined]
