"""The epoll replay loop: one thread, absolute deadlines, never early; it sends, stamps and finds the end of answers.

Interpretation of answers and preparation of bodies happen only in slack, or when the next send needs them. It retries
nothing, computes no statistic, and every wait in it has a deadline. Next: rows and chunks go back to
``harness.live.client``.
"""

from __future__ import annotations

import contextlib
import heapq
import select
from collections import deque
from collections.abc import Callable
from functools import partial
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
REFRESH, SEND = 0, 1
MAX_EVENTS = 64
# Work for slack is done in turns this long, with a look for arrivals between them: the kernel has stamped what comes
# in meanwhile. With more waiting than the limit, a turn is taken even when there is no slack.
JOBS_TURN_NS = 20 * NS_PER_US
MAX_WAITING_JOBS = 256


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
        choose_start: Callable[[], int],
    ) -> None:
        """choose_start: called once everything is ready; the common start in CLOCK_MONOTONIC ns."""
        self._script = script
        self._rows = script.rows
        self._host, self._port = host, port
        self._spin_ns = spin_us * NS_PER_US
        clock = script.clock
        self._request_timeout_ns = clock.to_monotonic_ns(request_timeout_ns)
        self._is_stopped = is_stopped
        self._on_slack = on_slack
        self._turns = turns
        self._choose_start = choose_start
        self._burst_from_ns = 0
        self.offsets = OffsetLog()
        self.spun_ns = 0
        self.num_wakeups = 0
        self.num_reconnects = 0
        self._deadlines: list[tuple[int, int, int]] = []
        self._expiries: deque[tuple[int, Connection, int]] = deque()
        # Prepared sends by row; one without a payload must not be sent.
        self._ready: dict[int, Exchange] = {}
        self._next_beat_ns = 0
        # Complete answers by session that are not judged yet.
        self._unjudged: dict[int, Exchange] = {}
        self._jobs: deque[Callable[[], object]] = deque()
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
            # The common start is one long run of sends, which those that it wakes must not cut into pieces.
            self._turns.as_before()
            start_ns = self._burst_from_ns = self._choose_start()
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
        poll, by_fd = self._epoll.poll, self._pool.by_fd
        while not script.is_finished:
            now_ns = monotonic_ns()
            if deadlines and deadlines[0][0] <= now_ns:
                now_ns = self._run_due(now_ns)
            next_ns = deadlines[0][0] if deadlines else 0
            left_ns = next_ns - now_ns
            late_beat_ns = now_ns - self._next_beat_ns
            if late_beat_ns >= 0 and (not next_ns or left_ns > self._spin_ns or late_beat_ns > HEARTBEAT_NS):
                self._beat(now_ns)
                continue
            if next_ns and left_ns <= self._spin_ns:
                if deadlines[0][2] not in self._ready and left_ns > BARE_SPIN_NS:
                    self._stage(deadlines[0][2])
                    continue
                events = self._spin(next_ns, now_ns) if left_ns <= BARE_SPIN_NS else poll(0, MAX_EVENTS)
                if left_ns > BARE_SPIN_NS:
                    self.spun_ns += monotonic_ns() - now_ns
            elif jobs:
                # Arrivals first: the end of an answer often follows its last token by microseconds.
                events = poll(0, MAX_EVENTS)
                if not events or len(jobs) > MAX_WAITING_JOBS:
                    self._run_jobs(min(now_ns + JOBS_TURN_NS, next_ns or now_ns + JOBS_TURN_NS))
            else:
                self._timer.arm(next_ns - self._spin_ns if next_ns else 0)
                events = poll(HEARTBEAT_S, MAX_EVENTS)
                self.num_wakeups += 1
            for fd, mask in events:
                connection = by_fd.get(fd)
                if mask == EPOLLIN and connection is not None and connection.is_connected:
                    self._on_readable(connection)
                else:
                    self._on_other_event(fd, mask, connection)
                if deadlines and deadlines[0][0] <= monotonic_ns():
                    self._run_due(monotonic_ns())
        while jobs:
            jobs.popleft()()

    def _run_due(self, now_ns: int) -> int:
        """Send, or refresh, everything that is due by now; the instant after it."""
        deadlines = self._deadlines
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
        return now_ns

    def _spin(self, next_ns: int, now_ns: int) -> list[tuple[int, int]]:
        while monotonic_ns() < next_ns:
            pass
        self.spun_ns += next_ns - now_ns
        return []

    def _run_jobs(self, until_ns: int) -> None:
        """Work for slack until the instant; at least one job, so that none waits for ever."""
        jobs = self._jobs
        while jobs:
            jobs.popleft()()
            if monotonic_ns() >= until_ns:
                return

    def _beat(self, now_ns: int) -> None:
        """What must happen now and then; not within the spin before a send, unless sends leave no other time."""
        self._next_beat_ns = now_ns + HEARTBEAT_NS
        if now_ns >= self.offsets.next_ns:
            self.offsets.sample()
        self._expire(now_ns)
        self._script.chunks.spill()
        if self._is_stopped():
            self._stop(now_ns)
        self._on_slack()

    def _on_other_event(self, fd: int, mask: int, connection: Connection | None) -> None:
        """Everything but data on an open connection."""
        if connection is None:
            if fd == self._timer.fd:
                self._timer.clear()
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
        elif not exchange.is_queued and exchange.status == 200:
            exchange.is_queued = True
            self._jobs.append(partial(self._read_on, connection, exchange))

    def _read_on(self, connection: Connection, exchange: Exchange) -> None:
        """In slack: interpret what has come of an answer, so that little is left to do at its end."""
        exchange.is_queued = False
        if connection.exchange is exchange:
            try:
                connection.parse(exchange)
            except httptools.HttpParserError as error:
                self._break(connection, "bad_response", f"not HTTP: {error}")
                return
            if connection.is_answer_complete:
                self._complete(connection, exchange, monotonic_ns())
        if exchange.interpret_some() and connection.exchange is exchange:
            exchange.is_queued = True
            self._jobs.append(partial(self._read_on, connection, exchange))

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

    def _prepare(self, row: int) -> Exchange:
        """A request with its bytes; without them when what came before it failed and it must not be sent."""
        script = self._script
        session = self._rows.session[row]
        exchange = Exchange(row, script.new_answer(row))
        if session in self._unjudged:
            self._judge(session)
        elif not self._rows.request[row] and (parent := script.parent_of(session)) is not None:
            self._judge(parent)
        if not script.may_send(row):
            return exchange
        reason = script.blocked_by(row)
        if reason:
            self._schedule_all(script.skip_session(row, reason, monotonic_ns()))
            return exchange
        body = script.body_parts(row)
        head = b"%b\r\nContent-Length: %d\r\n\r\n" % (self._rows.request_id[row].encode(), sum(map(len, body)))
        exchange.payload = b"".join((self._head, head, *body))
        return exchange

    def _stage(self, row: int) -> None:
        """Make everything ready for a send that is about to be due, so that only the send is left."""
        if row not in self._ready:
            self._ready[row] = self._prepare(row)

    def _dispatch(self, row: int) -> None:
        exchange = self._ready.pop(row, None) or self._prepare(row)
        if exchange.payload is None:
            return
        session = self._rows.session[row]
        connection = self._pool.of_session.get(session) or self._pool.open(session)
        if connection is None:
            now_ns = monotonic_ns()
            self._schedule_all(self._script.fail(row, now_ns, "connection", f"cannot connect: {self._pool.problem}"))
            return
        connection.begin(exchange)
        if connection.is_connected:
            self._send(connection, exchange)

    def _send(self, connection: Connection, exchange: Exchange) -> None:
        payload, row = exchange.payload, exchange.row
        assert payload is not None
        # Stamped before the call: on loopback the server may answer before it returns.
        sent_ns = monotonic_ns()
        try:
            connection.send(payload)
        except OSError as error:
            self._rows.sent_ns[row] = sent_ns
            self._break(connection, "connection", f"{error.strerror} while sending")
            return
        self._rows.sent_ns[row] = sent_ns
        exchange.payload = None
        if connection.unsent is not None:
            self._epoll.modify(connection.fd, EPOLLIN | EPOLLOUT)
        self._expiries.append((sent_ns + self._request_timeout_ns, connection, row))
        if not self._script.has_all_fresh:
            self._jobs.append(partial(self._script.prefetch_next, row))

    # -- ends of exchanges -------------------------------------------------------------------------------------

    def _complete(self, connection: Connection, exchange: Exchange, done_ns: int) -> None:
        row = exchange.row
        self._rows.first_byte_ns[row] = exchange.first_byte_ns
        self._rows.http_status[row] = exchange.status
        can_carry_another = connection.end_exchange(done_ns)
        if not can_carry_another:
            self._pool.drop(connection)
        if exchange.status != 200:
            body = b"".join([piece[2] for piece in exchange.pieces])
            due = self._script.fail(row, done_ns, "http_error", describe_error_body(body))
        else:
            self._unjudged[self._rows.session[row]] = exchange
            due = self._script.complete(row, done_ns)
            if not self._script.is_last_of_session(row) and due[0].due_ns == self._rows.trigger_ns[row + 1]:
                # No wait: on with the session, right now.
                self._dispatch(row + 1)
                return
            self._jobs.append(partial(self._finish_in_slack, exchange))
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

    def _finish_in_slack(self, exchange: Exchange) -> None:
        """Interpret a complete answer in turns; at the end judge it and build the session's next request."""
        if self._unjudged.get(self._rows.session[exchange.row]) is not exchange:
            return
        if exchange.interpret_some():
            self._jobs.append(partial(self._finish_in_slack, exchange))
            return
        self._judge(self._rows.session[exchange.row])
        following = exchange.row + 1
        if not self._script.is_last_of_session(exchange.row) and self._script.may_send(following):
            self._stage(following)

    def _judge(self, session: int) -> None:
        """Decide on the session's last answer, if that has not been done; its row is written later, in slack."""
        exchange = self._unjudged.pop(session, None)
        if exchange is not None:
            answer = exchange.interpret_all()
            self._schedule_all(self._script.judge(exchange.row, answer))
            self._jobs.append(partial(self._script.book, exchange.row, answer))

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
            with contextlib.suppress(httptools.HttpParserError):
                connection.parse(exchange)
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
        for session in list(self._unjudged):
            self._judge(session)
        for connection in list(self._pool.by_fd.values()):
            self._break(connection, "connection", "the replay was stopped before the answer was complete")
        self._script.stop(now_ns)
