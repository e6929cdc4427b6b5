"""What a report shows, as plain values: conditions, runs, findings and the lanes of a timeline.

Every number here was computed elsewhere; missing means None and is shown as a dash, never as zero.
Next: ``gather`` fills these from sealed runs; ``figures``, ``timeline`` and ``page`` draw them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from harness.analysis.method.compare import Comparison

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Rearrival:
    """A request after a wait: what formula C allows, and what the server said it reused [tokens]."""

    session: int
    request: int
    prompt_tokens: int
    expected_tokens: int
    cached_tokens: int


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
class RunView:
    """One sealed run. Seconds are model seconds; lags and spreads are wall milliseconds of the client's machine."""

    condition: str
    replicate: int
    is_valid: bool
    invalid_reasons: tuple[str, ...]
    folder: str
    plan_hash: str = ""
    drawn_hash: str = ""
    a_s: float | None = None
    b_s: float | None = None
    padding: float | None = None
    steps_by_n_b: Mapping[tuple[int, int], int] = field(default_factory=dict)
    computed_prefill_tokens: int | None = None
    num_requests: int = 0
    num_failed: int = 0
    rearrivals: tuple[Rearrival, ...] = ()
    evictions: Mapping[str, int] = field(default_factory=dict)
    rearrival_lag_ms: FloatArray = field(default_factory=lambda: np.empty(0))
    start_spread_ms: float | None = None
    checks: tuple[Check, ...] = ()
    audit_lag_ms: FloatArray = field(default_factory=lambda: np.empty(0))

    @property
    def label(self) -> str:
        return f"{self.condition}/{self.replicate}"

    @property
    def decode_steps(self) -> int | None:
        return sum(self.steps_by_n_b.values()) if self.steps_by_n_b else None


@dataclass(frozen=True, slots=True)
class ReplicateRatio:
    """Cost of one replicate over the same replicate of the baseline, on both channels."""

    replicate: int
    a: float | None
    b: float | None


@dataclass(frozen=True, slots=True)
class BucketShift:
    """A request count whose bucket differs from the baseline's: positions removed, and its share in the change of p."""

    n: int
    steps: int
    removed_slots: int
    padding_share: float


@dataclass(frozen=True, slots=True)
class ConditionView:
    """One condition over its valid runs. ``baseline`` is empty for a condition that is only compared against.

    changes: (key, value before, value now) against its baseline; of a baseline, against the experiment's own tables.
    """

    name: str
    color: int
    treatment: str
    baseline: str
    runs: tuple[RunView, ...]
    a_s: float | None = None
    b_s: float | None = None
    r_s: float | None = None
    decode_s: float | None = None
    prefill_s: float | None = None
    waiting_session_s: float | None = None
    ratio_a: float | None = None
    ratio_b: float | None = None
    tau: float | None = None
    comparison: Comparison | None = None
    factors: str = ""
    replicate_ratios: tuple[ReplicateRatio, ...] = ()
    padding: float | None = None
    decode_steps: int | None = None
    reused_rearrivals: int | None = None
    num_rearrivals: int | None = None
    reused_tokens: int | None = None
    computed_prefill_tokens: int | None = None
    changes: tuple[tuple[str, str, str], ...] = ()
    bucket_shifts: tuple[BucketShift, ...] = ()

    @property
    def difference(self) -> float | None:
        if self.ratio_a is None or self.ratio_b is None:
            return None
        return abs(self.ratio_a - self.ratio_b)

    @property
    def mean_n(self) -> float | None:
        """Requests per decode step."""
        steps = self.steps_by_n_b
        return sum(n * count for (n, _), count in steps.items()) / sum(steps.values()) if steps else None

    @property
    def mean_b(self) -> float | None:
        """Bucket positions per decode step."""
        steps = self.steps_by_n_b
        return sum(b * count for (_, b), count in steps.items()) / sum(steps.values()) if steps else None

    @property
    def mean_step_ms(self) -> float | None:
        if self.decode_s is None or not self.decode_steps:
            return None
        return 1000 * self.decode_s / self.decode_steps

    @property
    def steps_by_n_b(self) -> dict[tuple[int, int], int]:
        """Decode steps of all valid runs, by (requests really in the step, bucket)."""
        total: dict[tuple[int, int], int] = {}
        for run in self.runs:
            for key, count in run.steps_by_n_b.items():
                total[key] = total.get(key, 0) + count
        return total


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
    cached_tokens: int


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
class ReportView:
    """All of a report. ``facts``: (group, ((name, value), ...)) in the order shown."""

    title: str
    experiment: str
    question: str
    backend: str
    time_scale: float
    conditions: tuple[ConditionView, ...]
    runs: tuple[RunView, ...]
    timelines: tuple[TimelineView, ...]
    findings: tuple[FindingView, ...]
    facts: tuple[tuple[str, tuple[tuple[str, str], ...]], ...]
    spec_text: str
    command: str
    records_root: str
    written_utc: str

    @property
    def invalid_runs(self) -> tuple[RunView, ...]:
        return tuple(run for run in self.runs if not run.is_valid)

    @property
    def is_scaled(self) -> bool:
        return self.time_scale != 1.0

    @property
    def buckets(self) -> tuple[int, ...]:
        """Every bucket that any step used, ascending."""
        return tuple(sorted({b for run in self.runs for _, b in run.steps_by_n_b}))
