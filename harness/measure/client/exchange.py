"""One request and its answer so far: HTTP is parsed as bytes arrive, JSON when there is time.

httptools decides where the answer ends. There is no socket and no clock here: ``loop`` reads and stamps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import httptools

from harness.errors import printable
from harness.measure.client.answer import (
    COMPRESSED,
    MAX_ERROR_BYTES,
    MAX_ID_CHARS,
    MIN_FINAL_STATUS,
    NO_KERNEL_STAMP,
    SESSION_TOKEN_HEADER,
    Piece,
    ReceivedAnswer,
)
from harness.measure.client.rows import ABSENT
from harness.measure.client.target import Endpoint

MAX_HEAD_BYTES = 64 << 10
FRAMING_HEADERS = (b"content-length", b"transfer-encoding")
# When more receives wait, they are interpreted at once, so memory stays bounded whatever a server sends.
MAX_WAITING_PIECES = 32
# Receives interpreted at a time: about 40 us of work.
PIECES_AT_ONCE = 4


def request_head(endpoint: Endpoint, path: str, own_headers: Iterable[str] = ()) -> str:
    """The beginning of every request to ``path`` of ``endpoint``. own_headers: names that each request adds itself."""
    # Gateways refuse requests that do not say what sends them.
    agent = {} if "user-agent" in map(str.lower, own_headers) else {"User-Agent": "rbln-harness"}
    more = header_lines({**agent, **endpoint.headers})
    return (
        f"POST {endpoint.prefix}{path} HTTP/1.1\r\nHost: {endpoint.authority}\r\n"
        f"Content-Type: application/json\r\nAccept: */*\r\n{more}"
    )


def header_lines(headers: Mapping[str, str]) -> str:
    """Headers as they stand in a request."""
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())


def request_bytes(head: str, request_id: str, body: Sequence[bytes]) -> bytes:
    """A whole request. head: from ``request_head``."""
    head = f"{head}X-Request-Id: {request_id}\r\nContent-Length: {sum(map(len, body))}\r\n\r\n"
    return b"".join((head.encode(), *body))


def unreadable(error: Exception) -> str:
    """The problem of an answer that a parser did not expect."""
    return printable(f"cannot be read ({type(error).__name__}: {error})")


class Exchange:
    """A request and its answer so far.

    payload: the request's bytes until they are sent. status: 0 until the head is complete. problem: why the answer is
    not HTTP, empty while it is. has_head, is_over: the head, the answer is complete. is_queued: a job will interpret
    the waiting receives.
    """

    __slots__ = (
        "_has_framing",
        "_head_bytes",
        "_is_compressed",
        "_last",
        "_new_body",
        "_parser",
        "_waiting",
        "answer",
        "error_body",
        "first_byte_ns",
        "has_head",
        "is_kept_alive",
        "is_over",
        "is_queued",
        "last_received_ns",
        "payload",
        "problem",
        "row",
        "status",
    )

    def __init__(self, row: int, answer: ReceivedAnswer, payload: bytes) -> None:
        self.row = row
        self.answer = answer
        self.payload = payload
        self.status = 0
        self.problem = ""
        self.error_body = bytearray()
        self.first_byte_ns = self.last_received_ns = ABSENT
        self.is_over = self.is_kept_alive = self.is_queued = False
        # Summed over heads: an interim answer has a head too.
        self._head_bytes = 0
        self._has_framing = self.has_head = self._is_compressed = False
        self._new_body: list[bytes] = []
        self._waiting: deque[Piece] = deque()
        self._last: Piece | None = None
        self._parser: httptools.HttpResponseParser | None = None

    # -- called by httptools -----------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self.is_over:
            self.problem = "not HTTP: more bytes than the answer's end allows"
        self._has_framing = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name in FRAMING_HEADERS:
            self._has_framing = True
        elif name == b"content-encoding" and value.strip().lower() != b"identity":
            self._is_compressed = True
        elif name == self.answer.replica_header:
            self.answer.replica = value.decode("latin-1")[:MAX_ID_CHARS]
        elif name == SESSION_TOKEN_HEADER.encode() and value.isascii():
            self.answer.session_token = value.decode()

    def on_headers_complete(self) -> None:
        assert self._parser is not None
        self.has_head = True
        if self._is_compressed and self._parser.get_status_code() == 200:
            self.problem = COMPRESSED

    def on_body(self, body: bytes) -> None:
        self._new_body.append(body)

    def on_message_complete(self) -> None:
        assert self._parser is not None
        if self._parser.get_status_code() < MIN_FINAL_STATUS:
            # An interim answer (100 Continue): the final one follows.
            self.has_head = False
            return
        self.is_over = True
        # The parser forgets the message's framing after this call.
        self.is_kept_alive = self._parser.should_keep_alive()

    # -- called by the loop ------------------------------------------------------------------------------------

    def take(self, received_ns: int, kernel_ns: int, data: bytes) -> None:
        """Parse the bytes of one receive as HTTP; its part of the body waits to be interpreted."""
        if self._parser is None:
            self.first_byte_ns = received_ns
            self._parser = httptools.HttpResponseParser(self)
        self.last_received_ns = received_ns
        self._parse(self._parser, data)
        if not self.has_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self.problem = self.problem or "not HTTP: the head does not end"
            return
        if not self.status:
            self.status = self._parser.get_status_code()
        body = self._new_body
        if body:
            whole = body[0] if len(body) == 1 else b"".join(body)
            body.clear()
            if self.status == 200:
                self._waiting.append((received_ns, kernel_ns, whole))
                if len(self._waiting) > MAX_WAITING_PIECES:
                    self.interpret()
            else:
                self.error_body += whole[: MAX_ERROR_BYTES - len(self.error_body)]

    def _parse(self, parser: httptools.HttpResponseParser, data: bytes) -> None:
        try:
            parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.problem = self.problem or f"not HTTP: {error}"
        except httptools.HttpParserUpgrade:
            self.problem = "not HTTP: the server changes to another protocol"
        except Exception as error:  # a bad answer ends its own request and nothing else
            self.problem = self.problem or unreadable(error)

    def interpret(self, most: int = MAX_WAITING_PIECES + 1) -> bool:
        """Read the JSON of at most ``most`` waiting receives; True when more are waiting."""
        waiting, feed = self._waiting, self.answer.feed
        try:
            for _ in range(min(most, len(waiting))):
                self._last = piece = waiting.popleft()
                feed(piece)
        except Exception as error:
            self.answer.problem = self.answer.problem or unreadable(error)
        return bool(waiting)

    def read(self) -> ReceivedAnswer:
        """The answer, with everything received so far interpreted."""
        self.interpret()
        return self.answer

    def close(self) -> ReceivedAnswer:
        """The whole answer, once it is complete."""
        self.interpret()
        try:
            self.answer.close(self._last or (self.first_byte_ns, NO_KERNEL_STAMP, b""))
        except Exception as error:
            self.answer.problem = self.answer.problem or unreadable(error)
        return self.answer

    def release(self) -> None:
        """Free the parser: its callbacks make a reference cycle, and no garbage is collected during a replay."""
        self._parser = None

    @property
    def ends_at_close(self) -> bool:
        """Whether the answer ends with the connection."""
        return self.has_head and not self._has_framing and not self.problem
