"""The replay loop: one thread with absolute deadlines that sends, stamps and recognises the end of answers.

It never sends early. Sends come first: answers are interpreted and requests are built while no send is near, or when a
send needs them. It retries nothing and computes no statistic, and every wait has a limit.
"""

from __future__ import annotations

import heapq
import select
from collections import deque
from collections.abc import Callable
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING

from harness.clock import NS_PER_MS, NS_PER_S, NS_PER_US, DeadlineTimer, monotonic_ns
from harness.measure.client.answer import describe_error_body
from harness.measure.client.connection import Connection, ConnectionPool, Events, allow_sockets
from harness.measure.client.exchange import PIECES_AT_ONCE, Exchange, header_lines, request_bytes, request_head
from harness.measure.client.host import SHORT_SLICE_NS, SchedulerSlice
from harness.measure.client.receive_stamps import OffsetLog, PollTimes, kernel_stamp_ns
from harness.measure.client.rows import ABSENT

if TYPE_CHECKING:
    from harness.measure.client.replay_state import Due, ReplayState
    from harness.measure.client.target import Target

EPOLLIN, EPOLLOUT = select.EPOLLIN, select.EPOLLOUT
MAX_EVENTS = 64
# The loop wakes this often with nothing to do: to see the stop flag and to sample the clock offset.
HEARTBEAT_NS = 50 * NS_PER_MS
# The last part of a spin only reads the clock; before it, the spin also takes arrivals.
BARE_SPIN_NS = 25 * NS_PER_US
# A kept connection that idled longer is replaced before it is used: servers close idle connections after a few seconds
# (uvicorn: 5 s), and a request sent in that very moment would be lost.
FRESH_AFTER_IDLE_NS = NS_PER_S
PREPARE_LEAD_NS = 250 * NS_PER_MS
# Jobs (work that can wait) run in turns of this length; between turns the loop polls for arrivals, which the kernel has
# already stamped. No turn begins nearer to a send than the lead, unless more jobs wait than the limit.
TURN_NS = 20 * NS_PER_US
TURN_LEAD_NS = 60 * NS_PER_US
MAX_WAITING_JOBS = 256
FAR_AWAY_NS = 1 << 62
EVENT_START = b"data:"
# The purpose of a deadline. Deadlines of the same instant are met in this order.
PREPARE, SEND, LEAVE = range(3)


