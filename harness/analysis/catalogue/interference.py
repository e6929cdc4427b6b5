"""Prefill interference: what injected prompts do to running sessions, and how long those wait.

Waiting W is measured by the observer inside a server, or by the stamps of log and streams, beside what the model gives.
It is session time and is never added to device time.
Definitions: docs/method.md, "Waiting"; Table IV.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.analysis.catalogue import Analysis, AnalysisOutput
from harness.analysis.catalogue.costs import cost_table
from harness.analysis.catalogue.reuse import prefill_kinds_table
from harness.analysis.logs.observer import held_back, load_observer
from harness.analysis.method import stats
from harness.analysis.method.devices import mean_interval
from harness.analysis.method.figures import RunFigures, run_figures
from harness.analysis.method.interference import Injection, injections, measured_waiting_session_ns
from harness.analysis.method.reuse import sum_or_none
from harness.analysis.method.stats import Interval
from harness.analysis.method.verdicts import ExperimentRuns
from harness.clock import NS_PER_S
from harness.records import SealedRun, layout, paired
from harness.spec.rules import InterferenceRule
from harness.table import Cell, Table, table_of

INTERFERENCE = InterferenceRule(name="interference", kind="interference")
SAVINGS = (
    "reuse_gained_tokens",
    "prefill_saved_s",
    "waiting_saved_session_s",
    "waiting_saved_measured_session_s",
)


def _prefill_injection(experiment: ExperimentRuns) -> AnalysisOutput:
    by_condition = injections([run for group in experiment.runs.values() for run in group], INTERFERENCE)
    return AnalysisOutput(
        (_by_length(by_condition), _by_run(by_condition)),
        notes=(
            "elapsed is the server's prefill metric: scheduling and host time included",
            "intervals are between received chunks, which need not be tokens",
        ),
    )


def _by_length(by_condition: dict[str, list[Injection]]) -> Table:
    rows: list[dict[str, Cell]] = []
    for group in by_condition.values():
        if not group[0].spikes:
            continue
        elapsed = [one.prefill_ms for one in group if one.prefill_ms is not None]
        spike_ms = stats.median(one.spike_ms for one in group)
        elapsed_ms = stats.median(elapsed) if elapsed else None
        rows.append(
            {
                "injected_tokens": group[0].prompt_tokens,
                "elapsed_ms": elapsed_ms,
                "baseline_ms": stats.median(one.baseline_ms for one in group),
                "spike_ms": spike_ms,
                "spike_over_elapsed": None if not elapsed_ms else spike_ms / elapsed_ms,
                "simultaneous": sum(one.is_simultaneous for one in group),
                "waiting_session_s": stats.median(one.waiting_session_s for one in group),
                "runs": len(group),
            }
        )
    caption = "Medians over runs; a run's spike is the median over its background sessions (Table IV)"
    return table_of("injection", caption, sorted(rows, key=lambda row: int(row["injected_tokens"] or 0)))


def _by_run(by_condition: dict[str, list[Injection]]) -> Table:
    rows: list[dict[str, Cell]] = [
        {
            "condition": injection.condition,
            "replicate": injection.replicate,
            "cached_tokens": injection.cached_tokens,
            "elapsed_ms": injection.prefill_ms,
            "smallest_ratio": min((spike.ratio for spike in injection.spikes), default=None),
            "start_spread_ms": injection.start_spread_ms if injection.spikes else None,
            "end_spread_ms": injection.end_spread_ms if injection.spikes else None,
            "other_crossings": len(injection.crossings),
            "last_crossing_s": max((crossing.end_s for crossing in injection.crossings), default=None),
        }
        for group in by_condition.values()
        for injection in group
    ]
    return table_of(
        "injection by run", "Ratios are spike / baseline interval; crossings lie outside the injection", rows
    )


def _joined(experiment: ExperimentRuns) -> AnalysisOutput:
    rows: list[dict[str, Cell]] = []
    intervals: dict[str, Interval] = {}
    for condition, baseline in experiment.compared():
        pairs = paired(experiment.runs.get(condition, []), experiment.runs.get(baseline, []))
        savings = [_savings(experiment, own, base) for own, base in pairs]
        rows += [
            {"condition": condition, "replicate": own.replicate, **saved}
            for (own, _), saved in zip(pairs, savings, strict=True)
        ]
        for name in SAVINGS:
            known = [
                (float(value), run_figures(own))
                for (own, _), saved in zip(pairs, savings, strict=True)
                if isinstance(value := saved[name], int | float)
            ]
            values, runs = [value for value, _ in known], [run for _, run in known]
            if (interval := mean_interval(values, runs, unit="replicates")) is not None:
                intervals[f"{condition}: mean {name}"] = interval
    caption = "Per replicate, against the baseline: reuse restored, prefill saved, waiting of other sessions saved"
    tables = (
        table_of("joined", caption, rows),
        waiting_table(experiment),
        prefill_kinds_table(experiment),
        cost_table(experiment),
    )
    notes = (
        "waiting is modelled (T of each prefill times the requests held back) and measured (by the observer inside the "
        "server, else from log stamps and streams)",
        "waiting is session time: it is never added to device time",
    )
    return AnalysisOutput(tables, intervals, notes)


def _savings(experiment: ExperimentRuns, own: SealedRun, base: SealedRun) -> dict[str, Cell]:
    """What the condition saved against its baseline on the same plan."""
    ours, theirs = (_figures_of(experiment, run) for run in (own, base))
    measured_ns = [None if (seen := measured_waiting(run)) is None else seen.session_ns for run in (own, base)]
    prefill_ns = [None if figures.a is None else figures.a.prefill_ns for figures in (ours, theirs)]
    return {
        "reused": f"{theirs.reuse.share_text} -> {ours.reuse.share_text}",
        "reuse_gained_tokens": _difference(ours.reuse.reused_tokens, theirs.reuse.reused_tokens),
        "computed_saved_tokens": _difference(theirs.computed_prefill_tokens, ours.computed_prefill_tokens),
        "prefill_saved_s": _difference_s(prefill_ns[1], prefill_ns[0]),
        "waiting_saved_session_s": _difference_s(theirs.waiting_session_ns, ours.waiting_session_ns),
        "waiting_saved_measured_session_s": _difference_s(measured_ns[1], measured_ns[0]),
        "ratio_A": ours.a.total_ns / theirs.a.total_ns if ours.a and theirs.a and theirs.a.total_ns else None,
    }


def _figures_of(experiment: ExperimentRuns, run: SealedRun) -> RunFigures:
    return next(figures for figures in experiment.figures(run.condition) if figures.replicate == run.replicate)


def _difference(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left - right


def _difference_s(left: int | None, right: int | None) -> float | None:
    difference = _difference(left, right)
    return None if difference is None else difference / NS_PER_S


ANALYSES = (
    Analysis("prefill-injection", "what an injected prompt does to running sessions (Table IV)", _prefill_injection),
    Analysis("joined", "what restored reuse saves of prefill and of other sessions' waiting", _joined),
)


class MeasuredWaiting(NamedTuple):
    """session_ns: W in session-nanoseconds of the run's clock. source: "observer", or "stamps and streams"."""

    session_ns: int
    source: str


