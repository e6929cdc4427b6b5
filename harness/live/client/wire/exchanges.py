"""What happens on the connections of an epoll replay that the compiled loop leaves to others: heads, ends, failures.

Every exchange ends as a row's status, never as an exception; nothing is retried, and every wait has a limit. Next:
``sessions`` goes on with what an end makes due.
"""

from __future__ import annotations

import os
import select
from typing import TYPE_CHECKING

import httptools
import numpy as np

from harness.clock import monotonic_ns
from harness.live.client.answer import describe_error_body
from harness.live.client.rows import ABSENT
from harness.live.client.wire import events
from harness.live.client.wire.core import RECEIVE_NOW, SEND_MORE, SEND_NOW, TAKE_AGAIN, drive
from harness.live.client.wire.heads import KnownHeads
from harness.live.client.wire.layout import MODE_AWAIT_HEAD, MODE_CHUNKED, MODE_COUNTED, MODE_IDLE

if TYPE_CHECKING:
    from collections.abc import Callable

    from harness.live.client.wire.connection import Connection
    from harness.live.client.wire.layout import ConnectionState
    from harness.live.client.wire.pool import ConnectionPool
    from harness.live.client.wire.reading import Reading
    from harness.live.client.wire.sessions import Sessions
    from harness.live.client.wire.tables import SharedTables

EPOLLIN, EPOLLOUT = select.EPOLLIN, select.EPOLLOUT


