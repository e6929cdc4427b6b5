"""Requests as bytes in place: a session's next prompt is built where it lies, and goes out in one call; compiled.

A send is stamped before the call, never after. Next: ``core`` sends what is due, ``receiving`` builds what comes next.
"""

from __future__ import annotations

from harness.compiled import inner
from harness.live.client.wire import events
from harness.live.client.wire.chunks import begin_answer
from harness.live.client.wire.deadlines import push
from harness.live.client.wire.layout import (
    DUE_ABORT,
    GIVEN_UP,
    MODE_AWAIT_HEAD,
    MODE_IDLE,
    READY,
    SPAN_BYTES,
    TEXT_END,
    TEXT_LENGTH,
    TEXT_NONCE,
    TEXT_OPTIONS,
    TEXT_POST,
    TEXT_PROMPT,
    TEXT_TOKENS,
    ConnectionState,
    Registers,
    RequestState,
    SessionState,
    connection_at,
    instant_at,
    request_at,
    session_at,
    span_at,
)
from harness.live.client.wire.syscalls import EAGAIN, clock_ns, errno, memchr, send_parts
from harness.live.client.wire.texts import COMMA, DASH, NO_ROOM, put, put_byte, put_number

BLANK_LINE_BYTES = 4


@inner
def cut_stream(session: SessionState, keep_tokens: int) -> bool:
    """Keep the first ids of a session's text; False when they are not there."""
    if keep_tokens < 0 or keep_tokens > session.num_tokens:
        return False
    if keep_tokens == 0:
        session.used_bytes = 0
    elif keep_tokens < session.num_tokens:
        place, end = session.stream_at, session.stream_at + session.used_bytes
        for _ in range(keep_tokens):
            comma = memchr(place, COMMA, end - place)
            if comma == 0:
                return False
            place = comma + 1
        session.used_bytes = place - 1 - session.stream_at
    session.num_tokens = keep_tokens
    return True


@inner
def build_prompt(reg: Registers, row: int) -> int:
    """Bring a session's text to what this request sends: GO_ON, or NOT_READY when the text is shorter than what it
    keeps, or NO_ROOM.

    The text holds everything up to the answer before. The request's fresh part must have been drawn.
    """
    request = request_at(reg.requests_at, row)
    session = session_at(reg.sessions_at, request.session)
    if not cut_stream(session, request.keep_tokens):
        return events.NOT_READY
    to = session.stream_at + session.used_bytes
    end = session.stream_at + session.room_bytes
    if request.fresh_bytes:
        if session.used_bytes:
            to = put_byte(to, end, COMMA)
        to = put(to, end, request.fresh_at, request.fresh_bytes)
        if to == NO_ROOM:
            return events.NO_ROOM
    session.used_bytes = to - session.stream_at
    session.num_tokens += request.fresh_tokens
    request.prompt_at, request.prompt_bytes = session.stream_at, session.used_bytes
    request.readiness = READY
    return events.GO_ON


@inner
def set_urgent(reg: Registers, connection: ConnectionState, is_urgent: int) -> None:
    """Note whether a connection's next receive may be the first or the last of an answer."""
    reg.num_urgent += is_urgent - connection.is_urgent
    connection.is_urgent = is_urgent


@inner
def put_text(reg: Registers, to: int, which: int) -> int:
    """One of the fixed texts of a request; as ``put``."""
    text = span_at(reg.texts_at, which)
    return put(to, reg.out_at + reg.out_bytes, text.start_at, text.num_bytes)


@inner
def put_request_id(reg: Registers, to: int, request: RequestState) -> int:
    """``<nonce>-<session>-<request>``; as ``put``."""
    room_end = reg.out_at + reg.out_bytes
    to = put_byte(put_text(reg, to, TEXT_NONCE), room_end, DASH)
    to = put_byte(put_number(to, room_end, request.session), room_end, DASH)
    return put_number(to, room_end, request.request)


