"""What comes in: each receive is stamped, kept in the ring, entered in the journal, and looked at for an end; compiled.

An answer that ends as planned lets its session go on at once; everything else is an event. Next: ``core``.
"""

from __future__ import annotations

from harness.clock import NS_PER_S
from harness.compiled import inner
from harness.live.client.wire import chunks, events
from harness.live.client.wire.deadlines import plan_send, to_clock_ns
from harness.live.client.wire.layout import (
    ABSENT,
    DEADLINES_PER_REQUEST,
    END_AS_PLANNED,
    END_GOES_ON,
    END_NOT_AS_PLANNED,
    HEAD_FIELDS_BYTES,
    HEAD_STRIDE,
    JOURNAL_ENTRIES,
    MAX_HEAD_BYTES,
    MAX_HEADS,
    MODE_AWAIT_HEAD,
    MODE_CHUNKED,
    MODE_COUNTED,
    MODE_FOREIGN,
    MODE_IDLE,
    RECEIVE_BYTES,
    RING_BYTES,
    TEXT_PROMPT,
    ConnectionState,
    Receive,
    Registers,
    RequestState,
    SessionState,
    connection_at,
    control_at,
    http_status_at,
    instant_at,
    known_head_at,
    receive_at,
    request_at,
    session_at,
    span_at,
)
from harness.live.client.wire.scan import scan
from harness.live.client.wire.sending import BLANK_LINE_BYTES, build_prompt, set_urgent
from harness.live.client.wire.syscalls import (
    EAGAIN,
    EINTR,
    STAMP_MARK,
    clock_ns,
    errno,
    memcmp,
    memmem,
    receive_bytes,
)
from harness.live.client.wire.texts import put

# An answer with so many tokens to come is not at its end.
FAR_FROM_END_TOKENS = 8


@inner
def room_in_ring(reg: Registers, count: int) -> int:
    """The place of ``count`` free bytes in a row, -1 when the interpreter must read first."""
    written = reg.ring_written
    over = written % RING_BYTES + count - RING_BYTES
    if over > 0:
        written += count - over
    if written + count - reg.ring_read > RING_BYTES:
        return -1
    if reg.journal_written + 4 - reg.journal_read > JOURNAL_ENTRIES:
        return -1
    reg.ring_written = written
    return written


@inner
def note_piece(reg: Registers, connection: ConnectionState) -> Receive:
    """Write the journal entry of a connection's last receive."""
    connection.entry = reg.journal_written % JOURNAL_ENTRIES
    reg.journal_written += 1
    entry = receive_at(reg.receives_at, connection.entry)
    entry.row, entry.mode = connection.row, connection.mode
    entry.place, entry.num_bytes = connection.piece_place, connection.piece_bytes
    entry.received_ns, entry.kernel_ns = connection.piece_ns, connection.piece_kernel_ns
    entry.num_events = entry.end = entry.ids_bytes = 0
    entry.ring_end = reg.ring_written
    connection.num_events = 0
    return entry


@inner
def on_readable(reg: Registers, fd: int) -> int:
    """Take what a connection has received, stamp it, and find out what it completes."""
    connection = connection_at(reg.connections_at, fd)
    reg.event_fd = fd
    place = room_in_ring(reg, RECEIVE_BYTES)
    if place < 0:
        return events.FULL
    count = receive_bytes(reg, fd, reg.ring_at + place % RING_BYTES, RECEIVE_BYTES)
    received_ns = clock_ns(reg)
    if count < 0:
        reason = errno()
        if reason in (EAGAIN, EINTR):
            return events.GO_ON
        reg.event_detail = reason
        return events.RECEIVE_FAILED
    if connection.mode == MODE_IDLE:
        return events.OUT_OF_TURN  # closed, or talking while nothing was asked
    if count == 0:
        return events.CLOSED
    reg.ring_written += count
    connection.piece_place, connection.piece_bytes, connection.piece_ns = place, count, received_ns
    control = control_at(reg.control_at, 0)
    stamp_ns = control.seconds * NS_PER_S + control.nanoseconds
    connection.piece_kernel_ns = stamp_ns if control.mark == STAMP_MARK else ABSENT
    return take_piece(reg, connection)


@inner
def take_piece(reg: Registers, connection: ConnectionState) -> int:
    """Look at the connection's last receive."""
    row, count = connection.row, connection.piece_bytes
    address = reg.ring_at + connection.piece_place % RING_BYTES
    head_bytes = 0
    if connection.mode == MODE_AWAIT_HEAD:
        first_byte = instant_at(reg.first_byte_at, row)
        if first_byte.ns == ABSENT:
            first_byte.ns = connection.piece_ns
        head_bytes = find_head(reg, connection, address)
        if head_bytes < 0:
            return events.NEW_HEAD
    mode = connection.mode
    entry = note_piece(reg, connection)
    if mode == MODE_FOREIGN:
        return events.FOREIGN
    session = session_at(reg.sessions_at, connection.session)
    body_at, body_bytes = address + head_bytes, count - head_bytes
    if mode == MODE_COUNTED:
        if body_bytes > connection.left_bytes:
            return hand_over(reg, connection, events.TOO_MUCH)
        scan(connection, session, body_at, body_at + body_bytes)
        connection.left_bytes -= body_bytes
        return finish(reg, connection) if connection.left_bytes == 0 else events.GO_ON
    used = chunks.take_chunked(connection, session, body_at, body_bytes)
    entry.num_events = connection.num_events
    request = request_at(reg.requests_at, row)
    if 0 < request.abort_tokens <= connection.num_ids:
        reg.event_row = row
        return hand_over(reg, connection, events.LEAVE)
    if connection.chunk_mode < chunks.OVER:
        last = request.abort_tokens if request.abort_tokens > 0 else request.generate_tokens
        tokens_to_come = last - connection.num_ids
        set_urgent(reg, connection, 0 if connection.num_ids > 0 and tokens_to_come > FAR_FROM_END_TOKENS else 1)
        return events.GO_ON
    if connection.chunk_mode == chunks.ODD:
        connection.mode = MODE_FOREIGN
        return hand_over(reg, connection, events.FOREIGN)
    return finish(reg, connection) if used == body_bytes else hand_over(reg, connection, events.TOO_MUCH)


