"""Requests beside a replay (health, models, version, metrics, tokenizer), and the scrapes of /metrics through a run.

A whole answer has a deadline and a size limit, nothing is decompressed, and a failure is a field of the reply, never an
exception. A scrape is kept as it came, nothing is parsed. Each request holds the interpreter for microseconds only,
because a replay may run beside it.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, BinaryIO, Literal, NamedTuple, TypeVar

import pydantic_core

from harness.clock import NS_PER_S, Clock, monotonic_ns
from harness.errors import RecordsError
from harness.measure.client.answer import NO_KERNEL_STAMP, Answer
from harness.measure.client.exchange import Exchange
from harness.measure.client.target import Endpoint

NO_ANSWER = 0
NO_HEADERS: Mapping[str, str] = {}
HTTP_OK = 200
# A vLLM server's metrics are 50 kB; a list of models is less.
MAX_BYTES = 8 << 20
READ_BYTES = 1 << 16
# Short: that a server is too busy to answer in time is recorded, and the next scrape is due. Without the first and the
# last scrape nothing is known of what the server counted.
SCRAPE_TIMEOUT_S, END_SCRAPE_TIMEOUT_S = 2.0, 10.0
Reason = Literal["before", "interval", "after"]
RoundsT = TypeVar("RoundsT", bound="Rounds")
_from_json: Any = pydantic_core.from_json


class Reply(NamedTuple):
    """A server's answer. status: NO_ANSWER when none came within the limits; ``error`` then says why."""

    status: int
    body: bytes
    error: str = ""

    def json(self) -> Any:
        """The body as JSON, of bounded depth; None when it is not JSON."""
        try:
            return _from_json(self.body, allow_inf_nan=False)
        except ValueError:
            return None


