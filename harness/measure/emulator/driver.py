"""The engine in real time: each step of the core lasts until its modelled end, on an absolute schedule.

The next step starts where the last step ended in model time, so the host's delays do not add up. A stall beyond the
limit moves the schedule and is reported. What a step did (tokens to clients, log lines, metrics, trace) is reported
after the next step was armed, so that none of it delays the engine.
"""

from __future__ import annotations

import asyncio
import os
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn

from harness.clock import NS_PER_MS, NS_PER_US, DeadlineTimer, ScaledClock
from harness.errors import SpecError
from harness.measure.emulator import logs
from harness.measure.emulator.config import EmulatorConfig
from harness.measure.emulator.logs import LogWriter, copy_lines, kv_event_line
from harness.measure.emulator.metrics import ServerMetrics
from harness.measure.emulator.responses import EmulatedAnswer
from harness.measure.emulator.sessions import SessionRecorder
from harness.measure.emulator.step_log import StepFiles, step_log_header, step_log_row, step_record
from harness.model.engine import DECODE, PREFILL, EngineConfig, KvEvent
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd, StepStart

CRASH_EXIT_CODE = 1
SPIN_SHARE = 10  # at most this part of a step is spent busy-waiting


class _CrashAsked(Exception):  # noqa: N818  # the fault that the configuration asks for is no error
    """The fault ``crash-after-steps``."""


class StepReporter:
    """The driver's listener. answers: by handle of an engine request. ends_process: a crash ends this process."""

    ends_process = False

    def __init__(
        self, config: EmulatorConfig, clock: ScaledClock, log: LogWriter, metrics: ServerMetrics, files: StepFiles
    ) -> None:
        self.log, self.metrics = log, metrics
        self.answers: dict[int, EmulatedAnswer] = {}
        self._names: dict[int, str] = {}
        self._slots: dict[int, list[int]] = {}
        self._clock, self._files = clock, files
        self.engine = EngineConfig.from_server(config.server)
        self._is_paged = self.engine.rule_set.is_paged
        self._has_bucket_log = config.bucket_log and not self._is_paged
        self._sessions: SessionRecorder | None = None
        if self._is_paged and (path := config.sessions_path):
            with SpecError.on_os_error("cannot be written", where=Path(path), hint="Check the folder"):
                self._sessions = SessionRecorder(self.engine, Path(path), clock.to_monotonic_ns)
        if self._files.step_log is not None:
            self._files.step_log.append(step_log_header(self.engine, clock.to_monotonic_ns(clock.now_ns())))

    def register(self, answer: EmulatedAnswer) -> None:
        """From now on the tokens of its request go to an answer."""
        self.answers[answer.request.handle] = answer
        self._names[answer.request.handle] = answer.request.engine_id

    def step_ended(self, end: StepEnd, woken_ns: int) -> None:
        """A step ended at ``end.start.end_ns``; the host noticed at ``woken_ns`` (model ns)."""
        for request, num_tokens in zip(end.requests, end.num_tokens, strict=True):
            tokens = request.draw_tokens(num_tokens)
            if (answer := self.answers.get(request.handle)) is not None:
                answer.push(tokens)
        for request in end.finished:
            self.answers.pop(request.handle, None)
        emitted_ns = self._clock.now_ns()
        if self._sessions is not None:
            self._sessions.ended(end)
        self._log_kv(end.kv_events, end.start.end_ns)
        self.metrics.observe(end)
        if self._files.step_log is not None and (row := step_log_row(self.engine, end, self._clock.to_monotonic_ns)):
            self._files.step_log.append(row)
        if self._files.trace is not None:
            self._files.trace.append(step_record(end, woken_ns, emitted_ns))

    def step_started(self, start: StepStart) -> None:
        if self._sessions is not None:
            self._sessions.started(start)
        self._log_kv(start.kv_events_before, start.start_ns)
        self._log_kv(start.step.kv_events, start.start_ns)
        for request in start.preempted:
            self._slots.pop(request.handle, None)
        self._log_flushed(start.flushed, start.start_ns)
        if start.step.kind == PREFILL and not self._is_paged:
            self._log_prefill(start)
        elif start.step.kind == DECODE and self._has_bucket_log:
            step = start.step
            self.log.line(
                logs.BUCKET, f"[BUCKET] request_nums={step.num_seqs} padded_batch_size={step.bucket}", start.start_ns
            )

    def schedule_moved(self, by_ns: int) -> None:
        """The host stalled; every later step starts ``by_ns`` later than the model alone would have it."""
        self.metrics.schedule_moved(by_ns)
        self.log.line(logs.STALL, f"[EMULATOR] host stalled: schedule moved by {by_ns / NS_PER_MS:.3f} ms")
        if self._files.trace is not None:
            now_ns = self._clock.now_ns()
            self._files.trace.append({"kind": "STALL", "start_ns": now_ns, "duration_ns": 0, "moved_ns": by_ns})

    def engine_crashed(self, traceback: str) -> NoReturn:
        """The engine cannot continue: the fault that was asked for (no traceback), or a defect.

        The log says so. Then the process ends, or where it is not the emulator's, every answer does.
        """
        message = f"EngineCore encountered a fatal error.\n{traceback}".rstrip()
        self.log.line(logs.FATAL, message)
        if not self.ends_process:
            self.abort_all()
            raise RuntimeError(message)
        self.log.close()
        self._files.close()
        os._exit(CRASH_EXIT_CODE)

    def abort_all(self) -> list[int]:
        """End every open answer as aborted; returns the handles, for the core to drop."""
        handles = list(self.answers)
        for handle in handles:
            answer = self.answers.pop(handle)
            answer.request.finish_reason = "abort"
            answer.push([])
        return handles

    def _log_prefill(self, start: StepStart) -> None:
        request, step = start.requests[0], start.step
        slots = self._slots.get(request.handle, [])
        scheduled = (
            f"Request {request.engine_id} is now scheduled. Prompt tokens: {len(request.prompt)}, "
            f"Already generated tokens: {request.num_generated}, Allocated block(s): {list(request.kv_blocks)}"
        )
        self.log.line(logs.SCHEDULED, scheduled, start.start_ns)
        for site, message in copy_lines(step, slots, request.engine_id):
            self.log.line(site, message, start.start_ns)
        if step.failed_copy >= 0:
            # The runner prepares the prefill again, without reuse.
            self.log.line(logs.SCHEDULED, scheduled, start.start_ns)

    def _log_flushed(self, flushed: Iterable[EngineRequest], at_ns: int) -> None:
        for request in flushed:
            self._slots.pop(request.handle, None)
            self._names.pop(request.handle, None)
            if request.scheduled_ns < 0 or self._is_paged:
                continue  # aborted before the worker received it
            self.log.line(
                logs.FINISHED,
                f"Request {request.engine_id} is finished. Prompt tokens: {len(request.prompt)}, "
                f"Generated tokens: {request.num_generated}, Freed block(s): {list(request.kv_blocks)}",
                at_ns,
            )

    def _log_kv(self, events: Iterable[KvEvent], at_ns: int) -> None:
        for event in events:
            if event.kind == "ALLOC":
                self._slots.setdefault(event.request, []).extend(event.slots)
            self.log.line(*kv_event_line(event, self._names.get(event.request, "")), at_ns)