class Exchanges:
    """Requests and answers on their way, by connection."""

    def __init__(
        self,
        sessions: Sessions,
        pool: ConnectionPool,
        tables: SharedTables,
        request_timeout_ns: int,
        answer: Callable[[int], None],
    ) -> None:
        """request_timeout_ns: CLOCK_MONOTONIC. answer: deals with an event of the compiled side."""
        self._sessions, self._journal = sessions, sessions.journal
        self._script, self._rows = sessions.script, sessions.rows
        self._pool = pool
        self._tables, self._reg = tables, tables.reg
        self._request_timeout_ns = request_timeout_ns
        self._answer = answer
        self._heads = KnownHeads()
        self._sent = np.frombuffer(self._rows.sent_ns, dtype=np.int64)

    def _connection(self) -> Connection:
        return self._pool.by_fd[self._reg.event_fd]

    def _state(self, connection: Connection) -> ConnectionState:
        """Of this moment: a new connection may move the table."""
        return self._tables.connections[connection.fd]

    def _is_busy(self, connection: Connection) -> bool:
        return self._state(connection).mode >= MODE_AWAIT_HEAD

    # -- sending -----------------------------------------------------------------------------------------------

    def on_send_failed(self) -> None:
        """The kernel refused a request."""
        self._break(self._connection(), "connection", f"{os.strerror(self._reg.event_detail)} while sending")

    def on_sent_in_part(self) -> None:
        """The kernel has no room for all of a request."""
        self._pool.watch_room(self._connection(), is_wanted=True)

    def on_writable(self, connection: Connection) -> None:
        """A connection came about, or failed to, or has room for more of a request."""
        if connection.is_connected:
            event = drive(self._tables.address, SEND_MORE, connection.fd)
            if event == events.GO_ON:
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
            self._answer(drive(self._tables.address, SEND_NOW, row))

    def on_other(self) -> None:
        """Everything but data on an open connection."""
        mask = self._reg.event_detail
        connection = self._pool.by_fd.get(self._reg.event_fd)
        if connection is None:
            return
        if not connection.is_connected:
            if mask & ~EPOLLIN:  # a lone EPOLLIN is a stale event of a closed socket that had this number
                self.on_writable(connection)
            return
        if mask & EPOLLOUT:
            self.on_writable(connection)
        if mask & ~EPOLLOUT and self._pool.by_fd.get(connection.fd) is connection:
            self._answer(drive(self._tables.address, RECEIVE_NOW, connection.fd))

    # -- receiving ---------------------------------------------------------------------------------------------

    def on_new_head(self) -> None:
        """Learn what a head means, from the HTTP parser, and let the loop look again."""
        connection = self._connection()
        head = self._journal.from_ring(self._state(connection).piece_place, self._reg.event_detail)
        try:
            framing = self._heads.framing(head)
        except httptools.HttpParserError as error:
            self._break(connection, "bad_response", f"not HTTP: {error}")
            return
        if framing is None or framing.status != 200:
            self._tables.know_head(head, 0, 0, False)
        else:
            self._tables.know_head(head, *framing)
        self._answer(drive(self._tables.address, TAKE_AGAIN, connection.fd))

    def on_foreign(self) -> None:
        """The loop cannot follow this answer: let the HTTP parser see all of it that has come."""
        connection = self._connection()
        self._journal.read_all()
        state = self._state(connection)
        row = state.row
        reading = self._journal.reading_of(row)
        if reading is None:
            return
        if reading.problem:
            self._break(connection, "bad_response", reading.problem)
        elif self._script.has_enough(row, reading.answer):
            self._leave(connection, row)
        elif reading.is_over:
            self._rows.done_ns[row] = state.piece_ns
            state.is_kept_alive = reading.is_kept_alive
            self._tables.end_exchange(connection.fd, MODE_IDLE)
            self._complete(connection, row, reading)

    def on_complete(self) -> None:
        """The loop saw the end of an answer, and left it to us to go on."""
        self._complete(self._connection(), self._reg.event_row, None)

    def _complete(self, connection: Connection, row: int, reading: Reading | None) -> None:
        """reading: where the HTTP parser found the end; None: where the loop did, and the journal still holds it."""
        state = self._state(connection)
        free = connection if state.is_kept_alive and state.taken_bytes == state.request_bytes else None
        if free is None:
            self._pool.drop(connection)
        done_ns = self._rows.done_ns[row]
        if reading is not None:
            self._rows.http_status[row] = reading.status
            if reading.status != 200:
                self._journal.forget(row)
                error = describe_error_body(reading.error_body)
                self._sessions.fail(row, self._script.fail(row, done_ns, "http_error", error), free)
                return
        due = self._script.complete(row, done_ns)
        if reading is not None:
            self._sessions.judge(row, self._journal.whole_answer(row))
        self._sessions.go_on_after(row, due, free)

    def on_leave(self) -> None:
        """The plan has the client leave an answer that is under way."""
        row = self._reg.event_row
        self._leave(self._pool.of_session[self._rows.session[row]], row)

    def _leave(self, connection: Connection, row: int) -> None:
        """Close the connection, which tells the server, and go on with the session."""
        self._journal.read_all()
        reading = self._journal.reading_of(row)
        answer = self._script.new_answer(row) if reading is None else reading.answer
        problem = answer.problem if reading is None else reading.problem or answer.problem
        if problem:
            self._break(connection, "bad_response", problem)
            return
        if reading is not None and reading.status not in (0, 200):
            return  # a refusal, which will end by itself
        if reading is not None and reading.status:
            self._rows.http_status[row] = reading.status
        left_ns = monotonic_ns()
        self._pool.drop(connection)
        self._journal.forget(row)
        # Of the ids that the loop appended, those are carried again that the plan counts on.
        session = self._tables.sessions[self._rows.session[row]]
        session.used_bytes = session.answer_from
        self._sessions.go_on_after_leaving(row, self._script.leave(row, left_ns, answer))

    # -- what goes wrong ---------------------------------------------------------------------------------------

    def on_closed(self) -> None:
        """The server closed a connection: the end of an answer that has no other, else a failure."""
        connection = self._connection()
        self._journal.read_all()
        state = self._state(connection)
        reading = self._journal.reading_of(state.row)
        if reading is not None and not reading.problem and reading.ends_at_close():
            self._rows.done_ns[state.row] = monotonic_ns()
            state.is_kept_alive = 0
            self._complete(connection, state.row, reading)
        else:
            self._break(connection, "connection", f"closed by the server ({self._describe_progress(connection)})")

    def on_receive_failed(self) -> None:
        """The kernel reports an error of a connection."""
        connection = self._connection()
        why = os.strerror(self._reg.event_detail)
        self._break(connection, "connection", f"{why} ({self._describe_progress(connection)})")

    def on_out_of_turn(self) -> None:
        """An idle connection was closed, or talks while nothing was asked."""
        self._pool.drop(self._connection())

    def on_too_much(self) -> None:
        """Bytes came behind the end of an answer."""
        self._break(self._connection(), "bad_response", "not HTTP: more bytes than the answer's end allows")

    def _describe_progress(self, connection: Connection) -> str:
        """How far the exchange came, for the error text of a row."""
        if not connection.is_connected or not self._is_busy(connection):
            return "no connection"
        state = self._state(connection)
        if state.taken_bytes < state.request_bytes:
            return "request not fully sent"
        if self._rows.first_byte_ns[state.row] == ABSENT:
            return "no byte of the answer"
        reading = self._journal.reading_of(state.row)
        has_head = state.mode in (MODE_COUNTED, MODE_CHUNKED) or (reading is not None and reading.has_head)
        return "in the middle of the answer" if has_head else "in the middle of the answer's head"

    def _break(self, connection: Connection, status: str, error: str) -> None:
        """The connection is of no use any more; what it carried has failed."""
        row = self._state(connection).row if self._is_busy(connection) else connection.pending_row
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
        self._sessions.fail(row, self._script.fail(row, monotonic_ns(), status, error, answer))

    def expire(self, now_ns: int) -> None:
        """Break what has no end, or no connection, within its limit."""
        modes, rows = self._tables.connection_columns["mode"], self._tables.connection_columns["row"]
        busy = np.flatnonzero(modes >= MODE_AWAIT_HEAD)
        late = busy[self._sent[rows[busy]] + self._request_timeout_ns <= now_ns]
        for fd in late.tolist():
            connection = self._pool.by_fd.get(fd)
            if connection is not None and self._is_busy(connection):
                self._journal.read_all()
                progress = self._describe_progress(connection)
                self._break(connection, "timeout", f"no end within the limit ({progress})")
        for connection in self._pool.overdue(now_ns):
            self._break(connection, "timeout", "no connection within the limit")

    def stop(self, now_ns: int) -> None:
        """Break everything off: nobody wants the rest."""
        self._journal.read_all()
        for connection in list(self._pool.by_fd.values()):
            self._break(connection, "connection", "the replay was stopped before the answer was complete")
        self._script.stop(now_ns)
