"""Time in the steps of a vLLM (S), measured inside its engine core, and what lies between A and B, part by part.

B is time with a request in flight: in steps then, and between them. A prices each step. So B - A is the sum of what the
cost model errs in each kind of step, and of the time between steps.
Definitions: docs/reference/method.md, "Time in steps".
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from harness.analysis.cost.reconstruct import Span, step_prices, union_of
from harness.analysis.logs.engine_steps import step_spans
from harness.analysis.stats import IntArray, sum_or_none, when_known
from harness.clock import ScaledClock
from harness.measure.records.schema import values_of
from harness.model.engine import CostModel
from harness.stacks.vllm.core_steps import StepDetails
from harness.stacks.vllm.step_log import StepLog

NUM_QUARTERS = 4
BETWEEN = "between steps"
# A quarter of fewer holds the noise of single steps.
MIN_DECODE_STEPS = 100
# By how much the steps of a host may slow down before it is said: as far as A and B may lie apart.
MAX_DRIFT = 0.05


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Steps of one kind, decode steps by padded size.

    measured_ns: while requests were in flight. modelled_ns: None where the cost model states no such price.
    """

    num_steps: int
    measured_ns: int
    modelled_ns: int | None

    def __add__(self, other: StepGroup) -> StepGroup:
        modelled_ns = when_known(operator.add, self.modelled_ns, other.modelled_ns)
        return StepGroup(self.num_steps + other.num_steps, self.measured_ns + other.measured_ns, modelled_ns)

    @property
    def error_ns(self) -> int | None:
        """Its part of B - A: measured less modelled."""
        return None if self.modelled_ns is None else self.measured_ns - self.modelled_ns

    @property
    def speed(self) -> float | None:
        """Measured over modelled time."""
        return self.measured_ns / self.modelled_ns if self.modelled_ns else None


@dataclass(frozen=True, slots=True)
class StepParts:
    """The parts of B, of one run or summed. Times of a run's clock.

    between_ns: requests were in flight and the engine was in no step. groups: by the name of the kind. quarters: of one
    run, (measured, expected) time of its decode steps in each quarter of them; empty where there are few.
    """

    between_ns: int = 0
    groups: Mapping[str, StepGroup] = field(default_factory=dict[str, StepGroup])
    quarters: tuple[tuple[int, float], ...] = field(default=(), compare=False, repr=False)

    @property
    def in_steps_ns(self) -> int:
        """S: while requests were in flight."""
        return sum(group.measured_ns for group in self.groups.values())

    @property
    def b_ns(self) -> int:
        """Channel B."""
        return self.in_steps_ns + self.between_ns

    @property
    def a_ns(self) -> int | None:
        """Channel A; None where a group has no price."""
        return sum_or_none(group.modelled_ns for group in self.groups.values())

    @property
    def apart_ns(self) -> dict[str, int]:
        """B - A by part, whose sum it is; empty without A."""
        if self.a_ns is None:
            return {}
        errors = {name: group.error_ns or 0 for name, group in self.groups.items()}
        return {**errors, BETWEEN: self.between_ns}

    @property
    def decode(self) -> StepGroup:
        """All pure decode steps."""
        return sum((group for name, group in self.groups.items() if _is_decode(name)), StepGroup(0, 0, 0))

    @property
    def drift(self) -> float | None:
        """Slowest over fastest quarter of the decode steps, less 1; None where there are few."""
        speeds = [measured_ns / expected_ns for measured_ns, expected_ns in self.quarters if expected_ns]
        return max(speeds) / min(speeds) - 1 if len(speeds) == NUM_QUARTERS and min(speeds) > 0 else None

    def __add__(self, other: StepParts) -> StepParts:
        """The parts of both; quarters are of single runs."""
        nothing = StepGroup(0, 0, 0)
        names = sorted({**self.groups, **other.groups}, key=_place)
        groups = {name: self.groups.get(name, nothing) + other.groups.get(name, nothing) for name in names}
        return StepParts(self.between_ns + other.between_ns, groups)


class _Step(NamedTuple):
    """A step that did work. price_ns: None where the cost model states none."""

    group: str
    measured_ns: int
    price_ns: int | None


