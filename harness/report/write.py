"""From sealed runs to the HTML report: the figures and the words beside them as a ReportView, and the file.

Figures come from ``harness.analysis``. The file appears whole or not at all, and opens without a network.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import numpy as np

from harness.analysis import ConditionFigures, ExperimentSummary, RunFigures, summarise
from harness.analysis.cost.drift import drift
from harness.analysis.planning.stopping import declared_status
from harness.clock import utc_now
from harness.errors import SpecError
from harness.outputs import check_output, write_atomic
from harness.records import Finding, RunKey, SealedRun
from harness.report.facts import (
    changes,
    changes_from_experiment,
    gather_facts,
    num_planned,
    ran_until_decided,
    reproduce_command,
    spec_text,
    written_workload,
)
from harness.report.page import render_page
from harness.report.timeline import requests_in_stalls, timeline
from harness.report.view import LAG_P99, START_SPREAD, Check, FindingView, ReportView, Results, TimelineView


def check_report_page(path: Path) -> Path:
    """``path`` again when a report can go there: a new file, an empty one, or an earlier report of the harness."""
    if check_output(path).is_file() and (there := path.read_bytes()):
        is_report = there[:15].lower() == b"<!doctype html>" and b"rbln-harness" in there
        if not is_report:
            hint = "Name another file; `harness report --force` replaces it"
            raise SpecError("is there already and is no report of the harness", where=str(path), hint=hint)
    return path


def write_report(  # noqa: PLR0913  # an option each
    runs: Sequence[SealedRun],
    path: Path,
    *,
    title: str | None = None,
    timelines: Sequence[str] | None = None,
    results: Results | None = None,
    summary: ExperimentSummary | None = None,
) -> Path:
    """Write a self-contained HTML file about an experiment, and return its path; arguments as of ``gather``.

    Raises SpecError when there is nothing to report or a label is unknown, RecordsError when the disk refuses.
    """
    path = check_report_page(Path(path))
    page = render_page(gather(runs, title=title, timelines=timelines, results=results, page=path, summary=summary))
    return write_atomic(path, [page.encode()], what="the report")


MAX_TIMELINES = 6
# Requests, and groups of steps, that timelines beyond those may draw together: some 100 bytes each.
MAX_MARKS = 6_000


def gather(  # noqa: PLR0913  # an option each
    runs: Sequence[SealedRun],
    *,
    title: str | None = None,
    timelines: Sequence[str] | None = None,
    results: Results | None = None,
    page: Path | None = None,
    summary: ExperimentSummary | None = None,
) -> ReportView:
    """Everything that a report of ``runs`` shows.

    runs: of one experiment, invalid ones included. title: default: the experiment's own. timelines: labels
    "condition/replicate" of the runs to draw; default: all, the first valid one of each condition first, as long as the
    page stays small. results: what the experiment's analysis and rules gave. page: where the report goes, for
    links. summary: of these runs, where it is at hand.
    Raises SpecError when there are no runs, runs of several experiments, or a label that no run has.
    """
    names = sorted({run.experiment for run in runs})
    if len(names) != 1:
        named = ", ".join(names) or "none"
        raise SpecError(f"a report needs runs of exactly one experiment, got {named}", hint="Name one experiment")
    summary = summary or summarise(runs)
    sealed = {run.key: run for run in runs}
    first = sealed[summary.runs[0].key]
    return ReportView(
        title=title or summary.title,
        question=first.manifest.question,
        backend=first.manifest.backend,
        summary=summary,
        sealed=sealed,
        checks={run.key: _checks(sealed[run.key], run) for run in summary.runs},
        changes={condition.name: _changes(condition, runs) for condition in summary.conditions},
        timelines=_timelines(summary, sealed, timelines),
        findings=gather_findings(runs, summary.findings),
        facts=gather_facts(runs),
        spec_text=spec_text(first),
        command=reproduce_command(first),
        records_root=str(first.path.parent.parent.parent),
        written_utc=utc_now().strftime("%Y-%m-%d %H:%M:%S UTC"),
        results=results or Results(),
        num_planned=num_planned(first),
        status=declared_status(runs) if ran_until_decided(first) else None,
        drift=drift(runs),
        folders={} if page is None else {run.key: quote(os.path.relpath(run.path, page.parent)) for run in runs},
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


def _changes(condition: ConditionFigures, runs: Sequence[SealedRun]) -> tuple[tuple[str, str, str], ...]:
    mine = next(run for run in runs if run.condition == condition.name)
    base = next((run for run in runs if run.condition == condition.baseline), mine)
    if base is mine:
        return changes_from_experiment(mine.manifest)
    return (
        *changes({"treatment": mine.manifest.treatment}, {"treatment": base.manifest.treatment}),
        *changes(mine.manifest.server_spec, base.manifest.server_spec),
        *changes(written_workload(mine.manifest), written_workload(base.manifest), "workload."),
    )


def _timelines(
    summary: ExperimentSummary, sealed: Mapping[RunKey, SealedRun], labels: Sequence[str] | None
) -> tuple[TimelineView, ...]:
    if labels is None:
        # The first valid run of a condition, or its first one when none is valid.
        shown = [
            min(condition.valid_runs or condition.runs, key=lambda run: run.replicate).key
            for condition in summary.conditions
        ]
        others = [run.key for run in summary.runs if run.key not in shown]
        keys = shown[:MAX_TIMELINES] + _fitting(shown[MAX_TIMELINES:] + others, sealed)
    else:
        known = {run.label: key for key, run in sealed.items()}
        if unknown := [label for label in labels if label not in known]:
            raise SpecError(
                f"no sealed run {unknown[0]!r} to draw a timeline of", hint=f"Runs there: {', '.join(sorted(known))}"
            )
        keys = [known[label] for label in labels]
    drawn = [timeline(sealed[key], summary.place_of[key.condition]) for key in keys]
    return tuple(view for view in drawn if view is not None)


def _fitting(keys: Sequence[RunKey], sealed: Mapping[RunKey, SealedRun]) -> list[RunKey]:
    """The first of ``keys`` whose requests and steps, all together, leave the page small."""
    room, fitting = MAX_MARKS, list[RunKey]()
    for key in keys:
        room -= sealed[key].table("requests").num_rows + sealed[key].table("steps").num_rows // 8
        if room < 0:
            break
        fitting.append(key)
    return fitting


def gather_findings(runs: Sequence[SealedRun], of_experiment: Sequence[Finding] = ()) -> tuple[FindingView, ...]:
    """All findings, worst first: an entry for each kind, with every case of it and its runs."""
    places: dict[Finding, list[str]] = {finding: [] for finding in of_experiment}
    for run in runs:
        for finding in run.manifest.findings:
            places.setdefault(finding, []).append(run.label)
    kinds: dict[tuple[str, str, str], list[str]] = {}
    for finding, where in places.items():
        named = "every run" if len(where) == len(runs) > 1 else ", ".join(where)
        cases = kinds.setdefault((finding.severity, finding.code, finding.hint), [])
        cases.append(f"{named}: {finding.evidence}" if named else finding.evidence)
    order = {"invalid": 0, "warning": 1, "info": 2}
    ranked = sorted(kinds.items(), key=lambda item: order[item[0][0]])
    return tuple(FindingView(code, severity, tuple(cases), hint) for (severity, code, hint), cases in ranked)
