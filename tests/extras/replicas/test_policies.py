"""Routing policies: which replica gets a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.errors import SpecError
from harness.extras.replicas.policies import (
    KEPT_BLOCKS,
    MOST_LEAD,
    POLICIES,
    LeastRequests,
    PrefixAware,
    RoundRobin,
    RoutedRequest,
    SessionAffinity,
    policy_named,
)


def test_round_robin_takes_the_replicas_in_turn() -> None:
    policy = RoundRobin(3)
    assert [policy.route(RoutedRequest()) for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_least_requests_counts_what_is_open_and_takes_equals_in_turn() -> None:
    policy = LeastRequests(3)
    assert [policy.route(RoutedRequest()) for _ in range(3)] == [0, 1, 2]
    policy.finished(1)
    assert policy.route(RoutedRequest()) == 1
    for replica in range(3):
        policy.finished(replica)
    assert policy.route(RoutedRequest()) == 2


def test_affinity_sends_a_session_where_its_first_request_went() -> None:
    policy = SessionAffinity(2)
    first = {name: policy.route(RoutedRequest(name)) for name in "abcd"}
    assert first == {"a": 0, "b": 1, "c": 0, "d": 1}
    assert {name: policy.route(RoutedRequest(name)) for name in "dcba"} == first


def test_affinity_without_a_session_takes_the_least_loaded_replica() -> None:
    policy = SessionAffinity(2)
    assert [policy.route(RoutedRequest()) for _ in range(4)] == [0, 1, 0, 1]


def test_prefix_aware_follows_the_longest_beginning_that_was_sent() -> None:
    policy = PrefixAware(2)
    assert policy.route(RoutedRequest(keys=(1, 2, 3))) == 0
    assert policy.route(RoutedRequest(keys=(7, 8, 9))) == 1
    assert policy.route(RoutedRequest(keys=(7, 8, 10))) == 1
    assert policy.route(RoutedRequest(keys=(1, 5))) == 0
    policy.finished(0)
    # Blocks after one that was never sent do not count: then the fewest open requests decide.
    assert policy.route(RoutedRequest(keys=(11, 8, 9))) == 0


def test_prefix_aware_takes_replicas_of_equal_beginning_and_load_in_turn() -> None:
    policy = PrefixAware(3)
    for keys in ((1, 2), (3,), (4,)):
        policy.finished(policy.route(RoutedRequest(keys=keys)))
    policy.open = [9, 0, 0]
    assert policy.route(RoutedRequest(keys=(1,))) == 1
    policy.open = [0, 0, 0]
    # Replicas 0 and 1 were both sent this block; the one after the last choice comes first.
    assert policy.route(RoutedRequest(keys=(1,))) == 0
    assert policy.matched == [1, 1, 0]
    policy.open = [0, 0, 0]
    assert policy.route(RoutedRequest(keys=(1,))) == 1


def test_prefix_aware_gives_up_a_beginning_on_a_crowded_replica() -> None:
    policy = PrefixAware(2)
    assert [policy.route(RoutedRequest(keys=(1, 2))) for _ in range(MOST_LEAD + 2)] == [0] * (MOST_LEAD + 1) + [1]


def test_prefix_aware_forgets_the_oldest_blocks() -> None:
    policy = PrefixAware(2)
    assert policy.route(RoutedRequest(keys=(0,))) == 0
    assert policy.route(RoutedRequest(keys=(0, *range(1, KEPT_BLOCKS + 1)))) == 0
    policy.finished(0)
    policy.finished(0)
    # Key 0 went first, so no prompt begins with anything known: the next of the equally loaded.
    assert policy.route(RoutedRequest(keys=(0,))) == 1


@given(
    name=st.sampled_from(sorted(POLICIES)),
    num_replicas=st.integers(1, 4),
    asked=st.lists(st.tuples(st.sampled_from(["", "a", "b", "c"]), st.lists(st.integers(0, 5), max_size=4))),
    data=st.data(),
)
def test_every_request_gets_a_replica_and_is_open_until_it_is_over(
    name: str, num_replicas: int, asked: list[tuple[str, list[int]]], data: st.DataObject
) -> None:
    policy, again, routed = policy_named(name, num_replicas), policy_named(name, num_replicas), list[int]()
    for session, keys in asked:
        place = policy.route(RoutedRequest(session, keys))
        assert place == again.route(RoutedRequest(session, keys)), "equal histories, equal decisions"
        routed.append(place)
        if data.draw(st.booleans()):
            over = routed.pop(data.draw(st.integers(0, len(routed) - 1)))
            policy.finished(over)
            again.finished(over)
    assert policy.open == [routed.count(place) for place in range(num_replicas)]


def test_an_unknown_policy_is_refused_with_the_names() -> None:
    with pytest.raises(SpecError, match="round-robin"):
        policy_named("sticky", 2)
