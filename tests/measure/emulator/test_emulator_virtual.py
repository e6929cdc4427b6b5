"""The emulator's loop on a virtual clock is the simulator, step for step and to the nanosecond."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.measure.emulator.metrics import ServerMetrics
from harness.measure.emulator.step_log import step_record
from harness.model.engine import PREFILL, EngineConfig, Scheduler, load_cost_model
from harness.model.engine.core import EngineCore, EngineRequest
from harness.model.experiment import build_plan
from harness.model.plan.blocks import token_block_keys
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.spec import ServerSpec, WorkloadSpec
from tests.support.virtual_emulator import assert_same_run, run_virtually


def test_requests_that_arrive_together_enter_in_session_order() -> None:
    request = RequestPlan(keep_tokens=0, new_tokens=200, generate_tokens=3, wait_after_ns=0)
    sessions = tuple(SessionPlan(index, 0, None, None, (request,)) for index in range(5))
    plan = Plan("drawn", 1, 0, "as-drawn", 0, (1000, 2000), sessions, {})
    server = ServerSpec(max_num_seqs=4, decode_buckets=(1, 2, 4))
    starts = [end.start for end in run_virtually(plan, server)]
    prefilled = [start.requests[0].external_id for start in starts if start.step.kind == PREFILL]
    assert prefilled == ["0-0", "1-0", "2-0", "3-0", "4-0"]
    assert_same_run(plan, server)


def test_an_idle_step_flushes_the_last_finished_request_and_takes_no_time() -> None:
    workload = WorkloadSpec(num_sessions=1, requests_per_session=1)
    last = run_virtually(build_plan(workload, 3, 0), ServerSpec())[-1]
    assert last.start.step.kind == "IDLE"
    assert last.start.step.duration_ns == 0
    assert [request.external_id for request in last.start.flushed] == ["0-0"]


def test_the_trace_records_the_step_of_each_abort() -> None:
    """Who leaves while a step runs gets no token of it; who leaves between two steps is in none of the next ones."""
    ask = RequestPlan(0, 100, 50)
    leaves_later = replace(ask, abort_after_ns=300_000_000)
    requests = (replace(ask, abort_after_tokens=3), leaves_later, replace(ask, generate_tokens=400))
    sessions = tuple(SessionPlan(index, 0, None, None, (request,)) for index, request in enumerate(requests))
    plan = Plan("leavers", 1, 0, "as-drawn", 0, (1000, 2000), sessions)
    records = [step_record(end, 0, 0) for end in run_virtually(plan, ServerSpec(max_num_seqs=2, decode_buckets=(1, 2)))]
    steps = {
        name: [
            (record["index"], key) for record in records for key in ("aborted_before", "aborted") if name in record[key]
        ]
        for name in ("0-0", "1-0", "2-0")
    }
    assert {name: len(found) for name, found in steps.items()} == {"0-0": 1, "1-0": 1, "2-0": 0}
    for name in ("0-0", "1-0"):
        ((index, key),) = steps[name]
        in_steps = [record["index"] for record in records if name in record["requests"]]
        assert max(in_steps) == (index if key == "aborted" else index - 1)


Request = tuple[int, int]  # prompt and generated tokens


def served(requests: list[Request], server: ServerSpec, *, at_once: bool) -> tuple[list[tuple[int, ...]], str]:
    """(end, tokens generated so far by each that got one) of every step, and the metrics page at the end."""
    config = EngineConfig.from_server(server)
    core = EngineCore(Scheduler(config, load_cost_model("context-1-2-4-8")))
    metrics, steps, now_ns = ServerMetrics("model", config, server.num_kv_slots), list[tuple[int, ...]](), 0
    for handle, (prompt, generated) in enumerate(requests):
        ids = np.full(prompt, handle, dtype=np.int32)
        keys = token_block_keys(ids)
        core.submit(EngineRequest(handle, str(handle), str(handle), ids, generated, keys, generated, arrival_ns=0))
    while core.has_work or core.num_unfinished:
        core.start_step(now_ns)
        end = core.end_step(core.equal_ends_ns() if at_once else ())
        now_ns = end.ends_ns[-1]
        for at_ns in end.ends_ns:
            for request in end.requests:
                request.num_generated += 1
            steps.append((at_ns, *(request.num_generated for request in end.requests)))
        metrics.observe(end)
    return steps, metrics.render(of_the_process=False).decode()


@given(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 300)), min_size=1, max_size=6), st.booleans())
@settings(max_examples=10)
def test_equal_steps_taken_at_once_are_the_steps_one_by_one(requests: list[Request], caches: bool) -> None:
    server = ServerSpec(max_num_seqs=4, decode_buckets=(1, 2, 4), kv_slots=4, slot_tokens=1024, prefix_caching=caches)
    assert served(requests, server, at_once=True) == served(requests, server, at_once=False)
