"""How long recorded requests wait: in the queue and for their first token, recorded and by the scheduler's rules.

Two causes are kept apart. Decisions: the rules admit a request, or complete its prompt, in another step, or fill a step
otherwise. Costs: a step lasts as long as a cost model says. Time between steps stays as it was recorded.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from harness.analysis.stats import median, quantile
from harness.clock import NS_PER_MS
from harness.extras.formats.vllm_sessions import ObservedRequest


class StepTimes(NamedTuple):
    """Number and instants of a recorded step, and how long it lasts in ns.

    schedule_ns: it was decided. began_ns: it ran, and no earlier step did. update_ns: its result was there.
    by_costs_ns: of the recorded batch by the costs. by_rules_ns: of the batch of the rules by the costs.
    """

    step: int
    schedule_ns: int
    began_ns: int
    update_ns: int
    end_ns: int
    by_costs_ns: int
    by_rules_ns: int


@dataclass
class Places:
    """Steps, by their place among all, in which requests were admitted first; and had their first token."""

    admitted: dict[int, int] = field(default_factory=dict[int, int])
    admitted_by_rules: dict[int, int] = field(default_factory=dict[int, int])
    first_by_rules: dict[int, int] = field(default_factory=dict[int, int])


class Queued(NamedTuple):
    """Steps that were decided without a request while it waited, and its time in the queue: recorded, by the rules.

    first_step: number of the first step that could admit it.
    """

    request: int
    first_step: int
    steps: int
    steps_by_rules: int
    wait_ns: int
    wait_by_rules_ns: int


class FirstToken(NamedTuple):
    """Time to first token from the queue, in ns; its error is the sum of what decisions and costs leave."""

    ttft_ns: int
    from_decisions_ns: int
    from_costs_ns: int

    @property
    def error_ns(self) -> int:
        return self.from_decisions_ns + self.from_costs_ns


@dataclass
class Waits:
    """The waits of the requests of a recording.

    num_admitted_once: requests that only the server, or only the rules, admitted. num_without_token: requests whose
    first token is not in the file, or not in the steps of the rules.
    """

    queued: list[Queued] = field(default_factory=list[Queued])
    tokens: list[FirstToken] = field(default_factory=list[FirstToken])
    num_admitted_once: int = 0
    num_without_token: int = 0

    @property
    def elsewhere(self) -> list[Queued]:
        """Requests that were admitted in another step than by the rules, as they were queued."""
        return [each for each in self.queued if each.steps != each.steps_by_rules]


class Timeline:
    """The clock of the recording, where each step lasts as long as is said and time between steps is the same."""

    def __init__(self, times: Sequence[StepTimes], durations_ns: Sequence[int]) -> None:
        self._times, self._durations_ns = times, durations_ns
        self._ends_ns = [each.end_ns for each in times]
        self._shifts_ns = [0]
        for each, duration_ns in zip(times, durations_ns, strict=True):
            self._shifts_ns.append(self._shifts_ns[-1] + duration_ns - (each.end_ns - each.began_ns))

    def at(self, instant_ns: int) -> int:
        """An instant of the recording; within a step in proportion."""
        place = bisect_right(self._ends_ns, instant_ns)
        shift_ns = self._shifts_ns[place]
        if place < len(self._times) and instant_ns > (began_ns := self._times[place].began_ns):
            lasted_ns = self._ends_ns[place] - began_ns
            return began_ns + shift_ns + (instant_ns - began_ns) * self._durations_ns[place] // lasted_ns
        return instant_ns + shift_ns


def waits_of(requests: Sequence[ObservedRequest], times: Sequence[StepTimes], places: Places) -> Waits:
    """The waits of requests, by number, in the order in which they were queued."""
    found = Waits()
    schedules_ns, updates_ns = [each.schedule_ns for each in times], [each.update_ns for each in times]
    by_costs = Timeline(times, [each.by_costs_ns for each in times])
    by_rules = Timeline(times, [each.by_rules_ns for each in times])
    for request in sorted(requests, key=lambda each: (each.queued_ns, each.number)):
        queued_ns, number = request.queued_ns, request.number
        admitted, theirs = places.admitted.get(number), places.admitted_by_rules.get(number)
        if admitted is None or theirs is None:
            found.num_admitted_once += admitted != theirs
            continue
        first = bisect_left(schedules_ns, queued_ns)
        wait_ns = schedules_ns[admitted] - queued_ns
        wait_by_rules_ns = by_rules.at(schedules_ns[theirs]) - by_rules.at(queued_ns)
        waited = (admitted - first, theirs - first, wait_ns, wait_by_rules_ns)
        found.queued.append(Queued(number, times[first].step, *waited))
        token_ns = None if request.end is None else request.end.first_token_ns
        place = -1 if token_ns is None else bisect_right(updates_ns, token_ns) - 1
        place_by_rules = places.first_by_rules.get(number)
        if place < admitted or place_by_rules is None:
            found.num_without_token += 1
            continue
        ttft_ns = times[place].end_ns - queued_ns
        costs_ns = by_costs.at(times[place].end_ns) - by_costs.at(queued_ns)
        rules_ns = by_rules.at(times[place_by_rules].end_ns) - by_rules.at(queued_ns)
        found.tokens.append(FirstToken(ttft_ns, rules_ns - costs_ns, costs_ns - ttft_ns))
    return found


def lines_of_waits(waits: Waits, costs: str) -> list[str]:
    """What is printed. costs: the name of the cost model, "" where none is known."""
    return [*_lines_of_queue(waits, costs), *_lines_of_tokens(waits, costs)]


def _lines_of_queue(waits: Waits, costs: str) -> list[str]:
    queued, elsewhere = waits.queued, waits.elsewhere
    num_differ = len(elsewhere) + waits.num_admitted_once
    lines = [f"queueing: {num_differ} of {len(queued) + waits.num_admitted_once} requests are admitted in another step"]
    if waits.num_admitted_once:
        lines[0] += f", {waits.num_admitted_once} of them by the server or by the rules alone"
    if elsewhere:
        first = elsewhere[0]
        lines.append(
            f"first: request {first.request}, queued before step {first.first_step}, waits {first.steps} steps "
            f"recorded, {first.steps_by_rules} by the rules"
        )
    if queued:
        steps = _typical(each.steps for each in queued), _typical(each.steps_by_rules for each in queued)
        times = _typical_ms(each.wait_ns for each in queued), _typical_ms(each.wait_by_rules_ns for each in queued)
        lines.append(f"steps waited: {steps[0]} recorded; {steps[1]} by the rules")
        lines.append(f"time in the queue: {times[0]} recorded; {times[1]} by the rules and {_source(costs)}")
    return lines


def _lines_of_tokens(waits: Waits, costs: str) -> list[str]:
    tokens = waits.tokens
    left_out = (
        f"TTFT: {waits.num_without_token} requests are left out, without a first token in the file or in these steps"
    )
    notes = [left_out] if waits.num_without_token else []
    if not tokens:
        return ["TTFT: no request has a first token in both", *notes]
    recorded, by_rules = (each.ttft_ns for each in tokens), (each.ttft_ns + each.error_ns for each in tokens)
    decisions = sum(abs(each.from_decisions_ns) for each in tokens)
    of_costs = sum(abs(each.from_costs_ns) for each in tokens)
    lines = [
        f"TTFT of {len(tokens)} requests from the queue on: {_typical_ms(recorded)} recorded; "
        f"{_typical_ms(by_rules)} by the rules and {_source(costs)}"
    ]
    if costs and decisions + of_costs:
        share = 100 * decisions / (decisions + of_costs)
        shares = f"{share:.1f} % from decisions, {100 - share:.1f} % from costs"
        lines.append(f"error of TTFT: {_error_ms(each.error_ns for each in tokens)}; {shares}")
    elif costs:
        lines.append("error of TTFT: none")
    else:
        error = _error_ms(each.from_decisions_ns for each in tokens)
        lines.append(f"error of TTFT from decisions: {error}; from costs: unknown, name a --cost-model")
    return [*lines, *notes]


def _source(costs: str) -> str:
    return costs or "the recorded durations of steps"


def _typical(values: Iterable[float]) -> str:
    listed = list(values)
    return f"median {median(listed):g}, p90 {quantile(listed, 0.9):.4g}"


def _typical_ms(values_ns: Iterable[int]) -> str:
    listed = list(values_ns)
    return f"median {median(listed) / NS_PER_MS:.3f} ms, p90 {quantile(listed, 0.9) / NS_PER_MS:.3f} ms"


def _error_ms(errors_ns: Iterable[int]) -> str:
    listed = list(errors_ns)
    sizes = [abs(each) for each in listed]
    return f"median {median(listed) / NS_PER_MS:+.3f} ms, p90 of its size {quantile(sizes, 0.9) / NS_PER_MS:.3f} ms"
