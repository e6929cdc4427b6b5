"""Tables of interference: injected prefills, waiting of other sessions, busy neighbours, devices in a duet.

Waiting W is measured by the observer inside a server, or by the stamps of log and streams, beside the cost model's. It
is session time and is never added to device time. Neighbours and duets are on channel B: channel A prices steps by a
model that knows of no neighbour.
Definitions: docs/reference/method.md, "Waiting"; docs/reference/method.md; Table IV.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from operator import itemgetter, sub

import numpy as np

from harness.analysis import stats
from harness.analysis.compare.answer import ExperimentRuns
from harness.analysis.cost.devices import mean_interval
from harness.analysis.figures import RunFigures, run_figures, total_of
from harness.analysis.logs.engine_steps import observed_log
from harness.analysis.stats import Interval, ratio, seconds, when_known
from harness.extras.paper.rules import InterferenceRule
from harness.extras.paper.rules.interference import Injection, injection_of, measured_waiting_session_ns
from harness.judge.catalogue import Rows, table
from harness.measure.records.run import SealedRun, once_per_run
from harness.table import Cell

INTERFERENCE = InterferenceRule(name="interference", kind="interference")
SAVINGS = ("reuse_gained_tokens", "prefill_saved_s", "waiting_saved_session_s", "waiting_saved_measured_session_s")


@once_per_run
def _injection(run: SealedRun) -> Injection:
    return injection_of(run, INTERFERENCE)


@table("injection", "Medians over runs; a run's spike is the median over its background sessions (Table IV)")
def injection_table(experiment: ExperimentRuns) -> Rows:
    """One row per length of the injected prompt, ascending."""
    conditions = [[_injection(run) for run in runs] for runs in experiment.runs.values()]
    injected = [injections for injections in conditions if injections[0].spikes]
    for injections in sorted(injected, key=lambda injections: injections[0].prompt_tokens):
        elapsed = [injection.prefill_ms for injection in injections if injection.prefill_ms is not None]
        spike_ms = stats.median(injection.spike_ms for injection in injections)
        elapsed_ms = stats.median(elapsed) if elapsed else None
        yield {
            "injected_tokens": injections[0].prompt_tokens,
            "elapsed_ms": elapsed_ms,
            "baseline_ms": stats.median(injection.baseline_ms for injection in injections),
            "spike_ms": spike_ms,
            "spike_over_elapsed": ratio(spike_ms, elapsed_ms),
            "simultaneous": sum(injection.is_simultaneous for injection in injections),
            "waiting_session_s": stats.median(injection.waiting_session_s for injection in injections),
            "runs": len(injections),
        }


@table("injection by run", "Ratios are spike / baseline interval; crossings lie outside the injection")
def injection_run_table(experiment: ExperimentRuns) -> Rows:
    """One row per run, those of the control too."""
    for injection in map(_injection, experiment.valid_runs):
        yield {
            "condition": injection.condition,
            "replicate": injection.replicate,
            "cached_tokens": injection.cached_tokens,
            "elapsed_ms": injection.prefill_ms,
            "smallest_ratio": min((spike.ratio for spike in injection.spikes), default=None),
            "start_spread_ms": injection.start_spread_ms if injection.spikes else None,
            "end_spread_ms": injection.end_spread_ms if injection.spikes else None,
            "other_crossings": len(injection.crossings_s),
            "last_crossing_s": max(injection.crossings_s, default=None),
        }


def _all_savings(experiment: ExperimentRuns) -> Iterator[tuple[RunFigures, dict[str, Cell]]]:
    """Each run of a condition with another baseline, and what it saved."""
    for condition, baseline in experiment.compared():
        for run, base_run in experiment.sealed_pairs(condition, baseline):
            yield run_figures(run), _savings(run, base_run)


@table("joined", "Per replicate, against the baseline: reuse restored, prefill saved, waiting of other sessions saved")
def joined_table(experiment: ExperimentRuns) -> Rows:
    """One row per run of a condition that has a baseline."""
    for run, saved in _all_savings(experiment):
        yield {"condition": run.condition, "replicate": run.replicate, **saved}


def saving_intervals(experiment: ExperimentRuns) -> dict[str, Interval]:
    """t interval of the mean of each saving of each condition; none below three replicates."""
    intervals: dict[str, Interval] = {}
    by_condition = stats.grouped(_all_savings(experiment), lambda saving: saving[0].condition)
    for condition, savings in by_condition.items():
        for name in SAVINGS:
            known = [(run, float(value)) for run, saved in savings if isinstance(value := saved[name], int | float)]
            interval = mean_interval([value for _, value in known], [run for run, _ in known], unit="replicates")
            if interval is not None:
                intervals[f"{condition}: mean {name}"] = interval
    return intervals


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


@once_per_run
def measured_waiting(run: SealedRun) -> tuple[int, str] | None:
    """(measured W of a run in session-ns of its clock, by what); None without an observer, and streams or stamps.

    Observer: over each prefill step, its duration times the requests that were running beside it; its instants are the
    machine's own clock, so they are scaled to the run's.
    """
    log = observed_log(run)
    if log is not None:
        steps = zip(log.steps["kind"].to_pylist(), (step.values for step in log.cores[0].steps), strict=True)
        # The prefilled request itself is among the running ones once schedule() has returned.
        wall_ns = sum(
            (step["end_ns"] - step["schedule_ns"]) * ((step["running"] or 1) - 1)
            for kind, step in steps
            if kind == "prefill"
        )
        return round(wall_ns * run.manifest.time_scale), "observer"
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


@table(
    "neighbours",
    "Channel B beside so many busy neighbours against the same plan alone; all: with a 95 % t interval over rounds",
)
def neighbours_table(experiment: ExperimentRuns) -> Rows:
    """One row per condition and device, and one over all: how much longer with so many busy neighbours than alone."""
    for condition, baseline in experiment.compared():
        compared = experiment.compare(condition, baseline)
        if compared is None or compared.b.devices is None:
            continue
        busy = float(np.mean([run.neighbours for run in experiment.figures(condition)]))
        named: dict[str, Cell] = {"condition": condition, "neighbours": busy}
        for device in compared.b.devices.devices:
            longer = 100 * math.expm1(device.mean)
            yield {**named, "device": device.device, "blocks": device.num_blocks, "longer_%": longer}
        if compared.b.devices.estimate is not None:
            interval = compared.b.devices.estimate.interval(lambda value: 100 * math.expm1(value))
            ends = {"longer_%": interval.estimate, "low_%": interval.low, "high_%": interval.high}
            yield {**named, "device": "all", "blocks": len(compared.replicates), **ends}


@table(
    "duets",
    "100 ln of channel B over the baseline's on each device, and its mean over devices that exchanged conditions "
    "at once; sd: over rounds. The mean scatters less than its parts where they shared a host's noise",
)
def duet_table(experiment: ExperimentRuns) -> Rows:
    """One row per round: the effect on each device, and their mean, in which the host's noise of a period cancels."""
    for condition, baseline in experiment.compared():
        rounds: dict[int, dict[str, float]] = {}
        for own, base in experiment.pairs(condition, baseline):
            rounds.setdefault(own.unit, {})[own.device] = 100 * math.log(own.b_ns / base.b_ns)
        columns: dict[str, list[float]] = {}
        for number, by_device in sorted(rounds.items()):
            changes = {**by_device, "mean": float(np.mean(list(by_device.values())))}
            for name, value in changes.items():
                columns.setdefault(name, []).append(value)
            yield {"condition": condition, "round": number, **_percent(changes)}
        if len(rounds) > 1:
            sds = {name: float(np.std(values, ddof=1)) for name, values in columns.items()}
            yield {"condition": condition, "round": "sd", **_percent(sds)}


def _percent(values: Mapping[str, float]) -> dict[str, Cell]:
    return {f"{name}_%": value for name, value in values.items()}
