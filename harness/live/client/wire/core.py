"""The compiled loop: sends at absolute deadlines, never early; stamps; ends of answers; the session's next request.

It runs without the interpreter's lock until something needs the interpreter, and then returns an event; it opens and
closes nothing, and gives no answer its final status. Next: ``replay`` answers the events.
"""

from __future__ import annotations

from functools import lru_cache

from harness.clock import NS_PER_MS, NS_PER_S, NS_PER_US
from harness.engine.compiled import compiled_viewing as compiled
from harness.engine.compiled import inner_viewing as inner
from harness.live.client.wire import layout as at
from harness.live.client.wire import table
from harness.live.client.wire.layout import IntArray
from harness.live.client.wire.scan import begin_scan, take_chunked, take_counted
from harness.live.client.wire.syscalls import (
    EAGAIN,
    EINTR,
    EVENT_DATA_WORD,
    EVENT_WORDS,
    STAMP_MARK,
    arm_timer,
    bytes_at,
    clock_ns,
    epoll_wait,
    errno,
    ints_at,
    memchr,
    memcmp,
    memmem,
    nap,
    put,
    put_number,
    receive_bytes,
    send_parts,
    wide,
    words_at,
)

EPOLLIN = 1
HEARTBEAT_MS = 50
HEARTBEAT_NS = HEARTBEAT_MS * NS_PER_MS
# Below this the final spin only reads the clock; above it, it also looks for arrivals.
BARE_SPIN_NS = 25 * NS_PER_US
# A kept connection that idled longer is replaced before it is used: servers close idle ones after a few seconds
# (uvicorn: 5 s), and a request sent in that very moment would be lost.
FRESH_AFTER_IDLE_NS = NS_PER_S
FRESH_LEAD_NS = 250 * NS_PER_MS
# With more than this to interpret, a turn for it is taken even when there is no slack.
MAX_BACKLOG = at.JOURNAL_ENTRIES // 4
# What a turn of the interpreter may cost: none begins when a send is due sooner.
TURN_NS = 150 * NS_PER_US
# The interpreter has a turn when so much waits for it that the switch is worth while, or when nothing comes for a bit:
# soon when it has something to prepare, else not so soon, since a near timeout makes each wait dearer.
WORTH_A_TURN = 16
QUIET_MS = 2
# While nothing that comes in can make a send due, it is taken in company: the kernel stamps each arrival, and one
# waking costs as much as taking three. An answer with so many tokens to come is not at its end.
NAP_NS = 100 * NS_PER_US
FAR_FROM_END_TOKENS = 8
COMMA = 44


# -- time -------------------------------------------------------------------------------------------------------------


@inner
def to_clock_ns(reg: IntArray, monotonic_ns: int) -> int:
    """``ScaledClock.from_monotonic_ns``, in parts so that no product overflows."""
    numerator, denominator = reg[at.R_NUMERATOR], reg[at.R_DENOMINATOR]
    whole, rest = monotonic_ns // denominator, monotonic_ns % denominator
    return whole * numerator + rest * numerator // denominator


