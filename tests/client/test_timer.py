"""Absolute timers never fire early, and the scheduler's slice is given back."""

from __future__ import annotations

import select

from harness.client.scheduler_slice import MAX_SLICE_NS, SHORT_SLICE_NS, SchedulerSlice
from harness.client.timer import DeadlineTimer
from harness.clock import NS_PER_MS, NS_PER_S, monotonic_ns


class TestTheTimer:
    def test_it_is_never_early_and_can_be_armed_again(self) -> None:
        timer = DeadlineTimer()
        for _ in range(20):
            deadline_ns = monotonic_ns() + NS_PER_MS
            timer.arm(deadline_ns)
            assert select.select([timer.fd], [], [], 5)[0]
            assert monotonic_ns() >= deadline_ns
        timer.close()

    def test_disarming_clears_a_deadline_that_has_passed(self) -> None:
        timer = DeadlineTimer()
        timer.arm(monotonic_ns() - NS_PER_S)
        assert select.select([timer.fd], [], [], 5)[0]
        timer.clear()
        assert not select.select([timer.fd], [], [], 0)[0]
        timer.close()


def test_a_scheduler_slice_is_given_back() -> None:
    with SchedulerSlice() as first:
        granted = first.ask(SHORT_SLICE_NS)
        assert granted in {None, SHORT_SLICE_NS}
    with SchedulerSlice() as second:
        assert second.ask(10**18) in {None, MAX_SLICE_NS}
