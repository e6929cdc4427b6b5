"""Requests beside a replay (health, models, version, metrics, tokenizer), and the scrapes of /metrics through a run.

httpx speaks HTTP and TLS here; the replay has a client of its own. A whole answer has a deadline and a size limit,
nothing is decompressed, the client's secrets are replaced, no redirect is followed but of metrics on the same server,
and a failure is a field of the reply, never an exception. What asks while a replay runs does so from
``asking_process``: a request by httpx holds the interpreter for milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple, TypeVar
from urllib.parse import urljoin, urlsplit

import pydantic_core

from harness.clock import NS_PER_S, Clock
from harness.errors import RecordsError, printable
from harness.measure.client.answer import COMPRESSED, MAX_ERROR_BYTES
from harness.measure.client.certificates import trusting_context
from harness.processes import helper_process
from harness.secrets import note_secrets, noted_secrets, without_secrets

if TYPE_CHECKING:
    import httpx

    from harness.measure.client.target import Endpoint

NO_ANSWER = 0
METRICS = "/metrics"
NO_HEADERS: Mapping[str, str] = {}
HTTP_OK = 200
REDIRECTS, MOST_REDIRECTS = (301, 302, 303, 307, 308), 3
# A vLLM server's metrics are 50 kB; a list of models is less.
MAX_BYTES = 8 << 20
# Beyond the deadline of a request. A name that is looked up has none.
STUCK_S = 60.0
# Short: that a server is too busy to answer in time is recorded, and the next scrape is due. Without the first and the
# last scrape nothing is known of what the server counted.
SCRAPE_TIMEOUT_S, END_SCRAPE_TIMEOUT_S = 2.0, 10.0
Reason = Literal["before", "interval", "after"]
PollerT = TypeVar("PollerT", bound="Poller")
_from_json: Any = pydantic_core.from_json


class Reply(NamedTuple):
    """A server's answer. status: NO_ANSWER when none came within the limits; ``error`` then says why.

    challenge: the kind of authorization that the server asks for (WWW-Authenticate), "" where it names none.
    """

    status: int
    body: bytes
    error: str = ""
    challenge: str = ""

    def json(self) -> Any:
        """The body as JSON, of bounded depth; None when it is not JSON."""
        try:
            return _from_json(self.body, allow_inf_nan=False)
        except ValueError:
            return None


Get = Callable[[float], Reply]
"""GETs one URL. Takes the wall seconds that all of it may take, from connecting to the last byte."""


def ask(
    endpoint: Endpoint,
    path: str,
    *,
    deadline_s: float,
    body: bytes | None = None,
    headers: Mapping[str, str] = NO_HEADERS,
) -> Reply:
    """``ask_url`` for ``path`` of a server."""
    return ask_url(endpoint.url + path, deadline_s=deadline_s, body=body, headers={**endpoint.headers, **headers})


def ask_url(
    url: str, *, deadline_s: float, body: bytes | None = None, headers: Mapping[str, str] = NO_HEADERS
) -> Reply:
    """GET a URL, or POST ``body`` (JSON) to it.

    ``deadline_s`` wall seconds cover all of it, from connecting to the last byte. Proxy settings of the environment are
    ignored.
    """
    return _asked(url, deadline_s, body, headers)[0]


def ask_metrics(url: str, *, deadline_s: float, headers: Mapping[str, str] = NO_HEADERS) -> tuple[Reply, str]:
    """(reply, where it came from) of a GET; a redirect is followed on the same server, else ``error`` names its place.

    The headers may hold a key, which goes to no other server. ``deadline_s`` is of each of MOST_REDIRECTS + 1 requests.
    """
    reply, location = _asked(url, deadline_s, None, headers)
    for _ in range(MOST_REDIRECTS):
        place = urljoin(url, location)
        if not location:
            break
        if urlsplit(place)[:2] != urlsplit(url)[:2]:
            return reply._replace(error=f"status {reply.status}, a redirect to {printable(place)}"), url
        url = place
        reply, location = _asked(url, deadline_s, None, headers)
    return reply, url


def _asked(url: str, deadline_s: float, body: bytes | None, headers: Mapping[str, str]) -> tuple[Reply, str]:
    """(reply, where a redirect leads to, "" for none)."""
    # Imported here: commands that ask no server start without it.
    import httpx

    method, of_body = ("GET", {}) if body is None else ("POST", {"Content-Type": "application/json"})
    sent = {"Accept-Encoding": "identity", "Connection": "close", **of_body, **headers}
    fields = [(name.encode(), value.strip().encode()) for name, value in sent.items()]
    with (
        httpx.Client(trust_env=False, verify=trusting_context(url), timeout=deadline_s) as client,
        _cut_off_after(deadline_s) as (note, is_cut),
    ):
        try:
            with client.stream(method, url, content=body, headers=fields, extensions={"trace": note}) as response:
                reply = _read(response)
                kind = response.headers.get("www-authenticate", "").partition(" ")[0]
                reply = reply._replace(challenge=kind if kind.isalnum() else "")
                location = response.headers.get("location", "") if reply.status in REDIRECTS else ""
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
            reply, location = Reply(NO_ANSWER, b"", _reason(error)), ""
    # What was cut off may look like an answer that ends with its connection.
    cut_off = Reply(NO_ANSWER, b"", "TimeoutError: no whole answer within the limit")
    return (cut_off, "") if is_cut.is_set() else (reply, location)


@contextmanager
def _cut_off_after(deadline_s: float) -> Generator[tuple[Callable[[str, Mapping[str, Any]], None], threading.Event]]:
    """Ends the connection of a request at its deadline: httpx limits each read, not all of them together.

    Yields what httpx calls as the request goes on, and whether it was cut off.
    """
    open_sockets: list[socket.socket] = []
    is_cut = threading.Event()

    def note(event: str, facts: Mapping[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            # Of its own descriptor, because TLS takes the socket over.
            open_sockets.append(facts["return_value"].get_extra_info("socket").dup())
            if is_cut.is_set():
                cut()

    def cut() -> None:
        is_cut.set()
        for sock in open_sockets:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(deadline_s, cut)
    timer.daemon = True
    timer.start()
    try:
        yield note, is_cut
    finally:
        timer.cancel()
        for sock in open_sockets:
            sock.close()


def _read(response: httpx.Response) -> Reply:
    is_ok = response.status_code == HTTP_OK
    if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
        # Nobody can say what is in it, so that of an error is not kept either.
        return Reply(NO_ANSWER, b"", COMPRESSED) if is_ok else Reply(response.status_code, b"")
    body = bytearray()
    for data in response.iter_raw():
        body += data
        if len(body) > MAX_BYTES:
            return Reply(NO_ANSWER, b"", f"TooLong: more than {MAX_BYTES >> 20} MiB")
    whole = without_secrets(bytes(body))
    return Reply(response.status_code, whole if is_ok else whole[:MAX_ERROR_BYTES])


def _reason(error: BaseException) -> str:
    """What went wrong at the bottom: the system's error, or what the HTTP parser met."""
    while (below := error.__cause__ or error.__context__) is not None:
        error = below
    name = type(error).__name__
    # Its own words would show the header's value, which may be a key.
    words = "a header has characters that HTTP forbids" if name == "LocalProtocolError" else str(error)
    return printable(f"{name}: {words}")


