"""The compiled loop: it sends at absolute deadlines and never early, takes what comes in, and goes on.

It runs without the interpreter's lock until something needs the interpreter, and then returns an event; it opens and
closes nothing, and gives no answer its final status. Next: ``replay`` answers the events.
"""

from __future__ import annotations

from functools import lru_cache

from harness.clock import NS_PER_MS, NS_PER_US
from harness.compiled import compiled_viewing as compiled
from harness.compiled import inner_viewing as inner
from harness.live.client.wire import layout as at
from harness.live.client.wire import table
from harness.live.client.wire.deadlines import plan_send, pop
from harness.live.client.wire.layout import IntArray
from harness.live.client.wire.receiving import on_readable, take_piece
from harness.live.client.wire.sending import build_prompt, send_rest, send_row
from harness.live.client.wire.syscalls import (
    EVENT_DATA_WORD,
    EVENT_WORDS,
    arm_timer,
    clock_ns,
    epoll_wait,
    nap,
    wide,
    words_at,
)

EPOLLIN = 1
HEARTBEAT_MS = 50
HEARTBEAT_NS = HEARTBEAT_MS * NS_PER_MS
# Below this the final spin only reads the clock; above it, it also looks for arrivals.
BARE_SPIN_NS = 25 * NS_PER_US
# With more than this to interpret, a turn for it is taken even when there is no slack.
MAX_BACKLOG = at.JOURNAL_ENTRIES // 4
# What a turn of the interpreter may cost: none begins when a send is due sooner.
TURN_NS = 150 * NS_PER_US
# The interpreter has a turn when so much waits for it that the switch is worth while, or when nothing comes for a bit:
# soon when it has something to prepare, else not so soon, since a near timeout makes each wait dearer.
WORTH_A_TURN = 16
QUIET_MS = 2
# While nothing that comes in can make a send due, it is taken in company: the kernel stamps each arrival, and one
# waking costs as much as taking three.
NAP_NS = 100 * NS_PER_US


# -- the loop ---------------------------------------------------------------------------------------------------------


@inner
def run_due(reg: IntArray, now_ns: int) -> int:
    """Send everything that is due by now; what needs the interpreter ends the round."""
    heap = table.deadlines(reg)
    while reg[at.R_HEAP_LEN] and heap[0, at.H_AT_NS] <= now_ns:
        kind, row = heap[0, at.H_KIND], heap[0, at.H_ROW]
        pop(reg)
        reg[at.R_ABOUT] = row
        event = at.E_REFRESH if kind == at.REFRESH else send_row(reg, row)
        if event != at.GO_ON:
            return event
        now_ns = clock_ns(reg)
    if reg[at.R_BURST_FROM_NS] and now_ns >= reg[at.R_BURST_FROM_NS]:
        reg[at.R_BURST_FROM_NS] = 0
        return at.E_BURST_OVER
    return at.GO_ON


@inner
def wait_for_events(reg: IntArray, timeout_ms: int) -> int:
    """epoll_wait; how many events lie at R_EPOLL_EVENTS."""
    return max(0, epoll_wait(reg[at.R_EPOLL_FD], reg[at.R_EPOLL_EVENTS], at.MAX_EVENTS, timeout_ms))


@inner
def spin_until(reg: IntArray, until_ns: int, from_ns: int) -> None:
    """Read the clock until an instant."""
    while clock_ns(reg) < until_ns:
        pass
    reg[at.R_SPUN_NS] += until_ns - from_ns


@inner
def handle_events(reg: IntArray, count: int) -> int:
    """Take the events of one wait; an event for the interpreter ends it, and epoll will tell the rest again."""
    words = words_at(reg[at.R_EPOLL_EVENTS], at.MAX_EVENTS * EVENT_WORDS)
    for place in range(count):
        mask = wide(words[place * EVENT_WORDS])
        fd = wide(words[place * EVENT_WORDS + EVENT_DATA_WORD])
        if fd == reg[at.R_TIMER_FD]:
            arm_timer(reg, 0)
            continue
        mode = table.conns(reg)[fd, at.N_MODE] if 0 <= fd < reg[at.R_NUM_CONN] else at.ABSENT_MODE
        if mask == EPOLLIN and mode >= at.IDLE:
            event = on_readable(reg, fd)
        else:
            reg[at.R_FD], reg[at.R_DETAIL] = fd, mask
            event = at.E_OTHER
        if event != at.GO_ON:
            return event
        if reg[at.R_HEAP_LEN] and table.deadlines(reg)[0, at.H_AT_NS] <= clock_ns(reg):
            event = run_due(reg, clock_ns(reg))
            if event != at.GO_ON:
                return event
    return at.GO_ON


