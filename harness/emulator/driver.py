"""The real-time driver: each step of the core lasts until its modelled end, on an absolute schedule.

The next step starts where the last step ended in model time, so the host's delays do not add up. A stall beyond the
limit moves the schedule and is reported. A step is reported after the next step was armed.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable

from harness.clock import NS_PER_MS, NS_PER_US, DeadlineTimer, ScaledClock
from harness.emulator.config import EmulatorConfig
from harness.emulator.core import EmulatorCore, EngineRequest, StepStart
from harness.emulator.reporter import StepReporter

SPIN_SHARE = 10  # at most this part of a step is spent busy-waiting


class RealTimeDriver:
    """Runs an EmulatorCore on a ScaledClock inside an asyncio loop.

    The listener is called after the next step was armed, so that its work hides inside that step.
    """

    def __init__(self, core: EmulatorCore, clock: ScaledClock, listener: StepReporter, config: EmulatorConfig) -> None:
        self.core = core
        self._clock = clock
        self._listener = listener
        self._stall_limit_ns = round(config.stall_limit_ms * NS_PER_MS * clock.scale)
        self._spin_ns = round(config.spin_us * NS_PER_US)
        self._fault = config.fault
        self._free_at_ns = 0  # model instant from which the engine may start a step
        self._is_hung = False
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer()
        self._loop.add_reader(self._timer.fd, self._timer_fired)
        self._kick_pending = False

    def submit(self, request: EngineRequest) -> None:
        """Stamp a request with now and hand it to the core; an idle engine starts at once."""
        request.arrival_ns = self._clock.now_ns()
        self.core.submit(request)
        self._kick_soon()

    def abort(self, handle: int) -> None:
        """Drop a request, as of now."""
        self.core.abort(handle, self._clock.now_ns())
        self._kick_soon()

    @property
    def is_idle(self) -> bool:
        """Whether nothing runs and nothing waits."""
        return self.core.running_step is None and not self._kick_pending and self.core.num_unfinished == 0

    def close(self) -> None:
        """Stop."""
        self._loop.remove_reader(self._timer.fd)
        self._timer.close()

    def _kick_soon(self) -> None:
        # Later in this turn of the loop, so that all its requests are in the inbox before the first schedule.
        if self.core.running_step is None and not self._kick_pending:
            self._kick_pending = True
            self._loop.call_soon(self._kick)

    def _kick(self) -> None:
        self._kick_pending = False
        if self.core.running_step is None:
            self._or_crash(lambda: self._report(*self._arm_next(self._clock.now_ns())))

    def _or_crash(self, act: Callable[[], None]) -> None:
        # asyncio would log the exception and continue; a stopped engine must not look alive.
        try:
            act()
        except Exception:
            self._listener.engine_crashed(traceback.format_exc())
            raise

    def _timer_fired(self) -> None:
        self._timer.clear()
        self._or_crash(self._step_is_over)

    def _step_is_over(self) -> None:
        running = self.core.running_step
        assert running is not None, "the timer fired without a step"
        while (now_ns := self._clock.now_ns()) < running.end_ns:
            pass  # at most spin_us
        end = self.core.end_step()
        self._free_at_ns = running.end_ns
        if self._fault.crash_after_steps is not None and self.core.num_steps >= self._fault.crash_after_steps:
            self._listener.engine_crashed("")
        # The report comes last: tokens, logs and metrics of this step are made while the next step runs.
        start, moved_ns = self._arm_next(now_ns)
        self._listener.step_ended(end, now_ns)
        self._report(start, moved_ns)

    def _arm_next(self, now_ns: int) -> tuple[StepStart | None, int]:
        """Start the next step and arm the timer for its end; returns the step and by how much a stall moved it."""
        if self._is_hung:
            return None, 0
        if self._fault.hang_after_steps is not None and self.core.num_steps >= self._fault.hang_after_steps:
            self._is_hung = True
            return None, 0
        start_ns = self._free_at_ns
        if not self.core.has_work:
            # An arrival starts an idle engine when it arrived; without one, only aborts are left to apply.
            arrival_ns = self.core.next_arrival_ns
            start_ns = max(start_ns, now_ns if arrival_ns is None else arrival_ns)
        moved_ns = 0
        if now_ns - start_ns > self._stall_limit_ns:
            moved_ns, start_ns = now_ns - start_ns, now_ns
        start = self.core.start_step(start_ns)
        if start is None:
            return None, 0
        # A sleeping host wakes up to 0.2 ms late; on a fast clock a whole 0.2 ms would be most of the step.
        wall_ns = round(start.step.duration_ns / self._clock.scale)
        self._timer.arm(self._clock.to_monotonic_ns(start.end_ns) - min(self._spin_ns, wall_ns // SPIN_SHARE))
        return start, moved_ns

    def _report(self, start: StepStart | None, moved_ns: int) -> None:
        if start is None:
            return
        if moved_ns:
            self._listener.schedule_moved(moved_ns)
        self._listener.step_started(start)