@inner
def hand_over(reg: Registers, connection: ConnectionState, event: int) -> int:
    """Leave an answer to the interpreter, which carries its ids itself: what the scanner appended is forgotten."""
    session = session_at(reg.sessions_at, connection.session)
    session.used_bytes = session.answer_from
    connection.keeps_ids = 0
    return event


@inner
def find_head(reg: Registers, connection: ConnectionState, address: int) -> int:
    """Learn from a known head how the body ends; the head's bytes, -1 when this head was never seen before.

    A head that does not come whole in the first receive is left to the HTTP parser, with all that follows.
    """
    connection.mode = MODE_FOREIGN
    # The text that opens a prompt begins with the blank line that ends a head.
    blank_line_at = span_at(reg.texts_at, TEXT_PROMPT).start_at
    end = memmem(address, connection.piece_bytes, blank_line_at, BLANK_LINE_BYTES)
    if end == 0:
        return 0
    size = end + BLANK_LINE_BYTES - address
    if size > MAX_HEAD_BYTES:
        return 0
    for place in range(min(reg.num_heads, MAX_HEADS)):
        head_at = reg.heads_at + place * HEAD_STRIDE
        head = known_head_at(head_at, 0)
        if head.num_bytes == size and memcmp(head_at + HEAD_FIELDS_BYTES, address, size) == 0:
            if head.status == 0:
                return 0
            http_status_at(reg.http_status_at, connection.row).code = head.status
            connection.left_bytes, connection.is_kept_alive = head.body_bytes, head.is_kept_alive
            connection.mode = MODE_COUNTED if head.body_bytes else MODE_CHUNKED
            return size
    connection.mode = MODE_AWAIT_HEAD
    reg.event_row, reg.event_detail = connection.row, size
    return -1


@inner
def is_as_planned(reg: Registers, connection: ConnectionState, request: RequestState) -> bool:
    """Whether the scanner saw exactly what the plan asks for, so that the session can go on at once."""
    return (
        reg.has_token_ids == 1
        and connection.is_odd == 0
        and connection.num_ids == request.generate_tokens
        and connection.completion_tokens == request.generate_tokens
        and connection.prompt_tokens == request.prompt_tokens
        and (connection.has_done == 1 or reg.is_streamed == 0)
        and connection.taken_bytes == connection.request_bytes
        and http_status_at(reg.http_status_at, connection.row).code == 200
    )


@inner
def finish(reg: Registers, connection: ConnectionState) -> int:
    """The answer is complete: on with the session when it is as planned, else to the interpreter."""
    row, done_ns = connection.row, connection.piece_ns
    request = request_at(reg.requests_at, row)
    session = session_at(reg.sessions_at, request.session)
    entry = receive_at(reg.receives_at, connection.entry)
    instant_at(reg.done_at, row).ns = done_ns
    connection.mode = MODE_IDLE
    set_urgent(reg, connection, 0)
    is_planned = is_as_planned(reg, connection, request)
    if is_planned and request.is_continued:
        is_planned = keep_ids(reg, session, entry)
    if not is_planned:
        # What the scanner appended may be wrong; the interpreter will append what the parsers say.
        session.used_bytes = session.answer_from
    elif request.is_continued:
        session.num_tokens += request.generate_tokens
    goes_on = is_planned and not request.is_last and connection.is_kept_alive == 1 and go_on(reg, row, done_ns)
    entry.end = END_GOES_ON if goes_on else END_AS_PLANNED if is_planned else END_NOT_AS_PLANNED
    reg.event_row = row
    return events.GO_ON if goes_on else events.COMPLETE


@inner
def keep_ids(reg: Registers, session: SessionState, entry: Receive) -> bool:
    """Put the ids that were read into the ring, to be held to what the parsers read; False when there is no room."""
    # Behind a prompt the ids begin with a comma.
    answer_from = session.answer_from + (1 if session.answer_from else 0)
    size = session.used_bytes - answer_from
    place = room_in_ring(reg, size) if size > 0 else -1
    if place < 0:
        return False
    put(reg.ring_at + place % RING_BYTES, reg.ring_at + RING_BYTES, session.stream_at + answer_from, size)
    reg.ring_written += size
    entry.ids_place, entry.ids_bytes = place, size
    entry.ring_end = reg.ring_written
    return True


@inner
def go_on(reg: Registers, row: int, done_ns: int) -> bool:
    """Make the session's next request due and build it; False when that needs the interpreter."""
    # Both deadlines of a row may need room.
    if (
        request_at(reg.requests_at, row + 1).fresh_at == 0
        or reg.num_deadlines + 2 > DEADLINES_PER_REQUEST * reg.num_requests + 1
    ):
        return False
    if build_prompt(reg, row + 1) != events.GO_ON:
        return False
    trigger_ns = to_clock_ns(reg, done_ns)
    due_ns = trigger_ns + request_at(reg.requests_at, row).wait_ns
    instant_at(reg.trigger_at, row + 1).ns, instant_at(reg.due_at, row + 1).ns = trigger_ns, due_ns
    plan_send(reg, row + 1, due_ns, done_ns)
    return True
