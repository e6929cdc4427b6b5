"""The epoll replay: connects, releases the sessions together, and gives the compiled loop and the interpreter turns.

Answers are interpreted in slack, when the loop has nothing to send or take. It retries nothing, computes no statistic,
and every wait in it has a deadline. Next: rows and chunks go back to ``harness.live.client``.
"""

from __future__ import annotations

import select
from collections.abc import Callable
from typing import TYPE_CHECKING

from harness.clock import NS_PER_MS, NS_PER_US, monotonic_ns
from harness.live.client.kernel_stamps import OffsetLog
from harness.live.client.scheduler_slice import SHORT_SLICE_NS, SchedulerSlice
from harness.live.client.timer import DeadlineTimer
from harness.live.client.wire import events
from harness.live.client.wire.core import FAR_AWAY_NS, HEARTBEAT_NS, LOOP, drive
from harness.live.client.wire.deadlines import FRESH_AFTER_IDLE_NS
from harness.live.client.wire.exchanges import Exchanges
from harness.live.client.wire.memory import refuse_to_write
from harness.live.client.wire.pool import ConnectionPool, allow_sockets
from harness.live.client.wire.sessions import Sessions
from harness.live.client.wire.share import share_script

if TYPE_CHECKING:
    from harness.live.client.script import Script
    from harness.live.client.wire.streams import WireStreams

