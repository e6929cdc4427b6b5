"""One kept-alive HTTP/1.1 connection: non-blocking socket, parser, and the pieces of the answer that is under way.

Every receive is stamped twice, by the kernel and after the call; nothing of the body is interpreted here, only its end
is found. Next: ``wire`` owns the connections and hands finished exchanges to ``client_script``.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import deque
from typing import Any

import httptools

from harness.clock import monotonic_ns
from harness.live.client_answer import Answer, Piece
from harness.live.kernel_stamps import ANCILLARY_BYTES, enable_kernel_stamps

RECEIVE_BYTES = 65_536
SEND_BUFFER_BYTES = 1 << 20
ABSENT = -1


class Exchange:
    """One request on the wire and what has come back; pieces wait here until there is slack to interpret them."""

    __slots__ = ("answer", "first_byte_ns", "last", "pieces", "row", "status")

    def __init__(self, row: int, answer: Answer) -> None:
        self.row = row
        self.answer = answer
        self.pieces: deque[Piece] = deque()
        self.last: Piece | None = None
        self.status = 0
        self.first_byte_ns = ABSENT

    def interpret_one(self) -> bool:
        """Feed one waiting piece to the answer; True when more are waiting."""
        if self.pieces:
            self.last = self.pieces.popleft()
            self.answer.feed(self.last)
        return bool(self.pieces)

    def interpret_pieces(self) -> None:
        """Feed every waiting piece to the answer."""
        while self.interpret_one():
            pass

    def interpret_all(self) -> Answer:
        """The whole answer, once the exchange is complete."""
        self.interpret_pieces()
        self.answer.close(self.last or Piece(self.first_byte_ns, b"", b""))
        return self.answer


class Connection:
    """A socket and the exchange it carries.

    ``exchange`` is None while idle; ``unsent`` is what the kernel has not taken yet.
    """

    __slots__ = (
        "_body",
        "_head",
        "_is_head_complete",
        "_is_kept_alive",
        "_is_message_complete",
        "_parser",
        "exchange",
        "fd",
        "idle_since_ns",
        "is_connected",
        "session",
        "sock",
        "unsent",
    )

    def __init__(self, family: int, session: int) -> None:
        self.session = session
        self.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.fd = self.sock.fileno()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A prompt of 8,192 ids is 60 kB: with room for it, one call hands the whole request to the kernel.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        enable_kernel_stamps(self.sock)
        self.exchange: Exchange | None = None
        self.unsent: memoryview | None = None
        self.is_connected = False
        self.idle_since_ns = monotonic_ns()
        self._parser = httptools.HttpResponseParser(self)
        self._body: list[bytes] = []
        self._head = b""
        self._is_head_complete = False
        self._is_message_complete = False
        self._is_kept_alive = False

    # -- called by httptools -----------------------------------------------------------------------------------

    def on_headers_complete(self) -> None:
        self._is_head_complete = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
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
        self._is_head_complete = self._is_message_complete = False

    def send(self, payload: bytes | memoryview) -> None:
        """Hand bytes to the kernel; what it does not take stays in ``unsent``. Raises OSError."""
        try:
            taken = self.sock.send(payload)
        except BlockingIOError:
            taken = 0
        self.unsent = None if taken == len(payload) else memoryview(payload)[taken:]

    def receive(self) -> int:
        """Take what has arrived: the stamp of this receive when it completed the answer, 0 while it goes on, -1 at end
        of file.

        Raises OSError when the connection broke, httptools.HttpParserError when the bytes are no HTTP.
        """
        try:
            data, ancillary, _, _ = self.sock.recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES)
        except BlockingIOError:
            return 0
        received_ns = monotonic_ns()
        exchange = self.exchange
        if not data or exchange is None:
            return -1
        if exchange.first_byte_ns == ABSENT:
            exchange.first_byte_ns = received_ns
        if not self._is_head_complete:
            self._head += data
        self._parser.feed_data(data)
        if self._is_head_complete and not exchange.status:
            exchange.status = self._parser.get_status_code()
        body = self._body
        if body:
            whole = body[0] if len(body) == 1 else b"".join(body)
            exchange.pieces.append(Piece(received_ns, ancillary[0][2] if ancillary else b"", whole))
            body.clear()
        return received_ns if self._is_message_complete else 0

    def ends_at_close(self) -> bool:
        """True when the answer's end is marked by the end of the connection, and so an end of file completes it."""
        if not self._is_head_complete:
            return False
        head = self._head.split(b"\r\n\r\n", 1)[0].lower()
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
