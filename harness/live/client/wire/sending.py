"""Requests as bytes in place: a session's next prompt is built where it lies, and goes out in one call; compiled.

A send is stamped before the call, never after. Next: ``core`` sends what is due, ``receiving`` builds what comes next.
"""

from __future__ import annotations

from harness.compiled import inner_viewing as inner
from harness.live.client.wire import layout as at
from harness.live.client.wire import table
from harness.live.client.wire.layout import IntArray
from harness.live.client.wire.scan import begin_scan
from harness.live.client.wire.syscalls import (
    EAGAIN,
    NO_ROOM,
    clock_ns,
    errno,
    memchr,
    put,
    put_byte,
    put_number,
    send_parts,
)

COMMA, DASH = 44, 45


@inner
def cut_stream(session: IntArray, keep_tokens: int) -> bool:
    """Keep the first ids of a session's text; False when they are not there."""
    if keep_tokens < 0 or keep_tokens > session[at.S_TOKENS]:
        return False
    if keep_tokens == 0:
        session[at.S_BYTES] = 0
    elif keep_tokens < session[at.S_TOKENS]:
        place, end = session[at.S_STREAM], session[at.S_STREAM] + session[at.S_BYTES]
        for _ in range(keep_tokens):
            comma = memchr(place, COMMA, end - place)
            if comma == 0:
                return False
            place = comma + 1
        session[at.S_BYTES] = place - 1 - session[at.S_STREAM]
    session[at.S_TOKENS] = keep_tokens
    return True


@inner
def build_prompt(reg: IntArray, row: int) -> int:
    """Bring a session's text to what this request sends: GO_ON, or E_NOT_READY when the text is shorter than what it
    keeps, or E_NO_ROOM.

    The text holds everything up to the answer before. The request's fresh part must have been drawn.
    """
    line = table.rows(reg)[row]
    session = table.sessions(reg)[line[at.Q_SESSION]]
    if not cut_stream(session, line[at.Q_KEEP_TOKENS]):
        return at.E_NOT_READY
    to = session[at.S_STREAM] + session[at.S_BYTES]
    end = session[at.S_STREAM] + session[at.S_ROOM]
    if line[at.Q_FRESH_BYTES]:
        if session[at.S_BYTES]:
            to = put_byte(to, end, COMMA)
        to = put(to, end, line[at.Q_FRESH], line[at.Q_FRESH_BYTES])
        if to == NO_ROOM:
            return at.E_NO_ROOM
    session[at.S_BYTES] = to - session[at.S_STREAM]
    session[at.S_TOKENS] += line[at.Q_FRESH_TOKENS]
    line[at.Q_PROMPT], line[at.Q_PROMPT_BYTES] = session[at.S_STREAM], session[at.S_BYTES]
    line[at.Q_STATE] = at.READY
    return at.GO_ON


@inner
def set_urgent(reg: IntArray, conn: IntArray, is_urgent: int) -> None:
    """Note whether a connection's next receive may be the first or the last of an answer."""
    reg[at.R_NUM_URGENT] += is_urgent - conn[at.N_IS_URGENT]
    conn[at.N_IS_URGENT] = is_urgent


@inner
def put_text(reg: IntArray, to: int, which: int) -> int:
    """One of the fixed texts of a request; as ``put``."""
    return put(to, reg[at.R_OUT] + reg[at.R_OUT_BYTES], reg[which], reg[which + 1])


@inner
def put_request_id(reg: IntArray, to: int, line: IntArray) -> int:
    """``<nonce>-<session>-<request>``; as ``put``."""
    room_end = reg[at.R_OUT] + reg[at.R_OUT_BYTES]
    to = put_byte(put_text(reg, to, at.R_TEXT_NONCE), room_end, DASH)
    to = put_byte(put_number(to, room_end, line[at.Q_SESSION]), room_end, DASH)
    return put_number(to, room_end, line[at.Q_REQUEST])


@inner
def write_request(reg: IntArray, line: IntArray) -> int:
    """Describe a request in R_IOV as head, prompt and tail; all its bytes, or NO_ROOM."""
    tail_at, room_end = reg[at.R_OUT], reg[at.R_OUT] + reg[at.R_OUT_BYTES]
    end = put_text(reg, tail_at, at.R_TEXT_TOKENS)
    end = put_number(end, room_end, line[at.Q_GENERATE_TOKENS])
    end = put_text(reg, end, at.R_TEXT_OPTIONS)
    end = put_request_id(reg, end, line)
    end = put_text(reg, end, at.R_TEXT_END)
    tail_bytes = end - tail_at
    head_at = end
    to = put_text(reg, head_at, at.R_TEXT_POST)
    to = put_request_id(reg, to, line)
    to = put_text(reg, to, at.R_TEXT_LENGTH)
    to = put_number(to, room_end, reg[at.R_TEXT_PROMPT + 1] - 4 + line[at.Q_PROMPT_BYTES] + tail_bytes)
    # The blank line, which ends the head, and the beginning of the body.
    to = put_text(reg, to, at.R_TEXT_PROMPT)
    if to == NO_ROOM:
        return NO_ROOM
    reg[at.R_IOV], reg[at.R_IOV + 1] = head_at, to - head_at
    reg[at.R_IOV + 2], reg[at.R_IOV + 3] = line[at.Q_PROMPT], line[at.Q_PROMPT_BYTES]
    reg[at.R_IOV + 4], reg[at.R_IOV + 5] = tail_at, tail_bytes
    return to - head_at + line[at.Q_PROMPT_BYTES] + tail_bytes


@inner
def send_rest(reg: IntArray, fd: int) -> int:
    """Hand the kernel what it has not taken of a connection's request."""
    conn = table.conns(reg)[fd]
    reg[at.R_FD], reg[at.R_ABOUT] = fd, conn[at.N_ROW]
    total = write_request(reg, table.rows(reg)[conn[at.N_ROW]])
    skip, first = conn[at.N_TAKEN_BYTES], 0
    if total == NO_ROOM or skip > total:
        return at.E_NO_ROOM
    while first < 2 and skip >= reg[at.R_IOV + 2 * first + 1]:
        skip -= reg[at.R_IOV + 2 * first + 1]
        first += 1
    reg[at.R_IOV + 2 * first] += skip
    reg[at.R_IOV + 2 * first + 1] -= skip
    taken = send_parts(reg, fd, first, 3 - first)
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
    if fd < 0 or fd >= reg[at.R_NUM_CONN] or table.conns(reg)[fd, at.N_MODE] != at.IDLE:
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
