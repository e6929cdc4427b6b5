"""Sealed runs and their summary, turned into a ReportView: who is compared with whom, in which colour, with what facts.

Figures come from ``harness.analysis``; only what a plot needs is picked from tables here. Nothing is written.
Next: ``page`` renders the view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from harness.analysis import ExperimentSummary, RunFigures, summarise
from harness.analysis.method.summary import ConditionFigures
from harness.clock import NS_PER_S, utc_now
from harness.errors import SpecError
from harness.records import Finding, SealedRun
from harness.report.facts import (
    changes,
    changes_from_experiment,
    gather_facts,
    reproduce_command,
    spec_text,
    written_workload,
)
from harness.report.tables import requests_in_stalls, timeline
from harness.report.view import (
    BucketShift,
    Check,
    ConditionView,
    FindingView,
    Rearrival,
    ReplicateRatio,
    ReportView,
    RunView,
    TimelineView,
)
from harness.spec import factors_text

MAX_TIMELINES = 6
LAG_P99 = "re-arrival lag p99"
START_SPREAD = "start spread"


def gather(
    runs: Sequence[SealedRun], *, title: str | None = None, timelines: Sequence[str] | None = None
) -> ReportView:
    """Everything that a report of ``runs`` shows.

    runs: of one experiment, invalid ones included. title: default: the experiment's own. timelines: labels
    "condition/replicate" of the runs to draw; default: the first valid run of each of the first conditions.
    Raises SpecError when there are no runs, runs of several experiments, or no run of a label asked for.
    """
    names = sorted({run.experiment for run in runs})
    if len(names) != 1:
        found = ", ".join(names) or "none"
        raise SpecError(f"a report needs runs of exactly one experiment, got {found}", hint="Name one experiment")
    summary = summarise(runs)
    colors = {condition.name: index for index, condition in enumerate(summary.conditions)}
    sealed = {(run.condition, run.replicate): run for run in runs}
    views = {
        (run.condition, run.replicate): run_view(sealed[run.condition, run.replicate], run) for run in summary.runs
    }
    first = sealed[summary.runs[0].condition, summary.runs[0].replicate]
    experiment = dict(first.manifest.requested.get("experiment", {}))
    return ReportView(
        title=title or summary.title or summary.experiment,
        experiment=summary.experiment,
        question=str(experiment.get("question", "")),
        backend=first.manifest.backend,
        time_scale=summary.time_scale,
        conditions=tuple(_condition_view(condition, colors, views, sealed) for condition in summary.conditions),
        runs=tuple(sorted(views.values(), key=lambda run: (run.replicate, colors[run.condition]))),
        timelines=_timelines(summary, sealed, colors, timelines),
        findings=gather_findings(runs, summary.findings),
        facts=gather_facts(runs),
        spec_text=spec_text(first),
        command=reproduce_command(first),
        records_root=str(first.path.parent.parent.parent),
        written_utc=utc_now().strftime("%Y-%m-%d %H:%M:%S UTC"),
    )


def run_view(run: SealedRun, figures: RunFigures) -> RunView:
    """One run as the report shows it."""
    return RunView(
        condition=run.condition,
        replicate=run.replicate,
        is_valid=run.is_valid,
        invalid_reasons=run.invalid_reasons,
        folder=str(run.path),
        plan_hash=run.manifest.plan_hash,
        drawn_hash=run.manifest.drawn_hash,
        a_s=None if figures.a is None else figures.a.total_ns / NS_PER_S,
        b_s=figures.b_ns / NS_PER_S,
        padding=figures.padding.ratio,
        steps_by_n_b=figures.steps_by_n_b,
        computed_prefill_tokens=figures.computed_prefill_tokens,
        num_requests=figures.num_requests,
        num_failed=figures.num_failed,
        rearrivals=tuple(
            Rearrival(one.session, one.request, one.prompt_tokens, one.reusable_tokens, one.cached_tokens)
            for one in figures.reuse.rearrivals
        ),
        evictions=figures.evictions,
        rearrival_lag_ms=figures.lateness.rearrival_ms,
        start_spread_ms=figures.lateness.start_spread_ms,
        checks=_checks(run, figures),
        audit_lag_ms=np.asarray(run.audit.floor_lag_ms, dtype=np.float64),
    )


def _checks(run: SealedRun, figures: RunFigures) -> tuple[Check, ...]:
    """What the harness did in this run, each against its limit; what was not recorded has no value."""
    audit, late, limits = run.audit, figures.lateness, run.limits
    floor_ms, stalls = audit.floor_lag_ms, audit.stall_intervals_ns
    return (
        Check("re-arrival lag p50", late.rearrival_p50_ms, "wall ms"),
        Check(LAG_P99, late.rearrival_p99_ms, "wall ms", limits.rearrival_lag_p99_ms),
        Check("re-arrival lag max", late.rearrival_quantile_ms(1.0), "wall ms"),
        Check(START_SPREAD, late.start_spread_ms, "wall ms", limits.start_spread_ms),
        Check(
            "r / B",
            None if figures.r_ns is None or not figures.b_ns else figures.r_ns / figures.b_ns,
            "share",
            limits.residual_share,
        ),
        Check("early sends", late.num_early, "", 0),
        Check("floor p50", float(np.median(floor_ms)) if floor_ms else None, "wall ms"),
        Check("stalls", audit.num_stalls, ""),
        Check("longest stall", audit.stall_max_ms, "wall ms"),
        Check(
            "requests in a stall",
            None if stalls is None else requests_in_stalls(run.table("requests"), stalls),
            "",
        ),
        Check("CPU client", audit.cpu_s, "s"),
        Check("CPU others", audit.cpu_others_s, "s"),
    )


def _condition_view(
    condition: ConditionFigures,
    colors: Mapping[str, int],
    views: Mapping[tuple[str, int], RunView],
    sealed: Mapping[tuple[str, int], SealedRun],
) -> ConditionView:
    compared = condition.comparison
    has_steps = condition.num_steps > 0
    return ConditionView(
        name=condition.name,
        color=colors[condition.name],
        treatment=condition.treatment,
        baseline="" if condition.is_baseline else condition.baseline,
        runs=tuple(views[condition.name, run.replicate] for run in condition.valid_runs),
        a_s=_seconds(condition.a_ns),
        b_s=_seconds(condition.b_ns),
        r_s=_seconds(condition.r_ns),
        decode_s=_seconds(condition.decode_ns) if has_steps else None,
        prefill_s=_seconds(condition.prefill_ns),
        waiting_session_s=_seconds(condition.waiting_session_ns),
        ratio_a=None if compared is None else compared.ratio_a,
        ratio_b=None if compared is None else compared.ratio_b,
        tau=None if compared is None else compared.tau,
        comparison=compared,
        factors=factors_text(condition.factors),
        replicate_ratios=()
        if compared is None
        else tuple(ReplicateRatio(replicate, a, b) for replicate, a, b in compared.per_replicate),
        padding=condition.padding.ratio,
        decode_steps=condition.num_steps if has_steps else None,
        reused_rearrivals=condition.num_reused,
        num_rearrivals=condition.num_rearrivals,
        reused_tokens=condition.reused_tokens if condition.valid_runs else None,
        computed_prefill_tokens=condition.computed_prefill_tokens if condition.valid_runs else None,
        changes=_changes(condition, sealed),
        bucket_shifts=_bucket_shifts(condition),
    )


def _seconds(duration_ns: int | None) -> float | None:
    return None if duration_ns is None else duration_ns / NS_PER_S


def _changes(
    condition: ConditionFigures, sealed: Mapping[tuple[str, int], SealedRun]
) -> tuple[tuple[str, str, str], ...]:
    mine = sealed[condition.name, condition.runs[0].replicate]
    base = next((run for (name, _), run in sealed.items() if name == condition.baseline), mine)
    if base is mine or condition.is_baseline:
        return changes_from_experiment(mine.manifest)
    return (
        *changes(mine.manifest.server_spec, base.manifest.server_spec),
        *changes(written_workload(mine.manifest), written_workload(base.manifest), "workload."),
    )


def _bucket_shifts(condition: ConditionFigures) -> tuple[BucketShift, ...]:
    change = condition.bucket_change
    if change is None:
        return ()
    h = condition.histogram
    return tuple(
        BucketShift(n, h[n], removed, change.padding_shares[n]) for n, removed in sorted(change.removed_slots.items())
    )


def _timelines(
    summary: ExperimentSummary,
    sealed: Mapping[tuple[str, int], SealedRun],
    colors: Mapping[str, int],
    labels: Sequence[str] | None,
) -> tuple[TimelineView, ...]:
    if labels is None:
        keys = [_shown_run(condition) for condition in summary.conditions[:MAX_TIMELINES]]
    else:
        known = {f"{condition}/{replicate}": (condition, replicate) for condition, replicate in sealed}
        if unknown := [label for label in labels if label not in known]:
            raise SpecError(
                f"no sealed run {unknown[0]!r} to draw a timeline of", hint=f"Runs there: {', '.join(sorted(known))}"
            )
        keys = [known[label] for label in labels]
    drawn = [timeline(sealed[key], colors[key[0]]) for key in keys]
    return tuple(view for view in drawn if view is not None)


def _shown_run(condition: ConditionFigures) -> tuple[str, int]:
    """The first valid run of a condition, or its first one when none is valid."""
    runs = condition.valid_runs or condition.runs
    return condition.name, min(run.replicate for run in runs)


def gather_findings(runs: Sequence[SealedRun], of_experiment: Sequence[Finding] = ()) -> tuple[FindingView, ...]:
    """All findings, worst first: one entry per kind, with every case of it and the runs it was found in."""
    places: dict[Finding, list[str]] = {finding: [] for finding in of_experiment}
    for run in runs:
        for finding in run.manifest.findings:
            places.setdefault(finding, []).append(f"{run.condition}/{run.replicate}")
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for finding, where in places.items():
        cases = kinds.setdefault((finding.severity, finding.code, finding.hint), [])
        cases.append(_case(finding.evidence, where, len(runs)))
    order = {"invalid": 0, "warning": 1, "info": 2}
    ranked = sorted(kinds.items(), key=lambda item: order[item[0][0]])
    return tuple(FindingView(code, severity, tuple(cases), hint) for (severity, code, hint), cases in ranked)


def _case(evidence: str, where: Sequence[str], num_runs: int) -> str:
    if not where:
        return evidence
    return f"{'every run' if len(where) == num_runs and num_runs > 1 else ', '.join(where)}: {evidence}"
