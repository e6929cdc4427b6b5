"""A second client, on asyncio and aiohttp: a second opinion on the replay loop, with the same state and rows.

The same ``Exchange`` reads answers, so both clients judge them alike. It has no kernel stamps: each of its stamps is an
upper bound, and it notes the lower one. ``python -m tests.support.aiohttp_client`` is the command ``harness`` with it.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from contextvars import ContextVar
from functools import partial
from typing import Any, NamedTuple

import aiohttp
from aiohttp.client_proto import ResponseHandler

from harness.clock import NS_PER_MS, NS_PER_S, monotonic_ns
from harness.errors import printable
from harness.measure.client.answer import NO_KERNEL_STAMP, ReceivedAnswer, describe_error_body
from harness.measure.client.certificates import trusting_context
from harness.measure.client.exchange import Exchange
from harness.measure.client.held_tokens import held_facts
from harness.measure.client.host import CpuMeter, StallMeter, pause_facts, stall_facts, stamp_facts
from harness.measure.client.receive_stamps import PollTimes
from harness.measure.client.replay_state import Due, ReplayEvent, ReplayState
from harness.measure.client.rows import ABSENT
from harness.measure.client.run import StopSignal
from harness.measure.client.target import ReplayResult, Target
from harness.measure.records.schema import ABORTED
from harness.model.plan.model import Plan

HEARTBEAT_S = 0.05
START_LEAD_NS = 20 * NS_PER_MS
# A pooled connection that idled longer is not used again: servers close idle connections, and a request sent in that
# moment would be lost.
KEEPALIVE_S = 1.0


def replay_by_aiohttp(
    plan: Plan,
    target: Target,
    *,
    on_event: Callable[[ReplayEvent], None] | None = None,
    stop: StopSignal | None = None,
) -> ReplayResult:
    """As ``harness.measure.client.run.replay``, by this client."""
    is_stopped = stop.is_set if stop is not None else lambda: False
    state = ReplayState(plan, target, keeps_events=on_event is not None)
    state.prefetch_all()
    cpu = CpuMeter()

    def deliver() -> None:
        for event in state.finished_events:
            if on_event is not None:
                on_event(event)
        state.finished_events.clear()

    with StallMeter(target.clock) as stalls:
        start_ns = AiohttpReplay(state, target, is_stopped=is_stopped, on_slack=deliver).run()
    deliver()
    audit: dict[str, Any] = {
        "client": "aiohttp",
        "stream": state.stream,
        **state.chunks.together_facts(None),
    }
    requests = state.rows_table()
    sent_and_due = zip(requests["sent_ns"].to_pylist(), requests["due_ns"].to_pylist(), strict=True)
    audit |= {
        **({} if state.needs_token_ids else {"text_sizes": target.text_sizes.to_json()}),
        "num_early_sends": sum(sent_ns is not None and sent_ns < due_ns for sent_ns, due_ns in sent_and_due),
        "run_nonce": state.nonce,
        "tolerated": dict(state.tolerated),
        "replicas": state.replicas,
        "client_pauses_ns": state.pauses_ns,
        **cpu.read(),
    }
    chunks = state.chunks.stream(state.rows, state.clock, None)
    result = ReplayResult(requests, chunks, state.clock.from_monotonic_ns(start_ns), audit)
    audit.update(stall_facts(stalls, requests))
    audit.update(stamp_facts(chunks, target.clock.scale))
    audit.update(held_facts(chunks, requests))
    audit.update(pause_facts(audit["client_pauses_ns"], requests, target.clock.scale))
    return result


class AiohttpReplay:
    """One replay. ``run`` returns when every row has a final status."""

    def __init__(
        self,
        state: ReplayState,
        target: Target,
        *,
        is_stopped: Callable[[], bool],
        on_slack: Callable[[], None],
    ) -> None:
        self._state = state
        self._rows = state.rows
        self._url, self._headers = f"{target.endpoint.url}{state.path}", target.endpoint.headers
        self._timeout_s = state.clock.to_monotonic_ns(target.request_timeout_ns) / NS_PER_S
        self._is_stopped = is_stopped
        self._on_slack = on_slack
        self._payloads: dict[int, bytes] = {}
        self._gone = set[int]()  # rows whose body was sent

    def run(self) -> int:
        """Release all sessions together and see them to the end; the common start in CLOCK_MONOTONIC ns."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return self._run_in_loop()
        # Called from a notebook, whose own loop runs in this thread.
        with ThreadPoolExecutor(1) as elsewhere:
            return elsewhere.submit(self._run_in_loop).result()

    def _run_in_loop(self) -> int:
        """As ``asyncio.run``, with a loop that notes its polls."""
        with closing(PollTimes()) as self._poll_times:
            loop = asyncio.SelectorEventLoop(_NotingSelector(self._poll_times))
            try:
                return loop.run_until_complete(self._run())
            finally:
                loop.run_until_complete(_cancel_others())
                loop.run_until_complete(loop.shutdown_asyncgens())
                loop.run_until_complete(loop.shutdown_default_executor())
                loop.close()

    async def _run(self) -> int:
        state = self._state
        for due in state.release(0):
            self._payloads[due.row] = b"".join(state.body_parts(due.row))
        self._tasks: set[asyncio.Task[None]] = set()
        self._failures: list[BaseException] = []
        connector = _Connector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=trusting_context(self._url))
        timeout = aiohttp.ClientTimeout(total=self._timeout_s)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            read_bufsize=1 << 20,
            # No compressed body was requested, and a small one could unpack to a very large one.
            auto_decompress=False,
            trace_configs=[self._trace()],
        ) as self._http:
            start_ns = monotonic_ns() + START_LEAD_NS
            self._start(state.release(state.clock.from_monotonic_ns(start_ns)))
            while not state.is_finished and not self._failures:
                self._on_slack()
                self._poll_times.forget_waits()
                state.beat(monotonic_ns())
                if self._is_stopped():
                    await self._stop()
                else:
                    await asyncio.wait(self._tasks, timeout=HEARTBEAT_S, return_when=asyncio.FIRST_COMPLETED)
            if self._failures:
                await self._stop()
                raise self._failures[0]
        return start_ns

    def _trace(self) -> aiohttp.TraceConfig:
        """Stamps a request when its body is handed over: a connection may have to be made before."""

        async def on_body(_session: Any, context: Any, _chunk: Any) -> None:
            self._rows.sent_ns[context.trace_request_ctx] = monotonic_ns()
            self._gone.add(context.trace_request_ctx)

        trace = aiohttp.TraceConfig()
        trace.on_request_chunk_sent.append(on_body)
        return trace

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._state.stop(monotonic_ns())

    def _start(self, due: list[Due]) -> None:
        for item in due:
            task = asyncio.create_task(self._perform(item))
            self._tasks.add(task)
            task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (failure := task.exception()) is not None:
            self._failures.append(failure)

    async def _perform(self, due: Due) -> None:
        state, row = self._state, due.row
        reason = state.blocked_by(row)
        if reason:
            self._start(state.skip_session(row, reason, monotonic_ns()))
            return
        body = self._payloads.pop(row, None) or b"".join(state.body_parts(row))
        await state.clock.wait_until_ns(due.due_ns)
        answer = state.new_answer(row)
        try:
            status, problem = await self._exchange_or_leave(row, body, answer)
        except asyncio.CancelledError:
            if self._rows.sent_ns[row] >= 0:
                state.fail(
                    row, monotonic_ns(), "connection", "the replay was stopped before the answer was complete", answer
                )
            raise
        if status == ABORTED:
            self._start(state.leave(row, monotonic_ns(), answer))
            return
        if status:
            self._start(state.fail(row, monotonic_ns(), status, problem, answer))
            return
        due_next = state.complete(row, self._rows.done_ns[row])
        due_next_on_failure = state.judge(row, answer)
        state.book(row, answer)
        self._start([item for item in due_next if state.may_send(item.row)] + due_next_on_failure)

    async def _exchange_or_leave(self, row: int, body: bytes, answer: ReceivedAnswer) -> tuple[str, str]:
        """As ``_exchange``; ABORTED when the plan has the client leave, and the answer has not ended before."""
        leave_ns = self._state.clock.to_monotonic_ns(self._state.abort_after_ns[row])
        exchange = asyncio.ensure_future(self._exchange(row, body, answer))
        try:
            await asyncio.wait({exchange}, timeout=leave_ns / NS_PER_S if leave_ns else None)
            # A body may go long after the wait began, and a timer may fire early by its resolution.
            while not exchange.done() and (left_ns := self._left_ns(row, leave_ns)) > 0:
                await asyncio.wait({exchange}, timeout=left_ns / NS_PER_S)
            return exchange.result() if exchange.done() else (ABORTED, "")
        finally:
            exchange.cancel()
            await asyncio.gather(exchange, return_exceptions=True)

    def _left_ns(self, row: int, leave_ns: int) -> int:
        return leave_ns if row not in self._gone else self._rows.sent_ns[row] + leave_ns - monotonic_ns()

    async def _exchange(self, row: int, body: bytes, answer: ReceivedAnswer) -> tuple[str, str]:
        """One request to its end; a status and its reason when it failed, two empty strings otherwise."""
        headers = {
            **self._headers,
            **self._state.headers(row),
            "Content-Type": "application/json",
            "X-Request-Id": self._rows.request_id[row],
        }
        exchange = Exchange(row, answer, body)
        self._rows.sent_ns[row] = monotonic_ns()
        _CURRENT.set(_Receiver(exchange, self._poll_times, self._rows.sent_ns[row]))
        try:
            async with self._http.post(self._url, data=body, headers=headers, trace_request_ctx=row) as response:
                status, problem = await self._read(exchange, response)
        except asyncio.TimeoutError:
            status, problem = "timeout", "no end within the limit"
        except aiohttp.ClientResponseError as error:
            status, problem = "bad_response", printable(f"not HTTP: {error.message}")
        except (aiohttp.ClientError, OSError) as error:
            status, problem = "connection", printable(f"{type(error).__name__}: {error}")
        finally:
            exchange.release()
            self._rows.first_byte_ns[row] = exchange.first_byte_ns
            self._rows.http_status[row] = exchange.status or ABSENT
        # Broken HTTP often also breaks the connection: report the cause, as the epoll client does.
        return ("bad_response", exchange.problem) if exchange.problem else (status, problem)

    async def _read(self, exchange: Exchange, response: aiohttp.ClientResponse) -> tuple[str, str]:
        async for _data in response.content.iter_any():
            if exchange.problem:
                return "", ""
            if self._state.has_enough(exchange.row, exchange.read()):
                response.close()
                return ABORTED, ""
        self._rows.done_ns[exchange.row] = monotonic_ns()
        if not exchange.is_over and not exchange.ends_at_close:
            return "connection", "closed by the server (in the middle of the answer)"
        if exchange.status != 200:
            return "http_error", describe_error_body(exchange.error_body)
        exchange.close()
        return "", ""


