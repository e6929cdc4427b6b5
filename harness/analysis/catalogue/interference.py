"""Prefill interference: what injected prompts do to running sessions, and how long those wait.

Waiting W is measured by the observer inside a server, or by the stamps of log and streams, beside what the model gives.
It is session time and is never added to device time.
Definitions: docs/method.md, "Waiting"; Table IV.
"""

from __future__ import annotations

from operator import itemgetter, sub

import numpy as np

from harness.analysis import stats
from harness.analysis.catalogue import Analysis, AnalysisOutput, Rows, table
from harness.analysis.catalogue.costs import cost_table
from harness.analysis.catalogue.reuse import prefill_kinds_table
from harness.analysis.cost.devices import mean_interval
from harness.analysis.decisions.verdicts import ExperimentRuns
from harness.analysis.figures import run_figures, total_of
from harness.analysis.interference import Injection, injections, measured_waiting_session_ns
from harness.analysis.logs.observer import held_back, load_observer
from harness.analysis.stats import Interval, ratio, seconds, when_known
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
    injected = [group for group in by_condition.values() if group[0].spikes]
    for group in sorted(injected, key=lambda group: group[0].prompt_tokens):
        elapsed = [one.prefill_ms for one in group if one.prefill_ms is not None]
        spike_ms = stats.median(one.spike_ms for one in group)
        elapsed_ms = stats.median(elapsed) if elapsed else None
        rows.append(
            {
                "injected_tokens": group[0].prompt_tokens,
                "elapsed_ms": elapsed_ms,
                "baseline_ms": stats.median(one.baseline_ms for one in group),
                "spike_ms": spike_ms,
                "spike_over_elapsed": ratio(spike_ms, elapsed_ms),
                "simultaneous": sum(one.is_simultaneous for one in group),
                "waiting_session_s": stats.median(one.waiting_session_s for one in group),
                "runs": len(group),
            }
        )
    caption = "Medians over runs; a run's spike is the median over its background sessions (Table IV)"
    return table_of("injection", caption, rows)


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
        savings = [(own, _savings(own, base)) for own, base in pairs]
        rows += [{"condition": condition, "replicate": own.replicate, **saved} for own, saved in savings]
        for name in SAVINGS:
            known = [(own, value) for own, saved in savings if isinstance(value := saved[name], int | float)]
            values, runs = [float(value) for _, value in known], [run_figures(own) for own, _ in known]
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


def _savings(run: SealedRun, base_run: SealedRun) -> dict[str, Cell]:
    """What the condition saved against its baseline on the same plan."""
    own, base = run_figures(run), run_figures(base_run)
    measured_ns = [when_known(itemgetter(0), measured_waiting(each)) for each in (base_run, run)]
    return {
        "reused": f"{base.reuse.share_text} -> {own.reuse.share_text}",
        "reuse_gained_tokens": when_known(sub, own.reuse.reused_tokens, base.reuse.reused_tokens),
        "computed_saved_tokens": when_known(sub, base.computed_prefill_tokens, own.computed_prefill_tokens),
        "prefill_saved_s": seconds(when_known(sub, base.prefill_ns, own.prefill_ns)),
        "waiting_saved_session_s": seconds(when_known(sub, base.waiting_session_ns, own.waiting_session_ns)),
        "waiting_saved_measured_session_s": seconds(when_known(sub, *measured_ns)),
        "ratio_A": ratio(own.a_ns, base.a_ns),
    }


def measured_waiting(run: SealedRun) -> tuple[int, str] | None:
    """(measured W of a run in session-ns of its clock, by what); None without an observer, and streams or stamps.

    Observer: over each prefill step, its duration times the requests that were running beside it; its instants are the
    machine's own clock, so they are scaled to the run's.
    """
    path = run.file(layout.OBSERVER)
    if path.exists():
        prefills = held_back(load_observer(path).steps)
        wall_ns = np.asarray(prefills["duration_ns"]) * np.asarray(prefills["others"])
        return round(float(wall_ns.sum()) * run.manifest.time_scale), "observer"
    session_ns = measured_waiting_session_ns(run)
    return None if session_ns is None else (session_ns, "stamps and streams")


@table("waiting", "Waiting of other sessions during prefills, sums over replicates; session time, no device time")
def waiting_table(experiment: ExperimentRuns) -> Rows:
    """W per condition, modelled and measured, over the replicates where it was measured; none without any."""
    for condition, runs in experiment.runs.items():
        measured = {run.replicate: waiting for run in runs if (waiting := measured_waiting(run)) is not None}
        if not measured:
            continue
        figures = [run for run in experiment.figures(condition) if run.replicate in measured]
        modelled_ns = total_of(figures).waiting_session_ns
        measured_ns = sum(session_ns for session_ns, _ in measured.values())
        yield {
            "condition": condition,
            "W_modelled_session_s": seconds(modelled_ns),
            "W_measured_session_s": seconds(measured_ns),
            "measured_over_modelled": ratio(measured_ns, modelled_ns),
            "source": ", ".join(sorted({source for _, source in measured.values()})),
            "replicates": len(measured),
        }


ANALYSES = (
    Analysis("prefill-injection", "what an injected prompt does to running sessions (Table IV)", _prefill_injection),
    Analysis("joined", "what restored reuse saves of prefill and of other sessions' waiting", _joined),
)
