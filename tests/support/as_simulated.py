"""A live run of emulated replicas held to the simulator: each step, from the arrivals that a replica recorded, and each
routing decision, from what the router recorded."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from harness.analysis.run_tables import join_request_id
from harness.extras.replicas.policies import BLOCK_TOKENS, PrefixAware, RoutedRequest, policy_named
from harness.measure.emulator.step_log import read_trace, step_record
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import values_of
from harness.model.engine import EngineConfig
from harness.model.engine.core import EngineCore
from harness.model.engine.paged import scheduler_of
from harness.model.plan.blocks import BlockKeys
from harness.model.plan.event_queue import SENDS, ClientEvent, whole_sessions
from harness.model.sim.driver import UnreadRequests

DECIDED = ("kind", "n", "b", "requests", "cached_tokens", "computed_tokens", "duration_ns", "waiting", "finished")


class Held(NamedTuple):
    """steps, requests: how many were compared. late: steps that began later than in the simulator, of a host that
    stalled. differing: records of the emulator and of the simulator that are not equal, the first of each replica."""

    steps: int
    requests: int
    late: int
    differing: list[tuple[dict[str, Any], dict[str, Any]]]


def held_to_the_simulator(run: SealedRun, replica: int) -> Held:
    """What one replica of a run did, step by step, and what the simulator's engine does with the same arrivals."""
    config = EngineConfig.from_server(run.server.replica)
    core = EngineCore(scheduler_of(config, run.cost_model))
    unread = UnreadRequests(run.plan, config)
    columns = values_of(run.table("requests"), "response_id", "session", "request")
    place_of = {name: (session, request) for name, session, request in columns if name}
    records = read_trace(layout.replica_folder(run.path, replica) / layout.DEVICE_TRACE)
    num_requests = num_late = 0
    expected_ns: int | None = None
    for number, record in enumerate(record for record in records if record["kind"] != "STALL"):
        for name, at_ns in record["arrivals"]:
            session, request = place_of[str(join_request_id(name, place_of))]
            num_requests += 1
            core.submit(unread.request_of(ClientEvent(at_ns, SENDS, session, request), core.new_handle(), name))
        first_ns = min((at_ns for _name, at_ns in record["arrivals"]), default=record["start_ns"])
        # An idle engine begins with the first request that comes; a busy one when its step is over.
        begins_ns = first_ns if expected_ns is None else expected_ns
        num_late += begins_ns != record["start_ns"]
        assert core.start_step(record["start_ns"]) is not None, f"step {number} begins without a request"
        end = core.end_step()
        ours = step_record(end, record["woken_ns"], record["emitted_ns"])
        if any(ours[name] != record[name] for name in DECIDED):
            return Held(number, num_requests, num_late, [(record, ours)])
        for each in end.requests:
            each.num_generated += 1
        expected_ns = record["start_ns"] + record["duration_ns"] if core.has_work else None
    return Held(len(records), num_requests, num_late, [])


def other_decisions(run: SealedRun) -> tuple[int, int]:
    """(decisions, those that the policy does not make again from what the simulator reads of the same request).

    What a prefix-aware router read of a prompt is held to that too.
    """
    router = policy_named(run.server.routing.policy, run.server.num_replicas)
    requests = values_of(run.table("requests"), "request_id", "session", "request")
    place_of = {name: (session, request) for name, session, request in requests}
    whole, prompt_keys = whole_sessions(run.plan), BlockKeys(run.plan, BLOCK_TOKENS).prompt
    num_decisions = num_other = 0
    for line in run.file(layout.ROUTED).read_text().splitlines():
        _at_ns, what, name, *rest = json.loads(line)
        if what == "route":
            session, request = place_of[name]
            keys = prompt_keys(session, request).tolist() if router.reads_prompts else ()
            decided = [str(rest[0]).rpartition("-")[2], router.route(RoutedRequest(str(rest[0]), keys))]
            if isinstance(router, PrefixAware):
                decided += [len(keys), router.matched]
            num_decisions += 1
            num_other += decided != [str(whole[session]), *rest[1:]]
        else:
            router.finished(int(rest[0]))
    return num_decisions, num_other
