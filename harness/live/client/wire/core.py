"""The compiled loop: it sends at absolute deadlines and never early, takes what comes in, and goes on.

It runs without the interpreter's lock until something needs the interpreter, and then returns an event; it opens and
closes nothing, and gives no answer its final status. Next: ``replay`` answers the events.
"""

from __future__ import annotations

from functools import lru_cache

from harness.clock import NS_PER_MS, NS_PER_US
from harness.compiled import compiled, inner
from harness.live.client.wire import events
from harness.live.client.wire.deadlines import plan_send, pop
from harness.live.client.wire.layout import (
    DUE_ABORT,
    DUE_REFRESH,
    DUE_SEND,
    JOURNAL_ENTRIES,
    MAX_EVENTS,
    MODE_ABSENT,
    MODE_AWAIT_HEAD,
    MODE_IDLE,
    UNPREPARED,
    Registers,
    connection_at,
    deadline_at,
    epoll_event_at,
    instant_at,
    registers_at,
    request_at,
    session_at,
)
from harness.live.client.wire.receiving import on_readable, take_piece
from harness.live.client.wire.sending import build_prompt, send_rest, send_row
from harness.live.client.wire.syscalls import arm_timer, clock_ns, epoll_wait, nap, wide
from harness.live.client.wire.tables import SharedTables

EPOLLIN = 1
HEARTBEAT_MS = 50
HEARTBEAT_NS = HEARTBEAT_MS * NS_PER_MS
# Below this the final spin only reads the clock; above it, it also looks for arrivals.
BARE_SPIN_NS = 25 * NS_PER_US
# With more than this to interpret, a turn for it is taken even when there is no slack.
MAX_BACKLOG = JOURNAL_ENTRIES // 4
# What a turn of the interpreter may cost: none begins when a send is due sooner.
TURN_NS = 150 * NS_PER_US
# The interpreter has a turn when so much waits for it that the switch is worth while, or when nothing comes for a bit:
# soon when it has something to prepare, else not so soon, since a near timeout makes each wait dearer.
WORTH_A_TURN = 16
QUIET_MS = 2
# While nothing that comes in can make a send due, it is taken in company: the kernel stamps each arrival, and one
# waking costs as much as taking three.
NAP_NS = 100 * NS_PER_US

FAR_AWAY_NS = 1 << 62


# -- the loop ---------------------------------------------------------------------------------------------------------


@inner
def next_deadline_ns(reg: Registers) -> int:
    """The instant of the first deadline; FAR_AWAY_NS when there is none."""
    return deadline_at(reg.deadlines_at, 0).at_ns if reg.num_deadlines else FAR_AWAY_NS


@inner
def is_under_way(reg: Registers, row: int) -> bool:
    """Whether a request was sent and its answer has not ended."""
    fd = session_at(reg.sessions_at, request_at(reg.requests_at, row).session).fd
    if fd < 0 or fd >= reg.num_connections:
        return False
    connection = connection_at(reg.connections_at, fd)
    return connection.mode >= MODE_AWAIT_HEAD and connection.row == row


@inner
def run_due(reg: Registers, now_ns: int) -> int:
    """Send everything that is due by now; what needs the interpreter ends the round."""
    while next_deadline_ns(reg) <= now_ns:
        first = deadline_at(reg.deadlines_at, 0)
        kind, row = first.kind, first.row
        pop(reg)
        reg.event_row = row
        if kind == DUE_ABORT:
            event = events.LEAVE if is_under_way(reg, row) else events.GO_ON
        else:
            event = events.REFRESH if kind == DUE_REFRESH else send_row(reg, row)
        if event != events.GO_ON:
            return event
        now_ns = clock_ns(reg)
    if reg.burst_from_ns and now_ns >= reg.burst_from_ns:
        reg.burst_from_ns = 0
        return events.BURST_OVER
    return events.GO_ON


@inner
def wait_for_events(reg: Registers, timeout_ms: int) -> int:
    """epoll_wait; how many events lie at ``epoll_events_at``."""
    return max(0, wide(epoll_wait(reg.epoll_fd, reg.epoll_events_at, MAX_EVENTS, timeout_ms)))


@inner
def spin_until(reg: Registers, until_ns: int, from_ns: int) -> None:
    """Read the clock until an instant."""
    while clock_ns(reg) < until_ns:
        pass
    reg.spun_ns += until_ns - from_ns


