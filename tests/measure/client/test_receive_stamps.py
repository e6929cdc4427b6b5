"""Kernel stamps are trusted only where the realtime clock was steady."""

from __future__ import annotations

from array import array

import numpy as np

from harness.clock import NS_PER_S, monotonic_ns
from harness.measure.client.receive_stamps import SAMPLE_INTERVAL_NS, OffsetLog, PollTimes


class TestKernelStamps:
    def log(self, *offsets_ns: int) -> OffsetLog:
        log = OffsetLog()
        log.at_ns = array("q", [place * SAMPLE_INTERVAL_NS for place in range(len(offsets_ns))])
        log.offset_ns = array("q", offsets_ns)
        return log

    def test_a_steady_offset_gives_the_monotonic_instant(self) -> None:
        monotonic, is_trusted = self.log(10**18, 10**18).to_monotonic(np.array([10**18 + 40]), np.array([50]))
        assert monotonic.tolist() == [40]
        assert is_trusted.tolist() == [True]

    def test_stamps_beside_a_clock_step_are_refused_and_later_ones_are_not(self) -> None:
        step_ns = NS_PER_S
        log = self.log(0, 0, step_ns, step_ns)
        received = np.array([SAMPLE_INTERVAL_NS // 2, SAMPLE_INTERVAL_NS * 3 // 2, SAMPLE_INTERVAL_NS * 5 // 2])
        realtime = received - 10 + np.array([0, step_ns, step_ns])
        monotonic, is_trusted = log.to_monotonic(realtime, received)
        assert is_trusted.tolist() == [True, False, True]
        assert monotonic[[0, 2]].tolist() == (received[[0, 2]] - 10).tolist()
        assert log.steps() == [2 * SAMPLE_INTERVAL_NS]

    def test_a_stamp_from_before_a_step_that_was_read_after_it_is_refused(self) -> None:
        """An hour forward: by the new offset the data would have waited an hour for the client."""
        hour_ns = 3600 * NS_PER_S
        log = self.log(0, hour_ns, hour_ns)
        received = np.array([SAMPLE_INTERVAL_NS + 40, SAMPLE_INTERVAL_NS + 90])
        realtime = np.array([SAMPLE_INTERVAL_NS - 20, hour_ns + SAMPLE_INTERVAL_NS + 60])
        monotonic, is_trusted = log.to_monotonic(realtime, received)
        assert is_trusted.tolist() == [False, True]
        assert monotonic[1] == SAMPLE_INTERVAL_NS + 60

    def test_a_slew_of_the_clock_is_no_step(self) -> None:
        assert self.log(0, 40_000, 80_000).steps() == []

    def test_no_stamp_is_trusted_after_its_own_receive_or_missing_or_without_a_sample(self) -> None:
        _, is_trusted = self.log(0, 0).to_monotonic(np.array([NS_PER_S, -1]), np.array([10, 10]))
        assert is_trusted.tolist() == [False, False]
        _, is_trusted = self.log().to_monotonic(np.array([NS_PER_S]), np.array([NS_PER_S]))
        assert is_trusted.tolist() == [False]

    def test_samples_are_taken_evenly_with_the_first_and_the_last(self) -> None:
        log = self.log(*range(101))
        assert [offset_ns for _, offset_ns in log.some(10)] == list(range(0, 101, 10))
        assert [offset_ns for _, offset_ns in log.some(1000)] == list(range(101))
        assert self.log().some(10) == []


class TestPollTimes:
    def test_what_a_poll_shows_came_after_the_poll_before_that_showed_all(self) -> None:
        times = PollTimes()
        before_ns = monotonic_ns()
        times.begin(0)
        times.end()
        between_ns = monotonic_ns()
        times.begin(0)
        times.end()
        assert before_ns <= times.earliest_ns() <= between_ns
        after_ns = monotonic_ns()
        for _ in range(2):
            times.begin(0)
            times.end(is_all=False)
        assert times.earliest_ns() <= after_ns
        times.close()
