"""What a report shows: the figures of analysis themselves, and beside them checks, findings and timelines.

No figure is copied or computed here; missing means None and is shown as a dash, never as zero.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import quote

import numpy as np

from harness.analysis import RunFigures
from harness.analysis.compare.stopping import SequentialStatus
from harness.analysis.figures import figure_at
from harness.analysis.speeds import Drift, drift, places_table
from harness.analysis.summary import ConditionFigures, ExperimentSummary, summarise
from harness.clock import utc_now
from harness.errors import HarnessError, SpecError
from harness.judge.catalogue import AnalysisResult
from harness.judge.decisions.decide import Decision
from harness.measure.records.findings import FindingRow, finding_rows
from harness.measure.records.manifest import Finding
from harness.measure.records.run import SealedRun
from harness.plugins import plugged, service
from harness.present.report import facts
from harness.present.report.answers import Channel, channels_of, counted_words
from harness.present.report.timeline import TimelineView, requests_in_stalls, timeline
from harness.run_key import RunKey
from harness.table import Table

if TYPE_CHECKING:
    from harness.tune.diagnose import Hint

LAG_P99, START_SPREAD = "dispatch delay p99", "start spread"
MAX_TIMELINES = 6
# Requests, and groups of steps, that timelines beyond those may draw together: some 100 bytes each.
MAX_MARKS = 6_000


@dataclass(frozen=True, slots=True)
class FigureCheck:
    """One figure of the harness itself, and the limit it was held to (None: no limit)."""

    name: str
    value: float | None
    unit: str
    limit: float | None = None

    @property
    def is_met(self) -> bool | None:
        """None when there is no limit or nothing was measured."""
        if self.value is None or self.limit is None:
            return None
        return self.value <= self.limit


@dataclass(frozen=True, slots=True)
class FindingView:
    """One kind of advice that analysis gave; ``evidence``: every case of it, the runs named."""

    code: str
    severity: str
    evidence: tuple[str, ...]
    hint: str
    means: str = ""
    see: str = ""


@dataclass(frozen=True, slots=True)
class Results:
    """What the experiment itself asks for: its analysis, what its rules decide, and why one of them is not there.

    predicted: what the simulator says of the measured runs, beside what was measured. hint: what the runs suggest.
    """

    analysis: AnalysisResult | None = None
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    predicted: Table | None = None
    hint: Hint | None = None

    @property
    def tables(self) -> tuple[Table, ...]:
        """The tables to show; one of predictions that the analysis has as well stands once."""
        own = () if self.analysis is None else self.analysis.tables
        names = {table.name for table in own}
        return own if self.predicted is None or self.predicted.name in names else (*own, self.predicted)

    def __bool__(self) -> bool:
        return bool(self.analysis is not None or self.predicted is not None or self.decisions or self.notes)


@dataclass(frozen=True, slots=True)
class ReportView:
    """All of a report: the figures as analysis has them, and the facts beside them.

    sealed: the run that each figure is of. checks: what the harness did in each run. changes: by condition, (key,
    value before, value now) against its baseline; of a baseline, against the experiment's own tables.
    num_planned: runs that the experiment asks for; 0: until its rule decides.
    facts: (group, ((name, value), ...)) in the order shown. folders: of each run, as the page links to it.
    """

    title: str
    question: str
    backend: str
    summary: ExperimentSummary
    channels: tuple[Channel, ...]
    counted_words: str
    sealed: Mapping[RunKey, SealedRun]
    checks: Mapping[RunKey, tuple[FigureCheck, ...]]
    changes: Mapping[str, tuple[tuple[str, str, str], ...]]
    timelines: tuple[TimelineView, ...]
    findings: tuple[FindingView, ...]
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    spec_text: str
    command: str
    records_root: str
    written_utc: str
    results: Results = Results()
    folders: Mapping[RunKey, str] = field(default_factory=dict[RunKey, str])
    status: SequentialStatus | None = None
    num_planned: int = 0
    drift: Drift | None = None

    @property
    def runs(self) -> tuple[RunFigures, ...]:
        """Every run, by replicate, conditions in their order."""
        return tuple(sorted(self.summary.runs, key=lambda run: (run.replicate, self.summary.place_of[run.condition])))

    @property
    def invalid_runs(self) -> tuple[RunFigures, ...]:
        return tuple(run for run in self.runs if not run.is_valid)

    @property
    def repeated_runs(self) -> tuple[SealedRun, ...]:
        """Runs that repeat an INVALID one."""
        return tuple(run for run in self.sealed.values() if run.manifest.earlier_tries)

    @property
    def device_tables(self) -> list[Table]:
        """Speeds of the devices, comparisons on each, and their records; empty where fewer than two made the runs."""
        found = self.summary.device_tables
        return [*found, places_table(self.sealed.values())] if found else []

    @property
    def is_frozen(self) -> bool:
        """Whether every run was made under a preregistration."""
        return all(run.manifest.preregistration is not None for run in self.sealed.values())

    @property
    def is_scaled(self) -> bool:
        return self.summary.time_scale != 1.0

    @property
    def seconds_unit(self) -> str:
        """How seconds of the measured system are written: model seconds say so when time was scaled."""
        return f"model s, \u00d7{self.summary.time_scale:g}" if self.is_scaled else "s"

    @property
    def time_note(self) -> str:
        return f"model time, \u00d7{self.summary.time_scale:g}" if self.is_scaled else ""

    @property
    def is_compared(self) -> bool:
        return any(condition.is_compared for condition in self.summary.conditions)

    @property
    def is_given_costs(self) -> bool:
        """Whether an interval of A holds only if its costs are true."""
        compared = (condition.comparison for condition in self.summary.conditions)
        return any(bool(figure_at(each, "a.interval.is_given_costs")) for each in compared)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Every bucket that any step used, ascending."""
        return tuple(sorted({b for run in self.runs for _, b in run.steps_by_n_b}))


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
        backend=summary.backend,
        summary=summary,
        channels=channels_of(summary),
        counted_words=counted_words(summary),
        sealed=sealed,
        checks={run.key: _checks(sealed[run.key], run) for run in summary.runs},
        changes={condition.name: _changes(condition, runs) for condition in summary.conditions},
        timelines=_timelines(summary, sealed, timelines),
        findings=gather_findings(runs, summary.findings),
        facts=facts.gather_facts(runs),
        spec_text=facts.spec_text(first),
        command=facts.reproduce_command(first),
        records_root=str(first.path.parent.parent.parent),
        written_utc=utc_now().strftime("%Y-%m-%d %H:%M:%S UTC"),
        results=Results() if results is None else results,
        num_planned=facts.num_planned(first),
        status=summary.status,
        drift=drift(runs),
        folders={} if page is None else {run.key: quote(os.path.relpath(run.path, page.parent)) for run in runs},
    )


