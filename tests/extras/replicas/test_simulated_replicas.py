"""Replicas behind a router in virtual time: one is the simulator, several are as many simulators."""

from __future__ import annotations

import pytest

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import PlanError
from harness.extras.replicas.policies import policy_named
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.plan.event_queue import ClientEvent
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim.driver import UnreadRequests
from harness.model.spec import ServerSpec
from tests.support.naive_replicas import NaiveReplicas, drawn_case, play_replicas

pytestmark = pytest.mark.same_everywhere

SERVER = ServerSpec(max_num_seqs=2, decode_buckets=(1, 2), kv_slots=3)
PAGED = ServerSpec(
    max_num_seqs=4, decode_buckets=(1, 2, 4), num_gpu_blocks=600, rules="vllm-paged", cost_model="emulated-gpu"
)


def played(plan: Plan, server: ServerSpec, policy: str, num_replicas: int) -> NaiveReplicas:
    return play_replicas(plan, server, load_cost_model(server.cost_model), policy_named(policy, num_replicas))


@pytest.mark.parametrize("seed", range(10))
def test_replicas_together_serve_what_came_through_the_door(seed: int) -> None:
    case = drawn_case(seed)
    (plan, *_), num_replicas = case.plans, case.server.num_replicas
    router = policy_named(case.server.routing.policy, num_replicas)
    run = play_replicas(plan, case.server.replica, case.draws.models[0], router)
    figures = run.figures
    assert sum(figures.num_requests) == plan.num_requests == len(run.served_by)
    assert run.router.open == [0] * num_replicas
    assert figures.kept_tokens + figures.lost_by_routing_tokens + figures.lost_by_eviction_tokens == (
        figures.reusable_tokens
    )
    assert min(figures.kept_tokens, figures.lost_by_routing_tokens, figures.lost_by_eviction_tokens) >= 0
    assert max(figures.in_flight_s) <= figures.router_in_flight_s + 1e-9 <= sum(figures.in_flight_s) + 2e-9
    answered = sum(row["completion_tokens"] or 0 for row in run.requests_table().to_pylist())
    assert figures.generated_tokens == answered


def two_turns(num_sessions: int, apart_ns: int, shared_tokens: int = 0) -> Plan:
    turns = (RequestPlan(0, 1000, 20, 50_000_000), RequestPlan(1020, 200, 20, 0))
    sessions = tuple(SessionPlan(index, index * apart_ns, None, None, turns) for index in range(num_sessions))
    return Plan("drawn", 1, 0, "as-drawn", shared_tokens, (1000, 2000), sessions, {})


def test_reuse_that_is_lost_by_routing_is_told_from_reuse_that_is_lost_by_eviction() -> None:
    plan, roomy = two_turns(3, NS_PER_S * 10), ServerSpec(max_num_seqs=4, decode_buckets=(4,), kv_slots=8)
    # One session after the other: each second turn comes to the replica whose cache has never seen it.
    moved = played(plan, roomy, "round-robin", 2).figures
    assert (moved.num_home, moved.num_returns) == (0, 3)
    assert (moved.lost_by_routing_tokens, moved.lost_by_eviction_tokens) == (moved.reusable_tokens, 0)
    stayed = played(plan, roomy, "session-affinity", 2).figures
    assert (stayed.num_home, stayed.kept_tokens) == (3, stayed.reusable_tokens)
    tight = ServerSpec(max_num_seqs=1, decode_buckets=(1,), kv_slots=1)
    evicted = played(two_turns(6, NS_PER_MS), tight, "session-affinity", 2).figures
    assert evicted.lost_by_routing_tokens == 0
    assert evicted.lost_by_eviction_tokens > 0


@pytest.mark.parametrize("server", [ServerSpec(max_num_seqs=4, decode_buckets=(4,), kv_slots=8), PAGED])
def test_what_sessions_share_is_kept_on_a_replica_that_never_saw_the_session(server: ServerSpec) -> None:
    moved = played(two_turns(3, NS_PER_S * 10, shared_tokens=512), server, "round-robin", 2).figures
    # The first return comes to a replica that has seen nothing yet, the others find what the sessions share.
    assert (moved.num_home, moved.num_returns, moved.kept_tokens) == (0, 3, 2 * 512)
    assert (moved.lost_by_routing_tokens, moved.lost_by_eviction_tokens) == (moved.reusable_tokens - 2 * 512, 0)


def test_a_prefix_aware_router_reads_the_same_of_a_prompt_whatever_blocks_its_servers_have() -> None:
    # Text that all sessions share, shorter than a block of the router.
    turns = (RequestPlan(0, 1000, 20, 50_000_000), RequestPlan(1020, 200, 20, 0))
    sessions = tuple(SessionPlan(index, index, None, None, turns) for index in range(6))
    plan = Plan("drawn", 1, 0, "as-drawn", 100, (1000, 2000), sessions, {})
    slots = SERVER.model_copy(update={"kv_slots": 8})
    homes = [played(plan, server, "prefix-aware", 2).served_by for server in (slots, PAGED)]
    first = [[run[session, 0] for session in range(6)] for run in homes]
    assert first == [[0, 1, 0, 1, 0, 1]] * 2


def in_parts(wait_ns: int) -> Plan:
    """A session in two parts, of which the second continues the first after a wait, and another session meanwhile."""
    first, other = (SessionPlan(index, index, None, None, (RequestPlan(0, 1000, 20),)) for index in range(2))
    goes_on = SessionPlan(2, wait_ns, 0, 0, (RequestPlan(1020, 200, 20),), start_kind="tool")
    return Plan("drawn", 1, 0, "as-drawn", 0, (1000, 2000), (first, other, goes_on), {})


@pytest.mark.parametrize("server", [ServerSpec(max_num_seqs=4, decode_buckets=(4,), kv_slots=8), PAGED])
def test_a_session_in_parts_is_one_session_for_affinity(server: ServerSpec) -> None:
    run = played(in_parts(NS_PER_S), server, "session-affinity", 2)
    assert run.served_by == {(0, 0): 0, (1, 0): 1, (2, 0): 0}
    figures = run.figures
    assert (figures.num_home, figures.num_returns, figures.lost_by_routing_tokens) == (1, 1, 0)


def test_a_part_of_a_session_asks_for_a_pin_until_the_next_part() -> None:
    unread = UnreadRequests(in_parts(NS_PER_S), EngineConfig.from_server(PAGED))
    asked = [unread.request_of(ClientEvent(0, 1, session, 0), session).keep_ns for session in range(3)]
    assert asked == [2 * NS_PER_S, 0, 0]


def test_a_request_that_fits_no_replica_is_refused() -> None:
    turns = (RequestPlan(0, 9000, 20, 0),)
    plan = Plan("drawn", 1, 0, "as-drawn", 0, (1000, 2000), (SessionPlan(0, 0, None, None, turns),), {})
    with pytest.raises(PlanError, match="9"):
        played(plan, SERVER, "round-robin", 2)
