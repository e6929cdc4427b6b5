"""The epoll replay: connects, releases the sessions together, and answers what the compiled loop cannot decide.

Answers are interpreted in slack, when the loop has nothing to send or take. It retries nothing, computes no statistic,
and every wait in it has a deadline. Next: rows and chunks go back to ``harness.live.client``.
"""

from __future__ import annotations

import os
import select
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import httptools
import numpy as np

from harness.clock import NS_PER_US, monotonic_ns
from harness.live.client.answer import describe_error_body
from harness.live.client.kernel_stamps import OffsetLog
from harness.live.client.rows import ABSENT
from harness.live.client.scheduler_slice import SHORT_SLICE_NS, SchedulerSlice
from harness.live.client.wire import layout as at
from harness.live.client.wire.core import (
    HEARTBEAT_NS,
    LOOP,
    PLAN_SEND,
    RECEIVE_NOW,
    SEND_MORE,
    SEND_NOW,
    TAKE_AGAIN,
    drive,
)
from harness.live.client.wire.deadlines import FRESH_AFTER_IDLE_NS
from harness.live.client.wire.heads import KnownHeads
from harness.live.client.wire.journal import BLOCK_ENTRIES, JournalReader
from harness.live.client.wire.memory import refuse_to_write
from harness.live.client.wire.pool import ConnectionPool, allow_sockets
from harness.live.client.wire.reading import Reading, hold_to
from harness.live.client.wire.share import share_script
from harness.live.client.wire.timer import DeadlineTimer

if TYPE_CHECKING:
    from harness.live.client.answer import Answer
    from harness.live.client.script import Due, Script
    from harness.live.client.wire.connection import Connection
    from harness.live.client.wire.streams import WireStreams

EPOLLIN, EPOLLOUT = select.EPOLLIN, select.EPOLLOUT
# Work for slack is done in turns this long, with a look for arrivals between them: the kernel has stamped what comes
# in meanwhile.
TURN_NS = 30 * NS_PER_US
# With more journal entries than this, answers come faster than they can be read; fewer and longer turns are cheaper.
LONG_BACKLOG = 1_024
LONG_TURN_NS = 300 * NS_PER_US
LONG_BLOCK_ENTRIES = 16
# No long turn ends nearer to a send than this.
LEAD_NS = 500 * NS_PER_US
# With the journal full, this many entries are read before the loop goes on.
MAKE_ROOM_ENTRIES = 1_000
GIVEN_UP = "given up: the answer before it was not as planned"