@inner
def run_loop(reg: IntArray) -> int:
    """Loop until the interpreter is needed."""
    while True:
        now_ns = clock_ns(reg)
        event = run_due(reg, now_ns)
        if event != at.GO_ON:
            return event
        now_ns = clock_ns(reg)
        next_ns = table.deadlines(reg)[0, at.H_AT_NS] if reg[at.R_HEAP_LEN] else 0
        left_ns = next_ns - now_ns if next_ns else 1 << 62
        late_beat_ns = now_ns - reg[at.R_NEXT_BEAT_NS]
        if late_beat_ns >= 0 and (left_ns > reg[at.R_SPIN_NS] + TURN_NS or late_beat_ns > HEARTBEAT_NS):
            return at.E_BEAT
        backlog = reg[at.R_JOURNAL_WRITTEN] - reg[at.R_JOURNAL_READ] + reg[at.R_NUM_JOBS]
        if left_ns <= reg[at.R_SPIN_NS]:
            row = table.deadlines(reg)[0, at.H_ROW]
            if table.deadlines(reg)[0, at.H_KIND] == at.SEND and left_ns > BARE_SPIN_NS:
                reg[at.R_ABOUT] = row
                if table.rows(reg)[row, at.Q_STATE] == at.UNPREPARED:
                    return at.E_STAGE
            if left_ns <= BARE_SPIN_NS:
                spin_until(reg, next_ns, now_ns)
                continue
            count = wait_for_events(reg, 0)
            reg[at.R_SPUN_NS] += clock_ns(reg) - now_ns
        elif backlog:
            # Arrivals first: the end of an answer often follows its last token by microseconds.
            arm_timer(reg, next_ns - reg[at.R_SPIN_NS] if next_ns else 0)
            patience_ms = QUIET_MS if reg[at.R_NUM_JOBS] else HEARTBEAT_MS
            count = wait_for_events(reg, 0 if backlog >= WORTH_A_TURN else patience_ms)
            if (count == 0 and left_ns > reg[at.R_SPIN_NS] + TURN_NS) or backlog > MAX_BACKLOG:
                event = handle_events(reg, count)
                return at.E_SLACK if event == at.GO_ON else event
        else:
            arm_timer(reg, next_ns - reg[at.R_SPIN_NS] if next_ns else 0)
            count = wait_for_events(reg, HEARTBEAT_MS)
            reg[at.R_NUM_WAKEUPS] += 1
        event = handle_events(reg, count)
        if event != at.GO_ON:
            return event
        if count and reg[at.R_NUM_URGENT] == 0:
            nap_end_ns = clock_ns(reg) + NAP_NS
            if not reg[at.R_HEAP_LEN] or nap_end_ns + NAP_NS + reg[at.R_SPIN_NS] < table.deadlines(reg)[0, at.H_AT_NS]:
                nap(reg, nap_end_ns)


# -- the door for the interpreter -------------------------------------------------------------------------------------

# One function, since each door would be compiled with everything behind it.
LOOP, PLAN_SEND, PREPARE, SEND_NOW, SEND_MORE, TAKE_AGAIN, RECEIVE_NOW = range(7)


@compiled
def drive(reg: IntArray, what: int, subject: int) -> int:
    """Do one thing; why the interpreter is needed after it (E_...), with the subject in R_FD, R_ABOUT and R_DETAIL.

    E_NO_ROOM, for any of them: something would have been written outside its table, and was not.

    LOOP: send, take and go on until the interpreter is needed. PLAN_SEND: queue row ``subject`` for its due instant,
    which is written. PREPARE: build the row's prompt from its session's text; E_NOT_READY when the text is shorter than
    what it keeps. SEND_NOW: send the row. SEND_MORE: go on with a request that the kernel took in part, on
    descriptor ``subject``. TAKE_AGAIN: look again at the descriptor's last receive. RECEIVE_NOW: take what it received.
    """
    if what == LOOP:
        return run_loop(reg)
    of_row = what in (PLAN_SEND, PREPARE, SEND_NOW)
    if subject < 0 or subject >= (reg[at.R_NUM_ROW] if of_row else reg[at.R_NUM_CONN]):
        return at.E_NO_ROOM
    if what == PLAN_SEND:
        return at.GO_ON if plan_send(reg, subject, table.due_ns(reg)[subject], clock_ns(reg)) else at.E_NO_ROOM
    if what == PREPARE:
        return build_prompt(reg, subject)
    if what == SEND_NOW:
        return send_row(reg, subject)
    reg[at.R_FD] = subject
    if what == SEND_MORE:
        return send_rest(reg, subject)
    if what == TAKE_AGAIN:
        return take_piece(reg, subject)
    return on_readable(reg, subject)


@lru_cache(maxsize=1)
def warm_up() -> None:
    """Have the machine code ready: compiled once for this machine, then loaded (about 0.2 s)."""
    tables = at.SharedTables(1, 1)
    # A beat is due, so the loop returns at once.
    drive(tables.reg, LOOP, 0)


if __name__ == "__main__":
    # Under its own name, since code is cached by module.
    from harness.live.client.wire.core import warm_up as warm_up_for_all

    warm_up_for_all()