async def _cancel_others() -> None:
    """Cancel the tasks that an exception left behind, and see them to their end."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class _NotingSelector(selectors.DefaultSelector):
    """The selector of the loop: it notes when each poll began and returned."""

    def __init__(self, poll_times: PollTimes) -> None:
        super().__init__()
        self._poll_times = poll_times

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._poll_times.begin(0 if timeout is not None and timeout <= 0 else monotonic_ns())
        events = super().select(timeout)
        self._poll_times.end()
        return events


class _Receiver(NamedTuple):
    """What becomes of the receives of a request. sent_ns: CLOCK_MONOTONIC."""

    exchange: Exchange
    poll_times: PollTimes
    sent_ns: int

    def take(self, data: bytes) -> None:
        exchange = self.exchange
        earliest_ns = max(self.poll_times.earliest_ns(), exchange.last_received_ns, self.sent_ns)
        received_ns = monotonic_ns()
        exchange.answer.not_before[received_ns] = earliest_ns
        exchange.take(received_ns, NO_KERNEL_STAMP, data)


# What receives the answer to the request that the running task performs.
_CURRENT: ContextVar[_Receiver] = ContextVar("receiver")


class _Connection(ResponseHandler):
    """A connection that passes each receive to the exchange too, because aiohttp accepts some broken HTTP."""

    receiver: _Receiver | None = None

    def set_response_params(self, **options: Any) -> None:
        """Called by aiohttp, in the task of a request, before the request is sent."""
        self.receiver = _CURRENT.get()
        super().set_response_params(**options)

    def data_received(self, data: bytes) -> None:
        if data and self.receiver is not None:
            self.receiver.take(data)
        super().data_received(data)


class _Connector(aiohttp.TCPConnector):
    """Makes connections of that class, for which aiohttp has no public option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._factory = partial(_Connection, loop=asyncio.get_running_loop())


def main() -> None:
    """The command ``harness`` whose runs are replayed by this client; its audit of itself is the loop's."""
    from harness.cli import main as harness_main
    from harness.runner import run

    run.replay = replay_by_aiohttp
    harness_main()


if __name__ == "__main__":
    main()