@contextmanager
def asking_process(url: str, headers: Mapping[str, str] = NO_HEADERS) -> Generator[Get]:
    """GETs ``url`` from a process of its own: a replay in this one does not pay for it. For one thread."""
    with helper_process(f"{__name__}:answer_requests") as (process, line):

        def get(deadline_s: float) -> Reply:
            try:
                line.send((deadline_s, noted_secrets()))
                if not line.poll(deadline_s + STUCK_S):
                    process.kill()
                return line.recv()
            except (EOFError, OSError):
                return Reply(NO_ANSWER, b"", "ChildProcessError: the process that asks has ended")

        with suppress(OSError):  # a process that died is noticed when it is asked
            line.send((url, dict(headers)))
        yield get
        with suppress(OSError):
            line.send(None)


def answer_requests(fd: str) -> None:
    """The process that asks. URL and headers come from the line ``fd``, then deadlines with the secrets that
    are known; each is answered by a Reply without these."""
    with suppress(OSError):
        # The kernel lets such a process preempt others less when it wakes (sched(7)); a replay may share its core.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    # With click, httpx loads a command line of its own, and rich: twice the time that the rest takes.
    sys.modules["click"] = None  # pyright: ignore[reportArgumentType]
    # Loads everything while the server still starts.
    ask_url("", deadline_s=1.0)
    with Connection(int(fd)) as line, suppress(EOFError, OSError):
        url, headers = line.recv()
        while (asked := line.recv()) is not None:
            deadline_s, secrets = asked
            note_secrets(secrets)
            reply, url = ask_metrics(url, deadline_s=deadline_s, headers=headers)
            line.send(reply)


