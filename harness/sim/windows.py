"""Figures of a stretch of a longer life: what the device did and gave between two instants, and whether it was steady.

A window begins when every user has finished so many requests, and lasts a stated time; everything is counted to the ns,
steps that straddle an edge by the part inside. Nothing is drawn here. Next: ``search.evaluate`` judges candidates by
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.clock import NS_PER_S
from harness.engine.config import EngineConfig
from harness.engine.cost import CostModel
from harness.engine.state import STEP_PREFILL, IntArray
from harness.errors import PlanError
from harness.sim.kernel import arrays as layout
from harness.sim.search.space import WindowSpec
from harness.sim.simulate import check_slots, run_arrays


class WindowFigures(NamedTuple):
    """What happened in [start_ns, end_ns). Times in ns.

    completed: requests that completed inside. device_ns, decode_ns, wait_session_ns: the parts of steps inside.
    rearrivals, cached_tokens, reusable_tokens: of the re-arrivals admitted inside. decode_slots, decode_requests:
    sums of b and of n over the decode steps that start inside; histogram: h(n) of these. latencies_ns: of the
    requests completed inside.
    """

    start_ns: int
    end_ns: int
    completed: int
    device_ns: int
    decode_ns: int
    wait_session_ns: int
    rearrivals: int
    reused: int
    cached_tokens: int
    reusable_tokens: int
    decode_slots: int
    decode_requests: int
    histogram: tuple[int, ...]
    evictions: int
    latencies_ns: IntArray

    @property
    def reuse_share(self) -> float:
        """Share of the re-arrivals that reused anything; 1 when there was none."""
        return self.reused / self.rearrivals if self.rearrivals else 1.0

    @property
    def padding_ratio(self) -> float:
        """p = sum(b - n) / sum(b) over the decode steps."""
        return (self.decode_slots - self.decode_requests) / self.decode_slots if self.decode_slots else 0.0


def users_of(arrays: layout.PlanArrays) -> IntArray:
    """The user behind each session of a single plan: a session that starts after another is the same user's next."""
    users = np.arange(len(arrays.after), dtype=np.int64)
    for place, before in enumerate(arrays.after.tolist()):
        if before >= 0:
            users[place] = users[before]
    return users


def one_plan(arrays: layout.PlanArrays, plan: int) -> layout.PlanArrays:
    """The arrays of one of several plans, alone."""
    first, last = (int(arrays.first_session[place]) for place in (plan, plan + 1))
    first_request, last_request = (int(arrays.first_request[place]) for place in (first, last))
    per_session = {
        name: getattr(arrays, name)[first:last] for name in ("start_ns", "after", "continues", "root", "num_before")
    }
    lists: dict[str, IntArray] = {}
    for start, values in (("first_follower", "follower"), ("first_name", "name")):
        starts = getattr(arrays, start)[first : last + 1]
        lists |= {start: starts - starts[0], values: getattr(arrays, values)[starts[0] : starts[-1]]}
    per_request = {
        name: getattr(arrays, name)[first_request:last_request]
        for name in ("keep", "new", "generate", "wait_ns", "session", "pinned_ns")
    }
    return arrays._replace(
        first_session=np.array([0, last - first], dtype=np.int64),
        first_request=arrays.first_request[first : last + 1] - first_request,
        shared_prefix=arrays.shared_prefix[plan : plan + 1],
        named_tokens=arrays.named_tokens[plan : plan + 1],
        **lists,
        **per_session,
        **per_request,
    )


def window_figures(
    arrays: layout.PlanArrays, plan: int, config: EngineConfig, model: CostModel, window: WindowSpec
) -> WindowFigures:
    """Simulate one plan and look at its window.

    Raises PlanError when a user never finishes that many requests, or everything is over before the window is.
    """
    alone = one_plan(arrays, plan)
    check_slots(alone, config)
    outcome = run_arrays(alone, config, model)
    start_ns = window_start(alone, outcome, window.after_requests)
    end_ns = start_ns + round(window.seconds * NS_PER_S)
    life_ns = last_full_ns(alone, outcome)
    if end_ns > life_ns:
        raise PlanError(
            f"the window ends {end_ns / NS_PER_S:.1f} s after the start, when a user has already left "
            f"({life_ns / NS_PER_S:.1f} s)",
            where=f"plan {plan}",
            hint="Give each user more sessions, or a shorter window",
        )
    return look(alone, outcome, config, start_ns, end_ns)


