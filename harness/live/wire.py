"""The epoll replay loop: one thread, absolute deadlines, never early; it sends, stamps and finds the end of answers.

Interpretation of answers and preparation of bodies happen only in slack, or when the next send needs them. It retries
nothing, computes no statistic, and every wait in it has a deadline. Next: rows and chunks go back to
``harness.live.client``.
"""

from __future__ import annotations

import heapq
import select
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import httptools

from harness.clock import NS_PER_MS, NS_PER_S, NS_PER_US, monotonic_ns
from harness.live.client_answer import describe_error_body
from harness.live.kernel_stamps import OffsetLog
from harness.live.scheduler_slice import SHORT_SLICE_NS, SchedulerSlice
from harness.live.wire_connection import Connection, Exchange
from harness.live.wire_pool import ConnectionPool, allow_sockets
from harness.live.wire_timer import DeadlineTimer

if TYPE_CHECKING:
    from harness.live.client_script import Due, Script

EPOLLIN, EPOLLOUT = select.EPOLLIN, select.EPOLLOUT
# The loop wakes this often with nothing to do: to see the stop flag, expire requests and sample the clock offset.
HEARTBEAT_S = 0.05
HEARTBEAT_NS = 50 * NS_PER_MS
# Below this the final spin only reads the clock; above it, it also looks for arrivals.
BARE_SPIN_NS = 25 * NS_PER_US
# A kept connection that idled longer is replaced before it is used: servers close idle ones after a few seconds
# (uvicorn: 5 s), and a request sent in that very moment would be lost.
FRESH_AFTER_IDLE_NS = NS_PER_S
FRESH_LEAD_NS = 250 * NS_PER_MS
SEND_NS = 50 * NS_PER_US
START_LEAD_NS = 5 * NS_PER_MS
REFRESH, SEND = 0, 1
MAX_WAITING_JOBS = 4_096


