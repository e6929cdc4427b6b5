"""Simulates plans on a server: every admission, reuse, step and completion, in virtual time.

Exact integers, no randomness, no I/O: the same plan and server give the same result on every machine. Raises PlanError
when a request does not fit the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from harness.compiled.records import IntArray, Records, record_as_dict, record_fields
from harness.errors import PlanError
from harness.model.engine.config import EngineConfig, new_state
from harness.model.engine.cost import CostModel, load_cost_model
from harness.model.engine.paged_state import new_paged_state
from harness.model.engine.scheduler import CALLERS, STEP_KINDS
from harness.model.engine.steps import FAR
from harness.model.plan.model import Plan
from harness.model.sim.kernel import arrays as layout
from harness.model.sim.kernel.arrivals import PagedRun, SlotRun
from harness.model.sim.kernel.loop import run_paged_plans, run_plans
from harness.model.sim.plans import check_slots, check_times, plan_arrays
from harness.model.spec import ServerSpec

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True)
class SimResult:
    """The result of a simulated run. Times are ns after the common start.

    requests: session, request, prompt_tokens, generate_tokens, cached_tokens, hash_hit_tokens, arrival_ns,
    admitted_ns, first_token_ns, completed_ns, preemptions, aborted_tokens; one row per request, in plan order. A
    request that its client left completes at that instant with aborted_tokens received; -1 for the others.
    Under paged rules parts of prompts and decodes share steps of kind "mixed": prefill_ns is of all steps that are not
    pure decode steps, W the time that parts of prompts added to the steps of decoding requests.
    steps: start_ns, kind, n, b, count, session, request, computed_tokens, duration_ns (of each); ``count`` equal
    decode steps in one row, b is null for a prefill, session, request and computed_tokens are null for decode.
    evictions: at_ns (start of the step), slot, caller, session, request (whose prompt filled the slot).
    decode_histogram: h(n) at place n. wait_session_ns: W. interpolated_buckets: buckets whose cost was not measured.
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
    interpolated_buckets: tuple[int, ...]

    @property
    def device_ns(self) -> int:
        """D: the sum of all step times."""
        return self.decode_ns + self.prefill_ns

    @property
    def num_evictions(self) -> int:
        return self.evictions.num_rows


def simulate(
    plan: Plan,
    server: ServerSpec | EngineConfig,
    cost_model: CostModel | None = None,
    *,
    max_steps_per_advance: int = FAR,
) -> SimResult:
    """Simulate one plan on one freshly started server.

    cost_model: default, the cost model that the server specification names. max_steps_per_advance: limit of equal
    decode steps taken at once; it changes the speed, never the result.
    Raises PlanError when a request does not fit a slot or can never be admitted.
    """
    is_config = isinstance(server, EngineConfig)
    config = server if is_config else EngineConfig.from_server(server)
    model = cost_model or load_cost_model("paper" if is_config else server.cost_model)
    arrays = plan_arrays([plan])
    outcome = run_batch(arrays, config, model, with_records=True, max_steps=max_steps_per_advance)
    return _result(arrays, outcome, model.unmeasured_of(config))


def run_batch(  # noqa: PLR0913  # what a call of the kernel depends on
    arrays: layout.PlanArrays,
    config: EngineConfig,
    costs: CostModel | Sequence[CostModel],
    noise_seeds: Sequence[int] = (),
    noise: IntArray = layout.NO_NOISE,
    *,
    with_records: bool = False,
    max_steps: int = FAR,
    evicts_by_last_use: bool = False,
) -> layout.SimOutcome:
    """Many plans, each on a fresh server: their sums and every request.

    costs: of each plan, or of all. noise_seeds: of each plan, see ``CostArrays``; default: no noise. with_records:
    steps and evictions of the last plan. max_steps: see ``simulate``. evicts_by_last_use: slots go by last use (filled,
    read by a look-up, or finished) instead of by allocation, which no released server does.
    Raises PlanError when a request does not fit a slot or can never be admitted.
    """
    models = [costs] if isinstance(costs, CostModel) else costs
    check_slots(arrays, config)
    check_times(arrays, config, models)
    num_plans, num_requests, is_paged = len(arrays.plans), len(arrays.requests), config.rule_set.is_paged
    most_requests = int(arrays.plans["num_requests"].max())
    scratch = layout.new_scratch(arrays, knows_returns=bool(config.keep_kv_ns))
    room = (8 * num_requests + 64, 2 * num_requests + 64) if with_records else (0, 0)
    if with_records and (len(noise) > 1 or models[0].context_fs):
        # Almost every decode step has its own duration, so few steps share a record.
        room = min(int(arrays.requests["generate"].sum()) + room[0], 5 * room[0]), room[1]
    outcome = layout.new_outcome(arrays, config, *room)
    if is_paged:
        most_decodes = min(config.max_num_seqs, int(arrays.plans["num_sessions"].max()))
        in_blocks = layout.paged_costs(config, models, most_decodes, noise_seeds, noise)
        run = PagedRun(arrays, new_paged_state(config, most_requests), scratch, outcome, in_blocks)
    else:
        state = new_state(config, most_requests, evicts_by_last_use=evicts_by_last_use)
        run = SlotRun(arrays, state, scratch, outcome, layout.cost_arrays(config, models, noise_seeds, noise))
    while True:
        if isinstance(run, PagedRun):
            run_paged_plans(run, 0, num_plans, max_steps)
        else:
            run_plans(run, 0, num_plans, max_steps)
        check_admitted(outcome, f"Give more {'num_gpu_blocks' if is_paged else 'kv_slots'} or shorter prompts")
        if not with_records:
            return outcome
        used = record_as_dict(outcome.totals, num_plans - 1)
        needed = used["num_step_records"], used["num_eviction_records"]
        if needed[0] <= room[0] and needed[1] <= room[1]:
            return outcome._replace(steps=outcome.steps[: needed[0]], evictions=outcome.evictions[: needed[1]])
        # Anew with room for every step and eviction of the last plan.
        room = needed
        outcome = layout.new_outcome(arrays, config, *room)
        run = run._replace(outcome=outcome)