@inner
def write_request(reg: Registers, request: RequestState) -> int:
    """Describe a request as three parts: head, prompt and tail; all its bytes, or NO_ROOM."""
    tail_at, room_end = reg.out_at, reg.out_at + reg.out_bytes
    end = put_text(reg, tail_at, TEXT_TOKENS)
    end = put_number(end, room_end, request.generate_tokens)
    end = put_text(reg, end, TEXT_OPTIONS)
    end = put_request_id(reg, end, request)
    end = put_text(reg, end, TEXT_END)
    tail_bytes = end - tail_at
    head_at = end
    to = put_text(reg, head_at, TEXT_POST)
    to = put_request_id(reg, to, request)
    to = put_text(reg, to, TEXT_LENGTH)
    opening_bytes = span_at(reg.texts_at, TEXT_PROMPT).num_bytes - BLANK_LINE_BYTES
    to = put_number(to, room_end, opening_bytes + request.prompt_bytes + tail_bytes)
    # The blank line, which ends the head, and the beginning of the body.
    to = put_text(reg, to, TEXT_PROMPT)
    if to == NO_ROOM:
        return NO_ROOM
    head, prompt, tail = span_at(reg.parts_at, 0), span_at(reg.parts_at, 1), span_at(reg.parts_at, 2)
    head.start_at, head.num_bytes = head_at, to - head_at
    prompt.start_at, prompt.num_bytes = request.prompt_at, request.prompt_bytes
    tail.start_at, tail.num_bytes = tail_at, tail_bytes
    return to - head_at + request.prompt_bytes + tail_bytes


@inner
def send_rest(reg: Registers, fd: int) -> int:
    """Hand the kernel what it has not taken of a connection's request."""
    connection = connection_at(reg.connections_at, fd)
    reg.event_fd, reg.event_row = fd, connection.row
    total = write_request(reg, request_at(reg.requests_at, connection.row))
    skip, first = connection.taken_bytes, 0
    if total == NO_ROOM or skip > total:
        return events.NO_ROOM
    while first < 2 and skip >= span_at(reg.parts_at, first).num_bytes:
        skip -= span_at(reg.parts_at, first).num_bytes
        first += 1
    part = span_at(reg.parts_at, first)
    part.start_at += skip
    part.num_bytes -= skip
    taken = send_parts(reg, fd, reg.parts_at + first * SPAN_BYTES, 3 - first)
    if taken < 0:
        reason = errno()
        if reason != EAGAIN:
            reg.event_detail = reason
            return events.SEND_FAILED
        taken = 0
    connection.taken_bytes += taken
    connection.request_bytes = total
    return events.GO_ON if connection.taken_bytes == total else events.SENT_IN_PART


@inner
def send_row(reg: Registers, row: int) -> int:
    """Send a request now, if its prompt and a connection are there."""
    request = request_at(reg.requests_at, row)
    reg.event_row = row
    if request.readiness == GIVEN_UP:
        return events.GO_ON
    if request.readiness != READY:
        return events.NOT_READY
    session = session_at(reg.sessions_at, request.session)
    fd = session.fd
    if fd < 0 or fd >= reg.num_connections or connection_at(reg.connections_at, fd).mode != MODE_IDLE:
        return events.NO_CONNECTION
    connection = connection_at(reg.connections_at, fd)
    connection.row = row
    connection.taken_bytes = 0
    connection.mode = MODE_AWAIT_HEAD
    connection.keeps_ids = request.is_continued
    session.answer_from = session.used_bytes
    begin_answer(connection)
    set_urgent(reg, connection, 1)
    # Stamped before the call: on loopback the server may answer before it returns.
    sent_ns = clock_ns(reg)
    instant_at(reg.sent_at, row).ns = sent_ns
    if request.abort_ns > 0 and not push(reg, sent_ns + request.abort_ns, DUE_ABORT, row):
        return events.NO_ROOM
    return send_rest(reg, fd)