def window_start(arrays: layout.PlanArrays, outcome: layout.Outcome, after_requests: int) -> int:
    """The instant from which every user has finished ``after_requests`` requests."""
    if after_requests == 0:
        return 0
    user = users_of(arrays)[arrays.session]
    completed = outcome.requests[:, layout.O_COMPLETED]
    starts: list[int] = []
    for one in np.unique(user).tolist():
        own = np.sort(completed[user == one])
        if len(own) < after_requests:
            raise PlanError(
                f"it has {len(own)} requests, fewer than the {after_requests} after which the window begins",
                where=f"user {one}",
                hint="Give each user more sessions or requests",
            )
        starts.append(int(own[after_requests - 1]))
    return max(starts)


def last_full_ns(arrays: layout.PlanArrays, outcome: layout.Outcome) -> int:
    """The instant at which the first user has nothing left to do: after it the population shrinks."""
    user = users_of(arrays)[arrays.session]
    completed = outcome.requests[:, layout.O_COMPLETED]
    return min(int(completed[user == one].max()) for one in np.unique(user).tolist())


def look(
    arrays: layout.PlanArrays, outcome: layout.Outcome, config: EngineConfig, start_ns: int, end_ns: int
) -> WindowFigures:
    """Count what a simulated plan did in [start_ns, end_ns)."""
    requests = outcome.requests
    steps = outcome.steps[: outcome.totals[0, layout.A_NUM_STEP_RECORDS]]
    begin = steps[:, layout.T_START]
    each = steps[:, layout.T_DURATION]
    over = begin + each * steps[:, layout.T_COUNT]
    inside = np.clip(np.minimum(over, end_ns) - np.maximum(begin, start_ns), 0, None)
    is_prefill = steps[:, layout.T_KIND] == STEP_PREFILL
    decode_inside = _steps_inside(steps[~is_prefill], start_ns, end_ns)
    num_seqs, bucket = (steps[~is_prefill][:, column] for column in (layout.T_NUM_SEQS, layout.T_BUCKET))
    histogram = np.bincount(num_seqs, weights=decode_inside, minlength=config.max_num_seqs + 1).astype(np.int64)
    completed = requests[:, layout.O_COMPLETED]
    done = (start_ns <= completed) & (completed < end_ns)
    number = np.arange(len(requests)) - arrays.first_request[arrays.session]
    admitted = requests[:, layout.O_ADMITTED]
    again = (number > 0) & (start_ns <= admitted) & (admitted < end_ns)
    prompt = arrays.keep + arrays.new
    block = config.block_tokens
    reusable = np.minimum(np.roll(prompt, 1), prompt - 1) // block * block
    evicted_at = outcome.evictions[: outcome.totals[0, layout.A_NUM_EVICTION_RECORDS], layout.V_AT]
    return WindowFigures(
        start_ns=start_ns,
        end_ns=end_ns,
        completed=int(done.sum()),
        device_ns=int(inside.sum()),
        decode_ns=int(inside[~is_prefill].sum()),
        wait_session_ns=_waited(requests, steps[is_prefill], inside[is_prefill]),
        rearrivals=int(again.sum()),
        reused=int((requests[again, layout.O_CACHED] > 0).sum()),
        cached_tokens=int(requests[again, layout.O_CACHED].sum()),
        reusable_tokens=int(reusable[again].sum()),
        decode_slots=int((bucket * decode_inside).sum()),
        decode_requests=int((num_seqs * decode_inside).sum()),
        histogram=tuple(int(count) for count in histogram),
        evictions=int(((start_ns <= evicted_at) & (evicted_at < end_ns)).sum()),
        latencies_ns=(completed - requests[:, layout.O_ARRIVAL])[done],
    )


def _steps_inside(steps: IntArray, start_ns: int, end_ns: int) -> IntArray:
    """How many of each record's equal steps start in [start_ns, end_ns)."""
    begin, each, count = (steps[:, column] for column in (layout.T_START, layout.T_DURATION, layout.T_COUNT))
    each = np.maximum(each, 1)
    before = np.clip(-((begin - start_ns) // each), 0, count)
    until = np.clip(-((begin - end_ns) // each), 0, count)
    return until - before


def _waited(requests: IntArray, prefills: IntArray, inside: IntArray) -> int:
    """W: session ns that others, admitted and not yet complete, waited while these prefills ran."""
    admitted = np.sort(requests[:, layout.O_ADMITTED])
    completed = np.sort(requests[:, layout.O_COMPLETED])
    begin = prefills[:, layout.T_START]
    others = np.searchsorted(admitted, begin, "left") - np.searchsorted(completed, begin, "right")
    return int((others * inside).sum())


def median_of_paired_ratios(changed: Sequence[float], baseline: Sequence[float]) -> float:
    """Median over replicates of changed / baseline, each pair on the same plan."""
    return float(np.median(np.asarray(changed) / np.asarray(baseline)))


def ratio_of_sums(changed: Sequence[float], baseline: Sequence[float]) -> float:
    return float(np.sum(changed) / np.sum(baseline))
