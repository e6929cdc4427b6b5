"""The records that the interpreter and the compiled wire loop share, and what stands in them; both know no other.

Every table has one record per thing (file descriptor, session, request, deadline, receive); a field that ends in
``_at`` holds an address. Whoever runs owns everything, and the other side waits. Next: ``tables`` makes the memory.
"""

from __future__ import annotations

import platform

import numpy as np

from harness.compiled.addresses import record_at
from harness.compiled.records import record_dtype

ABSENT = -1
# At most this much is taken from the kernel at once.
RECEIVE_BYTES = 65_536
RING_BYTES = 8 << 20
JOURNAL_ENTRIES = 1 << 14
MAX_EVENTS = 64
MAX_HEADS = 32
MAX_HEAD_BYTES = 1_024


class Registers:
    """The scalars, one record: where the tables are, settings, what changes, and what the last event is about."""

    connections_at: int
    num_connections: int
    sessions_at: int
    requests_at: int
    num_requests: int
    deadlines_at: int
    receives_at: int
    ring_at: int
    heads_at: int
    texts_at: int
    # What system calls are given by address.
    epoll_events_at: int
    now_at: int
    nap_end_at: int
    timer_at: int
    message_at: int
    parts_at: int
    control_at: int
    # Columns of the script's rows, one number a request.
    trigger_at: int
    due_at: int
    sent_at: int
    first_byte_at: int
    done_at: int
    http_status_at: int
    # Scratch for one request's head and tail.
    out_at: int
    out_bytes: int

    epoll_fd: int
    timer_fd: int
    spin_ns: int
    clock_numerator: int
    clock_denominator: int
    is_streamed: int
    has_token_ids: int

    num_deadlines: int
    # Entries written and read, and bytes of the ring written and read, since the beginning.
    journal_written: int
    journal_read: int
    ring_written: int
    ring_read: int
    # Heads learned since the beginning; the last MAX_HEADS of them are known.
    num_heads: int
    next_beat_ns: int
    burst_from_ns: int
    num_jobs: int
    spun_ns: int
    num_wakeups: int
    armed_ns: int
    # Exchanges whose next receive must not wait: see ConnectionState.is_urgent.
    num_urgent: int

    event_fd: int
    event_row: int
    event_detail: int


class ConnectionState:
    """One connection, by file descriptor, and the answer that is on its way over it."""

    mode: int
    session: int
    row: int
    # Bytes of the request that the kernel has taken, and all of them.
    taken_bytes: int
    request_bytes: int
    # To come: of the body when it is counted, of the current piece when it is chunked.
    left_bytes: int
    chunk_mode: int
    is_kept_alive: int
    # The receive that is being looked at.
    piece_place: int
    piece_bytes: int
    piece_ns: int
    piece_kernel_ns: int
    # The journal entry of the last receive.
    entry: int
    # 1 while the next receive may be the first or the last of an answer: that is taken at once, others in company.
    is_urgent: int
    # What the scanner knows.
    window: int
    window_before: int
    scan_mode: int
    value: int
    num_ids: int
    prompt_tokens: int
    completion_tokens: int
    has_done: int
    is_odd: int
    keeps_ids: int
    num_events: int


# ConnectionState.mode. ABSENT: no connection here. From AWAIT_HEAD on a request is on its way. FOREIGN: the
# interpreter's HTTP parser looks for the end.
(
    MODE_ABSENT,
    MODE_CONNECTING,
    MODE_IDLE,
    MODE_AWAIT_HEAD,
    MODE_COUNTED,
    MODE_CHUNKED,
    MODE_FOREIGN,
) = range(7)


class SessionState:
    """One session: its connection, and its token ids so far as comma-separated text."""

    fd: int
    stream_at: int
    room_bytes: int
    used_bytes: int
    num_tokens: int
    # Where in the text the answer under way begins.
    answer_from: int


class RequestState:
    """One request, in plan order."""

    session: int
    request: int
    keep_tokens: int
    prompt_tokens: int
    generate_tokens: int
    wait_ns: int
    # When the client leaves: so long after sending (CLOCK_MONOTONIC), or with so many tokens; 0: it stays.
    abort_ns: int
    abort_tokens: int
    is_last: int
    is_continued: int
    fresh_at: int
    fresh_bytes: int
    fresh_tokens: int
    readiness: int
    prompt_at: int
    prompt_bytes: int


