"""What a server would do with a plan: every admission, reuse, step and completion, in virtual time.

Exact integers, no randomness, no I/O: the same plan and server give the same result on every machine.
Next: analysis and reports read the SimResult; the search calls ``kernel`` in bulk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from harness.engine.config import EngineConfig
from harness.engine.cost import CostModel, load_cost_model
from harness.engine.scheduler import CALLERS, STEP_KINDS
from harness.engine.state import IntArray, new_state
from harness.engine.steps import FAR
from harness.errors import PlanError
from harness.plan import Plan, SessionPlan
from harness.sim.kernel import arrays as layout
from harness.sim.kernel import events as kernel
from harness.spec import ServerSpec

REQUEST_COLUMNS = (
    ("cached_tokens", layout.O_CACHED),
    ("hash_hit_tokens", layout.O_HIT_TOKENS),
    ("arrival_ns", layout.O_ARRIVAL),
    ("admitted_ns", layout.O_ADMITTED),
    ("first_token_ns", layout.O_FIRST_TOKEN),
    ("completed_ns", layout.O_COMPLETED),
    ("preemptions", layout.O_PREEMPTIONS),
)


@dataclass(frozen=True)
class SimResult:
    """Everything a simulated run gave. Times are ns after the common start; token counts are tokens.

    requests: session, request, prompt_tokens, generate_tokens, cached_tokens, hash_hit_tokens, arrival_ns,
    admitted_ns, first_token_ns, completed_ns, preemptions; one row per request, in plan order.
    steps: start_ns, kind, n, b, count, session, request, computed_tokens, duration_ns (of each); ``count`` equal
    decode steps in one row, b is null for a prefill, session, request and computed_tokens are null for decode.
    evictions: at_ns (start of the step), slot, caller, session, request (who had filled the slot).
    decode_histogram: h(n), place n. wait_session_ns: W. filled_in_buckets: those whose cost was not measured.
    """

    requests: pa.Table
    steps: pa.Table
    evictions: pa.Table
    decode_histogram: tuple[int, ...]
    decode_ns: int
    prefill_ns: int
    wait_session_ns: int
    end_ns: int
    num_decode_steps: int
    computed_tokens: int
    cached_tokens: int
    preemptions: int
    filled_in_buckets: tuple[int, ...]

    @property
    def device_ns(self) -> int:
        """D: the sum of all step times."""
        return self.decode_ns + self.prefill_ns

    @property
    def num_evictions(self) -> int:
        return self.evictions.num_rows


class SessionRow(NamedTuple):
    """One session as numbers, see SessionPlan. after, continues: -1: none. requests: keep, new, generate, wait_ns.

    before: every session that must have completed, ``after`` first. blocks: names of the blocks it begins with.
    """

    start_ns: int
    after: int
    continues: int
    requests: Sequence[tuple[int, int, int, int]]
    before: Sequence[int] = ()
    blocks: Sequence[int] = ()


def plan_arrays(plans: Sequence[Plan]) -> layout.PlanArrays:
    """Plans end to end, as the compiled simulator reads them."""
    return pack(
        [[_session_row(session) for session in plan.sessions] for plan in plans],
        [plan.shared_prefix_tokens for plan in plans],
        [plan.block_tokens for plan in plans],
    )


def _session_row(session: SessionPlan) -> SessionRow:
    return SessionRow(
        session.start_offset_ns,
        -1 if session.after is None else session.after,
        -1 if session.continues is None else session.continues,
        [
            (request.keep_tokens, request.new_tokens, request.generate_tokens, request.wait_after_ns)
            for request in session.requests
        ],
        session.predecessors,
        session.blocks,
    )


def pack(
    plans: Sequence[Sequence[SessionRow]],
    shared_prefix_tokens: Sequence[int],
    named_tokens: Sequence[int] | None = None,
) -> layout.PlanArrays:
    """Sessions of one or more plans end to end. A session must continue one with a lower index."""
    first_session, first_request, first_follower, first_name = [0], [0], [0], [0]
    followers: list[int] = []
    names: list[int] = []
    sessions: list[tuple[int, ...]] = []
    requests: list[tuple[int, ...]] = []
    for plan in plans:
        roots, chains = list(range(len(plan))), dict[tuple[int, int], int]()
        waiting: list[list[int]] = [[] for _ in plan]
        for place, session in enumerate(plan):
            if session.continues >= 0:
                roots[place] = roots[session.continues]
            for before in set(_before(session)):
                waiting[before].append(place)
            chain = -1
            for name in session.blocks:
                chain = chains.setdefault((chain, name), len(chains))
                names.append(chain)
            first_name.append(len(names))
            requests += [(*request, place) for request in session.requests]
            first_request.append(len(requests))
        sessions += [
            (*session[:3], root, len(set(_before(session)))) for session, root in zip(plan, roots, strict=True)
        ]
        for group in waiting:
            followers += group
            first_follower.append(len(followers))
        first_session.append(len(sessions))
    session_table = np.array(sessions, dtype=np.int64).reshape(-1, 5)
    request_table = np.array(requests, dtype=np.int64).reshape(-1, 5)
    return layout.PlanArrays._make(
        [
            np.array(first_session, dtype=np.int64),
            np.array(first_request, dtype=np.int64),
            *(np.ascontiguousarray(session_table[:, column]) for column in range(5)),
            np.array(first_follower, dtype=np.int64),
            np.array(followers, dtype=np.int64),
            np.array(first_name, dtype=np.int64),
            np.array(names, dtype=np.int64),
            np.array(named_tokens or [0] * len(plans), dtype=np.int64),
            *(np.ascontiguousarray(request_table[:, column]) for column in range(5)),
            np.array(shared_prefix_tokens, dtype=np.int64),
            np.full(len(request_table), -1, dtype=np.int64),
        ]
    )


def _before(session: SessionRow) -> Sequence[int]:
    return session.before or ((session.after,) if session.after >= 0 else ())


def simulate(
    plan: Plan,
    server: ServerSpec | EngineConfig,
    cost_model: CostModel | None = None,
    *,
    max_steps_per_advance: int | None = None,
) -> SimResult:
    """Simulate one plan on one freshly started server.

    cost_model: default, the one the server specification names. max_steps_per_advance: at most so many equal decode
    steps at once; it changes the speed, never the result.
    Raises PlanError when a request does not fit a slot or can never be admitted.
    """
    if isinstance(server, EngineConfig):
        config = server
        model = load_cost_model("paper") if cost_model is None else cost_model
    else:
        config = EngineConfig.from_server(server)
        model = load_cost_model(server.cost_model) if cost_model is None else cost_model
    arrays = plan_arrays([plan])
    check_slots(arrays, config)
    outcome = run_arrays(arrays, config, model, max_steps_per_advance)
    return _result(arrays, outcome, model.filled_in_buckets(config.decode_buckets))


def run_totals(arrays: layout.PlanArrays, config: EngineConfig, model: CostModel) -> IntArray:
    """Sums of many plans, each on a fresh server: shape (plans, NUM_A), columns A_*; nothing else is kept.

    Raises PlanError when a request does not fit a slot or can never be admitted.
    """
    return run_batch(arrays, config, model).totals


def run_batch(arrays: layout.PlanArrays, config: EngineConfig, model: CostModel) -> layout.Outcome:
    """Many plans, each on a fresh server: their sums and every request, without records of steps.

    Raises PlanError when a request does not fit a slot or can never be admitted.
    """
    check_slots(arrays, config)
    most_sessions = int(np.diff(arrays.first_session).max())
    most_requests = int(np.diff(arrays.first_request[arrays.first_session]).max())
    outcome = layout.new_outcome(arrays, config)
    kernel.run_plans(
        arrays,
        new_state(config, most_requests, with_events=False),
        layout.cost_arrays(config, model),
        layout.new_scratch(config, most_sessions),
        outcome,
        FAR,
    )
    stuck = outcome.totals[:, layout.A_STUCK_SESSION]
    if np.any(stuck >= 0):
        plan = int(np.argmax(stuck >= 0))
        raise PlanError("its request can never be admitted", where=f"plan {plan}, session {int(stuck[plan])}")
    return outcome


def check_slots(arrays: layout.PlanArrays, config: EngineConfig) -> None:
    """Raise PlanError naming the first request of a plan that is too long for ``slot_tokens``."""
    prompt = arrays.keep + arrays.new
    total = prompt + arrays.generate
    wrong = np.flatnonzero((prompt >= config.slot_tokens) | (total > config.slot_tokens) | (arrays.generate < 1))
    if wrong.size == 0:
        return
    place = int(wrong[0])
    session = int(arrays.session[place])
    raise PlanError(
        f"{int(prompt[place])} prompt and {int(arrays.generate[place])} generated tokens do not fit a slot of "
        f"{config.slot_tokens} tokens",
        where=f"session {session}, request {place - int(arrays.first_request[session])}",
        hint="Shorten the session or raise slot_tokens",
    )


def run_arrays(
    arrays: layout.PlanArrays, config: EngineConfig, model: CostModel, max_steps: int | None = None
) -> layout.Outcome:
    """Run one plan with every step and eviction recorded; raises PlanError when a request can never be admitted."""
    num_requests, num_sessions = len(arrays.keep), len(arrays.start_ns)
    state = new_state(config, num_requests, with_events=False)
    cost = layout.cost_arrays(config, model)
    scratch = layout.new_scratch(config, num_sessions)
    step_room, eviction_room = 8 * num_requests + 64, 2 * num_requests + 64
    while True:
        outcome = layout.new_outcome(arrays, config, step_room, eviction_room)
        kernel.run_plan(arrays, 0, state, cost, scratch, outcome, FAR if max_steps is None else max_steps)
        totals = outcome.totals[0]
        if totals[layout.A_STUCK_SESSION] >= 0:
            raise PlanError(
                "its request can never be admitted: the KV memory is too small for it",
                where=f"session {int(totals[layout.A_STUCK_SESSION])}",
                hint="Give more kv_slots or shorter prompts",
            )
        steps, evictions = int(totals[layout.A_NUM_STEP_RECORDS]), int(totals[layout.A_NUM_EVICTION_RECORDS])
        if steps <= step_room and evictions <= eviction_room:
            return outcome
        step_room, eviction_room = max(step_room, steps), max(eviction_room, evictions)


def _result(arrays: layout.PlanArrays, outcome: layout.Outcome, filled_in: tuple[int, ...]) -> SimResult:
    totals = [int(value) for value in outcome.totals[0]]
    return SimResult(
        requests=_request_table(arrays, outcome.requests),
        steps=_step_table(outcome.steps[: totals[layout.A_NUM_STEP_RECORDS]]),
        evictions=_eviction_table(outcome.evictions[: totals[layout.A_NUM_EVICTION_RECORDS]]),
        decode_histogram=tuple(int(value) for value in outcome.histogram[0]),
        decode_ns=totals[layout.A_DECODE_NS],
        prefill_ns=totals[layout.A_PREFILL_NS],
        wait_session_ns=totals[layout.A_WAIT_NS],
        end_ns=totals[layout.A_END_NS],
        num_decode_steps=totals[layout.A_DECODE_STEPS],
        computed_tokens=totals[layout.A_COMPUTED],
        cached_tokens=totals[layout.A_CACHED],
        preemptions=totals[layout.A_PREEMPTIONS],
        filled_in_buckets=filled_in,
    )


def _request_table(arrays: layout.PlanArrays, requests: IntArray) -> pa.Table:
    number = np.arange(len(arrays.keep), dtype=np.int64) - arrays.first_request[arrays.session]
    columns: dict[str, pa.Array] = {
        "session": pa.array(arrays.session, pa.int32()),
        "request": pa.array(number, pa.int32()),
        "prompt_tokens": pa.array(arrays.keep + arrays.new, pa.int32()),
        "generate_tokens": pa.array(arrays.generate, pa.int32()),
    }
    for name, column in REQUEST_COLUMNS:
        columns[name] = pa.array(requests[:, column], pa.int64() if name.endswith("_ns") else pa.int32())
    return pa.table(columns)


def _step_table(steps: IntArray) -> pa.Table:
    is_decode = steps[:, layout.T_COMPUTED] < 0
    kinds = pa.DictionaryArray.from_arrays(
        pa.array(steps[:, layout.T_KIND], pa.int8()), pa.array([kind.lower() for kind in STEP_KINDS])
    )

    def nullable(column: int, nulls: npt.NDArray[np.bool_]) -> pa.Array:
        return pa.array(steps[:, column], pa.int32(), mask=nulls)

    return pa.table(
        {
            "start_ns": pa.array(steps[:, layout.T_START], pa.int64()),
            "kind": kinds.cast(pa.string()),
            "n": pa.array(steps[:, layout.T_NUM_SEQS], pa.int32()),
            "b": nullable(layout.T_BUCKET, ~is_decode),
            "count": pa.array(steps[:, layout.T_COUNT], pa.int64()),
            "session": nullable(layout.T_SESSION, is_decode),
            "request": nullable(layout.T_REQUEST, is_decode),
            "computed_tokens": nullable(layout.T_COMPUTED, is_decode),
            "duration_ns": pa.array(steps[:, layout.T_DURATION], pa.int64()),
        }
    )


def _eviction_table(evictions: IntArray) -> pa.Table:
    callers = pa.DictionaryArray.from_arrays(
        pa.array(evictions[:, layout.V_CALLER], pa.int8()), pa.array(list(CALLERS))
    )
    return pa.table(
        {
            "at_ns": pa.array(evictions[:, layout.V_AT], pa.int64()),
            "slot": pa.array(evictions[:, layout.V_SLOT], pa.int32()),
            "caller": callers.cast(pa.string()),
            "session": pa.array(evictions[:, layout.V_SESSION], pa.int32()),
            "request": pa.array(evictions[:, layout.V_REQUEST], pa.int32()),
        }
    )