class WireReplay:
    """One replay. ``run`` returns when every row has a final status."""

    def __init__(
        self,
        script: Script,
        *,
        host: str,
        port: int,
        host_header: str,
        spin_us: int,
        request_timeout_ns: int,
        is_stopped: Callable[[], bool],
        on_slack: Callable[[], None],
        turns: SchedulerSlice,
    ) -> None:
        self._script = script
        self._rows = script.rows
        self._host, self._port = host, port
        self._spin_ns = spin_us * NS_PER_US
        clock = script.clock
        self._request_timeout_ns = clock.to_monotonic_ns(request_timeout_ns)
        self._is_stopped = is_stopped
        self._on_slack = on_slack
        self._turns = turns
        self._burst_from_ns = 0
        self.offsets = OffsetLog()
        self.spun_ns = 0
        self.num_wakeups = 0
        self.num_reconnects = 0
        self._deadlines: list[tuple[int, int, int]] = []
        self._expiries: deque[tuple[int, Connection, int]] = deque()
        self._payloads: dict[int, bytes] = {}
        self._staged: dict[int, Exchange] = {}
        self._next_beat_ns = 0
        self._unsettled: dict[int, Exchange] = {}
        self._jobs: deque[Callable[[], bool]] = deque()
        self._head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {host_header}\r\nContent-Type: application/json\r\n"
            "Accept: */*\r\nX-Request-Id: "
        ).encode()

    # -- before the start --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Connect, release all sessions together, and loop to the end; the common start in CLOCK_MONOTONIC ns."""
        self._epoll = select.epoll()
        self._pool = ConnectionPool(self._epoll, self._host, self._port)
        self._timer = DeadlineTimer()
        self._epoll.register(self._timer.fd, EPOLLIN)
        try:
            first = self._script.release(0)
            allow_sockets(len(first))
            soon = [due.row for due in first if self._to_monotonic(due.due_ns) < FRESH_AFTER_IDLE_NS]
            self._pool.open_all([self._rows.session[row] for row in soon], self._on_writable, self._is_stopped)
            for due in first:
                self._stage(due.row)
            self.offsets.sample()
            # The common start is one long run of sends: a short slice would have it cut into pieces.
            self._turns.ask(SEND_NS * len(first))
            start_ns = self._burst_from_ns = monotonic_ns() + START_LEAD_NS
            for due in self._script.release(self._script.clock.from_monotonic_ns(start_ns)):
                self._schedule(due)
            self._loop()
        finally:
            self.offsets.sample()
            self._pool.close()
            self._timer.close()
            self._epoll.close()
        return start_ns

    def _to_monotonic(self, clock_ns: int) -> int:
        return self._script.clock.to_monotonic_ns(clock_ns)

    # -- the loop ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        deadlines, jobs, script = self._deadlines, self._jobs, self._script
        poll = self._epoll.poll
        while not script.is_finished:
            now_ns = monotonic_ns()
            while deadlines and deadlines[0][0] <= now_ns:
                _, kind, row = heapq.heappop(deadlines)
                if kind == SEND:
                    self._dispatch(row)
                else:
                    self._refresh(row)
                now_ns = monotonic_ns()
            if self._burst_from_ns and now_ns >= self._burst_from_ns:
                self._burst_from_ns = 0
                self._turns.ask(SHORT_SLICE_NS)
            next_ns = deadlines[0][0] if deadlines else 0
            left_ns = next_ns - now_ns
            late_beat_ns = now_ns - self._next_beat_ns
            if late_beat_ns >= 0 and (not next_ns or left_ns > self._spin_ns or late_beat_ns > HEARTBEAT_NS):
                self._beat(now_ns)
                continue
            if next_ns and left_ns <= self._spin_ns:
                if deadlines[0][2] not in self._staged and left_ns > BARE_SPIN_NS:
                    self._stage(deadlines[0][2])
                    continue
                events = self._spin(next_ns, now_ns) if left_ns <= BARE_SPIN_NS else poll(0)
                if left_ns > BARE_SPIN_NS:
                    self.spun_ns += monotonic_ns() - now_ns
            elif jobs:
                events = poll(0)
                if not events or len(jobs) > MAX_WAITING_JOBS:
                    self._run_job()
            else:
                self._timer.arm(next_ns - self._spin_ns if next_ns else 0)
                events = poll(HEARTBEAT_S)
                self.num_wakeups += 1
            for fd, mask in events:
                self._on_event(fd, mask)

    def _spin(self, next_ns: int, now_ns: int) -> list[tuple[int, int]]:
        while monotonic_ns() < next_ns:
            pass
        self.spun_ns += next_ns - now_ns
        return []

    def _run_job(self) -> None:
        job = self._jobs.popleft()
        if job():
            self._jobs.append(job)

    def _beat(self, now_ns: int) -> None:
        """What must happen now and then; not within the spin before a send, unless sends leave no other time."""
        self._next_beat_ns = now_ns + HEARTBEAT_NS
        if now_ns >= self.offsets.next_ns:
            self.offsets.sample()
        self._expire(now_ns)
        if self._is_stopped():
            self._stop(now_ns)
        self._on_slack()

    def _on_event(self, fd: int, mask: int) -> None:
        connection = self._pool.by_fd.get(fd)
        if connection is None:
            if fd == self._timer.fd:
                self._timer.clear()
            return
        if mask == EPOLLIN and connection.is_connected:
            self._on_readable(connection)
            return
        if not connection.is_connected:
            if mask & ~EPOLLIN:  # a lone EPOLLIN is a stale event of a closed socket that had this number
                self._on_writable(connection)
            return
        if mask & EPOLLOUT:
            self._on_writable(connection)
        if mask & ~EPOLLOUT and self._pool.by_fd.get(fd) is connection:
            self._on_readable(connection)

    def _on_writable(self, connection: Connection) -> None:
        if not connection.is_connected:
            problem = connection.finish_connect()
            if problem:
                self._break(connection, "connection", f"cannot connect: {problem}")
                return
            self._epoll.modify(connection.fd, EPOLLIN)
            if connection.exchange is not None:
                self._send(connection, connection.exchange)
            return
        if connection.unsent is not None:
            try:
                connection.send(connection.unsent)
            except OSError as error:
                self._break(connection, "connection", f"{error.strerror} while sending")
                return
        if connection.unsent is None:
            self._epoll.modify(connection.fd, EPOLLIN)

    def _on_readable(self, connection: Connection) -> None:
        exchange = connection.exchange
        try:
            done_ns = connection.receive()
        except OSError as error:
            self._break(connection, "connection", f"{error.strerror} ({connection.describe_progress()})")
            return
        except httptools.HttpParserError as error:
            self._break(connection, "bad_response", f"not HTTP: {error}")
            return
        if exchange is None:
            self._pool.drop(connection)  # closed, or talking out of turn, while idle
            return
        if done_ns < 0:
            if connection.ends_at_close():
                self._complete(connection, exchange, monotonic_ns())
            else:
                self._break(connection, "connection", f"closed by the server ({connection.describe_progress()})")
        elif done_ns:
            self._complete(connection, exchange, done_ns)
        elif len(exchange.pieces) == 1 and exchange.status == 200:
            self._jobs.append(exchange.interpret_one)

    # -- sending -----------------------------------------------------------------------------------------------

    def _schedule(self, due: Due) -> None:
        """Queue a send; see to it that its connection will be there, and fresh, before."""
        due_ns = self._to_monotonic(due.due_ns)
        heapq.heappush(self._deadlines, (due_ns, SEND, due.row))
        now_ns = monotonic_ns()
        session = self._rows.session[due.row]
        if due_ns - now_ns > FRESH_AFTER_IDLE_NS:
            heapq.heappush(self._deadlines, (due_ns - FRESH_LEAD_NS, REFRESH, due.row))
        elif session not in self._pool.of_session and due_ns > now_ns:
            self._pool.open(session)

    def _refresh(self, row: int) -> None:
        session = self._rows.session[row]
        connection = self._pool.of_session.get(session)
        if connection is not None:
            if connection.exchange is not None or not connection.is_connected:
                return
            self._pool.drop(connection)
        self.num_reconnects += 1
        self._pool.open(session)

    def _payload(self, row: int) -> bytes:
        body = self._script.body(row)
        head = f"{self._rows.request_id[row]}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        return b"".join((self._head, head, body))

    def _prepare(self, row: int) -> bytes | None:
        """The bytes of a request that is due; None when what came before it failed and it must not be sent."""
        payload = self._payloads.pop(row, None)
        if payload is not None:
            return payload
        script = self._script
        self._settle(self._rows.session[row])
        parent = script.parent_of(row)
        if parent is not None:
            self._settle(parent)
        if not script.may_send(row):
            return None
        reason = script.blocked_by(row)
        if reason:
            self._schedule_all(script.skip_session(row, reason, monotonic_ns()))
            return None
        return self._payload(row)

    def _stage(self, row: int) -> None:
        """Make everything ready for a send that is about to be due, so that only the send is left."""
        payload = self._prepare(row)
        if payload is not None:
            self._payloads[row] = payload
        self._staged[row] = Exchange(row, self._script.new_answer())

    def _dispatch(self, row: int) -> None:
        exchange = self._staged.pop(row, None) or Exchange(row, self._script.new_answer())
        payload = self._prepare(row)
        if payload is None:
            return
        session = self._rows.session[row]
        connection = self._pool.of_session.get(session)
        if connection is None:
            connection = self._pool.open(session)
        if connection is None:
            now_ns = monotonic_ns()
            self._schedule_all(self._script.fail(row, now_ns, "connection", f"cannot connect: {self._pool.problem}"))
            return
        connection.begin(exchange)
        connection.unsent = memoryview(payload)
        if connection.is_connected:
            self._send(connection, exchange)

    def _send(self, connection: Connection, exchange: Exchange) -> None:
        payload = connection.unsent
        assert payload is not None
        # Stamped before the call: on loopback the server may answer before it returns.
        sent_ns = monotonic_ns()
        try:
            connection.send(payload)
        except OSError as error:
            self._rows.sent_ns[exchange.row] = sent_ns
            self._break(connection, "connection", f"{error.strerror} while sending")
            return
        self._rows.sent_ns[exchange.row] = sent_ns
        if connection.unsent is not None:
            self._epoll.modify(connection.fd, EPOLLIN | EPOLLOUT)
        self._expiries.append((sent_ns + self._request_timeout_ns, connection, exchange.row))
        if not self._script.has_all_fresh:
            self._jobs.append(lambda: self._script.prefetch_next(exchange.row))

    # -- ends of exchanges -------------------------------------------------------------------------------------

    def _complete(self, connection: Connection, exchange: Exchange, done_ns: int) -> None:
        row = exchange.row
        self._rows.first_byte_ns[row] = exchange.first_byte_ns
        self._rows.http_status[row] = exchange.status
        can_carry_another = connection.end_exchange(done_ns)
        if not can_carry_another:
            self._pool.drop(connection)
        if exchange.status != 200:
            body = b"".join([piece.body for piece in exchange.pieces])
            due = self._script.fail(row, done_ns, "http_error", describe_error_body(body))
        else:
            self._unsettled[self._rows.session[row]] = exchange
            due = self._script.complete(row, done_ns)
            # Without a wait, the session's next send settles it, right now.
            if self._script.is_last_of_session(row) or due[0].due_ns > self._rows.trigger_ns[row + 1]:
                self._jobs.append(lambda: self._finish_in_slack(exchange))
        self._schedule_all(due, connection if can_carry_another else None)

    def _schedule_all(self, due: list[Due], connection: Connection | None = None) -> None:
        """Queue what became due; the first session that follows takes the connection over."""
        for item in due:
            session = self._rows.session[item.row]
            if connection is not None and session not in self._pool.of_session:
                self._pool.hand_over(connection, session)
                connection = None
            self._schedule(item)
        if not due and connection is not None:
            self._pool.drop(connection)

    def _finish_in_slack(self, exchange: Exchange) -> bool:
        """Interpret piece by piece; at the end judge the answer and build the session's next body. True: more to do."""
        session = self._rows.session[exchange.row]
        if self._unsettled.get(session) is not exchange:
            return False
        if exchange.interpret_one():
            return True
        self._settle(session)
        following = exchange.row + 1
        if not self._script.is_last_of_session(exchange.row) and self._script.may_send(following):
            self._payloads[following] = self._payload(following)
        return False

    def _settle(self, session: int) -> None:
        exchange = self._unsettled.pop(session, None)
        if exchange is not None:
            self._schedule_all(self._script.settle(exchange.row, exchange.interpret_all()))

    def _break(self, connection: Connection, status: str, error: str) -> None:
        """The connection is of no use any more; what it carried has failed."""
        exchange = connection.exchange
        connection.exchange = None
        self._pool.drop(connection)
        if exchange is None:
            return
        self._rows.first_byte_ns[exchange.row] = exchange.first_byte_ns
        if exchange.status:
            self._rows.http_status[exchange.row] = exchange.status
        if exchange.status == 200:
            exchange.interpret_pieces()
        self._schedule_all(self._script.fail(exchange.row, monotonic_ns(), status, error, exchange.answer))

    def _expire(self, now_ns: int) -> None:
        # In order of their deadlines, since all have the same limit.
        while self._expiries:
            deadline_ns, connection, row = self._expiries[0]
            is_over = connection.exchange is None or connection.exchange.row != row
            if not is_over and deadline_ns > now_ns:
                break
            self._expiries.popleft()
            if not is_over:
                self._break(connection, "timeout", f"no end within the limit ({connection.describe_progress()})")
        for connection in self._pool.overdue(now_ns):
            self._break(connection, "timeout", "no connection within the limit")

    def _stop(self, now_ns: int) -> None:
        for session in list(self._unsettled):
            self._settle(session)
        for connection in list(self._pool.by_fd.values()):
            self._break(connection, "connection", "the replay was stopped before the answer was complete")
        self._script.stop(now_ns)
