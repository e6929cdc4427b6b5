"""The memory that the interpreter and the compiled wire loop share: int64 tables, a ring of received bytes, a journal.

Every table has one row per thing (file descriptor, session, request, deadline, journal entry); the names below are its
columns. Whoever runs owns everything, and the other side waits. Next: ``core`` works on it, ``replay`` steers it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.live.client.wire.memory import GuardedMemory

IntArray = NDArray[np.int64]
BytesArray = NDArray[np.uint8]

ABSENT = -1
# At most this much is taken from the kernel at once.
RECEIVE_BYTES = 65_536
RING_BYTES = 8 << 20
JOURNAL_ENTRIES = 1 << 14
MAX_EVENTS = 64
MAX_HEADS = 32
MAX_HEAD_BYTES = 1_024

# -- registers: addresses, settings, and the scalars that change ------------------------------------------------------

R_SELF = 0
R_CONN, R_NUM_CONN = 1, 2
R_SESS, R_NUM_SESS = 3, 4
R_ROW, R_NUM_ROW = 5, 6
R_HEAP = 7
R_JOURNAL = 8
R_RING = 9
R_HEADS = 10
R_TRIGGER, R_DUE, R_SENT, R_FIRST_BYTE, R_DONE, R_HTTP_STATUS = 11, 12, 13, 14, 15, 16
R_EPOLL_EVENTS = 17
# Scratch for one request's head and tail; the fixed texts that they are made of, (address, length) each.
R_OUT, R_OUT_BYTES = 18, 19
R_TEXT_POST, R_TEXT_LENGTH, R_TEXT_PROMPT, R_TEXT_TOKENS, R_TEXT_OPTIONS, R_TEXT_END, R_TEXT_NONCE = (
    20,
    22,
    24,
    26,
    28,
    30,
    32,
)
R_EPOLL_FD, R_TIMER_FD = 34, 35
R_SPIN_NS, R_BARE_SPIN_NS = 36, 37
R_NUMERATOR, R_DENOMINATOR = 38, 39
R_STREAMS, R_HAS_TOKEN_IDS = 40, 41
R_HEAP_LEN = 42
# Entries written and read, and bytes of the ring written and read, since the beginning.
R_JOURNAL_WRITTEN, R_JOURNAL_READ, R_RING_WRITTEN, R_RING_READ = 43, 44, 45, 46
# Heads learned since the beginning; the last MAX_HEADS of them are known.
R_NUM_HEADS = 47
R_NEXT_BEAT_NS, R_BURST_FROM_NS, R_NUM_JOBS = 48, 49, 50
R_SPUN_NS, R_NUM_WAKEUPS = 51, 52
R_ARMED_NS = 53
# What a returned event is about.
R_FD, R_ABOUT, R_DETAIL = 54, 55, 56
R_TIMESPEC = 60  # 2 words
R_TIMER_SPEC = 62  # 4 words
R_MESSAGE = 66  # struct msghdr, 7 words
R_IOV = 74  # 3 parts, 6 words
R_CONTROL = 80  # 8 words
R_NAP_END = 88  # 2 words
# Exchanges whose next receive must not wait: see N_IS_URGENT.
R_NUM_URGENT = 90
NUM_REGISTERS = 96

# -- connections, by file descriptor ----------------------------------------------------------------------------------

N_MODE = 0
N_SESSION = 1
N_ROW = 2
# Bytes of the request that the kernel has taken, and all of them.
N_TAKEN_BYTES, N_REQUEST_BYTES = 4, 5
N_LEFT = 6  # bytes to come: of the body when it is counted, of the current piece when it is chunked
N_CHUNK_MODE = 7
N_IS_KEPT_ALIVE = 8
# The receive that is being looked at: place in the ring, bytes, stamps.
N_PIECE_AT, N_PIECE_BYTES, N_PIECE_NS, N_PIECE_KERNEL_NS = 9, 10, 11, 12
# What the scanner knows.
N_WINDOW, N_WINDOW_BEFORE, N_SCAN_MODE, N_VALUE = 14, 15, 16, 17
N_NUM_IDS, N_PROMPT_TOKENS, N_COMPLETION_TOKENS, N_HAS_DONE, N_IS_ODD = 18, 19, 20, 21, 22
N_KEEPS_IDS, N_NUM_EVENTS = 23, 24
N_ENTRY = 25  # the journal entry of the last receive
# 1 while the next receive may be the first or the last of an answer: it is taken at once, others may come in company.
N_IS_URGENT = 26
CONN_WIDTH = 27

# Values of N_MODE. ABSENT_MODE: no connection here. From AWAIT_HEAD on a request is on its way. FOREIGN: the
# interpreter's HTTP parser looks for the end.
ABSENT_MODE, CONNECTING, IDLE, AWAIT_HEAD, COUNTED, CHUNKED, FOREIGN = range(7)

# Values of N_CHUNK_MODE: where in a chunked body the next byte is.
(
    CHUNK_SIZE,
    CHUNK_EXTENSION,
    CHUNK_DATA,
    CHUNK_DATA_CR,
    CHUNK_DATA_LF,
    CHUNK_LAST_CR,
    CHUNK_LAST_LF,
    CHUNK_OVER,
    CHUNK_ODD,
) = range(9)

# Values of N_SCAN_MODE.
(
    SCAN_SEARCH,
    SCAN_IDS_OPEN,
    SCAN_IDS,
    SCAN_PROMPT_IDS_OPEN,
    SCAN_PROMPT_IDS,
    SCAN_PROMPT_TOKENS,
    SCAN_COMPLETION_TOKENS,
) = range(7)

# -- sessions ---------------------------------------------------------------------------------------------------------

S_FD = 0
# The session's token ids so far as comma-separated text: where, how much room, how much there is.
S_STREAM, S_ROOM, S_BYTES, S_TOKENS = 1, 2, 3, 4
# Where in it the answer under way begins.
S_ANSWER_AT = 5
SESS_WIDTH = 6

# -- requests, in plan order ------------------------------------------------------------------------------------------

Q_SESSION, Q_REQUEST = 0, 1
Q_KEEP_TOKENS, Q_PROMPT_TOKENS, Q_GENERATE_TOKENS = 2, 3, 4
Q_WAIT_NS = 5
Q_IS_LAST, Q_IS_CONTINUED = 6, 7
Q_FRESH, Q_FRESH_BYTES, Q_FRESH_TOKENS = 8, 9, 10
Q_STATE = 11
Q_PROMPT, Q_PROMPT_BYTES = 12, 13
ROW_WIDTH = 14

# Values of Q_STATE. READY: Q_PROMPT is what to send. GIVEN_UP: not to be sent any more.
UNPREPARED, READY, GIVEN_UP = 0, 1, 2

# -- deadlines (a heap), journal, known heads -------------------------------------------------------------------------

H_AT_NS, H_KIND, H_ROW = 0, 1, 2
HEAP_WIDTH = 3
REFRESH, SEND = 0, 1

# One entry per receive: whose it is, how the loop follows that answer, where in the ring its bytes are, its stamps, and
# the events of a stream that ended in it.
J_ROW, J_MODE, J_AT, J_BYTES, J_NS, J_KERNEL_NS, J_NUM_EVENTS = 0, 1, 2, 3, 4, 5, 6
# Where the answer ended in it: one of the values below, and the ids that the loop read, as text in the ring.
J_END, J_IDS_AT, J_IDS_BYTES = 7, 8, 9
# Bytes written to the ring up to and with this entry.
J_RING_END = 10
JOURNAL_WIDTH = 11
# Values of J_END. NOT_AS_PLANNED: the interpreter decides and goes on. AS_PLANNED: the ids are in the session's text,
# the interpreter goes on. GOES_ON: the loop has gone on with the session.
NOT_OVER, NOT_AS_PLANNED, AS_PLANNED, GOES_ON = 0, 1, 2, 3

# Before the bytes of a known head: length, status, length of the body (0: chunked), kept alive; status 0: foreign.
HEAD_FIELDS = 4
HEAD_STRIDE = 8 * HEAD_FIELDS + MAX_HEAD_BYTES

# -- why the loop returns to the interpreter --------------------------------------------------------------------------

(
    GO_ON,
    E_BEAT,
    E_SLACK,
    E_BURST_OVER,
    E_STAGE,
    E_REFRESH,
    E_NOT_READY,
    E_NO_CONNECTION,
    E_SEND_FAILED,
    E_SENT_IN_PART,
    E_OTHER,
    E_CLOSED,
    E_RECEIVE_FAILED,
    E_OUT_OF_TURN,
    E_NEW_HEAD,
    E_FOREIGN,
    E_TOO_MUCH,
    E_COMPLETE,
    E_FULL,
    E_NO_ROOM,
) = range(20)


class SharedTables:
    """The memory itself, for a plan of ``num_sessions`` and ``num_rows``; ``reg`` tells the loop where it is."""

    def __init__(self, num_sessions: int, num_rows: int) -> None:
        self.memory = memory = GuardedMemory()
        self.reg = memory.table("registers", NUM_REGISTERS, np.int64)
        self.sess = memory.table("sessions", (num_sessions, SESS_WIDTH), np.int64)
        self.sess[:, S_FD] = ABSENT
        self.row = memory.table("requests", (num_rows, ROW_WIDTH), np.int64)
        self.heap = memory.table("deadlines", (2 * num_rows + 1, HEAP_WIDTH), np.int64)
        self.journal = memory.table("receives", (JOURNAL_ENTRIES, JOURNAL_WIDTH), np.int64)
        self.ring = memory.table("received bytes", RING_BYTES, np.uint8)
        # Written once here, so that the kernel need not find its pages during the run.
        self.ring[:] = 0xFF
        self._heads = memory.table("heads", MAX_HEADS * HEAD_STRIDE, np.uint8)
        self._epoll_events = memory.table("events", 2 * MAX_EVENTS, np.int64)
        self._kept: dict[int, NDArray[Any]] = {}
        self.conn: NDArray[np.int64] = np.zeros((0, CONN_WIDTH), dtype=np.int64)
        self.reg[R_SELF] = address_of(self.reg)
        for register, memory in (
            (R_SESS, self.sess),
            (R_ROW, self.row),
            (R_HEAP, self.heap),
            (R_JOURNAL, self.journal),
            (R_RING, self.ring),
            (R_HEADS, self._heads),
            (R_EPOLL_EVENTS, self._epoll_events),
        ):
            self.share(register, memory)
        self.reg[R_NUM_SESS], self.reg[R_NUM_ROW] = num_sessions, num_rows
        self.make_room_for(255)

    def share(self, register: int, memory: NDArray[Any]) -> None:
        """Let the compiled side find an array, and keep it for as long as these tables live."""
        self._kept[register] = memory
        self.reg[register] = address_of(memory)

    def share_text(self, register: int, text: bytes) -> None:
        """Let the compiled side find a text: address and length."""
        self.share(register, np.frombuffer(text or b" ", dtype=np.uint8))
        self.reg[register + 1] = len(text)

    def make_room_for(self, fd: int) -> None:
        """Have a line for a file descriptor; only while the compiled side does not run."""
        old = self.conn
        if fd < len(old):
            return
        self.memory.give_up("connections")
        grown = self.memory.table("connections", (max(2 * len(old), fd + 1), CONN_WIDTH), np.int64)
        grown[: len(old)] = old
        self.conn = grown
        self.share(R_CONN, grown)
        self.reg[R_NUM_CONN] = len(grown)

    def know_head(self, head: bytes, status: int, length: int, is_kept_alive: bool) -> None:
        """Remember what a head promises (status 0: nothing the loop can follow); the oldest gives way."""
        count = int(self.reg[R_NUM_HEADS])
        place = count % MAX_HEADS
        base = place * HEAD_STRIDE
        fields = np.asarray([len(head), status, length, is_kept_alive], dtype=np.int64)
        self._heads[base : base + 8 * HEAD_FIELDS] = fields.view(np.uint8)
        start = base + 8 * HEAD_FIELDS
        self._heads[start : start + len(head)] = np.frombuffer(head, dtype=np.uint8)
        self.reg[R_NUM_HEADS] = count + 1


def address_of(memory: NDArray[Any]) -> int:
    """Where an array's data lie; the caller keeps the array."""
    return int(memory.ctypes.data)