def ask(
    endpoint: Endpoint,
    path: str,
    *,
    deadline_s: float,
    body: bytes | None = None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> Reply:
    """GET ``path`` from a server, or POST ``body`` (JSON) to it.

    ``deadline_s`` wall seconds cover all of it, from connecting to the last byte. Proxy settings of the environment are
    ignored.
    """
    deadline_ns = monotonic_ns() + int(deadline_s * NS_PER_S)
    try:
        with ExitStack() as open_sockets:
            address = (endpoint.host, endpoint.port)
            sock = open_sockets.enter_context(socket.create_connection(address, timeout=deadline_s))
            if endpoint.is_https:
                context = ssl.create_default_context()
                sock = open_sockets.enter_context(context.wrap_socket(sock, server_hostname=endpoint.host))
            of_body = {} if body is None else {"Content-Type": "application/json", "Content-Length": str(len(body))}
            sent = {**endpoint.headers, **headers, **of_body}
            more = "".join(f"{name}: {value}\r\n" for name, value in sent.items())
            method = "GET" if body is None else "POST"
            head = (
                f"{method} {endpoint.prefix}{path} HTTP/1.1\r\nHost: {endpoint.authority}\r\n"
                f"Accept-Encoding: identity\r\nConnection: close\r\n{more}\r\n"
            )
            sock.sendall(head.encode() + (body or b""))
            return _read(sock, deadline_ns)
    except (OSError, ValueError) as error:  # a host name of impossible form is a ValueError
        return Reply(NO_ANSWER, b"", f"{type(error).__name__}: {error}")


def _read(sock: socket.socket, deadline_ns: int) -> Reply:
    exchange = Exchange(0, Answer(stream=False), b"")
    try:
        return _read_into(exchange, sock, deadline_ns)
    finally:
        exchange.release()


def _read_into(exchange: Exchange, sock: socket.socket, deadline_ns: int) -> Reply:
    num_bytes = 0
    while not exchange.is_over:
        left_ns = deadline_ns - monotonic_ns()
        if left_ns <= 0:
            raise TimeoutError("no whole answer within the limit")
        sock.settimeout(left_ns / NS_PER_S)
        data = sock.recv(READ_BYTES)
        if not data:
            break
        exchange.take(monotonic_ns(), NO_KERNEL_STAMP, data)
        num_bytes += len(data)
        if exchange.problem:
            return Reply(NO_ANSWER, b"", exchange.problem)
        if num_bytes > MAX_BYTES:
            return Reply(NO_ANSWER, b"", f"TooLong: more than {MAX_BYTES >> 20} MiB")
    if not exchange.has_head:
        return Reply(NO_ANSWER, b"", "ConnectionResetError: closed before an answer")
    if not exchange.is_over and not exchange.ends_at_close:
        return Reply(NO_ANSWER, b"", "ConnectionResetError: closed in the middle of the answer")
    return Reply(exchange.status, exchange.read().body or bytes(exchange.error_body))


class Rounds:
    """Calls ``act`` with "before" at its start, "interval" from a thread until it is stopped, then "after".

    interval_s: in seconds of ``clock``. Missed instants are skipped: two calls at once would show nothing new.
    """

    def __init__(self, act: Callable[[Reason], object], clock: Clock, interval_s: float) -> None:
        self._act = act
        self._clock = clock
        self._interval_ns = int(interval_s * NS_PER_S)
        self._stop_asked = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Call once, then keep calling at the interval."""
        self._act("before")
        self._thread = threading.Thread(target=self._repeat, name=type(self).__name__, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, then call once more; safe to call again."""
        if self._thread is not None:
            self._stop_asked.set()
            self._thread.join()
            self._thread = None
            self._act("after")

    def __enter__(self: RoundsT) -> RoundsT:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def _repeat(self) -> None:
        due_ns = self._clock.now_ns()
        while True:
            now_ns = self._clock.now_ns()
            due_ns += self._interval_ns * max(1, -(-(now_ns - due_ns) // self._interval_ns))
            if self._stop_asked.wait((due_ns - now_ns) / self._clock.scale / NS_PER_S):
                return
            self._act("interval")


class Scraper(Rounds):
    """Scrapes one server from a thread between ``start`` and ``stop``.

    One line per scrape: {"at_ns": when it was sent, "done_ns": when the body was complete, "reason", "status": HTTP
    status or 0 for no answer, "body", "error" when there was no answer, and the figures of ``beside``}. Instants are of
    ``clock``. A failed scrape is a line with a status, never an exception. Bytes that are not UTF-8 stand as lone
    surrogates (``surrogateescape``).
    """

    def __init__(
        self,
        sink: BinaryIO,
        *,
        endpoint: Endpoint,
        clock: Clock,
        interval_s: float,
        beside: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        super().__init__(self.scrape, clock, interval_s)
        self._sink = sink
        self._endpoint = endpoint
        self._beside = beside
        self.timeout_s, self.end_timeout_s = SCRAPE_TIMEOUT_S, END_SCRAPE_TIMEOUT_S
        self._sink_lock = threading.Lock()
        self._sink_error: OSError | None = None
        self.num_scrapes = 0
        self.num_failed = 0

    def stop(self) -> None:
        """As ``Rounds.stop``. Raises RecordsError when a line could not be written."""
        super().stop()
        if self._sink_error is not None:
            raise RecordsError(
                f"a scrape cannot be written ({self._sink_error.strerror})", hint="Free some disk space"
            ) from self._sink_error

    def scrape(self, reason: Reason) -> int:
        """Scrape now from the calling thread; returns the HTTP status, 0 for no answer."""
        at_ns = self._clock.now_ns()
        deadline_s = self.timeout_s if reason == "interval" else self.end_timeout_s
        reply = ask(self._endpoint, "/metrics", deadline_s=deadline_s)
        line: dict[str, Any] = {
            "at_ns": at_ns,
            "done_ns": self._clock.now_ns(),
            "reason": reason,
            "status": reply.status,
            "body": reply.body.decode("utf-8", "surrogateescape"),
            **self._beside(),
        }
        if reply.error:
            line["error"] = reply.error
        with self._sink_lock:
            self.num_scrapes += 1
            self.num_failed += reply.status != HTTP_OK
            try:
                self._sink.write(json.dumps(line).encode("ascii") + b"\n")
                self._sink.flush()
            except OSError as failure:
                self._sink_error = failure
        return reply.status