class RealTimeDriver:
    """Runs an EngineCore on a ScaledClock inside an asyncio loop.

    The reporter is called after the next step was armed, so that its work hides inside that step.
    """

    def __init__(self, core: EngineCore, clock: ScaledClock, reporter: StepReporter, config: EmulatorConfig) -> None:
        self.core, self.reporter, self.is_shutting_down = core, reporter, False
        self._clock, self._config = clock, config
        self._stall_limit_ns = round(config.stall_limit_ms * NS_PER_MS * clock.scale)
        self._spin_ns = round(config.spin_us * NS_PER_US)
        self._free_at_ns = 0  # model instant from which the engine may start a step
        self._is_hung = False
        self._loop = asyncio.get_running_loop()
        self._timer = DeadlineTimer()
        self._loop.add_reader(self._timer.fd, self._timer_fired)
        self._kick_pending = False

    def now_ns(self) -> int:
        """The present instant of the model."""
        return self._clock.now_ns()

    def submit(self, answer: EmulatedAnswer) -> None:
        """Hand the request of an answer, stamped with its arrival, to the engine; refused while shutting down."""
        log, request = self.reporter.log, answer.request
        if self.is_shutting_down:
            log.line(logs.REJECTING, f"Rejecting request {request.engine_id} (server shutting down)")
            request.finish_reason = "abort"
            answer.push([])
            return
        if self._config.log_requests:
            params = f"SamplingParams(n=1, max_tokens={request.max_tokens})"
            log.line(logs.RECEIVED, f"Received request {request.external_id}: params: {params}, lora_request: None.")
            log.line(logs.ADDED, f"Added request {request.engine_id}.")
        self.reporter.register(answer)
        self.core.submit(request)
        self._kick_soon()

    def forget(self, answer: EmulatedAnswer) -> None:
        """The HTTP request is over: an engine request that still runs is aborted, because its client went away."""
        log, request = self.reporter.log, answer.request
        if self.reporter.answers.pop(request.handle, None) is not None:
            self._abort(request.handle)
            if self._config.log_requests:
                log.line(logs.ABORTING, f"Aborted request(s) {request.engine_id}.")
                log.line(logs.ABORTED, f"Request {request.external_id} aborted.")

    def abort_all(self) -> None:
        """Abort every engine request; its answer ends."""
        for handle in self.reporter.abort_all():
            self._abort(handle)

    def _abort(self, handle: int) -> None:
        self.core.abort(handle, self._clock.now_ns())
        self._kick_soon()

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
        except Exception as error:
            self.reporter.engine_crashed("" if isinstance(error, _CrashAsked) else traceback.format_exc())

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
        if (
            self._config.fault.crash_after_steps is not None
            and self.core.num_steps >= self._config.fault.crash_after_steps
        ):
            raise _CrashAsked
        # The report comes last: tokens, logs and metrics of this step are made while the next step runs.
        start, moved_ns = self._arm_next(now_ns)
        self.reporter.step_ended(end, now_ns)
        self._report(start, moved_ns)

    def _arm_next(self, now_ns: int) -> tuple[StepStart | None, int]:
        """Start the next step and arm the timer for its end; returns the step and by how much a stall moved it."""
        if self._is_hung:
            return None, 0
        if (
            self._config.fault.hang_after_steps is not None
            and self.core.num_steps >= self._config.fault.hang_after_steps
        ):
            self._is_hung = True
            return None, 0
        start_ns, moved_ns = self._free_at_ns, 0
        if not self.core.has_work:
            # An arrival starts an idle engine when it arrived, however long the emulator worked on it: what is still
            # late when the step ends moves the next one. Without an arrival, only aborts are left to apply.
            arrival_ns = self.core.next_arrival_ns
            start_ns = max(start_ns, now_ns if arrival_ns is None else arrival_ns)
        elif now_ns - start_ns > self._stall_limit_ns:
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
            self.reporter.schedule_moved(moved_ns)
        self.reporter.step_started(start)
