"""Tables of repeats: how far the channels move between runs of the same input, and step times between artifacts.

Pairs of repeats share runs and are no independent samples. Step times are intervals of the step log where nothing else
ran; prefill times are answer times of one-token requests that ran alone. Nothing is fitted.
Definitions: docs/reference/method-comparisons.md, "Decisions"; Tables S1 to S3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from harness.analysis import stats
from harness.analysis.calibration.scatter import run_steady_step_ns
from harness.analysis.compare.answer import ExperimentRuns
from harness.analysis.figures import cells
from harness.clock import NS_PER_MS
from harness.extras.paper.catalogue.costs import TAU0_GRID
from harness.extras.paper.rules import decide
from harness.extras.paper.rules.cases import artifact_times_ms, channels_s
from harness.extras.paper.statistics import (
    coefficient_of_variation,
    disjoint_sum_pair_differences,
    pooled_pair_differences,
    spread,
)
from harness.judge.catalogue import Rows, table
from harness.measure.records.schema import values_of
from harness.table import Cell, Table, table_of

SUM_SIZE = 3
TIMES = {"reported": "model p50 of the server's own report", "steps": "whole step periods (model, sampler and host)"}


class _Repeats(NamedTuple):
    """Both channels of the runs of a condition, seconds, and how far they differ from pair to pair."""

    a_s: list[float]
    b_s: list[float]
    singles: list[float]
    sums: list[float]

    @classmethod
    def of(cls, experiment: ExperimentRuns, condition: str) -> _Repeats:
        a_s, b_s = channels_s(experiment.figures(condition))
        return cls(a_s, b_s, *(disjoint_sum_pair_differences(a_s, b_s, size).tolist() for size in (1, SUM_SIZE)))

    def tolerance(self, tau0: float) -> float:
        return decide.agreement_tolerance_s(sum(self.a_s), sum(self.b_s), tau0)


@table("repeats", "Channel ratio differences between runs of the same input; pairs share runs")
def repeats_table(experiment: ExperimentRuns) -> Rows:
    """Table S1: |A_i/A_j - B_i/B_j| over single pairs and over pairs of disjoint sums, and tau."""
    for condition in experiment.runs:
        repeats = _Repeats.of(experiment, condition)
        units = {"single run pair": repeats.singles, f"{SUM_SIZE}-run summed pair": repeats.sums}
        for unit, of_unit in ((unit, spread(values)) for unit, values in units.items() if values):
            yield {
                "unit": unit,
                "condition": condition,
                "N": experiment.runs[condition][0].workload.num_sessions,
                "pairs": of_unit.num_values,
                "median": of_unit.median,
                "q95": of_unit.q95,
                "max": of_unit.maximum,
                "tau": repeats.tolerance(0.02),
                "cv_A": coefficient_of_variation(repeats.a_s),
                "cv_B": coefficient_of_variation(repeats.b_s),
            }


@table("tau sensitivity", "Share of pairs within tau = max(tau0, r / B of these runs)")
def repeat_sensitivity_table(experiment: ExperimentRuns) -> Rows:
    """What other defaults of the tolerance would cover of the same distributions (S1): tau0 from 0.005 to 0.05.

    Where r/B of the runs lies above tau0 it is the tolerance, and tau0 changes nothing.
    """
    for condition in experiment.runs:
        repeats = _Repeats.of(experiment, condition)
        if not repeats.sums:
            continue
        for tau0 in TAU0_GRID:
            tau = repeats.tolerance(tau0)
            yield {
                "condition": condition,
                "tau0": tau0,
                "tau": tau,
                "single_pairs_within": sum(value <= tau for value in repeats.singles) / len(repeats.singles),
                "sums_within": sum(value <= tau for value in repeats.sums) / len(repeats.sums),
                "covers_q95_of_sums": spread(repeats.sums).q95 <= tau,
            }


@table("survival by repeat", "Runs by number of re-arrivals that reused; the same input every time")
def survival_variation_table(experiment: ExperimentRuns) -> Rows:
    """How many re-arrivals reused their KV in each repeat of the same input."""
    for condition in experiment.runs:
        counts = Counter(run.reuse.num_reused for run in experiment.figures(condition))
        # Those with an unknown number come last.
        for reused in sorted(counts, key=lambda reused: (reused is None, reused)):
            yield {"condition": condition, "reused": reused, "runs": counts[reused]}


def session_table(experiment: ExperimentRuns) -> Table:
    """Table S2: per bucket and artifact, the time of every session, their median, and the pooled null pairs."""
    rows: list[dict[str, Cell]] = []
    by_bucket, source = artifact_times_ms(experiment)
    # The server's report has two digits.
    digits = 2 if source == "reported" else 3
    for bucket, artifacts in by_bucket.items():
        null_ms = pooled_pair_differences(artifacts.values())
        null = spread(null_ms) if null_ms else None
        rows.extend(
            {
                "bucket": bucket,
                "artifact": artifact,
                "source": source,
                "ms_per_session": " / ".join(f"{value:.{digits}f}" for value in values),
                "median_ms": stats.median(values) if values else None,
                "null_pairs": len(null_ms),
                **cells(null, {"null_median_ms": "median", "null_q95_ms": "q95", "null_max_ms": "maximum"}),
            }
            for artifact, values in sorted(artifacts.items())
        )
    caption = f"Median time with the bucket exactly full, per session (restart): {TIMES[source]}"
    return table_of("sessions", caption, rows)


@table("decode steps", "Intervals between step stamps where n and b stay and no prefill lies between")
def step_table(experiment: ExperimentRuns) -> Rows:
    """Undisturbed decode steps by (n, b): how many, their median and spread, and what the cost model says."""
    steps_ms: dict[tuple[int, int], list[float]] = {}
    for run in experiment.valid_runs:
        for pair, durations in run_steady_step_ns(run).items():
            steps_ms.setdefault(pair, []).extend((durations / NS_PER_MS).tolist())
    model = experiment.valid_runs[0].cost_model
    for (n, b), durations_ms in sorted(steps_ms.items()):
        yield {
            "n": n,
            "b": b,
            "steps": len(durations_ms),
            "median_ms": stats.median(durations_ms),
            "q05_ms": stats.quantile(durations_ms, 0.05),
            "q95_ms": stats.quantile(durations_ms, 0.95),
            "model_ms": model.decode_step_ns(b, n) / NS_PER_MS,
        }


@table("prefills", "One-token requests, one at a time: from send to done, the client's path included")
def prefill_table(experiment: ExperimentRuns) -> Rows:
    """Answer times of one-token requests that ran alone against T(q), ascending q."""
    columns = ("completion_tokens", "prompt_tokens", "cached_tokens", "sent_ns", "done_ns")
    model = experiment.valid_runs[0].cost_model
    times = (
        (prompt - cached, (done_ns - sent_ns) / NS_PER_MS)
        for run in experiment.valid_runs
        for generated, prompt, cached, sent_ns, done_ns in values_of(run.table("requests"), *columns)
        if generated == 1 and done_ns is not None and cached is not None
    )
    for tokens, elapsed_ms in sorted(times):
        yield {
            "computed_tokens": tokens,
            "elapsed_ms": elapsed_ms,
            "model_ms": model.prefill_ns(tokens) / NS_PER_MS,
            "is_extrapolated": model.is_prefill_extrapolated(tokens),
        }


def largest_model_error_ms(table: Table, measured: str) -> float | None:
    """Largest |measured - model| of a table of this module, ms; None for an empty one."""
    return max((abs(float(row[measured] or 0) - float(row["model_ms"] or 0)) for row in table.records()), default=None)


def model_distances(experiment: ExperimentRuns) -> Iterator[str]:
    """How far the step and prefill times lie from the cost model, in words."""
    kinds = (("decode", step_table, "median_ms"), ("prefill", prefill_table, "elapsed_ms"))
    for kind, build, measured in kinds:
        if (error_ms := largest_model_error_ms(build(experiment), measured)) is not None:
            yield f"largest distance to the cost model, {kind}: {error_ms:.3f} ms"