def next_call_ns(due_ns: int, now_ns: int, interval_ns: int, *, has_random_gaps: bool) -> int:
    """When a ``Poller`` calls next, whose last call was due at ``due_ns``."""
    if has_random_gaps:
        return now_ns + int(interval_ns * random.uniform(0.5, 1.5))
    return due_ns + interval_ns * max(1, -(-(now_ns - due_ns) // interval_ns))


class Poller:
    """Calls ``act`` with "before" at its start, "interval" from a thread until it is stopped, then "after".

    interval_s: in seconds of ``clock``. Missed instants are skipped: two calls at once would show nothing new.
    has_random_gaps: of half to one and a half intervals, so that nothing periodic keeps step with the calls.
    """

    def __init__(
        self, act: Callable[[Reason], object], clock: Clock, interval_s: float, *, has_random_gaps: bool = False
    ) -> None:
        self._act = act
        self._clock = clock
        self._interval_ns = int(interval_s * NS_PER_S)
        self._has_random_gaps = has_random_gaps
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

    def __enter__(self: PollerT) -> PollerT:
        self.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self.stop()

    def _repeat(self) -> None:
        due_ns = self._clock.now_ns()
        while True:
            now_ns = self._clock.now_ns()
            due_ns = next_call_ns(due_ns, now_ns, self._interval_ns, has_random_gaps=self._has_random_gaps)
            if self._stop_asked.wait((due_ns - now_ns) / self._clock.scale / NS_PER_S):
                return
            self._act("interval")


class Scraper(Poller):
    """Scrapes a server from a thread between ``start`` and ``stop``. metrics: GETs its /metrics; of several replicas
    each GETs that of one, and its lines name it: "replica", from 0.

    One line per scrape: {"at_ns": when it was due, "done_ns": when the body was complete, "reason", "status": HTTP
    status or 0 for no answer, "body", "error" when there was no answer, and the figures of ``beside``}. Instants are of
    ``clock``. A failed scrape is a line with a status, never an exception. Bytes that are not UTF-8 stand as lone
    surrogates (``surrogateescape``).
    """

    def __init__(
        self,
        sink: BinaryIO,
        *metrics: Get,
        clock: Clock,
        interval_s: float,
        beside: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        super().__init__(self.scrape, clock, interval_s)
        self._sink = sink
        self._metrics = metrics
        self._beside = beside
        self.timeout_s, self.end_timeout_s = SCRAPE_TIMEOUT_S, END_SCRAPE_TIMEOUT_S
        self._sink_lock = threading.Lock()
        self._sink_error: OSError | None = None
        self.num_scrapes = 0
        self.num_failed = 0

    def stop(self) -> None:
        """As ``Poller.stop``. Raises RecordsError when a line could not be written."""
        super().stop()
        if self._sink_error is not None:
            raise RecordsError(
                f"a scrape cannot be written ({self._sink_error.strerror})", hint="Free some disk space"
            ) from self._sink_error

    def scrape(self, reason: Reason) -> int:
        """Scrape now from the calling thread; returns the HTTP status, 0 for no answer; of several, the worst."""
        if len(self._metrics) == 1:
            return self._scrape(self._metrics[0], reason, {})
        statuses = [self._scrape(metrics, reason, {"replica": place}) for place, metrics in enumerate(self._metrics)]
        return next((status for status in statuses if status != HTTP_OK), HTTP_OK)

    def _scrape(self, metrics: Get, reason: Reason, of: Mapping[str, int]) -> int:
        at_ns = self._clock.now_ns()
        reply = metrics(self.timeout_s if reason == "interval" else self.end_timeout_s)
        line: dict[str, Any] = {
            "at_ns": at_ns,
            "done_ns": self._clock.now_ns(),
            "reason": reason,
            **of,
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