def _result(arrays: layout.PlanArrays, outcome: layout.SimOutcome, interpolated: tuple[int, ...]) -> SimResult:
    totals = record_as_dict(outcome.totals, 0)
    same = ("decode_ns", "prefill_ns", "end_ns", "computed_tokens", "cached_tokens", "preemptions")
    return SimResult(
        requests=_request_table(arrays, outcome.requests),
        steps=_step_table(outcome.steps),
        evictions=_eviction_table(outcome.evictions),
        decode_histogram=tuple(int(value) for value in outcome.histogram[0]),
        wait_session_ns=totals["wait_ns"],
        num_decode_steps=totals["decode_steps"],
        interpolated_buckets=interpolated,
        **{name: totals[name] for name in same},
    )


def _request_table(arrays: layout.PlanArrays, requests: Records[layout.RequestResult]) -> pa.Table:
    import pyarrow as pa

    number = (
        np.arange(len(arrays.requests), dtype=np.int64) - arrays.sessions["first_request"][arrays.requests["session"]]
    )
    columns: dict[str, pa.Array] = {
        "session": pa.array(arrays.requests["session"], pa.int32()),
        "request": pa.array(number, pa.int32()),
        "prompt_tokens": pa.array(arrays.requests["keep"] + arrays.requests["new"], pa.int32()),
        "generate_tokens": pa.array(arrays.requests["generate"], pa.int32()),
    }
    for name in record_fields(layout.RequestResult):
        columns[name] = pa.array(requests[name], pa.int64() if name.endswith("_ns") else pa.int32())
    return pa.table(columns)


def _step_table(steps: Records[layout.StepRecord]) -> pa.Table:
    import pyarrow as pa

    kinds = pa.DictionaryArray.from_arrays(
        pa.array(steps["kind"], pa.int8()), pa.array([kind.lower() for kind in STEP_KINDS])
    )

    def nullable(column: str, nulls: npt.NDArray[np.bool_] | None = None) -> pa.Array:
        return pa.array(steps[column], pa.int32(), mask=steps[column] < 0 if nulls is None else nulls)

    return pa.table(
        {
            "start_ns": pa.array(steps["start_ns"], pa.int64()),
            "kind": kinds.cast(pa.string()),
            "n": pa.array(steps["num_seqs"], pa.int32()),
            "b": nullable("bucket", steps["computed_tokens"] >= 0),
            "count": pa.array(steps["count"], pa.int64()),
            "session": nullable("session"),
            "request": nullable("request"),
            "computed_tokens": nullable("computed_tokens"),
            "duration_ns": pa.array(steps["duration_ns"], pa.int64()),
        }
    )


def _eviction_table(evictions: Records[layout.EvictionRecord]) -> pa.Table:
    import pyarrow as pa

    callers = pa.DictionaryArray.from_arrays(pa.array(evictions["caller"], pa.int8()), pa.array(list(CALLERS)))
    # A block of paged memory has no slot, session or request: -1.
    slot, session, request = (
        pa.array(evictions[name], pa.int32(), mask=evictions[name] < 0) for name in ("slot", "session", "request")
    )
    at_ns = pa.array(evictions["at_ns"], pa.int64())
    return pa.table(
        {"at_ns": at_ns, "slot": slot, "caller": callers.cast(pa.string()), "session": session, "request": request}
    )


def check_admitted(outcome: layout.SimOutcome, hint: str) -> None:
    """Raise PlanError naming the session whose request can never be admitted, if there is one."""
    stuck = outcome.totals["stuck_session"]
    if not np.any(stuck >= 0):
        return
    plan = int(np.argmax(stuck >= 0))
    raise PlanError(
        "its request can never be admitted: the KV memory is too small for it",
        where=f"plan {plan}, session {stuck[plan]}" if len(stuck) > 1 else f"session {stuck[plan]}",
        hint=hint,
    )
