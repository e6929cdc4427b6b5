"""Step costs of artifacts and of constant-n runs: medians per session, null pairs, prefill times by length.

Step times are intervals of the step log where nothing else ran; prefill times are answer times of one-token requests
that ran alone. Nothing is fitted here; a calibration does that.
Definitions: docs/method.md, "Decisions"; Tables S2 and S3.
"""

from __future__ import annotations

from harness.analysis import stats
from harness.analysis.calibration.scatter import run_steady_step_ns
from harness.analysis.catalogue import Analysis, AnalysisOutput, Rows, of_tables, table
from harness.analysis.decisions.verdicts import ExperimentRuns, artifact_times_ms
from harness.analysis.figures import cells
from harness.clock import NS_PER_MS
from harness.records.schema import values_of
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
