"""What requests and sessions felt: how many met the targets of [slo], under how many agents at a time, and the times to
tokens.

A request that was preempted gave no token for a while: the steps without one count as one gap at its start.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.analysis.serving import is_good, latencies, requests_in_window
from harness.analysis.sessions import session_times
from harness.analysis.stats import t_quantile
from harness.clock import NS_PER_MS, NS_PER_S
from harness.measure.records.run import SealedRun
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel
from harness.model.engine.state import STEP_PREFILL
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.plans import one_plan
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerSpec, SloSpec
from harness.table import interval_text
from harness.tune.setups import Setup

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
FELT_PLANS = 12
"""Plans whose steps say how tokens came."""
PROPOSED = "proposed"
ALPHA = 0.025
"""Chance that a number of agents is wrongly said to hold, or to fail; targets of requests and of sessions share it."""
SKEWER = 1.25
"""Runs are more skewed than a sample of them shows."""
Verdict = Literal["holds", "fails", "open"]


class Counts(NamedTuple):
    """What met its target in one run: (met, all) of requests and of sessions; None where there is no such target."""

    requests: tuple[int, int] | None
    sessions: tuple[int, int] | None


class Targets(NamedTuple):
    """Targets of requests and of sessions, and the share that is to meet them."""

    slo: SloSpec
    share: float


class Felt(NamedTuple):
    """Times over requests, model ms; of gaps between tokens None where no steps are simulated. share: of requests, or
    of sessions where fewer of them do, within the targets; None without targets."""

    ttft_p50: float
    ttft_p99: float
    itl_p50: float | None
    itl_p99: float | None
    share: float | None = None

    def beside(self, today: Felt) -> str:
        """ "TTFT p50 80 -> 78 ms, p99 518 -> 70 ms; ITL p50 9 -> 9 ms, p99 167 -> 28 ms"."""
        parts = [("TTFT", self[:2], today[:2]), ("ITL", self[2:4], today[2:4])]
        return "; ".join(
            f"{name} p50 {_ms(was[0])} -> {_ms(now[0])} ms, p99 {_ms(was[1])} -> {_ms(now[1])} ms"
            for name, now, was in parts
            if None not in (*now, *was)
        )


def _ms(time: float | None) -> str:
    return "" if time is None else f"{time:,.0f}" if time >= 100 else f"{time:.3g}"


def counts_of(
    arrays: layout.PlanArrays, outcome: layout.SimOutcome, slo: SloSpec, server: ServerSpec, model: CostModel
) -> list[Counts]:
    """What met its target in each simulated plan. A session's active time is the sum over its requests.

    server, model: of which the steps are simulated again where slo.itl_ms is set.
    """
    made, num_plans = outcome.requests, len(arrays.plans)
    ttft_ns = made["first_token_ns"] - made["arrival_ns"]
    e2e_ns = made["completed_ns"] - made["arrival_ns"]
    met = np.ones(len(arrays.requests), dtype=np.bool_)
    if slo.ttft_ms is not None:
        met &= ttft_ns <= slo.ttft_ms * NS_PER_MS
    if slo.tpot_ms is not None:
        met &= e2e_ns - ttft_ns <= slo.tpot_ms * NS_PER_MS * np.maximum(arrays.requests["generate"] - 1, 0)
    if slo.e2e_ms is not None:
        met &= e2e_ns <= slo.e2e_ms * NS_PER_MS
    if slo.itl_ms is not None:
        met &= _short_gaps(arrays, server, model, slo)
    requests = _by_plan(met, arrays.plans["num_requests"]) if slo.is_set else [None] * num_plans
    sessions: Sequence[tuple[int, int] | None] = [None] * num_plans
    if slo.session_s is not None:
        first = np.repeat(arrays.plans["first_session"], arrays.plans["num_requests"])
        own_ns = np.bincount(first + arrays.requests["session"], weights=e2e_ns, minlength=len(arrays.sessions))
        sessions = _by_plan(own_ns <= slo.session_s * NS_PER_S, arrays.plans["num_sessions"])
    return [Counts(*pair) for pair in zip(requests, sessions, strict=True)]


def _by_plan(met: BoolArray, sizes: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """(met, all) of each plan."""
    parts = np.split(met, np.cumsum(sizes)[:-1])
    return [(int(part.sum()), len(part)) for part in parts]


def parts_of(counts: Sequence[Counts]) -> list[list[tuple[int, int]]]:
    """The counts of requests and of sessions over runs, each where there is a target."""
    columns = ([each.requests for each in counts], [each.sessions for each in counts])
    return [[pair for pair in column if pair is not None] for column in columns if None not in column]


def share_met(counts: Sequence[Counts]) -> float:
    """The least share that meets a target, of requests and of sessions."""
    return min(sum(met for met, _ in part) / sum(of for _, of in part) for part in parts_of(counts))


def gaps_ns(arrays: layout.PlanArrays, config: EngineConfig, model: CostModel) -> list[FloatArray]:
    """The gaps between the tokens of every request, in plan order, as its plan alone has them at these costs."""
    gaps: list[FloatArray] = []
    for plan in range(len(arrays.plans)):
        alone = one_plan(arrays, plan)
        outcome = run_batch(alone, config, model, with_records=True)
        steps = outcome.steps[: int(outcome.totals["num_step_records"][0])]
        steps = steps[steps["kind"] != STEP_PREFILL]
        count = steps["count"]
        place = np.arange(int(count.sum())) - np.repeat(np.cumsum(count) - count, count)
        ends = np.repeat(steps["start_ns"], count) + (place + 1) * np.repeat(steps["duration_ns"], count)
        made = outcome.requests
        for first_ns, done_ns, tokens in zip(
            made["first_token_ns"], made["completed_ns"], alone.requests["generate"], strict=True
        ):
            low, high = np.searchsorted(ends, (first_ns, done_ns), side="right")
            low += max(0, high - low - (int(tokens) - 1))
            gaps.append(np.diff(ends[low:high], prepend=first_ns).astype(np.float64))
    return gaps


def _short_gaps(arrays: layout.PlanArrays, server: ServerSpec, model: CostModel, slo: SloSpec) -> BoolArray:
    """Which requests meet slo.itl_ms; an answer of one token has no gap that could be too long."""
    limit_ns = (slo.itl_ms or 0.0) * NS_PER_MS
    found = gaps_ns(arrays, EngineConfig.from_server(server), model)
    return np.array([not len(gaps) or np.percentile(gaps, slo.itl_percentile) <= limit_ns for gaps in found])


def felt_of(
    arrays: layout.PlanArrays, outcome: layout.SimOutcome, server: ServerSpec, model: CostModel, share: float | None
) -> Felt:
    """Quantiles over all requests; of gaps over those of FELT_PLANS plans, none of replicas behind a router."""
    ttft_ms = (outcome.requests["first_token_ns"] - outcome.requests["arrival_ns"]) / NS_PER_MS
    p50, p99 = (float(value) for value in np.quantile(ttft_ms, (0.5, 0.99)))
    if server.is_routed:
        return Felt(p50, p99, None, None, share)
    count = min(FELT_PLANS, len(arrays.plans))
    few = layout.PlanArrays(arrays.plans[:count], *arrays[1:])
    gaps = np.concatenate(gaps_ns(few, EngineConfig.from_server(server), model)) / NS_PER_MS
    if not len(gaps):
        return Felt(p50, p99, None, None, share)
    itl_p50, itl_p99 = (float(value) for value in np.quantile(gaps, (0.5, 0.99)))
    return Felt(p50, p99, itl_p50, itl_p99, share)


def in_flight_ns(arrays: layout.PlanArrays, outcome: layout.SimOutcome) -> FloatArray:
    """Time of each plan in which any request was in flight (B); shape (plans,)."""
    cuts = np.cumsum(arrays.plans["num_requests"])[:-1]
    sums: list[int] = []
    for sent_ns, done_ns in zip(
        np.split(outcome.requests["arrival_ns"], cuts), np.split(outcome.requests["completed_ns"], cuts), strict=True
    ):
        order = np.argsort(sent_ns)
        sent_ns, latest_ns = sent_ns[order], np.maximum.accumulate(done_ns[order])
        idle_ns = np.maximum(0, sent_ns[1:] - latest_ns[:-1]).sum()
        sums.append(int(latest_ns[-1] - sent_ns[0] - idle_ns))
    return np.array(sums, dtype=np.float64)


def most_shown(num_runs: int, alpha: float) -> float:
    """The largest share that so many runs can show, each of which meets every target: a worse run may be among more."""
    return alpha ** (1 / num_runs)


class Share(NamedTuple):
    """A share with the interval over runs."""

    share: float
    low: float
    high: float


@dataclass(frozen=True)
class Point:
    """A number of agents at a time that was measured. requests, sessions: None where there is no such target."""

    agents: int
    verdict: Verdict
    requests: Share | None
    sessions: Share | None
    num_runs: int

    @property
    def most_shown(self) -> float:
        """The largest share that its runs can show."""
        return most_shown(self.num_runs, ALPHA / (2 - (None in (self.requests, self.sessions))))

    @property
    def words(self) -> str:
        """ "12 agents at a time: requests 97.1 % (94.0 to 98.6) within the targets, holds"."""
        return f"{self.agents} agents at a time: {self.share_words}"

    @property
    def share_words(self) -> str:
        """ "requests 97.1 % (94.0 to 98.6) within the targets, holds"."""
        parts = [
            f"{name} {100 * each.share:.1f} % ({interval_text(100 * each.low, 100 * each.high, 1)})"
            for name, each in (("requests", self.requests), ("sessions", self.sessions))
            if each is not None
        ]
        told = {"holds": "holds", "fails": "does not hold", "open": "not told"}[self.verdict]
        return f"{', '.join(parts)} within the targets, {told}"


def counts_of_run(run: SealedRun, slo: SloSpec) -> Counts:
    """What met its target in a sealed run; what was not answered met none."""
    requests = sessions = None
    if slo.is_set:
        requests = int(is_good(latencies(run), slo).sum()), len(requests_in_window(run))
    if slo.session_s is not None and (times := session_times(run)) is not None:
        sessions = times.num_within(slo.session_s), len(times.session)
    return Counts(requests, sessions)


def share_of(pairs: Sequence[tuple[int, int]], alpha: float) -> Share:
    """A share of sums over runs, of each run one draw: by Student's t, wider on the side of the rare runs (Johnson's
    correction for skewness), and never narrower than runs can show of which none is worse."""
    total, num = sum(of for _, of in pairs), len(pairs)
    share = sum(met for met, _ in pairs) / total
    if num < 2:
        return Share(share, 0.0, 1.0)
    left = np.array([(met - share * of) * num / total for met, of in pairs])
    sd, t = float(left.std(ddof=1)), t_quantile(1 - 2 * alpha, num - 1)
    half = t * sd / math.sqrt(num)
    shift = SKEWER * float((left**3).mean()) / sd**2 * (1 + 2 * t * t) / (6 * num) if sd else 0.0
    most = most_shown(num, alpha)
    low, high = min(most, share - half + min(shift, 0.0)), max(1 - most, share + half + max(shift, 0.0))
    return Share(share, max(0.0, low), min(1.0, high))


def point_of(agents: int, counts: Sequence[Counts], share: float) -> Point:
    """What the runs of one number of agents show. A number fails by either target, which share the error."""
    alpha = ALPHA / max(1, len(parts_of(counts)))
    requests, sessions = (
        None if None in column else share_of([pair for pair in column if pair is not None], alpha)
        for column in ([each.requests for each in counts], [each.sessions for each in counts])
    )
    shares = [each for each in (requests, sessions) if each is not None]
    verdict: Verdict = "open"
    if any(each.high < share for each in shares):
        verdict = "fails"
    elif all(each.low >= share for each in shares):
        verdict = "holds"
    return Point(agents, verdict, requests, sessions, len(counts))


@dataclass(frozen=True)
class Capacity:
    """The most agents at a time of a configuration: predicted, and measured between ``low`` and ``high`` - 1.

    low: 0: no number was shown to hold. high: the least that was shown to fail; None: none was.
    """

    name: str
    setup: Setup
    predicted: int
    points: tuple[Point, ...] = ()

    @property
    def low(self) -> int:
        return max((point.agents for point in self.points if point.verdict == "holds"), default=0)

    @property
    def high(self) -> int | None:
        return min((point.agents for point in self.points if point.verdict == "fails"), default=None)

    @property
    def has_boundary(self) -> bool:
        """Whether no number fails below one that holds."""
        return self.high is None or self.low < self.high

    @property
    def words(self) -> str:
        """ "12 to 14 agents at a time"; where a number fails below one that holds, both."""
        if self.high is None:
            return f"at least {self.low} agents at a time" if self.low else "an unknown number of agents at a time"
        if not self.low:
            return f"fewer than {self.high} agents at a time" if self.high > 1 else "not even one agent at a time"
        if not self.has_boundary:
            return f"no single boundary: {self.low} agents at a time hold and {self.high} do not"
        most = self.high - 1
        return f"{self.low} agents at a time" if self.low >= most else f"{self.low} to {most} agents at a time"
