"""What a report shows: the figures of analysis themselves, and beside them checks, findings and lanes of a timeline.

No figure is copied or computed here; missing means None and is shown as a dash, never as zero.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from harness.analysis import ConditionFigures, ExperimentSummary, RunFigures
from harness.analysis.catalogue import AnalysisResult
from harness.analysis.cost.drift import Drift
from harness.analysis.cost.speeds import places_table
from harness.analysis.decisions.decide import Decision
from harness.analysis.planning.stopping import SequentialStatus
from harness.records import RunKey, SealedRun
from harness.report.answers import Channel, channels_of, common_replicates, counted_words, over
from harness.table import Table

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
LAG_P99, START_SPREAD = "re-arrival lag p99", "start spread"


@dataclass(frozen=True, slots=True)
class Check:
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


@dataclass(frozen=True, slots=True)
class Bar:
    """One request on a timeline, model seconds since the run's start; None where it was not observed.

    reuse: "first" (nothing to reuse), "cached", "partial", "recomputed" or "unknown".
    """

    session: int
    request: int
    due_s: float
    sent_s: float | None
    first_token_s: float | None
    done_s: float | None
    reuse: str
    status: str
    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class TimelineView:
    """One run as lanes of requests over steps. ``step_s`` is empty when the log carries no step times.

    step_s, step_n, step_b: shape (steps,), ascending times. start_ns: the instant of the run's clock that is 0 s.
    stalls_s: (start, duration) of moments in which the client's machine stood still.
    """

    label: str
    condition: str
    color: int
    num_sessions: int
    bars: tuple[Bar, ...]
    step_s: FloatArray
    step_n: IntArray
    step_b: IntArray
    end_s: float
    start_ns: int = 0
    stalls_s: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Results:
    """What the experiment itself asks for: its analysis, what its rules decide, and why one of them is not there.

    predicted: what the simulator says of the measured runs, beside what was measured.
    """

    analysis: AnalysisResult | None = None
    decisions: tuple[Decision, ...] = ()
    notes: tuple[str, ...] = ()
    predicted: Table | None = None

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
    sealed: Mapping[RunKey, SealedRun]
    checks: Mapping[RunKey, tuple[Check, ...]]
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
    def conditions(self) -> tuple[ConditionFigures, ...]:
        return self.summary.conditions

    @property
    def channels(self) -> tuple[Channel, ...]:
        return channels_of(self.summary)

    def counted(self, condition: ConditionFigures) -> ConditionFigures:
        """The condition over the replicates that every condition has, so that sums may stand side by side."""
        return over(condition, common_replicates(self.summary))

    @property
    def counted_words(self) -> str:
        return counted_words(self.summary)

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
    def time_scale(self) -> float:
        return self.summary.time_scale

    @property
    def is_scaled(self) -> bool:
        return self.time_scale != 1.0

    @property
    def seconds_unit(self) -> str:
        """How seconds of the measured system are written: model seconds say so when time was scaled."""
        return f"model s, \u00d7{self.time_scale:g}" if self.is_scaled else "s"

    @property
    def time_note(self) -> str:
        return f"model time, \u00d7{self.time_scale:g}" if self.is_scaled else ""

    @property
    def time_caption(self) -> str:
        """``time_note`` as the first words of a caption, as HTML."""
        return f"<b>{self.time_note.capitalize()}.</b> " if self.is_scaled else ""

    @property
    def is_compared(self) -> bool:
        return any(condition.is_compared for condition in self.conditions)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Every bucket that any step used, ascending."""
        return tuple(sorted({b for run in self.runs for _, b in run.steps_by_n_b}))