def _checks(run: SealedRun, figures: RunFigures) -> tuple[FigureCheck, ...]:
    """What the harness did in this run, each against its limit; what was not recorded has no value."""
    audit, late, limits = run.audit, figures.lateness, run.limits
    floor_ms, stalls = audit.floor_lag_ms, audit.stall_intervals_ns
    return (
        FigureCheck("dispatch delay p50", late.rearrival_p50_ms, "wall ms"),
        FigureCheck(LAG_P99, late.rearrival_p99_ms, "wall ms", limits.rearrival_lag_p99_ms),
        FigureCheck("dispatch delay max", late.rearrival_quantile_ms(1.0), "wall ms"),
        FigureCheck(START_SPREAD, late.start_spread_ms, "wall ms", limits.start_spread_ms),
        FigureCheck(
            "r / B",
            None if figures.r_ns is None or not figures.b_ns else figures.r_ns / figures.b_ns,
            "share",
            limits.residual_share,
        ),
        FigureCheck("early sends", late.num_early, "", 0),
        FigureCheck("floor p50", float(np.median(floor_ms)) if floor_ms else None, "wall ms"),
        FigureCheck("stalls", audit.num_stalls, ""),
        FigureCheck("longest stall", audit.stall_max_ms, "wall ms"),
        FigureCheck(
            "requests in a stall", None if stalls is None else requests_in_stalls(run.table("requests"), stalls), ""
        ),
        FigureCheck("CPU client", audit.cpu_s, "s"),
        FigureCheck("CPU others", audit.cpu_others_s, "s"),
    )


def _changes(condition: ConditionFigures, runs: Sequence[SealedRun]) -> tuple[tuple[str, str, str], ...]:
    mine = next(run for run in runs if run.condition == condition.name)
    base = next((run for run in runs if run.condition == condition.baseline), mine)
    if base is mine:
        return facts.changes_from_experiment(mine.manifest)
    return (
        *facts.changes({"treatment": mine.manifest.treatment}, {"treatment": base.manifest.treatment}),
        *facts.changes(mine.manifest.server_spec, base.manifest.server_spec),
        *facts.changes(facts.written_workload(mine.manifest), facts.written_workload(base.manifest), "workload."),
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
    unknown = FindingRow((), "")  # of a plug-in, or of another release
    rows = {code: finding_rows().get(code, unknown) for _severity, code, _hint in kinds}
    return tuple(
        FindingView(code, severity, tuple(cases), hint, rows[code].means, rows[code].see)
        for (severity, code, hint), cases in ranked
    )


ROUTING_SERVICE = "routing of runs"


class Routing(NamedTuple):
    """One condition behind a router. Shares of tokens sum to 1, and are None where nothing could be reused."""

    name: str
    returns: int
    home: float | None
    """Share of its returning requests that came back to the replica of the turn before."""
    kept: float | None
    lost_by_routing: float | None
    lost_by_eviction: float | None
    shares: tuple[float, ...]
    """Of the requests, by replica."""


def routing_of(runs: Iterable[SealedRun]) -> list[Routing]:
    """By condition, over the replicates that all have; empty without replicas, or where the records do not tell."""
    valid = [run for run in runs if run.is_valid]
    if not any(run.server.is_routed for run in valid) or ROUTING_SERVICE not in plugged("services"):
        return []
    try:
        return service(ROUTING_SERVICE, where="report")(valid)
    except HarnessError:
        return []