class EpollReplay:
    """One replay. ``run`` returns when every row has a final status."""

    def __init__(
        self, state: ReplayState, target: Target, *, is_stopped: Callable[[], bool], on_slack: Callable[[], None]
    ) -> None:
        """on_slack: called about every 50 ms."""
        self._state = state
        self._rows = state.rows
        self._target = target
        self._head = request_head(target.endpoint, state.path, target.request.headers)
        self._spin_ns = target.options.spin_us * NS_PER_US
        self._timeout_ns = state.clock.to_monotonic_ns(target.request_timeout_ns)
        self._is_stopped = is_stopped
        self._on_slack = on_slack
        self.offsets = OffsetLog()
        self.spun_ns = self.num_wakeups = self.num_reconnects = self.ended_ns = 0
        self._next_beat_ns = 0
        # (instant, what for, row)
        self._deadlines: list[tuple[int, int, int]] = []
        self._jobs: deque[Callable[[], object]] = deque()
        # By row: the exchanges that are ready to be sent, and whether an exchange was ever made.
        self._ready: dict[int, Exchange | None] = {}
        self._is_prepared = bytearray(self._rows.count)
        # Complete answers that are not judged yet, by session.
        self._unjudged: dict[int, Exchange] = {}

    def run(self, turns: SchedulerSlice, choose_start: Callable[[], int]) -> int:
        """Connect, release all sessions together, and loop to the end; the common start in CLOCK_MONOTONIC ns.

        choose_start: called once everything is ready; returns that start.
        """
        state, clock = self._state, self._state.clock
        with select.epoll() as self._epoll, DeadlineTimer() as self._timer, closing(PollTimes()) as self._poll_times:
            self._pool = ConnectionPool(self._epoll, self._target.endpoint)
            self._epoll.register(self._timer.fd, EPOLLIN)
            try:
                first = state.release(0)
                allow_sockets(len(first))
                soon = [due.row for due in first if clock.to_monotonic_ns(due.due_ns) < FRESH_AFTER_IDLE_NS]
                self._pool.open_all([self._rows.session[row] for row in soon], self._take_events, self._is_stopped)
                for row in soon:
                    self._stage(row)
                self.offsets.sample()
                # The common start is a long run of sends. Processes woken by them must not interrupt it.
                turns.as_before()
                start_ns = choose_start()
                self._schedule_all(state.release(clock.from_monotonic_ns(start_ns)))
                self._loop(start_ns, turns)
            finally:
                self.offsets.sample()
                self._pool.close()
        return start_ns

    # -- the loop ----------------------------------------------------------------------------------------------

    def _loop(self, start_ns: int, turns: SchedulerSlice) -> None:
        state, deadlines = self._state, self._deadlines
        is_burst = True
        while not state.is_finished:
            now_ns = self._run_due()
            if is_burst and now_ns >= start_ns:
                is_burst = False
                turns.ask(SHORT_SLICE_NS)
            next_ns = deadlines[0][0] if deadlines else FAR_AWAY_NS
            late_beat_ns = now_ns - self._next_beat_ns
            if late_beat_ns >= 0 and (next_ns - now_ns > self._spin_ns or late_beat_ns > HEARTBEAT_NS):
                self._beat(now_ns)
            else:
                self._take_events(self._wait(now_ns, next_ns))
        while self._jobs:
            self._jobs.popleft()()
        self.ended_ns = monotonic_ns()

    def _run_due(self) -> int:
        """Meet every deadline that has passed; returns the instant after it."""
        deadlines = self._deadlines
        now_ns = monotonic_ns()
        while deadlines and deadlines[0][0] <= now_ns:
            _, what, row = heapq.heappop(deadlines)
            if what == SEND:
                self._dispatch(row)
            elif what == PREPARE:
                self._refresh(row)
                self._jobs.append(partial(self._stage, row))
            else:
                self._leave_in_time(row)
            now_ns = monotonic_ns()
        return now_ns

    def _wait(self, now_ns: int, next_ns: int) -> Events:
        """Wait for events until the next deadline or heartbeat, and do jobs meanwhile."""
        left_ns = next_ns - now_ns
        if left_ns <= self._spin_ns:
            return self._spin(now_ns, next_ns)
        jobs = self._jobs
        if jobs and (left_ns > self._spin_ns + TURN_LEAD_NS or len(jobs) > MAX_WAITING_JOBS):
            # Arrivals first: the end of an answer often follows its last token by microseconds.
            events = self._poll(0, 0)
            is_behind = len(jobs) > MAX_WAITING_JOBS
            while jobs and (is_behind or not events):
                jobs.popleft()()
                if monotonic_ns() >= now_ns + TURN_NS:
                    break
            return events
        if next_ns < FAR_AWAY_NS:
            self._timer.arm(next_ns - self._spin_ns)
        else:
            self._timer.clear()
        self.num_wakeups += 1
        return self._poll(HEARTBEAT_NS / NS_PER_S, now_ns)

    def _poll(self, timeout_s: float, now_ns: int) -> list[tuple[int, int]]:
        """Events of epoll. now_ns: the present instant where this may sleep, else 0."""
        self._poll_times.begin(now_ns)
        events = self._epoll.poll(timeout_s, MAX_EVENTS)
        # Of more events than that, the rest was there too.
        self._poll_times.end(is_all=len(events) < MAX_EVENTS)
        return events

    def _spin(self, now_ns: int, next_ns: int) -> Events:
        """Wait for a near deadline without giving up the core."""
        if next_ns - now_ns <= BARE_SPIN_NS:
            while monotonic_ns() < next_ns:
                pass
            self.spun_ns += next_ns - now_ns
            return ()
        _, what, row = self._deadlines[0]
        if what == SEND and not self._is_prepared[row]:
            self._stage(row)
            return ()
        events = self._poll(0, 0)
        self.spun_ns += monotonic_ns() - now_ns
        return events

    def _beat(self, now_ns: int) -> None:
        """Do periodic work: not within the spin before a send, unless sends leave no other time."""
        self._next_beat_ns = now_ns + HEARTBEAT_NS
        if now_ns >= self.offsets.next_ns:
            self.offsets.sample()
        self._poll_times.forget_waits()
        for connection, problem in self._pool.overdue(now_ns):
            self._break(connection, "timeout", problem)
        self._state.beat(now_ns)
        if self._is_stopped():
            self._stop(now_ns)
        self._on_slack()

    def _take_events(self, events: Events) -> None:
        deadlines, by_fd = self._deadlines, self._pool.by_fd
        for fd, mask in events:
            connection = by_fd.get(fd)
            if connection is None:
                if fd == self._timer.fd:
                    self._timer.clear()
                continue
            if not connection.is_connected:
                # Before a handshake a lone EPOLLIN is a stale event of a closed socket that had this number.
                if mask & ~EPOLLIN or connection.is_in_handshake:
                    self._on_writable(connection)
            elif mask == EPOLLIN:
                self._on_readable(connection)
            else:
                # First what came: a server may answer and close before it has read the request.
                if mask & ~EPOLLOUT:
                    self._on_readable(connection)
                if mask & EPOLLOUT and by_fd.get(fd) is connection:
                    self._on_writable(connection)
            if deadlines and deadlines[0][0] <= monotonic_ns():
                self._run_due()

    # -- what comes in -----------------------------------------------------------------------------------------

    def _on_readable(self, connection: Connection) -> None:
        try:
            data, ancillary, is_cut = connection.receive()
        except BlockingIOError:
            return
        except OSError as error:
            self._lose(connection, f"{error.strerror} ({connection.describe_progress()})")
            return
        received_ns = monotonic_ns()
        exchange = connection.exchange
        if exchange is None:
            self._pool.drop(connection)  # closed, or it sends without a request
            return
        if not data:
            if exchange.ends_at_close:
                self._complete(connection, exchange, received_ns)
            else:
                self._lose(connection, f"closed by the server ({connection.describe_progress()})")
            return
        if is_cut or data.count(EVENT_START) > 1:
            # The kernel's stamp is that of the last segment.
            exchange.answer.not_before[received_ns] = max(
                self._poll_times.earliest_ns(), exchange.last_received_ns, self._rows.sent_ns[exchange.row]
            )
        exchange.take(received_ns, kernel_stamp_ns(ancillary), data)
        if exchange.problem:
            self._break(connection, "bad_response", exchange.problem)
        elif self._state.abort_after_tokens[exchange.row] and self._state.has_enough(exchange.row, exchange.read()):
            self._leave(connection, exchange)
        elif exchange.is_over:
            self._complete(connection, exchange, received_ns)
        else:
            self._read_later(exchange)

    def _read_later(self, exchange: Exchange) -> None:
        if not exchange.is_queued:
            exchange.is_queued = True
            self._jobs.append(partial(self._read_on, exchange))

    def _read_on(self, exchange: Exchange) -> None:
        """A job: interpret a part of an answer; judge a complete answer when all of it is interpreted."""
        exchange.is_queued = False
        if exchange.interpret(PIECES_AT_ONCE):
            self._read_later(exchange)
        elif self._unjudged.get(session := self._rows.session[exchange.row]) is exchange:
            self._judge(session)

    def _on_writable(self, connection: Connection) -> None:
        """A connection was made, or failed, or its handshake goes on, or it has room for more of a request."""
        if not connection.is_connected:
            problem = connection.finish_connect()
            if problem:
                self._break(connection, "connection", f"cannot connect: {problem}")
                return
            self._pool.watch_room(connection, is_wanted=connection.unsent is not None)
            if connection.is_connected and connection.exchange is not None:
                self._send(connection, connection.exchange)
        elif connection.unsent is None or self._hand_over(connection):
            self._pool.watch_room(connection, is_wanted=connection.unsent is not None)

    # -- sending -----------------------------------------------------------------------------------------------

    def _schedule(self, due: Due) -> None:
        """Queue a send, and the work before it: build its bytes, open a fresh connection."""
        due_ns = self._state.clock.to_monotonic_ns(due.due_ns)
        heapq.heappush(self._deadlines, (due_ns, SEND, due.row))
        now_ns = monotonic_ns()
        if due_ns - now_ns > FRESH_AFTER_IDLE_NS:
            heapq.heappush(self._deadlines, (due_ns - PREPARE_LEAD_NS, PREPARE, due.row))
        elif due_ns > now_ns:
            self._jobs.append(partial(self._stage, due.row))
            session = self._rows.session[due.row]
            if session not in self._pool.of_session:
                self._pool.open(session)

    def _schedule_all(self, due: list[Due], connection: Connection | None = None) -> None:
        """Queue what became due; the first follower takes over the connection."""
        for item in due:
            session = self._rows.session[item.row]
            if connection is not None and session not in self._pool.of_session:
                self._pool.hand_over(connection, session)
                connection = None
            self._schedule(item)
        if not due and connection is not None:
            self._pool.drop(connection)

    def _refresh(self, row: int) -> None:
        """Replace a connection that would idle for too long before a send."""
        if not self._state.may_send(row):
            return
        session = self._rows.session[row]
        connection = self._pool.of_session.get(session)
        if connection is not None:
            if connection.exchange is not None or not connection.is_connected:
                return
            self._pool.drop(connection)
        self.num_reconnects += 1
        self._pool.open(session)

    def _prepare(self, row: int) -> Exchange | None:
        """Build a request; None when an earlier failure means that it must not be sent."""
        state, rows = self._state, self._rows
        self._is_prepared[row] = True
        session = rows.session[row]
        if session in self._unjudged:
            self._judge(session)
        elif not rows.request[row] and (parent := state.plan.sessions[session].continues) is not None:
            self._judge(parent)
        if not state.may_send(row):
            return None
        reason = state.blocked_by(row)
        if reason:
            self._schedule_all(state.skip_session(row, reason, monotonic_ns()))
            return None
        head = self._head + header_lines(state.headers(row))
        payload = request_bytes(head, rows.request_id[row], state.body_parts(row))
        return Exchange(row, state.new_answer(row), payload)

    def _stage(self, row: int) -> None:
        """Build a request before it is due, so that only the send is left."""
        if not self._is_prepared[row]:
            self._ready[row] = self._prepare(row)

    def _dispatch(self, row: int) -> None:
        exchange = self._ready.pop(row, None) if self._is_prepared[row] else self._prepare(row)
        if exchange is None:
            return
        session = self._rows.session[row]
        connection = self._pool.of_session.get(session) or self._pool.open(session)
        if connection is None:
            problem = f"cannot connect: {self._pool.problem}"
            self._schedule_all(self._state.fail(row, monotonic_ns(), "connection", problem))
            return
        connection.exchange = exchange
        if connection.is_connected:
            self._send(connection, exchange)

    def _send(self, connection: Connection, exchange: Exchange) -> None:
        row = exchange.row
        if not self._hand_over(connection, exchange):
            return
        if not connection.has_answered:
            exchange.payload = b""
        sent_ns = self._rows.sent_ns[row]
        if connection.unsent is not None:
            self._pool.watch_room(connection, is_wanted=True)
        self._pool.expect_end(connection, exchange, sent_ns + self._timeout_ns)
        leave_after_ns = self._state.abort_after_ns[row]
        if leave_after_ns:
            leave_ns = sent_ns + self._state.clock.to_monotonic_ns(leave_after_ns)
            heapq.heappush(self._deadlines, (leave_ns, LEAVE, row))
        if not self._state.has_all_fresh:
            self._jobs.append(partial(self._state.prefetch_next, row))

    def _hand_over(self, connection: Connection, exchange: Exchange | None = None) -> bool:
        """Send a request, or what is unsent of one; False when that breaks the connection."""
        try:
            data = connection.unsent or b"" if exchange is None else connection.on_wire(exchange.payload)
            if exchange is not None:
                # Stamped before the call: on loopback the server may answer before it returns.
                self._rows.sent_ns[exchange.row] = monotonic_ns()
            connection.send(data)
        except OSError as error:
            self._lose(connection, f"{error.strerror} while sending")
            return False
        return True

    # -- ends of exchanges -------------------------------------------------------------------------------------

    def _complete(self, connection: Connection, exchange: Exchange, done_ns: int) -> None:
        """The answer is complete: continue its session."""
        state, row = self._state, exchange.row
        self._note_head(exchange)
        is_free = exchange.is_kept_alive and connection.unsent is None and not connection.has_end
        free = connection if is_free else None
        connection.end_exchange()
        connection.has_answered = True
        if free is None:
            self._pool.drop(connection)
        if exchange.status != 200:
            error = describe_error_body(exchange.error_body)
            self._schedule_all(state.fail(row, done_ns, "http_error", error), free)
            return
        self._unjudged[self._rows.session[row]] = exchange
        due = state.complete(row, done_ns)
        if not state.is_last[row] and due[0].due_ns == self._rows.trigger_ns[row + 1]:
            # No wait: send the next request now.
            self._dispatch(row + 1)
            return
        self._read_later(exchange)
        self._schedule_all(due, free)

    def _judge(self, session: int) -> None:
        """Judge the session's last answer, if that is still to do; its row is written later, as a job."""
        exchange = self._unjudged.pop(session, None)
        if exchange is None:
            return
        answer = exchange.close()
        due = self._state.judge(exchange.row, answer)
        connection = self._pool.of_session.get(session)
        if self._rows.status[exchange.row] == "ok" or connection is None or connection.exchange is not None:
            connection = None
        self._schedule_all(due, connection)
        self._jobs.append(partial(self._state.book, exchange.row, answer))

    def _leave_in_time(self, row: int) -> None:
        """Leave an answer at the planned instant, unless it has ended."""
        connection = self._pool.of_session.get(self._rows.session[row])
        if connection is not None and connection.exchange is not None and connection.exchange.row == row:
            self._leave(connection, connection.exchange)

    def _leave(self, connection: Connection, exchange: Exchange) -> None:
        """Leave an answer as planned: close the connection, which the server notices, and continue the session."""
        problem = exchange.problem or exchange.read().problem
        if problem:
            self._break(connection, "bad_response", problem)
            return
        if exchange.status not in {0, 200}:
            return  # an error response, which will end by itself
        row = exchange.row
        self._note_head(exchange)
        left_ns = monotonic_ns()
        self._pool.drop(connection)
        self._schedule_all(self._state.leave(row, left_ns, exchange.answer))

    def _break(self, connection: Connection, status: str, error: str) -> None:
        """Drop a connection; the request that it carried has failed."""
        exchange = connection.exchange
        self._pool.drop(connection)
        if exchange is None:
            return
        self._note_head(exchange)
        self._schedule_all(self._state.fail(exchange.row, monotonic_ns(), status, error, exchange.read()))

    def _lose(self, connection: Connection, error: str) -> None:
        """The server closed or broke a connection: the request that it carried goes out again, or has failed.

        Again, on a new connection, only where no byte of its answer came and the connection had carried an answer: then
        the server closed it after that answer, without the header that says so.
        """
        exchange = connection.exchange
        if exchange is not None and connection.has_answered and exchange.first_byte_ns == ABSENT:
            connection.exchange = None
            self._pool.drop(connection)
            if (fresh := self._pool.open(connection.session)) is not None:
                self.num_reconnects += 1
                fresh.exchange = exchange
                return
            connection.exchange = exchange
        self._break(connection, "connection", error)

    def _note_head(self, exchange: Exchange) -> None:
        self._rows.first_byte_ns[exchange.row] = exchange.first_byte_ns
        self._rows.http_status[exchange.row] = exchange.status or ABSENT

    def _stop(self, now_ns: int) -> None:
        """Fail everything in flight and end the replay."""
        for session in list(self._unjudged):
            self._judge(session)
        for connection in list(self._pool.by_fd.values()):
            self._break(connection, "connection", "the replay was stopped before the answer was complete")
        self._state.stop(now_ns)
