"""Sessions that are cut into parts: when each goes on."""

from __future__ import annotations

from harness.model.plan.event_queue import return_waits_ns
from tests.support.replays import plan_of, session


def test_a_session_waits_between_its_requests_and_its_last_one_for_nothing() -> None:
    assert return_waits_ns(plan_of(session(0, num_requests=3, wait_ns=5), session(1, num_requests=1))) == [
        *(5, 5, None),
        None,
    ]


def test_a_part_waits_until_the_earliest_part_that_continues_it() -> None:
    parts = [
        session(0, num_requests=1),
        session(1, num_requests=1, after=0, start_offset_ns=9, continues=0, keep_first=46),
        session(2, num_requests=1, after=0, start_offset_ns=4, continues=0, keep_first=46),
        # The next session of the same user continues nothing.
        session(3, num_requests=1, after=2, start_offset_ns=1),
    ]
    assert return_waits_ns(plan_of(*parts)) == [4, None, None, None]


def test_a_part_that_waits_for_the_work_of_others_waits_as_long_as_they_do() -> None:
    parts = [
        session(0, num_requests=1),
        session(1, num_requests=3, after=0, start_offset_ns=2, wait_ns=10),
        session(2, num_requests=1, after=0, start_offset_ns=3),
        session(3, num_requests=1, after=1, also_after=(2,), start_offset_ns=5, continues=0, keep_first=46),
    ]
    assert return_waits_ns(plan_of(*parts)) == [27, 10, 10, None, None, None]
