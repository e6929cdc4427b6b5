"""What comes in: each receive is stamped, kept in the ring, entered in the journal, and looked at for an end; compiled.

An answer that ends as planned lets its session go on at once; everything else is an event. Next: ``core``.
"""

from __future__ import annotations

from harness.clock import NS_PER_S
from harness.compiled import inner_viewing as inner
from harness.live.client.wire import layout as at
from harness.live.client.wire import table
from harness.live.client.wire.deadlines import plan_send, to_clock_ns
from harness.live.client.wire.layout import IntArray
from harness.live.client.wire.scan import take_chunked, take_counted
from harness.live.client.wire.sending import build_prompt, set_urgent
from harness.live.client.wire.syscalls import (
    EAGAIN,
    EINTR,
    STAMP_MARK,
    clock_ns,
    errno,
    ints_at,
    memcmp,
    memmem,
    put,
    receive_bytes,
)

# An answer with so many tokens to come is not at its end.
FAR_FROM_END_TOKENS = 8


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
            return hand_over(reg, conn, at.E_TOO_MUCH)
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
        return hand_over(reg, conn, at.E_FOREIGN)
    return finish(reg, fd) if used == body_bytes else hand_over(reg, conn, at.E_TOO_MUCH)


@inner
def hand_over(reg: IntArray, conn: IntArray, event: int) -> int:
    """Leave an answer to the interpreter, which carries its ids itself: what the scanner appended is forgotten."""
    session = table.sessions(reg)[conn[at.N_SESSION]]
    session[at.S_BYTES] = session[at.S_ANSWER_AT]
    conn[at.N_KEEPS_IDS] = 0
    return event


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
        place = room_in_ring(reg, size) if size > 0 else -1
        if place < 0:
            is_planned = False
        else:
            ring_end = reg[at.R_RING] + at.RING_BYTES
            put(reg[at.R_RING] + place % at.RING_BYTES, ring_end, session[at.S_STREAM] + answer_at, size)
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
    """Make the session's next request due and build it; False when that needs the interpreter."""
    following = table.rows(reg)[row + 1]
    # Both deadlines of a row may need room.
    if following[at.Q_FRESH] == 0 or reg[at.R_HEAP_LEN] + 2 > 2 * reg[at.R_NUM_ROW] + 1:
        return False
    if build_prompt(reg, row + 1) != at.GO_ON:
        return False
    trigger_ns = to_clock_ns(reg, done_ns)
    due_ns = trigger_ns + table.rows(reg)[row, at.Q_WAIT_NS]
    table.trigger_ns(reg)[row + 1], table.due_ns(reg)[row + 1] = trigger_ns, due_ns
    plan_send(reg, row + 1, due_ns, done_ns)
    return True