# RequestState.readiness. READY: prompt_at is what to send. GIVEN_UP: not to be sent any more.
UNPREPARED, READY, GIVEN_UP = range(3)


class Deadline:
    """A place of the heap: an instant (CLOCK_MONOTONIC), what is due then, and for which request."""

    at_ns: int
    kind: int
    row: int


# Deadline.kind: replace the connection, send the request, leave its answer.
DUE_REFRESH, DUE_SEND, DUE_ABORT = range(3)
DEADLINES_PER_REQUEST = 3


class Receive:
    """A journal entry: whose it is, how the loop follows that answer, its bytes in the ring, its stamps.

    num_events: of a stream, that ended in it. end: how the answer ended in it. ids_place, ids_bytes: the ids that the
    loop read, as text in the ring. ring_end: bytes written to the ring up to and with this entry.
    """

    row: int
    mode: int
    place: int
    num_bytes: int
    received_ns: int
    kernel_ns: int
    num_events: int
    end: int
    ids_place: int
    ids_bytes: int
    ring_end: int


# Receive.end. NOT_AS_PLANNED: the interpreter decides and goes on. AS_PLANNED: the ids are in the session's text, the
# interpreter goes on. GOES_ON: the loop has gone on with the session.
END_NOT_YET, END_NOT_AS_PLANNED, END_AS_PLANNED, END_GOES_ON = range(4)


class KnownHead:
    """What stands before the bytes of a known head. body_bytes 0: chunked; status 0: not for the loop to follow."""

    num_bytes: int
    status: int
    body_bytes: int
    is_kept_alive: int


class Span:
    """Bytes at an address: a text that requests are made of, or a part of a message (struct iovec)."""

    start_at: int
    num_bytes: int


TEXT_POST, TEXT_LENGTH, TEXT_PROMPT, TEXT_TOKENS, TEXT_OPTIONS, TEXT_END, TEXT_NONCE = range(7)
NUM_TEXTS = 7
MAX_PARTS = 3


class Instant:
    """One number of a column of instants."""

    ns: int


class HttpStatus:
    """One number of a column of int32."""

    code: int


class TimeSpec:
    """struct timespec."""

    seconds: int
    nanoseconds: int


class TimerSpec:
    """struct itimerspec."""

    interval_seconds: int
    interval_nanoseconds: int
    seconds: int
    nanoseconds: int


class Message:
    """struct msghdr."""

    name_at: int
    name_bytes: int
    parts_at: int
    num_parts: int
    control_at: int
    control_bytes: int
    flags: int


class ControlMessage:
    """A control message that carries an arrival stamp. mark: its level and its type."""

    num_bytes: int
    mark: int
    seconds: int
    nanoseconds: int


# As many as one receive has room for.
MAX_CONTROL_MESSAGES = 2


class EpollEvent:
    """struct epoll_event: both are int32."""

    mask: int
    fd: int


# The struct is packed on x86-64 alone: 12 bytes, else 16 with the data at 8.
_IS_EVENT_PACKED = platform.machine() == "x86_64"
EPOLL_EVENT = np.dtype(
    {
        "names": ["mask", "fd"],
        "formats": [np.int32, np.int32],
        "offsets": [0, 4 if _IS_EVENT_PACKED else 8],
        "itemsize": 12 if _IS_EVENT_PACKED else 16,
    }
)
CONTROL_ROOM_BYTES = MAX_CONTROL_MESSAGES * record_dtype(ControlMessage).itemsize
SPAN_BYTES = record_dtype(Span).itemsize
HEAD_FIELDS_BYTES = record_dtype(KnownHead).itemsize
HEAD_STRIDE = HEAD_FIELDS_BYTES + MAX_HEAD_BYTES

registers_at = record_at(Registers)
connection_at = record_at(ConnectionState)
session_at = record_at(SessionState)
request_at = record_at(RequestState)
deadline_at = record_at(Deadline)
receive_at = record_at(Receive)
span_at = record_at(Span)
instant_at = record_at(Instant)
http_status_at = record_at(HttpStatus, np.dtype([("code", np.int32)]))
timespec_at = record_at(TimeSpec)
timerspec_at = record_at(TimerSpec)
message_at = record_at(Message)
control_at = record_at(ControlMessage)
epoll_event_at = record_at(EpollEvent, EPOLL_EVENT)
# Heads lie HEAD_STRIDE apart.
known_head_at = record_at(KnownHead)
