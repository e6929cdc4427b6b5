"""One question to a server beside a replay (health, models, version, metrics, exporter), within limits.

The whole answer has one deadline and one size, nothing is decompressed, and no exception leaves here: what went wrong
is a word in the reply. It holds the interpreter for microseconds, since a replay may run beside it.
"""

from __future__ import annotations

import socket
import ssl
from contextlib import ExitStack
from typing import Any, NamedTuple

import httptools
import pydantic_core

from harness.client.answer import MIN_FINAL_STATUS
from harness.client.target import Endpoint
from harness.clock import NS_PER_S, monotonic_ns

NO_ANSWER = 0
HTTP_OK = 200
# A vLLM server's metrics are 50 kB; a list of models is less.
MAX_BODY_BYTES = 8 << 20
MAX_HEAD_BYTES = 64 << 10
READ_BYTES = 1 << 16
_from_json: Any = pydantic_core.from_json


class Reply(NamedTuple):
    """What came back. status: NO_ANSWER when there was none within the limits, and then ``error`` says why."""

    status: int
    body: bytes
    error: str = ""

    def json(self) -> Any:
        """The body as JSON, of bounded depth; None when it is none."""
        try:
            return _from_json(self.body, allow_inf_nan=False)
        except ValueError:
            return None


class _Answer:
    """Called by the HTTP parser."""

    def __init__(self) -> None:
        self.body = bytearray()
        self.num_head_bytes = 0
        self.has_head = self.has_framing = self.is_over = self.is_compressed = False
        self.parser = httptools.HttpResponseParser(self)

    def close(self) -> None:
        """Part with the parser, which holds this object: a replay collects no cycles, and many answers are large."""
        del self.parser

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self.has_framing = self.has_framing or name in (b"content-length", b"transfer-encoding")
        if name == b"content-encoding" and value.strip().lower() != b"identity":
            self.is_compressed = True

    def on_headers_complete(self) -> None:
        self.has_head = self.parser.get_status_code() >= MIN_FINAL_STATUS

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.is_over = self.has_head

    def take(self, data: bytes) -> str:
        """The next bytes; what is wrong with them, or an empty string."""
        if not self.has_head:
            self.num_head_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            return f"not HTTP: {error}" if not self.is_over else ""
        if len(self.body) > MAX_BODY_BYTES or (not self.has_head and self.num_head_bytes > MAX_HEAD_BYTES):
            return f"TooLong: more than {MAX_BODY_BYTES >> 20} MiB, or a head without an end"
        return "compressed, which was not asked for" if self.is_compressed else ""


def ask(host: str, port: int, path: str, *, deadline_s: float) -> Reply:
    """GET ``path`` from a server of plain HTTP, as ``ask_endpoint`` does."""
    return ask_endpoint(Endpoint(host, port), path, deadline_s=deadline_s)


def ask_endpoint(endpoint: Endpoint, path: str, *, deadline_s: float) -> Reply:
    """GET ``path`` from a server; everything, from the connection to the last byte, within ``deadline_s`` wall seconds.
    No proxy of the environment stands between.
    """
    deadline_ns = monotonic_ns() + int(deadline_s * NS_PER_S)
    try:
        with ExitStack() as open_sockets:
            address = (endpoint.host, endpoint.port)
            sock = open_sockets.enter_context(socket.create_connection(address, timeout=deadline_s))
            if endpoint.is_https:
                context = ssl.create_default_context()
                sock = open_sockets.enter_context(context.wrap_socket(sock, server_hostname=endpoint.host))
            more = "".join(f"{name}: {value}\r\n" for name, value in endpoint.headers.items())
            head = (
                f"GET {endpoint.prefix}{path} HTTP/1.1\r\nHost: {endpoint.authority}\r\n"
                f"Accept-Encoding: identity\r\nConnection: close\r\n{more}\r\n"
            )
            sock.sendall(head.encode())
            return _read(sock, deadline_ns)
    except (OSError, ValueError) as error:  # a host name of impossible form is a ValueError
        return Reply(NO_ANSWER, b"", f"{type(error).__name__}: {error}")


def _read(sock: socket.socket, deadline_ns: int) -> Reply:
    answer = _Answer()
    try:
        return _read_into(answer, sock, deadline_ns)
    finally:
        answer.close()


def _read_into(answer: _Answer, sock: socket.socket, deadline_ns: int) -> Reply:
    while not answer.is_over:
        left_ns = deadline_ns - monotonic_ns()
        if left_ns <= 0:
            raise TimeoutError("no whole answer within the limit")
        sock.settimeout(left_ns / NS_PER_S)
        data = sock.recv(READ_BYTES)
        if not data:
            break
        problem = answer.take(data)
        if problem:
            return Reply(NO_ANSWER, b"", problem)
    if not answer.has_head:
        return Reply(NO_ANSWER, b"", "ConnectionResetError: closed before an answer")
    if answer.has_framing and not answer.is_over:
        return Reply(NO_ANSWER, b"", "ConnectionResetError: closed in the middle of the answer")
    return Reply(answer.parser.get_status_code(), bytes(answer.body))
