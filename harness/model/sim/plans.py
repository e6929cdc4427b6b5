"""Plans in the tables of the compiled simulator: made from plans, drawn without them, joined, cut and read back.

Replicates of a drawn workload differ only in lengths and waits, so one plan gives the shape of all. The numbers are
those that ``build_plan`` draws.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from harness.clock import NS_PER_S
from harness.compiled.records import IntArray, record_as_dict, records_from
from harness.errors import PlanError
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import FS_PER_S, LARGEST_FS, CostModel
from harness.model.engine.state import FS_PER_NS
from harness.model.engine.steps import FAR
from harness.model.experiment import build_plan
from harness.model.plan.build import draw_requests, is_waited, wait_cap_ns
from harness.model.plan.model import Plan, SessionPlan
from harness.model.sim.kernel import arrays as layout
from harness.model.spec import Treatment, WorkloadSpec

_Table = TypeVar("_Table")
FloatArray = npt.NDArray[np.float64]
MOST_NS = 1 << 61
SECONDS_PER_YEAR = 365.25 * 86_400


def plan_arrays(plans: Sequence[Plan]) -> layout.PlanArrays:
    """Plans end to end."""
    return session_arrays(
        [plan.sessions for plan in plans],
        [plan.shared_prefix_tokens for plan in plans],
        [plan.block_tokens for plan in plans],
    )


def session_arrays(
    plans: Sequence[Sequence[SessionPlan]], shared_prefix_tokens: Sequence[int], named_tokens: Sequence[int]
) -> layout.PlanArrays:
    """Sessions of one or more plans end to end. A session must continue one with a lower index."""
    plan_rows: list[tuple[int, ...]] = []
    sessions: list[tuple[int, ...]] = []
    requests: list[tuple[int, ...]] = []
    followers: list[int] = []
    names: list[int] = []
    for plan, shared, named in zip(plans, shared_prefix_tokens, named_tokens, strict=True):
        first_session, first_request = len(sessions), len(requests)
        roots, chains = list(range(len(plan))), dict[tuple[int, int], int]()
        waiting: list[list[int]] = [[] for _ in plan]
        before = [set(session.predecessors) for session in plan]
        for place, session in enumerate(plan):
            if session.continues is not None:
                roots[place] = roots[session.continues]
            for earlier in before[place]:
                waiting[earlier].append(place)
        for place, session in enumerate(plan):
            first_name, chain = len(names), -1
            for name in session.blocks:
                chain = chains.setdefault((chain, name), len(chains))
                names.append(chain)
            after, continues = (-1 if link is None else link for link in (session.after, session.continues))
            links = (after, continues, roots[place], len(before[place]), len(followers), len(waiting[place]))
            own = (len(requests), len(session.requests), session.start_offset_ns)
            sessions.append((*own, *links, first_name, len(session.blocks), int(session.is_start_waited)))
            followers += waiting[place]
            requests += [
                (
                    *(request.keep_tokens, request.new_tokens, request.generate_tokens, request.wait_after_ns),
                    *(place, -1, request.abort_after_ns, request.abort_after_tokens),
                )
                for request in session.requests
            ]
        num_abortable = sum(request.is_abortable for session in plan for request in session.requests)
        num_requests = len(requests) - first_request
        plan_rows.append((first_session, len(plan), first_request, num_requests, shared, named, num_abortable))
    return layout.PlanArrays(
        plans=records_from(layout.PlanRecord, plan_rows),
        sessions=records_from(layout.SessionRecord, sessions),
        requests=records_from(layout.RequestRecord, requests),
        followers=np.array(followers, dtype=np.int64),
        names=np.array(names, dtype=np.int64),
    )


class Input(NamedTuple):
    """One plan: the replicate of a workload under a base seed."""

    workload: WorkloadSpec
    base_seed: int
    replicate: int


def input_arrays(inputs: Sequence[Input], treatment: Treatment = "as-drawn") -> layout.PlanArrays:
    """The plans of these inputs end to end, in their order, under a treatment.

    Raises SpecError when a wait distribution is unknown or its file is wrong.
    """
    places: dict[tuple[WorkloadSpec, int], list[int]] = {}
    for place, (workload, base_seed, _) in enumerate(inputs):
        places.setdefault((workload, base_seed), []).append(place)
    parts: dict[int, layout.PlanArrays] = {}
    for (workload, base_seed), of_workload in places.items():
        plans = _replicates(workload, base_seed, [inputs[place].replicate for place in of_workload], treatment)
        parts.update(zip(of_workload, plans, strict=True))
    return joined([parts[place] for place in range(len(inputs))])


def _replicates(
    workload: WorkloadSpec, base_seed: int, replicates: Sequence[int], treatment: Treatment
) -> Iterator[layout.PlanArrays]:
    """The plans of one workload and base seed, one by one."""
    if workload.source != "drawn":
        for replicate in replicates:
            yield plan_arrays([build_plan(workload, base_seed, replicate).with_treatment(treatment)])
        return
    shape = plan_arrays([build_plan(workload, base_seed, replicates[0])])
    drawn = draw_requests(workload, base_seed, replicates)
    waits_ns = _treated(np.minimum(drawn.wait_ns, wait_cap_ns(workload)), is_waited(workload), treatment)
    for place in range(len(replicates)):
        requests = shape.requests.copy()
        requests["keep"][:] = drawn.keep_tokens[place]
        requests["new"][:] = drawn.new_tokens[place]
        requests["generate"][:] = drawn.generate_tokens[place]
        requests["wait_ns"][:] = waits_ns[place]
        yield shape._replace(requests=requests)


def _treated(wait_ns: IntArray, waited: npt.NDArray[np.bool_], treatment: Treatment) -> IntArray:
    """The waits of several plans under a treatment, as ``Plan.with_treatment`` has them; shape (plans, requests)."""
    if treatment == "no-waits":
        return np.zeros_like(wait_ns)
    if treatment == "equal-waits" and waited.any():
        num_waits = int(waited.sum())
        mean_ns, remainder = np.divmod(wait_ns[:, waited].sum(axis=1, keepdims=True), num_waits)
        wait_ns[:, waited] = mean_ns + (np.arange(num_waits) < remainder)
    return wait_ns


def joined(parts: Sequence[layout.PlanArrays]) -> layout.PlanArrays:
    """Plans end to end."""
    counts = np.array([[len(table) for table in part] for part in parts])
    num_plans, num_sessions = counts[:, 0], counts[:, 1]
    _, first_session, first_request, first_follower, first_name = (counts.cumsum(axis=0) - counts).T
    plans = _end_to_end([part.plans for part in parts])
    sessions = _end_to_end([part.sessions for part in parts])
    plans["first_session"][:] += np.repeat(first_session, num_plans)
    plans["first_request"][:] += np.repeat(first_request, num_plans)
    sessions["first_request"][:] += np.repeat(first_request, num_sessions)
    sessions["first_follower"][:] += np.repeat(first_follower, num_sessions)
    sessions["first_name"][:] += np.repeat(first_name, num_sessions)
    requests = _end_to_end([part.requests for part in parts])
    followers, names = _end_to_end([part.followers for part in parts]), _end_to_end([part.names for part in parts])
    return layout.PlanArrays(plans, sessions, requests, followers, names)


def _end_to_end(tables: Sequence[_Table]) -> _Table:
    arrays = cast("Sequence[npt.NDArray[np.void]]", tables)
    # Without a given type, numpy searches a common type for every pair of tables.
    return cast("_Table", np.concatenate(arrays, dtype=arrays[0].dtype))


def one_plan(arrays: layout.PlanArrays, plan: int) -> layout.PlanArrays:
    """The arrays of one plan out of several."""
    record = record_as_dict(arrays.plans, plan)
    first, first_request = record["first_session"], record["first_request"]
    alone = layout.PlanArrays(
        plans=arrays.plans[plan : plan + 1].copy(),
        sessions=arrays.sessions[first : first + record["num_sessions"]].copy(),
        requests=arrays.requests[first_request : first_request + record["num_requests"]].copy(),
        followers=arrays.followers,
        names=arrays.names,
    )
    alone.plans["first_session"][:] = 0
    alone.plans["first_request"][:] = 0
    alone.sessions["first_request"][:] -= first_request
    return alone


def is_rearrival(arrays: layout.PlanArrays) -> npt.NDArray[np.bool_]:
    """Which requests continue the text of an earlier request."""
    session = arrays.requests["session"] + np.repeat(arrays.plans["first_session"], arrays.plans["num_requests"])
    is_first = np.arange(len(session)) == arrays.sessions["first_request"][session]
    return ~is_first | (arrays.sessions["continues"][session] >= 0)


def most_sessions_at_once(arrays: layout.PlanArrays, first: int = 0, last: int | None = None) -> int:
    """Most sessions at once in any of the plans [first, last): the leaves of the "after" forest."""
    is_leaf = arrays.sessions["num_followers"] == 0
    plans = arrays.plans[first:last]
    spans = zip(plans["first_session"].tolist(), plans["num_sessions"].tolist(), strict=True)
    return max(int(is_leaf[start : start + size].sum()) for start, size in spans)


def sharing_key(config: EngineConfig, width: int) -> tuple[object, ...]:
    """What decides under KV slots with at most ``width`` sessions at once: of servers that agree figures are equal."""
    limit = min(config.max_num_seqs, width + 1)
    # No step has more requests, so no step uses a size beyond the first that holds so many.
    largest = bisect_left(config.decode_buckets, min(limit, width))
    # The dummy slot goes by the compiled limit, admission by the lowered one.
    memory = (config.num_usable_slots, config.is_full, config.slot_tokens, config.prefix_caching)
    return (limit, min(config.active_limit, width + 1), *memory, config.decode_buckets[: largest + 1])


def check_slots(arrays: layout.PlanArrays, config: EngineConfig) -> None:
    """Raise PlanError naming the first request of a plan that is too long for ``slot_tokens``."""
    prompt = arrays.requests["keep"] + arrays.requests["new"]
    total = prompt + arrays.requests["generate"]
    wrong = np.flatnonzero(
        (prompt >= config.slot_tokens) | (total > config.slot_tokens) | (arrays.requests["generate"] < 1)
    )
    if wrong.size == 0:
        return
    place = int(wrong[0])
    session = int(arrays.requests["session"][place])
    raise PlanError(
        f"{int(prompt[place])} prompt and {int(total[place] - prompt[place])} generated tokens do not fit a slot of "
        f"{config.slot_tokens} tokens",
        where=f"session {session}, request {place - int(arrays.sessions['first_request'][session])}",
        hint="Shorten the session or raise slot_tokens",
    )


def check_times(arrays: layout.PlanArrays, config: EngineConfig, models: Iterable[CostModel]) -> None:
    """Raise PlanError where a plan could take longer than int64 holds in ns, or a step in fs: all sums are of integers.

    Each step counts as the longest that these requests and costs allow.
    """
    plans, sessions, requests = arrays.plans, arrays.sessions, arrays.requests
    tokens = requests["keep"] + requests["new"] + requests["generate"]
    longest, most = int(tokens.max()), min(config.max_num_seqs, int(plans["num_sessions"].max()))
    step_fs = max(
        _longest_step_fs(model, config, longest, most) for model in {id(each): each for each in models}.values()
    )
    waits_ns = requests["wait_ns"].astype(np.float64)
    # Nothing waits for the wait after a session's last request.
    waits_ns[sessions["first_request"] + sessions["num_requests"] - 1] = 0
    of_requests = waits_ns + requests["abort_ns"] + (requests["generate"] + 1.0) * step_fs / FS_PER_NS
    total_ns = _sums(of_requests, plans["first_request"], plans["num_requests"])
    total_ns += _sums(sessions["start_ns"], plans["first_session"], plans["num_sessions"])
    is_step_too_long = not config.rule_set.is_paged and step_fs > FAR
    if is_step_too_long or total_ns.max() > MOST_NS:
        what = f"a step could take {step_fs / FS_PER_S:,.0f} s"
        if not is_step_too_long:
            what = f"its waits and steps could take {total_ns.max() / NS_PER_S / SECONDS_PER_YEAR:,.0f} years"
        raise PlanError(
            f"{what}, more than the simulator's integers hold",
            where=f"plan {int(total_ns.argmax())}",
            hint="Look at the units of waits and costs, or shorten the plan",
        )


def _longest_step_fs(model: CostModel, config: EngineConfig, longest: int, most: int) -> int:
    """An upper bound of a step of ``most`` requests at most, none longer than ``longest`` tokens."""
    context = longest * most
    # f of a size is a second at most, and what is drawn of it twice that.
    step_fs = 2 * LARGEST_FS + abs(model.alpha_fs) + abs(model.beta_fs) * most + model.context_fs * context
    if not config.rule_set.is_paged:
        return max(step_fs, FS_PER_NS * model.prefill_ns(longest, longest))
    computed = config.max_num_batched_tokens
    if not config.rule_set.never_mixes:
        computed = min(computed, context)
    step_fs += model.chunk_token_fs * computed + model.attended_fs * computed * longest
    return (
        step_fs
        + (model.chunk_step_fs or 0)
        + FS_PER_NS * (model.eager_ns + model.chunk_eager_ns + (model.draft_pass_ns or 0) * config.drafts.num_passes)
    )


def _sums(values: npt.NDArray[np.int64] | npt.NDArray[np.float64], first: IntArray, num: IntArray) -> FloatArray:
    before = np.concatenate(([0.0], np.cumsum(values, dtype=np.float64)))
    return before[first + num] - before[first]
