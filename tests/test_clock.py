"""Time is whole nanoseconds of a clock that is passed: never early, never drifting, the same in every process."""

from __future__ import annotations

import asyncio
import select

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.clock import (
    NS_PER_MS,
    NS_PER_S,
    DeadlineTimer,
    MonotonicClock,
    ScaledClock,
    monotonic_ns,
    realtime_minus_monotonic_ns,
    utc_now,
)

SCALES = st.sampled_from([0.5, 1.0, 4.0, 20.0, 1 / 3, 7.3])
INSTANTS = st.integers(0, 2**62)


@given(SCALES, INSTANTS)
def test_a_wait_for_a_model_instant_never_ends_early(scale: float, model_ns: int) -> None:
    clock = ScaledClock(scale)
    assert clock.from_monotonic_ns(clock.to_monotonic_ns(model_ns)) >= model_ns
    assert clock.from_monotonic_ns(clock.to_monotonic_ns(model_ns) - 1) < model_ns


@given(SCALES, INSTANTS, st.integers(0, 10**12))
def test_model_time_runs_at_its_scale_to_the_nanosecond_however_long_the_machine_is_up(
    scale: float, up_ns: int, passed_ns: int
) -> None:
    clock = ScaledClock(scale)
    numerator, denominator = clock.ratio
    model_ns = clock.from_monotonic_ns(up_ns + passed_ns) - clock.from_monotonic_ns(up_ns)
    assert abs(model_ns * denominator - passed_ns * numerator) < denominator


def test_two_processes_of_one_scale_agree_on_every_instant() -> None:
    here, there = ScaledClock(20.0), ScaledClock(20.0)
    assert here.from_monotonic_ns(10**18 + 1) == there.from_monotonic_ns(10**18 + 1) == 20 * (10**18 + 1)


def test_a_scale_that_would_stop_or_turn_time_is_refused() -> None:
    for scale in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="positive"):
            ScaledClock(scale)


@pytest.mark.parametrize("clock", [MonotonicClock(), ScaledClock(50.0)], ids=["real", "scaled"])
def test_sleepers_and_waiting_tasks_wake_at_their_deadline_or_after(clock: MonotonicClock | ScaledClock) -> None:
    for wait_ns in (NS_PER_MS, -NS_PER_MS):
        deadline_ns = clock.now_ns() + wait_ns
        clock.sleep_until_ns(deadline_ns)
        assert clock.now_ns() >= deadline_ns
        deadline_ns = clock.now_ns() + wait_ns
        asyncio.run(clock.wait_until_ns(deadline_ns))
        assert clock.now_ns() >= deadline_ns


def test_the_offset_of_realtime_places_a_monotonic_stamp_in_the_calendar() -> None:
    # A second is far wider than any bracket of reads, and far narrower than a wrong clock.
    offset_ns = realtime_minus_monotonic_ns()
    before_ns, now_ns, after_ns = monotonic_ns(), int(utc_now().timestamp() * 1e9), monotonic_ns()
    assert before_ns - 1_000 * NS_PER_MS < now_ns - offset_ns < after_ns + 1_000 * NS_PER_MS


class TestTheTimer:
    def test_it_is_never_early_and_can_be_armed_again(self) -> None:
        timer = DeadlineTimer()
        for _ in range(20):
            deadline_ns = monotonic_ns() + NS_PER_MS
            timer.arm(deadline_ns)
            assert select.select([timer.fd], [], [], 5)[0]
            assert monotonic_ns() >= deadline_ns
        timer.close()

    @pytest.mark.parametrize("deadline_ns", [0, -1, -NS_PER_S, -6_000 * NS_PER_S])
    def test_an_instant_before_the_machine_started_has_passed(self, deadline_ns: int) -> None:
        with DeadlineTimer() as timer:
            timer.arm(deadline_ns)
            assert select.select([timer.fd], [], [], 5)[0]

    def test_disarming_clears_a_deadline_that_has_passed(self) -> None:
        timer = DeadlineTimer()
        timer.arm(monotonic_ns() - NS_PER_S)
        assert select.select([timer.fd], [], [], 5)[0]
        timer.clear()
        assert not select.select([timer.fd], [], [], 0)[0]
        timer.close()