def step_parts(
    log: StepLog, requests: pa.Table, clock: ScaledClock, cost_model: CostModel | None = None
) -> StepParts | None:
    """The parts of a run; None for several engines, and where no engine core stamped its steps.

    A step lasts from the end of the step before it where requests were running, else from its own beginning, as
    calibration takes it. Steps outside the time in flight have a price and no time.
    """
    if not log.cores or len(log.engines) > 1:
        return None
    in_flight = _TimeInFlight(
        (sent, done) for sent, done in values_of(requests, "sent_ns", "done_ns") if None not in (sent, done)
    )
    steps = list(_steps(log, in_flight, clock, cost_model))
    groups: dict[str, StepGroup] = {}
    for step in steps:
        one = StepGroup(1, step.measured_ns, step.price_ns)
        groups[step.group] = groups[step.group] + one if step.group in groups else one
    ordered = {name: groups[name] for name in sorted(groups, key=_place)}
    in_steps_ns = sum(group.measured_ns for group in ordered.values())
    return StepParts(in_flight.total_ns - in_steps_ns, ordered, _quarters(steps, ordered))


class _TimeInFlight:
    """The union of the requests' intervals. total_ns: its length, which is B."""

    def __init__(self, flights: Iterable[Span]) -> None:
        merged = union_of(flights)
        self._starts: IntArray = np.array([start for start, _end in merged], dtype=np.int64)
        self._before = [0, *accumulate(end - start for start, end in merged)]
        self._ends = [end for _start, end in merged]
        self.total_ns = self._before[-1]

    def within(self, span: Span) -> int:
        """How much of a span it covers."""
        return self._until(span[1]) - self._until(span[0])

    def _until(self, instant_ns: int) -> int:
        place = int(np.searchsorted(self._starts, instant_ns, side="right"))
        return self._before[place] - (max(0, self._ends[place - 1] - instant_ns) if place else 0)


def _steps(log: StepLog, in_flight: _TimeInFlight, clock: ScaledClock, cost_model: CostModel | None) -> Iterator[_Step]:
    prices = None if cost_model is None else step_prices(log, cost_model)
    rows = values_of(log.steps, "kind", "n", "b", "runtime_mode")
    details = (step.details for step in log.cores[0].steps)
    places = zip(step_spans(log), rows, details, prices or [None] * log.steps.num_rows, strict=True)
    running_until_ns = None
    for span, (kind, n, b, mode), work, price_ns in places:
        if span is None or kind in ("idle", "dummy"):
            continue
        was_idle = span[0] != running_until_ns
        running_until_ns = span[1]
        on_clock = (clock.from_monotonic_ns(span[0]), clock.from_monotonic_ns(span[1]))
        name = _name(kind, n if b is None else b, work, was_idle=was_idle)
        name += " without a graph" if n and log.has_graphs and mode == "NONE" else ""
        yield _Step(name, in_flight.within(on_clock), price_ns)


def _name(kind: str, size: int | None, work: StepDetails | None, *, was_idle: bool) -> str:
    """The kind of a step: of decodes by size; of prompts by what came before the parts, and before the step."""
    if kind == "decode":
        return f"decode of {size}"
    if kind != "prefill" or work is None:
        return kind
    if work.num_later_parts:
        return "prefill, later part"
    what = "after cached tokens" if any(before for before, _tokens in work.parts) else "first part"
    return f"prefill, {what}{', engine was idle' if was_idle else ''}"


def _is_decode(name: str) -> bool:
    return name.startswith("decode of ")


def _place(name: str) -> tuple[bool, int, str]:
    """Decode steps first, by size."""
    return (not _is_decode(name), len(name), name)


def _quarters(steps: Sequence[_Step], groups: Mapping[str, StepGroup]) -> tuple[tuple[int, float], ...]:
    """Decode steps in the order of time. Each is expected to take its group's mean, in the proportion of its price.

    So neither the sizes of the batches nor the level of the cost model is drift.
    """
    decodes = [step for step in steps if _is_decode(step.group)]
    if len(decodes) < MIN_DECODE_STEPS:
        return ()
    quarters: list[tuple[int, float]] = []
    for part in np.array_split(np.arange(len(decodes)), NUM_QUARTERS):
        those = [decodes[place] for place in part.tolist()]
        expected_ns = sum(_expected_ns(step, groups[step.group]) for step in those)
        quarters.append((sum(step.measured_ns for step in those), expected_ns))
    return tuple(quarters)


def _expected_ns(step: _Step, group: StepGroup) -> float:
    share = step.price_ns / group.modelled_ns if step.price_ns and group.modelled_ns else 1 / group.num_steps
    return share * group.measured_ns