@inner
def to_monotonic_ns(reg: IntArray, clock_ns: int) -> int:
    """``ScaledClock.to_monotonic_ns``: rounded up, so that no wait ends early."""
    numerator, denominator = reg[at.R_NUMERATOR], reg[at.R_DENOMINATOR]
    whole, rest = clock_ns // numerator, clock_ns % numerator
    return whole * denominator - (-rest * denominator // numerator)


# -- deadlines --------------------------------------------------------------------------------------------------------


@inner
def is_before(heap: IntArray, one: int, other: int) -> bool:
    """Earlier first; at one instant in the order of kinds, then of rows."""
    for column in range(at.HEAP_WIDTH):
        if heap[one, column] != heap[other, column]:
            return heap[one, column] < heap[other, column]
    return False


@inner
def swap(heap: IntArray, one: int, other: int) -> None:
    """Exchange two entries."""
    for column in range(at.HEAP_WIDTH):
        heap[one, column], heap[other, column] = heap[other, column], heap[one, column]


@inner
def push(reg: IntArray, at_ns: int, kind: int, row: int) -> None:
    """Add a deadline; each row has at most one of each kind at a time."""
    heap, place = table.deadlines(reg), reg[at.R_HEAP_LEN]
    reg[at.R_HEAP_LEN] = place + 1
    heap[place, at.H_AT_NS], heap[place, at.H_KIND], heap[place, at.H_ROW] = at_ns, kind, row
    while place and is_before(heap, place, (place - 1) // 2):
        swap(heap, place, (place - 1) // 2)
        place = (place - 1) // 2


@inner
def pop(reg: IntArray) -> None:
    """Remove the first deadline."""
    heap = table.deadlines(reg)
    last = reg[at.R_HEAP_LEN] - 1
    reg[at.R_HEAP_LEN] = last
    swap(heap, 0, last)
    place = 0
    while True:
        least = place
        for child in (2 * place + 1, 2 * place + 2):
            if child < last and is_before(heap, child, least):
                least = child
        if least == place:
            return
        swap(heap, place, least)
        place = least


@inner
def plan_send(reg: IntArray, row: int, due_ns: int, now_ns: int) -> None:
    """A send at ``due_ns`` (clock), and a fresh connection before it when the old one would idle for long."""
    due_monotonic_ns = to_monotonic_ns(reg, due_ns)
    push(reg, due_monotonic_ns, at.SEND, row)
    if due_monotonic_ns - now_ns > FRESH_AFTER_IDLE_NS:
        push(reg, due_monotonic_ns - FRESH_LEAD_NS, at.REFRESH, row)


# -- the session's next prompt ----------------------------------------------------------------------------------------


@inner
def cut_stream(session: IntArray, keep_tokens: int) -> None:
    """Keep the first ids of a session's text."""
    if keep_tokens == 0:
        session[at.S_BYTES] = 0
    elif keep_tokens < session[at.S_TOKENS]:
        place, end = session[at.S_STREAM], session[at.S_STREAM] + session[at.S_BYTES]
        for _ in range(keep_tokens):
            place = memchr(place, COMMA, end - place) + 1
        session[at.S_BYTES] = place - 1 - session[at.S_STREAM]
    session[at.S_TOKENS] = keep_tokens


@inner
def build_prompt(reg: IntArray, row: int) -> bool:
    """Bring a session's text to what this request sends; False when the text is shorter than what it keeps.

    The text holds everything up to the answer before. The request's fresh part must have been drawn.
    """
    line = table.rows(reg)[row]
    session = table.sessions(reg)[line[at.Q_SESSION]]
    if line[at.Q_KEEP_TOKENS] > session[at.S_TOKENS]:
        return False
    cut_stream(session, line[at.Q_KEEP_TOKENS])
    to = session[at.S_STREAM] + session[at.S_BYTES]
    if line[at.Q_FRESH_BYTES]:
        if session[at.S_BYTES]:
            bytes_at(to, 1)[0] = COMMA
            to += 1
        to = put(to, line[at.Q_FRESH], line[at.Q_FRESH_BYTES])
    session[at.S_BYTES] = to - session[at.S_STREAM]
    session[at.S_TOKENS] += line[at.Q_FRESH_TOKENS]
    line[at.Q_PROMPT], line[at.Q_PROMPT_BYTES] = session[at.S_STREAM], session[at.S_BYTES]
    line[at.Q_STATE] = at.READY
    return True


@inner
def set_urgent(reg: IntArray, conn: IntArray, is_urgent: int) -> None:
    """Note whether a connection's next receive may be the first or the last of an answer."""
    reg[at.R_NUM_URGENT] += is_urgent - conn[at.N_IS_URGENT]
    conn[at.N_IS_URGENT] = is_urgent


# -- sending ----------------------------------------------------------------------------------------------------------


@inner
def put_text(reg: IntArray, to: int, which: int) -> int:
    """One of the fixed texts of a request; the address after it."""
    return put(to, reg[which], reg[which + 1])


@inner
def put_request_id(reg: IntArray, to: int, line: IntArray) -> int:
    """``<nonce>-<session>-<request>``; the address after it."""
    dash = 45
    to = put_text(reg, to, at.R_TEXT_NONCE)
    bytes_at(to, 1)[0] = dash
    to = put_number(to + 1, line[at.Q_SESSION])
    bytes_at(to, 1)[0] = dash
    return put_number(to + 1, line[at.Q_REQUEST])


@inner
def num_digits(number: int) -> int:
    """Decimal digits of a non-negative number."""
    digits = 1
    while number >= 10:
        number //= 10
        digits += 1
    return digits


@inner
def write_request(reg: IntArray, line: IntArray) -> int:
    """Describe a request in R_IOV as head, prompt and tail; all its bytes."""
    tail_at = reg[at.R_OUT]
    end = put_text(reg, tail_at, at.R_TEXT_TOKENS)
    end = put_number(end, line[at.Q_GENERATE_TOKENS])
    end = put_text(reg, end, at.R_TEXT_OPTIONS)
    end = put_request_id(reg, end, line)
    end = put_text(reg, end, at.R_TEXT_END)
    tail_bytes = end - tail_at
    head_at = end
    to = put_text(reg, head_at, at.R_TEXT_POST)
    to = put_request_id(reg, to, line)
    to = put_text(reg, to, at.R_TEXT_LENGTH)
    to = put_number(to, reg[at.R_TEXT_PROMPT + 1] - 4 + line[at.Q_PROMPT_BYTES] + tail_bytes)
    # The blank line, which ends the head, and the beginning of the body.
    to = put_text(reg, to, at.R_TEXT_PROMPT)
    reg[at.R_IOV], reg[at.R_IOV + 1] = head_at, to - head_at
    reg[at.R_IOV + 2], reg[at.R_IOV + 3] = line[at.Q_PROMPT], line[at.Q_PROMPT_BYTES]
    reg[at.R_IOV + 4], reg[at.R_IOV + 5] = tail_at, tail_bytes
    return to - head_at + line[at.Q_PROMPT_BYTES] + tail_bytes


@inner
def send_rest(reg: IntArray, fd: int) -> int:
    """Hand the kernel what it has not taken of a connection's request."""
    conn = table.conns(reg)[fd]
    total = write_request(reg, table.rows(reg)[conn[at.N_ROW]])
    skip, first = conn[at.N_TAKEN_BYTES], 0
    while first < 2 and skip >= reg[at.R_IOV + 2 * first + 1]:
        skip -= reg[at.R_IOV + 2 * first + 1]
        first += 1
    reg[at.R_IOV + 2 * first] += skip
    reg[at.R_IOV + 2 * first + 1] -= skip
    taken = send_parts(reg, fd, first, 3 - first)
    reg[at.R_FD], reg[at.R_ABOUT] = fd, conn[at.N_ROW]
    if taken < 0:
        reason = errno()
        if reason != EAGAIN:
            reg[at.R_DETAIL] = reason
            return at.E_SEND_FAILED
        taken = 0
    conn[at.N_TAKEN_BYTES] += taken
    conn[at.N_REQUEST_BYTES] = total
    return at.GO_ON if conn[at.N_TAKEN_BYTES] == total else at.E_SENT_IN_PART


@inner
def send_row(reg: IntArray, row: int) -> int:
    """Send a request now, if its prompt and a connection are there."""
    line = table.rows(reg)[row]
    reg[at.R_ABOUT] = row
    if line[at.Q_STATE] == at.GIVEN_UP:
        return at.GO_ON
    if line[at.Q_STATE] != at.READY:
        return at.E_NOT_READY
    session = line[at.Q_SESSION]
    fd = table.sessions(reg)[session, at.S_FD]
    if fd < 0 or table.conns(reg)[fd, at.N_MODE] != at.IDLE:
        return at.E_NO_CONNECTION
    conn = table.conns(reg)[fd]
    conn[at.N_ROW] = row
    conn[at.N_TAKEN_BYTES] = 0
    conn[at.N_MODE] = at.AWAIT_HEAD
    conn[at.N_KEEPS_IDS] = line[at.Q_IS_CONTINUED]
    table.sessions(reg)[session, at.S_ANSWER_AT] = table.sessions(reg)[session, at.S_BYTES]
    begin_scan(conn)
    set_urgent(reg, conn, 1)
    # Stamped before the call: on loopback the server may answer before it returns.
    table.sent_ns(reg)[row] = clock_ns(reg)
    return send_rest(reg, fd)


# -- receiving --------------------------------------------------------------------------------------------------------


@inner
def room_in_ring(reg: IntArray, count: int) -> int:
    """The place of ``count`` free bytes in a row, -1 when the interpreter must read first."""
    written = reg[at.R_RING_WRITTEN]
    over = written % at.RING_BYTES + count - at.RING_BYTES
    if over > 0:
        written += count - over
    if written + count - reg[at.R_RING_READ] > at.RING_BYTES:
        return -1
    if reg[at.R_JOURNAL_WRITTEN] + 4 - reg[at.R_JOURNAL_READ] > at.JOURNAL_ENTRIES:
        return -1
    reg[at.R_RING_WRITTEN] = written
    return written


@inner
def note_piece(reg: IntArray, conn: IntArray) -> IntArray:
    """Write the journal entry of a connection's last receive."""
    conn[at.N_ENTRY] = reg[at.R_JOURNAL_WRITTEN] % at.JOURNAL_ENTRIES
    reg[at.R_JOURNAL_WRITTEN] += 1
    entry = table.journal(reg)[conn[at.N_ENTRY]]
    entry[at.J_ROW], entry[at.J_MODE] = conn[at.N_ROW], conn[at.N_MODE]
    entry[at.J_AT], entry[at.J_BYTES], entry[at.J_NS] = conn[at.N_PIECE_AT], conn[at.N_PIECE_BYTES], conn[at.N_PIECE_NS]
    entry[at.J_KERNEL_NS] = conn[at.N_PIECE_KERNEL_NS]
    entry[at.J_NUM_EVENTS] = entry[at.J_END] = entry[at.J_IDS_BYTES] = 0
    entry[at.J_RING_END] = reg[at.R_RING_WRITTEN]
    conn[at.N_NUM_EVENTS] = 0
    return entry


@inner
def on_readable(reg: IntArray, fd: int) -> int:
    """Take what a connection has received, stamp it, and find out what it completes."""
    conn = table.conns(reg)[fd]
    reg[at.R_FD] = fd
    place = room_in_ring(reg, at.RECEIVE_BYTES)
    if place < 0:
        return at.E_FULL
    count = receive_bytes(reg, fd, reg[at.R_RING] + place % at.RING_BYTES, at.RECEIVE_BYTES)
    received_ns = clock_ns(reg)
    if count < 0:
        reason = errno()
        if reason in (EAGAIN, EINTR):
            return at.GO_ON
        reg[at.R_DETAIL] = reason
        return at.E_RECEIVE_FAILED
    if conn[at.N_MODE] == at.IDLE:
        return at.E_OUT_OF_TURN  # closed, or talking while nothing was asked
    if count == 0:
        return at.E_CLOSED
    reg[at.R_RING_WRITTEN] += count
    conn[at.N_PIECE_AT], conn[at.N_PIECE_BYTES], conn[at.N_PIECE_NS] = place, count, received_ns
    has_stamp = reg[at.R_CONTROL + 1] == STAMP_MARK
    stamp_ns = reg[at.R_CONTROL + 2] * NS_PER_S + reg[at.R_CONTROL + 3]
    conn[at.N_PIECE_KERNEL_NS] = stamp_ns if has_stamp else at.ABSENT
    return take_piece(reg, fd)


@inner
def take_piece(reg: IntArray, fd: int) -> int:
    """Look at the connection's last receive."""
    conn = table.conns(reg)[fd]
    place, count, row = conn[at.N_PIECE_AT], conn[at.N_PIECE_BYTES], conn[at.N_ROW]
    address = reg[at.R_RING] + place % at.RING_BYTES
    head_bytes = 0
    if conn[at.N_MODE] == at.AWAIT_HEAD:
        if table.first_byte_ns(reg)[row] == at.ABSENT:
            table.first_byte_ns(reg)[row] = conn[at.N_PIECE_NS]
        head_bytes = find_head(reg, conn, row, address, count)
        if head_bytes < 0:
            return at.E_NEW_HEAD
    mode = conn[at.N_MODE]
    entry = note_piece(reg, conn)
    if mode == at.FOREIGN:
        return at.E_FOREIGN
    body_at, body_bytes = address + head_bytes, count - head_bytes
    if mode == at.COUNTED:
        if body_bytes > conn[at.N_LEFT]:
            return at.E_TOO_MUCH
        take_counted(reg, fd, body_at, body_bytes)
        return finish(reg, fd) if conn[at.N_LEFT] == 0 else at.GO_ON
    used = take_chunked(reg, fd, body_at, body_bytes)
    entry[at.J_NUM_EVENTS] = conn[at.N_NUM_EVENTS]
    if conn[at.N_CHUNK_MODE] < at.CHUNK_OVER:
        tokens_to_come = table.rows(reg)[row, at.Q_GENERATE_TOKENS] - conn[at.N_NUM_IDS]
        has_begun = conn[at.N_NUM_IDS] > 0
        set_urgent(reg, conn, 0 if has_begun and tokens_to_come > FAR_FROM_END_TOKENS else 1)
        return at.GO_ON
    if conn[at.N_CHUNK_MODE] == at.CHUNK_ODD:
        conn[at.N_MODE] = at.FOREIGN
        return at.E_FOREIGN
    return finish(reg, fd) if used == body_bytes else at.E_TOO_MUCH


@inner
def find_head(reg: IntArray, conn: IntArray, row: int, address: int, count: int) -> int:
    """Learn from a known head how the body ends; the head's bytes, -1 when this head was never seen before.

    A head that does not come whole in the first receive is left to the HTTP parser, with all that follows.
    """
    conn[at.N_MODE] = at.FOREIGN
    end = memmem(address, count, reg[at.R_TEXT_PROMPT], 4)
    if end == 0:
        return 0
    size = end + 4 - address
    if size > at.MAX_HEAD_BYTES:
        return 0
    for place in range(min(reg[at.R_NUM_HEADS], at.MAX_HEADS)):
        base = reg[at.R_HEADS] + place * at.HEAD_STRIDE
        known = ints_at(base, at.HEAD_FIELDS)
        if known[0] == size and memcmp(base + 8 * at.HEAD_FIELDS, address, size) == 0:
            if known[1] == 0:
                return 0
            table.http_status(reg)[row] = known[1]
            conn[at.N_LEFT], conn[at.N_IS_KEPT_ALIVE] = known[2], known[3]
            conn[at.N_MODE] = at.COUNTED if known[2] else at.CHUNKED
            return size
    conn[at.N_MODE] = at.AWAIT_HEAD
    reg[at.R_ABOUT], reg[at.R_DETAIL] = row, size
    return -1


# -- ends of answers --------------------------------------------------------------------------------------------------


@inner
def is_as_planned(reg: IntArray, conn: IntArray, line: IntArray) -> bool:
    """Whether the scanner saw exactly what the plan asks for, so that the session can go on at once."""
    generate_tokens = line[at.Q_GENERATE_TOKENS]
    return (
        reg[at.R_HAS_TOKEN_IDS] == 1
        and conn[at.N_IS_ODD] == 0
        and conn[at.N_NUM_IDS] == generate_tokens
        and conn[at.N_COMPLETION_TOKENS] == generate_tokens
        and conn[at.N_PROMPT_TOKENS] == line[at.Q_PROMPT_TOKENS]
        and (conn[at.N_HAS_DONE] == 1 or reg[at.R_STREAMS] == 0)
        and conn[at.N_TAKEN_BYTES] == conn[at.N_REQUEST_BYTES]
    )


@inner
def finish(reg: IntArray, fd: int) -> int:
    """The answer is complete: on with the session when it is as planned, else to the interpreter."""
    conn = table.conns(reg)[fd]
    row, done_ns = conn[at.N_ROW], conn[at.N_PIECE_NS]
    line = table.rows(reg)[row]
    session = table.sessions(reg)[line[at.Q_SESSION]]
    entry = table.journal(reg)[conn[at.N_ENTRY]]
    table.done_ns(reg)[row] = done_ns
    conn[at.N_MODE] = at.IDLE
    set_urgent(reg, conn, 0)
    is_planned = is_as_planned(reg, conn, line) and table.http_status(reg)[row] == 200
    if is_planned and line[at.Q_IS_CONTINUED]:
        # Behind a prompt the ids begin with a comma.
        answer_at = session[at.S_ANSWER_AT] + (1 if session[at.S_ANSWER_AT] else 0)
        size = session[at.S_BYTES] - answer_at
        place = room_in_ring(reg, size)
        if place < 0:
            is_planned = False
        else:
            put(reg[at.R_RING] + place % at.RING_BYTES, session[at.S_STREAM] + answer_at, size)
            reg[at.R_RING_WRITTEN] += size
            entry[at.J_IDS_AT], entry[at.J_IDS_BYTES] = place, size
            entry[at.J_RING_END] = reg[at.R_RING_WRITTEN]
    if not is_planned:
        # What the scanner appended may be wrong; the interpreter will append what the parsers say.
        session[at.S_BYTES] = session[at.S_ANSWER_AT]
    elif line[at.Q_IS_CONTINUED]:
        session[at.S_TOKENS] += line[at.Q_GENERATE_TOKENS]
    goes_on = is_planned and not line[at.Q_IS_LAST] and conn[at.N_IS_KEPT_ALIVE] == 1 and go_on(reg, row, done_ns)
    entry[at.J_END] = at.GOES_ON if goes_on else at.AS_PLANNED if is_planned else at.NOT_AS_PLANNED
    reg[at.R_FD], reg[at.R_ABOUT] = fd, row
    return at.GO_ON if goes_on else at.E_COMPLETE


@inner
def go_on(reg: IntArray, row: int, done_ns: int) -> bool:
    """Make the session's next request due and build it; False when its fresh part has not been drawn yet."""
    following = table.rows(reg)[row + 1]
    if following[at.Q_FRESH] == 0 or not build_prompt(reg, row + 1):
        return False
    trigger_ns = to_clock_ns(reg, done_ns)
    due_ns = trigger_ns + table.rows(reg)[row, at.Q_WAIT_NS]
    table.trigger_ns(reg)[row + 1], table.due_ns(reg)[row + 1] = trigger_ns, due_ns
    plan_send(reg, row + 1, due_ns, done_ns)
    return True


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
        mode = table.conns(reg)[fd, at.N_MODE] if fd < reg[at.R_NUM_CONN] else at.ABSENT_MODE
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

    LOOP: send, take and go on until the interpreter is needed. PLAN_SEND: queue row ``subject`` for its due instant,
    which is written. PREPARE: build the row's prompt from its session's text; GO_ON, or E_NOT_READY when the text is
    shorter than what it keeps. SEND_NOW: send the row. SEND_MORE: go on with a request that the kernel took in part, on
    descriptor ``subject``. TAKE_AGAIN: look again at the descriptor's last receive. RECEIVE_NOW: take what it received.
    """
    if what == LOOP:
        return run_loop(reg)
    if what == PLAN_SEND:
        plan_send(reg, subject, table.due_ns(reg)[subject], clock_ns(reg))
        return at.GO_ON
    if what == PREPARE:
        return at.GO_ON if build_prompt(reg, subject) else at.E_NOT_READY
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