@inner
def handle_events(reg: Registers, count: int) -> int:
    """Take the events of one wait; an event for the interpreter ends it, and epoll will tell the rest again."""
    for place in range(count):
        told = epoll_event_at(reg.epoll_events_at, place)
        mask, fd = wide(told.mask), wide(told.fd)
        if fd == reg.timer_fd:
            arm_timer(reg, 0)
            continue
        mode = connection_at(reg.connections_at, fd).mode if 0 <= fd < reg.num_connections else MODE_ABSENT
        if mask == EPOLLIN and mode >= MODE_IDLE:
            event = on_readable(reg, fd)
        else:
            reg.event_fd, reg.event_detail = fd, mask
            event = events.OTHER
        if event != events.GO_ON:
            return event
        if reg.num_deadlines:
            now_ns = clock_ns(reg)
            if next_deadline_ns(reg) <= now_ns:
                event = run_due(reg, now_ns)
                if event != events.GO_ON:
                    return event
    return events.GO_ON


@inner
def run_loop(reg: Registers) -> int:
    """Loop until the interpreter is needed."""
    while True:
        event = run_due(reg, clock_ns(reg))
        if event != events.GO_ON:
            return event
        now_ns = clock_ns(reg)
        next_ns = next_deadline_ns(reg)
        left_ns = next_ns - now_ns
        is_far = left_ns > reg.spin_ns + TURN_NS
        late_beat_ns = now_ns - reg.next_beat_ns
        if late_beat_ns >= 0 and (is_far or late_beat_ns > HEARTBEAT_NS):
            return events.BEAT
        backlog = reg.journal_written - reg.journal_read + reg.num_jobs
        if left_ns <= reg.spin_ns:
            if left_ns <= BARE_SPIN_NS:
                spin_until(reg, next_ns, now_ns)
                continue
            first = deadline_at(reg.deadlines_at, 0)
            if first.kind == DUE_SEND:
                reg.event_row = first.row
                if request_at(reg.requests_at, first.row).readiness == UNPREPARED:
                    return events.STAGE
            count = wait_for_events(reg, 0)
            reg.spun_ns += clock_ns(reg) - now_ns
        else:
            arm_timer(reg, next_ns - reg.spin_ns if next_ns < FAR_AWAY_NS else 0)
            if backlog:
                # Arrivals first: the end of an answer often follows its last token by microseconds.
                patience_ms = QUIET_MS if reg.num_jobs else HEARTBEAT_MS
                count = wait_for_events(reg, 0 if backlog >= WORTH_A_TURN else patience_ms)
                if (count == 0 and is_far) or backlog > MAX_BACKLOG:
                    event = handle_events(reg, count)
                    return events.SLACK if event == events.GO_ON else event
            else:
                count = wait_for_events(reg, HEARTBEAT_MS)
                reg.num_wakeups += 1
        event = handle_events(reg, count)
        if event != events.GO_ON:
            return event
        if count and reg.num_urgent == 0:
            nap_end_ns = clock_ns(reg) + NAP_NS
            if nap_end_ns + NAP_NS + reg.spin_ns < next_deadline_ns(reg):
                nap(reg, nap_end_ns)


# -- the door for the interpreter -------------------------------------------------------------------------------------

# One function, since each door would be compiled with everything behind it.
LOOP, PLAN_SEND, PREPARE, SEND_NOW, SEND_MORE, TAKE_AGAIN, RECEIVE_NOW = range(7)


@compiled
def drive(address: int, what: int, subject: int) -> int:
    """Do one thing; why the interpreter is needed after it (``events``), with the subject in the registers.

    address: of the registers. NO_ROOM, for any of them: something would have been written outside its table, and was
    not.

    LOOP: send, take and go on until the interpreter is needed. PLAN_SEND: queue row ``subject`` for its due instant,
    which is written. PREPARE: build the row's prompt from its session's text; NOT_READY when the text is shorter than
    what it keeps. SEND_NOW: send the row. SEND_MORE: go on with a request that the kernel took in part, on
    descriptor ``subject``. TAKE_AGAIN: look again at the descriptor's last receive. RECEIVE_NOW: take what it received.
    """
    reg = registers_at(address, 0)
    if what == LOOP:
        return run_loop(reg)
    if subject < 0 or subject >= (reg.num_requests if what <= SEND_NOW else reg.num_connections):
        return events.NO_ROOM
    if what == PLAN_SEND:
        is_told = plan_send(reg, subject, instant_at(reg.due_at, subject).ns, clock_ns(reg))
        return events.GO_ON if is_told else events.NO_ROOM
    if what == PREPARE:
        return build_prompt(reg, subject)
    if what == SEND_NOW:
        return send_row(reg, subject)
    reg.event_fd = subject
    if what == SEND_MORE:
        return send_rest(reg, subject)
    if what == TAKE_AGAIN:
        return take_piece(reg, connection_at(reg.connections_at, subject))
    return on_readable(reg, subject)


@lru_cache(maxsize=1)
def warm_up() -> None:
    """Have the machine code ready: compiled once for this machine, then loaded (about 0.2 s)."""
    # A beat is due, so the loop returns at once.
    drive(SharedTables(1, 1).address, LOOP, 0)