# Work for slack is done in turns this long, with a look for arrivals between them: the kernel has stamped what comes
# in meanwhile.
TURN_NS = 30 * NS_PER_US
# With more journal entries than this, answers come faster than they can be read; fewer and longer turns are cheaper.
LONG_BACKLOG = 1_024
LONG_TURN_NS = 300 * NS_PER_US
# Nearer to a send than this no long turn goes on, and no other one that has had its time.
LONG_LEAD_NS, LEAD_NS = 500 * NS_PER_US, 100 * NS_PER_US
# With the journal full, it is read for so long before the loop goes on.
MAKE_ROOM_NS = 10 * NS_PER_MS


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
        self._tables = streams.tables
        self._reg = reg = streams.tables.reg
        self._is_stopped = is_stopped
        self._on_slack = on_slack
        self._turns = turns
        self._choose_start = choose_start
        self.offsets = OffsetLog()
        self.ended_ns = 0
        share_script(script, self._tables, host_header, spin_us)
        self._epoll = select.epoll()
        self._pool = ConnectionPool(self._epoll, host, port, self._tables)
        self._timer = DeadlineTimer()
        self._epoll.register(self._timer.fd, select.EPOLLIN)
        reg.epoll_fd, reg.timer_fd = self._epoll.fileno(), self._timer.fd
        self._tables.make_room_for(self._timer.fd)
        self._sessions = sessions = Sessions(script, streams, self._pool, self._answer)
        timeout_ns = script.clock.to_monotonic_ns(request_timeout_ns)
        self._exchanges = exchanges = Exchanges(sessions, self._pool, self._tables, timeout_ns, self._answer)
        self._answers: dict[int, Callable[[], None]] = {
            events.BEAT: self._beat,
            events.SLACK: self._use_slack,
            events.BURST_OVER: self._end_burst,
            events.FULL: self._make_room,
            events.STAGE: sessions.on_stage,
            events.REFRESH: sessions.on_refresh,
            events.NOT_READY: sessions.on_not_ready,
            events.NO_CONNECTION: sessions.on_no_connection,
            events.SEND_FAILED: exchanges.on_send_failed,
            events.SENT_IN_PART: exchanges.on_sent_in_part,
            events.OTHER: exchanges.on_other,
            events.CLOSED: exchanges.on_closed,
            events.RECEIVE_FAILED: exchanges.on_receive_failed,
            events.OUT_OF_TURN: exchanges.on_out_of_turn,
            events.NEW_HEAD: exchanges.on_new_head,
            events.FOREIGN: exchanges.on_foreign,
            events.TOO_MUCH: exchanges.on_too_much,
            events.COMPLETE: exchanges.on_complete,
            events.NO_ROOM: refuse_to_write,
            events.LEAVE: exchanges.on_leave,
        }

    @property
    def spun_ns(self) -> int:
        """Wall ns spent reading the clock before sends."""
        return self._reg.spun_ns

    @property
    def num_wakeups(self) -> int:
        """Times the loop went to sleep and was woken."""
        return self._reg.num_wakeups

    @property
    def num_reconnects(self) -> int:
        """Connections replaced because they would have idled for too long."""
        return self._sessions.num_reconnects

    def run(self) -> int:
        """Connect, release all sessions together, and loop to the end; the common start in CLOCK_MONOTONIC ns."""
        script, sessions = self._script, self._sessions
        try:
            first = script.release(0)
            allow_sockets(len(first))
            soon = [due.row for due in first if script.clock.to_monotonic_ns(due.due_ns) < FRESH_AFTER_IDLE_NS]
            soon_sessions = [script.rows.session[row] for row in soon]
            self._pool.open_all(soon_sessions, self._exchanges.on_writable, self._is_stopped)
            for due in first:
                sessions.stage(due.row)
            self.offsets.sample()
            # The common start is one long run of sends, which those that it wakes must not cut into pieces.
            self._turns.as_before()
            start_ns = self._choose_start()
            self._reg.burst_from_ns = start_ns
            sessions.schedule_all(script.release(script.clock.from_monotonic_ns(start_ns)))
            self._loop()
        finally:
            self.offsets.sample()
            self._pool.close()
            self._timer.close()
            self._epoll.close()
        self._tables.memory.require_intact()
        return start_ns

    # -- the loop ----------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        reg, address, script, answers = self._reg, self._tables.address, self._script, self._answers
        jobs, use_slack = self._sessions.jobs, self._use_slack
        while not script.is_finished:
            reg.num_jobs = len(jobs)
            event = drive(address, LOOP, 0)
            if event == events.SLACK:
                use_slack()
            else:
                answers[event]()
        self._sessions.journal.read_all()
        while jobs:
            jobs.popleft()()
        self.ended_ns = monotonic_ns()

    def _answer(self, event: int) -> None:
        """Deal with an event of a door other than the loop's."""
        if event != events.GO_ON:
            self._answers[event]()

    def _use_slack(self) -> None:
        """Interpret, then do other work that can wait, for one turn; at least one piece of it, so none waits for ever.

        Nothing is due before the turn ends.
        """
        journal, jobs = self._sessions.journal, self._sessions.jobs
        next_ns = self._tables.deadlines[0].at_ns if self._reg.num_deadlines else FAR_AWAY_NS
        until_ns = monotonic_ns() + TURN_NS
        if journal.backlog > LONG_BACKLOG:
            until_ns = max(until_ns, min(until_ns + LONG_TURN_NS, next_ns - LONG_LEAD_NS))
        if journal.read_until(until_ns, next_ns - LEAD_NS):
            return
        while jobs:
            jobs.popleft()()
            if monotonic_ns() >= until_ns:
                return

    def _make_room(self) -> None:
        self._sessions.journal.read_until(monotonic_ns() + MAKE_ROOM_NS, 0)

    def _beat(self) -> None:
        """What must happen now and then; not within the spin before a send, unless sends leave no other time."""
        now_ns = monotonic_ns()
        self._reg.next_beat_ns = now_ns + HEARTBEAT_NS
        if now_ns >= self.offsets.next_ns:
            self.offsets.sample()
        self._exchanges.expire(now_ns)
        self._script.chunks.spill()
        if self._is_stopped():
            self._exchanges.stop(now_ns)
        self._on_slack()

    def _end_burst(self) -> None:
        self._turns.ask(SHORT_SLICE_NS)