def measured_waiting(run: SealedRun) -> MeasuredWaiting | None:
    """Measured W of a run; None without an observer and without streams or stamps.

    Observer: over each prefill step, its duration times the requests that were running beside it; its instants are the
    machine's own clock, so they are scaled to the run's.
    """
    path = run.file(layout.OBSERVER)
    if path.exists():
        prefills = held_back(load_observer(path).steps)
        wall_ns = np.asarray(prefills["duration_ns"]) * np.asarray(prefills["others"])
        return MeasuredWaiting(round(float(wall_ns.sum()) * run.manifest.time_scale), "observer")
    session_ns = measured_waiting_session_ns(run)
    return None if session_ns is None else MeasuredWaiting(session_ns, "stamps and streams")


def waiting_table(experiment: ExperimentRuns) -> Table:
    """W per condition, modelled and measured, over the replicates where it was measured; none without any."""
    rows: list[dict[str, Cell]] = []
    for condition, runs in experiment.runs.items():
        measured = {run.replicate: waiting for run in runs if (waiting := measured_waiting(run)) is not None}
        if not measured:
            continue
        figures = [run for run in experiment.figures(condition) if run.replicate in measured]
        modelled_ns = sum_or_none(run.waiting_session_ns for run in figures)
        measured_ns = sum(waiting.session_ns for waiting in measured.values())
        rows.append(
            {
                "condition": condition,
                "W_modelled_session_s": None if modelled_ns is None else modelled_ns / NS_PER_S,
                "W_measured_session_s": measured_ns / NS_PER_S,
                "measured_over_modelled": measured_ns / modelled_ns if modelled_ns else None,
                "source": ", ".join(sorted({waiting.source for waiting in measured.values()})),
                "replicates": len(measured),
            }
        )
    caption = "Waiting of other sessions during prefills, sums over replicates; session time, no device time"
    return table_of("waiting", caption, rows)