class WireReplay:
    """One replay. ``run`` returns when every row has a final status."""

    def __init__(
        self,
        script: Script,
        streams: WireStreams,
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
        """streams: the script's own prompts. choose_start: called once everything is ready; the common start in
        CLOCK_MONOTONIC ns.
        """
        self._script = script
        self._rows = script.rows
        self._streams = streams
        self._tables = streams.tables
        self._reg = streams.tables.reg
        self._host, self._port = host, port
        self._request_timeout_ns = script.clock.to_monotonic_ns(request_timeout_ns)
        self._is_stopped = is_stopped
        self._on_slack = on_slack
        self._turns = turns
        self._choose_start = choose_start
        self.offsets = OffsetLog()
        self.num_reconnects = 0
        self.ended_ns = 0
        self._heads = KnownHeads()
        self._journal = JournalReader(script, self._tables, on_begin=self._on_begin, on_end=self._on_end)
        self._jobs: deque[Callable[[], object]] = deque()
        self._sent = np.frombuffer(self._rows.sent_ns, dtype=np.int64)
        share_script(script, self._tables, host_header, spin_us)
        self._answers: dict[int, Callable[[], None]] = {
            at.E_BEAT: self._beat,
            at.E_SLACK: self._use_slack,
            at.E_BURST_OVER: self._end_burst,
            at.E_STAGE: self._on_stage,
            at.E_REFRESH: self._on_refresh,
            at.E_NOT_READY: self._on_not_ready,
            at.E_NO_CONNECTION: self._on_no_connection,
            at.E_SEND_FAILED: self._on_send_failed,
            at.E_SENT_IN_PART: self._on_sent_in_part,
            at.E_OTHER: self._on_other,
            at.E_CLOSED: self._on_closed,
            at.E_RECEIVE_FAILED: self._on_receive_failed,
            at.E_OUT_OF_TURN: self._on_out_of_turn,
            at.E_NEW_HEAD: self._on_new_head,
            at.E_FOREIGN: self._on_foreign,
            at.E_TOO_MUCH: self._on_too_much,
            at.E_COMPLETE: self._on_complete,
            at.E_FULL: self._on_full,
            at.E_NO_ROOM: refuse_to_write,
        }

    @property
    def spun_ns(self) -> int:
        """Wall ns spent reading the clock before sends."""
        return int(self._reg[at.R_SPUN_NS])

    @property
    def num_wakeups(self) -> int:
        """Times the loop went to sleep and was woken."""
        return int(self._reg[at.R_NUM_WAKEUPS])

    # -- before the start --------------------------------------------------------------------------------------

    def run(self) -> int:
        """Connect, release all sessions together, and loop to the end; the common start in CLOCK_MONOTONIC ns."""
        self._epoll = select.epoll()
        self._pool = ConnectionPool(self._epoll, self._host, self._port, self._tables)
        self._timer = DeadlineTimer()
        self._epoll.register(self._timer.fd, EPOLLIN)
        self._reg[at.R_EPOLL_FD], self._reg[at.R_TIMER_FD] = self._epoll.fileno(), self._timer.fd
        self._tables.make_room_for(self._timer.fd)
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
            start_ns = self._choose_start()
            self._reg[at.R_BURST_FROM_NS] = start_ns
            for due in self._script.release(self._script.clock.from_monotonic_ns(start_ns)):
                self._schedule(due)
            self._loop()
        finally:
            self.offsets.sample()
            self._pool.close()
            self._timer.close()
            self._epoll.close()
        self._tables.memory.require_intact()
        return start_ns

    def _to_monotonic(self, clock_ns: int) -> int:
        return self._script.clock.to_monotonic_ns(clock_ns)

    # -- the loop ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        reg, script, jobs, answers = self._reg, self._script, self._jobs, self._answers
        use_slack = self._use_slack
        while not script.is_finished:
            reg[at.R_NUM_JOBS] = len(jobs)
            event = drive(reg, LOOP, 0)
            if event == at.E_SLACK:
                use_slack()
            else:
                answers[event]()
        self._journal.read_all()
        while jobs:
            jobs.popleft()()
        self.ended_ns = monotonic_ns()

    def _answer(self, event: int) -> None:
        """Deal with an event of a door other than the loop's."""
        if event != at.GO_ON:
            self._answers[event]()

    def _row(self) -> int:
        return int(self._reg[at.R_ABOUT])

    def _connection(self) -> Connection:
        return self._pool.by_fd[int(self._reg[at.R_FD])]

    def _use_slack(self) -> None:
        """Interpret, then do other work that can wait, for one turn; at least one piece of it, so none waits for ever.

        Nothing is due before the turn ends.
        """
        until_ns = monotonic_ns() + TURN_NS
        block_entries = BLOCK_ENTRIES
        if self._journal.backlog > LONG_BACKLOG:
            long_until_ns = until_ns + LONG_TURN_NS
            if self._reg[at.R_HEAP_LEN]:
                long_until_ns = min(long_until_ns, int(self._tables.heap[0, at.H_AT_NS]) - LEAD_NS)
            until_ns, block_entries = max(until_ns, long_until_ns), LONG_BLOCK_ENTRIES
        if self._journal.read_until(until_ns, block_entries):
            return
        jobs = self._jobs
        while jobs:
            jobs.popleft()()
            if monotonic_ns() >= until_ns:
                return

    def _beat(self) -> None:
        """What must happen now and then; not within the spin before a send, unless sends leave no other time."""
        now_ns = monotonic_ns()
        self._reg[at.R_NEXT_BEAT_NS] = now_ns + HEARTBEAT_NS
        if now_ns >= self.offsets.next_ns:
            self.offsets.sample()
        self._expire(now_ns)
        self._script.chunks.spill()
        if self._is_stopped():
            self._stop(now_ns)
        self._on_slack()

    def _end_burst(self) -> None:
        self._turns.ask(SHORT_SLICE_NS)

    # -- interpretation ----------------------------------------------------------------------------------------

    def _on_begin(self, row: int) -> None:
        if not self._script.has_all_fresh:
            self._jobs.append(partial(self._script.prefetch_next, row))

    def _on_end(self, row: int, answer: Answer, entry: list[int]) -> None:
        """The loop saw the end of the answer in this receive."""
        if entry[at.J_IDS_BYTES]:
            hold_to(answer, self._journal.from_ring(entry[at.J_IDS_AT], entry[at.J_IDS_BYTES]))
            self._streams.note_carried(self._rows.session[row])
        self._judge(row, answer)
        if entry[at.J_END] != at.GOES_ON and not self._script.is_last_of_session(row):
            following = row + 1
            if self._script.may_send(following):
                self._jobs.append(partial(self._stage, following))

    def _judge(self, row: int, answer: Answer) -> None:
        """Decide on a complete answer and write its row."""
        due = self._script.judge(row, answer)
        self._script.book(row, answer)
        if self._rows.status[row] == "ok":
            self._streams.forget_fresh(row)
        else:
            self._give_up_after(row)
        if due:
            self._schedule_all(due)

    def _give_up_after(self, row: int) -> None:
        """A session has failed at a row: nothing more of it is sent, and what was sent since is broken off."""
        session = self._rows.session[row]
        for later in range(row + 1, self._script.end_of_session(session)):
            self._tables.row[later, at.Q_STATE] = at.GIVEN_UP
            if self._rows.sent_ns[later] != ABSENT:
                is_answered = self._rows.done_ns[later] != ABSENT
                self._rows.status[later] = "bad_response" if is_answered else "connection"
                self._rows.error[later] = GIVEN_UP
                if not is_answered:
                    self._rows.done_ns[later] = monotonic_ns()
                self._journal.forget(later)
                connection = self._pool.of_session.get(session)
                if connection is not None and not self._pool.is_idle(connection):
                    self._pool.drop(connection)

    # -- preparing and sending ---------------------------------------------------------------------------------

    def _schedule(self, due: Due) -> None:
        """Queue a send; see to it that its connection will be there, and fresh, before."""
        now_ns = monotonic_ns()
        self._answer(drive(self._reg, PLAN_SEND, due.row))
        due_ns = self._to_monotonic(due.due_ns)
        session = self._rows.session[due.row]
        if now_ns < due_ns <= now_ns + FRESH_AFTER_IDLE_NS and session not in self._pool.of_session:
            self._pool.open(session)

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

    def _stage(self, row: int) -> bool:
        """Make everything ready for a send that is about to be due, so that only the send is left; False when it must
        not be sent at all.
        """
        script, line = self._script, self._tables.row[row]
        if line[at.Q_STATE] == at.READY:
            return True
        before = row - 1 if self._rows.request[row] else script.last_row_of_parent(self._rows.session[row])
        if before is not None and not self._journal.is_reading:
            self._journal.read_to(before)
        if not script.may_send(row):
            line[at.Q_STATE] = at.GIVEN_UP
            return False
        reason = script.blocked_by(row)
        if reason:
            self._fail(row, script.skip_session(row, reason, monotonic_ns()))
            return False
        if line[at.Q_STATE] != at.READY:
            self._streams.prepare(row)
        return True

    def _fail(self, row: int, due: list[Due]) -> None:
        """The row has failed: give up the rest of its session, go on with what follows."""
        self._tables.row[row, at.Q_STATE] = at.GIVEN_UP
        self._give_up_after(row)
        self._schedule_all(due)

    def _on_stage(self) -> None:
        self._stage(self._row())

    def _on_not_ready(self) -> None:
        self._send(self._row())

    def _send(self, row: int) -> None:
        if self._stage(row):
            self._answer(drive(self._reg, SEND_NOW, row))

    def _on_no_connection(self) -> None:
        row = self._row()
        session = self._rows.session[row]
        connection = self._pool.of_session.get(session) or self._pool.open(session)
        if connection is None:
            due = self._script.fail(row, monotonic_ns(), "connection", f"cannot connect: {self._pool.problem}")
            self._fail(row, due)
        else:
            connection.pending_row = row

    def _on_refresh(self) -> None:
        if not self._script.may_send(self._row()):
            return
        session = self._rows.session[self._row()]
        connection = self._pool.of_session.get(session)
        if connection is not None:
            if not self._pool.is_idle(connection):
                return
            self._pool.drop(connection)
        self.num_reconnects += 1
        self._pool.open(session)

    def _on_send_failed(self) -> None:
        self._break(self._connection(), "connection", f"{os.strerror(int(self._reg[at.R_DETAIL]))} while sending")

    def _on_sent_in_part(self) -> None:
        self._pool.watch_room(self._connection(), is_wanted=True)

    def _on_writable(self, connection: Connection) -> None:
        if connection.is_connected:
            event = drive(self._reg, SEND_MORE, connection.fd)
            if event == at.GO_ON:
                self._pool.watch_room(connection, is_wanted=False)
            else:
                self._answer(event)
            return
        problem = connection.finish_connect()
        if problem:
            self._break(connection, "connection", f"cannot connect: {problem}")
            return
        self._pool.become_idle(connection)
        row, connection.pending_row = connection.pending_row, ABSENT
        if row != ABSENT:
            self._answer(drive(self._reg, SEND_NOW, row))

    # -- receiving ---------------------------------------------------------------------------------------------

    def _on_other(self) -> None:
        """Everything but data on an open connection."""
        mask = int(self._reg[at.R_DETAIL])
        connection = self._pool.by_fd.get(int(self._reg[at.R_FD]))
        if connection is None:
            return
        if not connection.is_connected:
            if mask & ~EPOLLIN:  # a lone EPOLLIN is a stale event of a closed socket that had this number
                self._on_writable(connection)
            return
        if mask & EPOLLOUT:
            self._on_writable(connection)
        if mask & ~EPOLLOUT and self._pool.by_fd.get(connection.fd) is connection:
            self._answer(drive(self._reg, RECEIVE_NOW, connection.fd))

    def _on_full(self) -> None:
        for _ in range(MAKE_ROOM_ENTRIES // BLOCK_ENTRIES):
            self._journal.read_block()

    def _on_new_head(self) -> None:
        """Learn what a head means, from the HTTP parser, and let the loop look again."""
        reg = self._reg
        fd = int(reg[at.R_FD])
        head = self._journal.from_ring(int(self._tables.conn[fd, at.N_PIECE_AT]), int(reg[at.R_DETAIL]))
        try:
            framing = self._heads.framing(head)
        except httptools.HttpParserError as error:
            self._break(self._connection(), "bad_response", f"not HTTP: {error}")
            return
        if framing is None or framing.status != 200:
            self._tables.know_head(head, 0, 0, False)
        else:
            self._tables.know_head(head, *framing)
        self._answer(drive(reg, TAKE_AGAIN, fd))

    def _on_foreign(self) -> None:
        """The loop cannot follow this answer: let the HTTP parser see all of it that has come."""
        connection, row = self._connection(), self._row_of(self._connection())
        self._journal.read_all()
        reading = self._journal.reading_of(row)
        if reading is None:
            return
        if reading.problem:
            self._break(connection, "bad_response", reading.problem)
        elif reading.is_over:
            line = self._tables.conn[connection.fd]
            self._rows.done_ns[row] = int(line[at.N_PIECE_NS])
            line[at.N_IS_KEPT_ALIVE] = reading.is_kept_alive
            line[at.N_MODE] = at.IDLE
            self._reg[at.R_NUM_URGENT] -= line[at.N_IS_URGENT]
            line[at.N_IS_URGENT] = 0
            self._complete(connection, row, reading)

    def _row_of(self, connection: Connection) -> int:
        return int(self._tables.conn[connection.fd, at.N_ROW])

    def _on_complete(self) -> None:
        """The loop saw the end of an answer, and left it to us to go on."""
        self._complete(self._connection(), self._row(), None)

    def _complete(self, connection: Connection, row: int, reading: Reading | None) -> None:
        """reading: where the HTTP parser found the end; None: where the loop did, and the journal still holds it."""
        line = self._tables.conn[connection.fd]
        can_carry_another = bool(line[at.N_IS_KEPT_ALIVE]) and line[at.N_TAKEN_BYTES] == line[at.N_REQUEST_BYTES]
        if not can_carry_another:
            self._pool.drop(connection)
        done_ns = self._rows.done_ns[row]
        if reading is not None:
            self._rows.http_status[row] = reading.status
            if reading.status != 200:
                self._journal.forget(row)
                due = self._script.fail(row, done_ns, "http_error", describe_error_body(reading.error_body))
                self._give_up_after(row)
                self._schedule_all(due, connection if can_carry_another else None)
                return
        due = self._script.complete(row, done_ns)
        if reading is not None:
            self._judge(row, self._journal.whole_answer(row))
        if not self._script.is_last_of_session(row):
            following = row + 1
            if due[0].due_ns == self._rows.trigger_ns[following] and can_carry_another:
                # No wait: on with the session, right now.
                self._send(following)
                return
            self._jobs.append(partial(self._stage, following))
        self._schedule_all(due, connection if can_carry_another else None)

    # -- what goes wrong ---------------------------------------------------------------------------------------

    def _on_closed(self) -> None:
        connection = self._connection()
        row = self._row_of(connection)
        self._journal.read_all()
        reading = self._journal.reading_of(row)
        if reading is not None and not reading.problem and reading.ends_at_close():
            line = self._tables.conn[connection.fd]
            self._rows.done_ns[row] = monotonic_ns()
            line[at.N_IS_KEPT_ALIVE] = 0
            self._complete(connection, row, reading)
        else:
            self._break(connection, "connection", f"closed by the server ({self._describe_progress(connection)})")

    def _on_receive_failed(self) -> None:
        connection = self._connection()
        why = os.strerror(int(self._reg[at.R_DETAIL]))
        self._break(connection, "connection", f"{why} ({self._describe_progress(connection)})")

    def _on_out_of_turn(self) -> None:
        self._pool.drop(self._connection())

    def _on_too_much(self) -> None:
        self._break(self._connection(), "bad_response", "not HTTP: more bytes than the answer's end allows")

    def _is_busy(self, connection: Connection) -> bool:
        return bool(self._tables.conn[connection.fd, at.N_MODE] >= at.AWAIT_HEAD)

    def _describe_progress(self, connection: Connection) -> str:
        """How far the exchange came, for the error text of a row."""
        if not connection.is_connected or not self._is_busy(connection):
            return "no connection"
        line = self._tables.conn[connection.fd]
        row = int(line[at.N_ROW])
        if line[at.N_TAKEN_BYTES] < line[at.N_REQUEST_BYTES]:
            return "request not fully sent"
        if self._rows.first_byte_ns[row] == ABSENT:
            return "no byte of the answer"
        reading = self._journal.reading_of(row)
        has_head = line[at.N_MODE] in (at.COUNTED, at.CHUNKED) or (reading is not None and reading.has_head)
        return "in the middle of the answer" if has_head else "in the middle of the answer's head"

    def _break(self, connection: Connection, status: str, error: str) -> None:
        """The connection is of no use any more; what it carried has failed."""
        row = self._row_of(connection) if self._is_busy(connection) else connection.pending_row
        self._pool.drop(connection)
        if row == ABSENT:
            return
        self._journal.read_all()
        if self._rows.status[row]:
            return
        reading = self._journal.reading_of(row)
        if reading is not None and reading.status:
            self._rows.http_status[row] = reading.status
        self._journal.forget(row)
        answer = reading.answer if reading is not None else None
        self._fail(row, self._script.fail(row, monotonic_ns(), status, error, answer))

    def _expire(self, now_ns: int) -> None:
        conn = self._tables.conn
        busy = np.flatnonzero(conn[:, at.N_MODE] >= at.AWAIT_HEAD)
        late = busy[self._sent[conn[busy, at.N_ROW]] + self._request_timeout_ns <= now_ns]
        for fd in late.tolist():
            connection = self._pool.by_fd.get(fd)
            if connection is not None and self._is_busy(connection):
                self._journal.read_all()
                progress = self._describe_progress(connection)
                self._break(connection, "timeout", f"no end within the limit ({progress})")
        for connection in self._pool.overdue(now_ns):
            self._break(connection, "timeout", "no connection within the limit")

    def _stop(self, now_ns: int) -> None:
        self._journal.read_all()
        for connection in list(self._pool.by_fd.values()):
            self._break(connection, "connection", "the replay was stopped before the answer was complete")
        self._script.stop(now_ns)
