"""One kept-alive HTTP/1.1 connection: non-blocking socket, stamps, and the pieces of the answer that is under way.

Every receive is stamped twice, by the kernel and after the call, before anything else is done with it; during the run
only the end of the answer is looked for. Next: ``wire`` owns the connections and hands finished exchanges to
``client_script``.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from typing import Any

import httptools

from harness.clock import monotonic_ns
from harness.live.client_answer import NO_KERNEL_STAMP, Answer, Piece
from harness.live.kernel_stamps import ANCILLARY_BYTES, enable_kernel_stamps
from harness.live.wire_head import HEAD_END, KnownHeads

RECEIVE_BYTES = 65_536
SEND_BUFFER_BYTES = 1 << 20
MAX_PIECES_AT_ONCE = 4
ABSENT = -1
# How the end of the answer under way is found. EVERY_PIECE: the parser sees each piece at once. CHUNKED: a chunked body
# can only end with an empty line, so the parser is asked when one ends a receive, and has the rest in slack. COUNTED:
# after as many bytes as the head promised.
EVERY_PIECE, CHUNKED, COUNTED = 0, 1, 2


class Exchange:
    """One request on the wire and what has come back; pieces wait here until there is slack to interpret them.

    raw: receives the HTTP parser has not seen. pieces: body bytes that the answer has not seen.
    """

    __slots__ = ("answer", "first_byte_ns", "is_queued", "last", "payload", "pieces", "raw", "row", "status")

    def __init__(self, row: int, answer: Answer) -> None:
        self.row = row
        self.answer = answer
        self.payload: bytes | None = None
        self.raw: deque[Piece] = deque()
        self.pieces: deque[Piece] = deque()
        self.last: Piece | None = None
        self.status = 0
        self.first_byte_ns = ABSENT
        self.is_queued = False

    def interpret_some(self) -> bool:
        """Feed a few waiting pieces to the answer; True when more are waiting."""
        pieces, feed = self.pieces, self.answer.feed
        for _ in range(min(len(pieces), MAX_PIECES_AT_ONCE)):
            self.last = piece = pieces.popleft()
            feed(piece)
        return bool(pieces)

    def interpret_pieces(self) -> None:
        """Feed every waiting piece to the answer."""
        pieces, feed = self.pieces, self.answer.feed
        while pieces:
            self.last = piece = pieces.popleft()
            feed(piece)

    def interpret_all(self) -> Answer:
        """The whole answer, once the exchange is complete."""
        self.interpret_pieces()
        self.answer.close(self.last or (self.first_byte_ns, NO_KERNEL_STAMP, b""))
        return self.answer


class Connection:
    """A socket and the exchange it carries.

    ``exchange`` is None while idle; ``unsent`` is what the kernel has not taken yet.
    """

    __slots__ = (
        "_body",
        "_end_mode",
        "_head",
        "_heads",
        "_is_head_complete",
        "_is_kept_alive",
        "_is_message_complete",
        "_left_bytes",
        "_parser",
        "_recvmsg",
        "_send",
        "exchange",
        "fd",
        "idle_since_ns",
        "is_connected",
        "session",
        "sock",
        "unsent",
    )

    def __init__(self, family: int, session: int, heads: KnownHeads) -> None:
        self.session = session
        self.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.fd = self.sock.fileno()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A prompt of 8,192 ids is 60 kB: with room for it, one call hands the whole request to the kernel.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        enable_kernel_stamps(self.sock)
        self._recvmsg, self._send = self.sock.recvmsg, self.sock.send
        self.exchange: Exchange | None = None
        self.unsent: memoryview | None = None
        self.is_connected = False
        self.idle_since_ns = monotonic_ns()
        self._heads = heads
        self._parser: httptools.HttpResponseParser | None = None
        self._body: list[bytes] = []
        self._head = b""
        self._left_bytes = 0
        self._end_mode = EVERY_PIECE
        self._is_head_complete = False
        self._is_message_complete = False
        self._is_kept_alive = False

    # -- called by httptools -----------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._is_head_complete = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() >= 200:
            self._is_message_complete = True
            # To be asked here: the parser forgets the message's framing right after this call.
            self._is_kept_alive = self._parser.should_keep_alive()
        else:  # an interim answer (100 Continue): the real one follows
            self._is_head_complete = False

    # -- called by the loop ------------------------------------------------------------------------------------

    def start_connect(self, address: tuple[Any, ...]) -> str:
        """Begin to connect; the error's text when that fails at once."""
        code = self.sock.connect_ex(address)
        return "" if code in {0, errno.EINPROGRESS} else os.strerror(code)

    def finish_connect(self) -> str:
        """Called when writable: the error's text, or empty when connected."""
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.is_connected = code == 0
        return os.strerror(code) if code else ""

    def begin(self, exchange: Exchange) -> None:
        """Make ready for the answer of a new request."""
        self.exchange = exchange
        self._head = b""
        self._end_mode = EVERY_PIECE
        self._is_head_complete = self._is_message_complete = False

    def send(self, payload: bytes | memoryview) -> None:
        """Hand bytes to the kernel; what it does not take stays in ``unsent``. Raises OSError."""
        try:
            taken = self._send(payload)
        except BlockingIOError:
            taken = 0
        self.unsent = None if taken == len(payload) else memoryview(payload)[taken:]

    def receive(self) -> int:
        """Take what has arrived: the stamp of this receive when it completed the answer, 0 while it goes on, -1 at end
        of file.

        Raises OSError when the connection broke, httptools.HttpParserError when the bytes are no HTTP.
        """
        try:
            data, ancillary, _, _ = self._recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES)
        except BlockingIOError:
            return 0
        received_ns = monotonic_ns()
        exchange = self.exchange
        if exchange is None:
            return -1
        if not data:
            self.parse(exchange)
            return -1
        piece = (received_ns, ancillary[0][2] if ancillary else NO_KERNEL_STAMP, data)
        if exchange.first_byte_ns == ABSENT:
            exchange.first_byte_ns = received_ns
            piece = self._begin_answer(exchange, piece)
        if self._end_mode == COUNTED:
            exchange.pieces.append(piece)
            self._left_bytes -= len(piece[2])
            if self._left_bytes < 0:
                raise httptools.HttpParserError("more bytes than its Content-Length")
            self._is_message_complete = self._left_bytes == 0
        else:
            exchange.raw.append(piece)
            # An end that was cut into splinters has a last one shorter than itself.
            if self._end_mode == CHUNKED and not data.endswith(HEAD_END) and len(data) >= len(HEAD_END):
                return 0
            self.parse(exchange)
        return received_ns if self._is_message_complete else 0

    def _begin_answer(self, exchange: Exchange, piece: Piece) -> Piece:
        """Choose how the end will be found; what is left of the piece when its head needs no further parsing."""
        received_ns, kernel, data = piece
        head_bytes = data.find(HEAD_END) + len(HEAD_END)
        framing = self._heads.framing(data[:head_bytes]) if head_bytes >= len(HEAD_END) else None
        if framing is None:
            return piece
        exchange.status = framing.status
        self._is_head_complete = True
        if not framing.length:
            self._end_mode = CHUNKED
            return piece
        self._end_mode, self._left_bytes, self._is_kept_alive = COUNTED, framing.length, framing.is_kept_alive
        return received_ns, kernel, data[head_bytes:]

    def parse(self, exchange: Exchange) -> None:
        """Let the HTTP parser see what it has not seen. Raises httptools.HttpParserError."""
        raw, body, pieces = exchange.raw, self._body, exchange.pieces
        if not raw:
            return
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        feed_data = self._parser.feed_data
        while raw:
            received_ns, kernel, data = raw.popleft()
            if not self._is_head_complete:
                self._head += data
            feed_data(data)
            if body:
                whole = body[0] if len(body) == 1 else b"".join(body)
                pieces.append((received_ns, kernel, whole))
                body.clear()
        if self._is_head_complete and not exchange.status:
            exchange.status = self._parser.get_status_code()

    @property
    def is_answer_complete(self) -> bool:
        """True once the parser has seen the end of the answer under way."""
        return self._is_message_complete

    def ends_at_close(self) -> bool:
        """True when the answer's end is marked by the end of the connection, and so an end of file completes it."""
        if not self._is_head_complete or self._end_mode != EVERY_PIECE:
            return False
        head = self._head.split(HEAD_END, 1)[0].lower()
        return b"\r\ncontent-length:" not in head and b"\r\ntransfer-encoding:" not in head

    def end_exchange(self, now_ns: int) -> bool:
        """Detach the finished exchange; False when the connection cannot carry another."""
        self.exchange = None
        self.idle_since_ns = now_ns
        return self.unsent is None and self._is_message_complete and self._is_kept_alive

    def describe_progress(self) -> str:
        """How far the exchange came, for the error text of a row."""
        if self.exchange is None or not self.is_connected:
            return "no connection"
        if self.unsent is not None:
            return "request not fully sent"
        if self.exchange.first_byte_ns == ABSENT:
            return "no byte of the answer"
        return "in the middle of the answer" if self._is_head_complete else "in the middle of the answer's head"

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
        # Its callbacks refer back to this object, and nothing collects cycles during a run.
        self._parser = None
