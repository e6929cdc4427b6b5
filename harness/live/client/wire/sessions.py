"""What the sessions of an epoll replay do next: requests are made ready and queued, answers judged, failures ended.

It runs in the interpreter, in slack or when the loop cannot go on by itself, and it touches no socket. Next:
``exchanges`` sees to what happens on the connections, ``replay`` gives both their turns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from harness.clock import monotonic_ns
from harness.live.client.rows import ABSENT
from harness.live.client.wire.core import PLAN_SEND, SEND_NOW, drive
from harness.live.client.wire.deadlines import FRESH_AFTER_IDLE_NS
from harness.live.client.wire.journal import JournalReader
from harness.live.client.wire.layout import END_GOES_ON, GIVEN_UP, READY
from harness.live.client.wire.reading import hold_to

if TYPE_CHECKING:
    from harness.live.client.answer import Answer
    from harness.live.client.script import Due, Script
    from harness.live.client.wire.connection import Connection
    from harness.live.client.wire.pool import ConnectionPool
    from harness.live.client.wire.streams import WireStreams

GIVEN_UP_ERROR = "given up: the answer before it was not as planned"


class Sessions:
    """The script, followed. jobs: work that can wait for slack."""

    def __init__(self, script: Script, streams: WireStreams, pool: ConnectionPool, answer: Callable[[int], None]):
        """streams: the script's own prompts. answer: deals with an event of the compiled side."""
        self.script = script
        self.rows = script.rows
        self.jobs: deque[Callable[[], object]] = deque()
        self.journal = JournalReader(script, streams.tables, on_begin=self._on_begin, on_end=self._on_end)
        self.num_reconnects = 0
        self._streams = streams
        self._tables = streams.tables
        self._reg = streams.tables.reg
        self._pool = pool
        self._answer = answer

    # -- answers -----------------------------------------------------------------------------------------------

    def _on_begin(self, row: int) -> None:
        if not self.script.has_all_fresh:
            self.jobs.append(partial(self.script.prefetch_next, row))

    def _on_end(self, row: int, answer: Answer, end: int, ids: bytes) -> None:
        """The loop saw the end of the answer, and went on with these ids."""
        if ids:
            hold_to(answer, ids)
            self._streams.note_carried(self.rows.session[row])
        self.judge(row, answer)
        if end != END_GOES_ON and not self.script.is_last_of_session(row) and self.script.may_send(row + 1):
            self.jobs.append(partial(self.stage, row + 1))

    def judge(self, row: int, answer: Answer) -> None:
        """Decide on a complete answer and write its row."""
        due = self.script.judge(row, answer)
        self.script.book(row, answer)
        if self.rows.status[row] == "ok":
            self._streams.forget_fresh(row)
        else:
            self.give_up_after(row)
        if due:
            self.schedule_all(due)

    def give_up_after(self, row: int) -> None:
        """A session has failed at a row: nothing more of it is sent, and what was sent since is broken off."""
        session = self.rows.session[row]
        for later in range(row + 1, self.script.end_of_session(session)):
            self._tables.requests[later].readiness = GIVEN_UP
            if self.rows.sent_ns[later] != ABSENT:
                is_answered = self.rows.done_ns[later] != ABSENT
                self.rows.status[later] = "bad_response" if is_answered else "connection"
                self.rows.error[later] = GIVEN_UP_ERROR
                if not is_answered:
                    self.rows.done_ns[later] = monotonic_ns()
                self.journal.forget(later)
                connection = self._pool.of_session.get(session)
                if connection is not None and not self._pool.is_idle(connection):
                    self._pool.drop(connection)

    def fail(self, row: int, due: list[Due], connection: Connection | None = None) -> None:
        """The row has failed: give up the rest of its session, go on with what follows.

        connection: one that can carry another session.
        """
        self._tables.requests[row].readiness = GIVEN_UP
        self.give_up_after(row)
        self.schedule_all(due, connection)

    # -- what comes next ---------------------------------------------------------------------------------------

    def _schedule(self, due: Due) -> None:
        """Queue a send; see to it that its connection will be there, and fresh, before."""
        now_ns = monotonic_ns()
        self._answer(drive(self._tables.address, PLAN_SEND, due.row))
        due_ns = self.script.clock.to_monotonic_ns(due.due_ns)
        session = self.rows.session[due.row]
        if now_ns < due_ns <= now_ns + FRESH_AFTER_IDLE_NS and session not in self._pool.of_session:
            self._pool.open(session)

    def schedule_all(self, due: list[Due], connection: Connection | None = None) -> None:
        """Queue what became due; the first session that follows takes the connection over."""
        for item in due:
            session = self.rows.session[item.row]
            if connection is not None and session not in self._pool.of_session:
                self._pool.hand_over(connection, session)
                connection = None
            self._schedule(item)
        if not due and connection is not None:
            self._pool.drop(connection)

    def go_on_after(self, row: int, due: list[Due], connection: Connection | None) -> None:
        """An answer is complete, and left to the interpreter. connection: its own, if it can carry another request."""
        if not self.script.is_last_of_session(row):
            following = row + 1
            if connection is not None and due[0].due_ns == self.rows.trigger_ns[following]:
                # No wait: on with the session, right now.
                self.send(following)
                return
            self.jobs.append(partial(self.stage, following))
        self.schedule_all(due, connection)

    def go_on_after_leaving(self, row: int, due: list[Due]) -> None:
        """The client has left an answer; its connection is closed."""
        self._streams.forget_fresh(row)
        if not self.script.is_last_of_session(row):
            self.jobs.append(partial(self.stage, row + 1))
        self.schedule_all(due)

    def stage(self, row: int) -> bool:
        """Make everything ready for a send that is about to be due, so that only the send is left; False when it must
        not be sent at all.
        """
        script, request = self.script, self._tables.requests[row]
        if request.readiness == READY:
            return True
        before = row - 1 if self.rows.request[row] else script.last_row_of_parent(self.rows.session[row])
        if before is not None and not self.journal.is_reading:
            self.journal.read_to(before)
        if not script.may_send(row):
            request.readiness = GIVEN_UP
            return False
        reason = script.blocked_by(row)
        if reason:
            self.fail(row, script.skip_session(row, reason, monotonic_ns()))
            return False
        if request.readiness != READY:
            self._streams.prepare(row)
        return True

    def send(self, row: int) -> None:
        """Send a request now, unless it must not be sent at all."""
        if self.stage(row):
            self._answer(drive(self._tables.address, SEND_NOW, row))

    # -- what the loop asks for --------------------------------------------------------------------------------

    def on_stage(self) -> None:
        """A send is near and not ready."""
        self.stage(self._reg.event_row)

    def on_not_ready(self) -> None:
        """A send is due and not ready."""
        self.send(self._reg.event_row)

    def on_no_connection(self) -> None:
        """A send is due, and its session has no connection that could carry it."""
        row = self._reg.event_row
        session = self.rows.session[row]
        connection = self._pool.of_session.get(session) or self._pool.open(session)
        if connection is None:
            due = self.script.fail(row, monotonic_ns(), "connection", f"cannot connect: {self._pool.problem}")
            self.fail(row, due)
        else:
            connection.pending_row = row

    def on_refresh(self) -> None:
        """A connection would idle for too long before a send: another takes its place."""
        if not self.script.may_send(self._reg.event_row):
            return
        session = self.rows.session[self._reg.event_row]
        connection = self._pool.of_session.get(session)
        if connection is not None:
            if not self._pool.is_idle(connection):
                return
            self._pool.drop(connection)
        self.num_reconnects += 1
        self._pool.open(session)
