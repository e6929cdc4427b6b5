"""Step costs of artifacts and of constant-n runs: medians per session, null pairs, prefill times by length.

Step times are intervals of the step log where nothing else ran; prefill times are answer times of one-token requests
that ran alone. Nothing is fitted here; a calibration does that.
Definitions: docs/method.md, "Decisions"; Tables S2 and S3.
"""

from __future__ import annotations

import numpy as np

from harness.analysis.catalogue import Analysis, AnalysisOutput, of_tables
from harness.analysis.method import stats
from harness.analysis.method.scatter import run_steady_step_ns
from harness.analysis.method.verdicts import ExperimentRuns, artifact_times_ms
from harness.clock import NS_PER_MS
from harness.records import SealedRun
from harness.table import Cell, Table, table_of

TIMES = {"reported": "model p50 of the server's own report", "steps": "whole step periods (model, sampler and host)"}


def session_table(experiment: ExperimentRuns) -> Table:
    """Table S2: per bucket and artifact, the time of every session, their median, and the pooled null pairs."""
    rows: list[dict[str, Cell]] = []
    by_bucket, source = artifact_times_ms(experiment)
    # The server's report has two digits.
    digits = 2 if source == "reported" else 3
    for bucket, artifacts in by_bucket.items():
        null_ms = stats.pooled_pair_differences(artifacts.values())
        null = stats.spread(null_ms) if null_ms else None
        rows.extend(
            {
                "bucket": bucket,
                "artifact": artifact,
                "source": source,
                "ms_per_session": " / ".join(f"{value:.{digits}f}" for value in values),
                "median_ms": stats.median(values) if values else None,
                "null_pairs": len(null_ms),
                "null_median_ms": None if null is None else null.median,
                "null_q95_ms": None if null is None else null.q95,
                "null_max_ms": None if null is None else null.maximum,
            }
            for artifact, values in sorted(artifacts.items())
        )
    caption = f"Median time with the bucket exactly full, per session (restart): {TIMES[source]}"
    return table_of("sessions", caption, rows)


def step_table(experiment: ExperimentRuns) -> Table:
    """Undisturbed decode steps by (n, b): how many, their median and spread, and what the cost model says."""
    found: dict[tuple[int, int], list[float]] = {}
    for runs in experiment.runs.values():
        for run in runs:
            for pair, durations in run_steady_step_ns(run).items():
                found.setdefault(pair, []).extend((durations / NS_PER_MS).tolist())
    model = next(iter(experiment.runs.values()))[0].cost_model
    rows: list[dict[str, Cell]] = [
        {
            "n": n,
            "b": b,
            "steps": len(durations),
            "median_ms": stats.median(durations),
            "q05_ms": stats.quantile(durations, 0.05),
            "q95_ms": stats.quantile(durations, 0.95),
            "model_ms": model.decode_step_ns(b, n) / NS_PER_MS,
        }
        for (n, b), durations in sorted(found.items())
    ]
    return table_of(
        "decode steps", "Intervals between step stamps where n and b stay and no prefill lies between", rows
    )


def prefill_times(run: SealedRun) -> list[tuple[int, float]]:
    """(computed tokens, answer time in ms) of one-token requests that ran alone, in plan order."""
    rows = run.table("requests").to_pylist()
    return [
        (row["prompt_tokens"] - row["cached_tokens"], (row["done_ns"] - row["sent_ns"]) / NS_PER_MS)
        for row in rows
        if row["completion_tokens"] == 1 and row["done_ns"] is not None and row["cached_tokens"] is not None
    ]


def prefill_table(experiment: ExperimentRuns) -> Table:
    """Answer times of one-token requests against T(q), ascending q."""
    pairs = [pair for runs in experiment.runs.values() for run in runs for pair in prefill_times(run)]
    model = next(iter(experiment.runs.values()))[0].cost_model
    rows: list[dict[str, Cell]] = [
        {
            "computed_tokens": tokens,
            "elapsed_ms": elapsed_ms,
            "model_ms": model.prefill_ns(tokens) / NS_PER_MS,
            "is_extrapolated": model.is_prefill_extrapolated(tokens),
        }
        for tokens, elapsed_ms in sorted(pairs)
    ]
    return table_of(
        "prefills", "One-token requests, one at a time: from send to done, the client's path included", rows
    )


def largest_model_error_ms(table: Table, measured: str) -> float | None:
    """Largest |measured - model| of a table of this module, ms."""
    errors = [
        abs(float(ours) - float(theirs))
        for ours, theirs in zip(table.column(measured), table.column("model_ms"), strict=True)
        if isinstance(ours, float) and isinstance(theirs, float)
    ]
    return float(np.max(errors)) if errors else None


def _step_cost(experiment: ExperimentRuns) -> AnalysisOutput:
    decode, prefill = step_table(experiment), prefill_table(experiment)
    errors_ms = {
        "decode": largest_model_error_ms(decode, "median_ms"),
        "prefill": largest_model_error_ms(prefill, "elapsed_ms"),
    }
    notes = tuple(
        f"largest distance to the cost model, {kind}: {error_ms:.3f} ms"
        for kind, error_ms in errors_ms.items()
        if error_ms is not None
    )
    return AnalysisOutput((decode, prefill), notes=notes)


ANALYSES = (
    Analysis("step-cost", "step and prefill times beside the cost model's (Table S3)", _step_cost),
    Analysis(
        "recompilation",
        "step times of artifacts that were compiled apart (Table S2)",
        of_tables(session_table, step_table),
    ),
)
