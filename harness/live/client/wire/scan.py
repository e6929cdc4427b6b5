"""Finds, in the bytes of a body as they come in, which token ids and counts it holds, and where its events end.

It only lets the loop go on with a session at once: what an answer *means* is decided later, by real parsers, and a
difference fails the request. Unusual bytes set ``is_odd`` and are left to them. Next: ``chunks`` and ``receiving`` call
``scan`` with what belongs to a body.
"""

from __future__ import annotations

from harness.compiled import inner
from harness.compiled.addresses import byte_at
from harness.live.client.wire.layout import ABSENT, ConnectionState, SessionState
from harness.live.client.wire.texts import COMMA, NO_ROOM, ZERO, put_byte, put_number


def window_of(text: bytes) -> int:
    """Up to eight bytes as the scanner's window holds them: the last one lowest, as a signed 64-bit number."""
    return int.from_bytes(text.rjust(8, b"\0")[-8:], "big", signed=True)


# ConnectionState.scan_mode: what the next byte is looked at as.
SEARCH, IDS, IDS_OPEN, PROMPT_IDS_OPEN, PROMPT_IDS, PROMPT_TOKENS, COMPLETION_TOKENS = range(7)

COLON, BRACKET_OPEN, BRACKET_CLOSE, SPACE, LF, NINE = 58, 91, 93, 32, 10, 57
# The keys, each as its last eight bytes and (a part of) the eight before: the quote in front tells "token_ids" from
# "prompt_token_ids", and inside a JSON string a quote never stands without a backslash.
IDS_KEY, IDS_KEY_BEFORE, IDS_KEY_MASK = window_of(b'en_ids":'), window_of(b'"tok'), 0xFFFFFFFF
PROMPT_IDS_BEFORE = window_of(b"_tok")
TOKENS_KEY = window_of(b'tokens":')
PROMPT_BEFORE, COMPLETION_BEFORE = window_of(b'"prompt_'), window_of(b"pletion_")
DONE_WINDOW = window_of(b": [DONE]")
# What ends an event of a stream.
BLANK_LINE, BLANK_LINE_CRLF = window_of(b"\n\n"), window_of(b"\n\r\n")
MAX_ID = 1 << 31


@inner
def begin_scan(connection: ConnectionState) -> None:
    """Forget the answer before."""
    connection.window = connection.window_before = connection.value = 0
    connection.scan_mode = SEARCH
    connection.num_ids = connection.has_done = connection.is_odd = 0
    connection.prompt_tokens = connection.completion_tokens = ABSENT


@inner
def scan(connection: ConnectionState, session: SessionState, place: int, end: int) -> None:
    """Look through the next bytes of a body, from one address to another."""
    while place < end:
        mode = connection.scan_mode
        if mode == SEARCH:
            place = search(connection, place, end)
        elif mode == IDS:
            place = read_ids(connection, session, place, end)
        elif mode < PROMPT_TOKENS:
            place = pass_brackets(connection, place, end)
        else:
            place = read_count(connection, place, end)


@inner
def search(connection: ConnectionState, place: int, end: int) -> int:
    """Go on to behind the next key, and note the ends of events on the way; the address reached."""
    window, before = connection.window, connection.window_before
    while place < end and connection.scan_mode == SEARCH:
        byte = byte_at(place)
        place += 1
        before = (before << 8) | ((window >> 56) & 0xFF)
        window = (window << 8) | byte
        if byte == COLON:
            connection.scan_mode = mode_behind(window, before)
            connection.value = ABSENT
        elif byte == LF:
            if window & 0xFFFF == BLANK_LINE or window & 0xFFFFFF == BLANK_LINE_CRLF:
                connection.num_events += 1
        elif byte == BRACKET_CLOSE and window == DONE_WINDOW:
            connection.has_done = 1
    connection.window, connection.window_before = window, before
    return place


@inner
def mode_behind(window: int, before: int) -> int:
    """How to go on behind a colon: by the key that it ends, if it is one of those looked for."""
    if window == IDS_KEY:
        if before & IDS_KEY_MASK == IDS_KEY_BEFORE:
            return IDS_OPEN
        if before & IDS_KEY_MASK == PROMPT_IDS_BEFORE:
            return PROMPT_IDS_OPEN
    elif window == TOKENS_KEY:
        if before == PROMPT_BEFORE:
            return PROMPT_TOKENS
        if before == COMPLETION_BEFORE:
            return COMPLETION_TOKENS
    return SEARCH


@inner
def forget_window(connection: ConnectionState) -> None:
    """Search again behind a value that was understood."""
    connection.scan_mode = SEARCH
    connection.window = connection.window_before = 0


@inner
def pass_brackets(connection: ConnectionState, place: int, end: int) -> int:
    """The next byte before or inside a list: into it, out of the prompt's, or back when it is none (null)."""
    byte = byte_at(place)
    mode = connection.scan_mode
    if mode == PROMPT_IDS:
        while byte != BRACKET_CLOSE and place + 1 < end:
            place += 1
            byte = byte_at(place)
        if byte == BRACKET_CLOSE:
            connection.scan_mode = SEARCH
    elif byte == BRACKET_OPEN:
        connection.scan_mode = IDS if mode == IDS_OPEN else PROMPT_IDS
        connection.value = ABSENT
    elif byte != SPACE:
        connection.scan_mode = SEARCH
    return place + 1


@inner
def read_ids(connection: ConnectionState, session: SessionState, place: int, end: int) -> int:
    """Read on in a list of generated ids, up to its end; the address reached."""
    while place < end and connection.scan_mode == IDS:
        byte = byte_at(place)
        place += 1
        if ZERO <= byte <= NINE:
            connection.value = max(connection.value, 0) * 10 + byte - ZERO
            if connection.value >= MAX_ID:
                connection.is_odd = 1
                connection.value = 0
        elif byte == COMMA:
            take_id(connection, session)
        elif byte == BRACKET_CLOSE:
            take_id(connection, session)
            forget_window(connection)
        elif byte != SPACE:
            connection.is_odd = 1
            connection.scan_mode = SEARCH
    return place


@inner
def take_id(connection: ConnectionState, session: SessionState) -> None:
    """The end of a token id, if there was one: count it and, when a later prompt goes on from it, append it to the
    session's text.
    """
    if connection.value < 0:
        return
    connection.num_ids += 1
    if connection.keeps_ids:
        to = session.stream_at + session.used_bytes
        end = session.stream_at + session.room_bytes
        if session.used_bytes:
            to = put_byte(to, end, COMMA)
        to = put_number(to, end, connection.value)
        if to == NO_ROOM:
            connection.is_odd = 1
            connection.keeps_ids = 0
            return
        session.used_bytes = to - session.stream_at
    connection.value = ABSENT


@inner
def read_count(connection: ConnectionState, place: int, end: int) -> int:
    """Read on in a number of tokens, up to the byte behind it; the address reached."""
    while place < end:
        byte = byte_at(place)
        place += 1
        if ZERO <= byte <= NINE:
            connection.value = min(max(connection.value, 0), MAX_ID) * 10 + byte - ZERO
        elif byte != SPACE or connection.value >= 0:
            if connection.value >= 0:
                if connection.scan_mode == PROMPT_TOKENS:
                    connection.prompt_tokens = connection.value
                else:
                    connection.completion_tokens = connection.value
            forget_window(connection)
            return place
    return place
