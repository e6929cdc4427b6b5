"""Metric scrapes as they came: the body of /metrics before, after and at an interval of a run, one JSON line each.

A scrape that fails is a line with a status, never an exception, and never waits for the replay or makes it wait.
Nothing is parsed here, so that every figure can be rebuilt from what the server said.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, BinaryIO, Literal

from harness.client.target import Endpoint
from harness.clock import NS_PER_S, Clock
from harness.errors import RecordsError
from harness.server.ask import ask_endpoint

Reason = Literal["before", "interval", "after"]
# Short: a server too busy to answer within this is a fact worth a line, and the next scrape is due.
SCRAPE_TIMEOUT_S = 2.0


class Scraper:
    """Scrapes one server from a thread of its own between ``start`` and ``stop``.

    One line per scrape: {"at_ns": when it was sent, "done_ns": when the body was complete, "reason", "status": HTTP
    status or 0 for no answer, "body", "error" when there was no answer, and what ``beside`` gives}. Instants are of
    ``clock``; interval_s is in seconds of ``clock`` too.
    Bytes that are not UTF-8 stand as lone surrogates (``surrogateescape``).
    """

    def __init__(
        self,
        sink: BinaryIO,
        *,
        endpoint: Endpoint,
        clock: Clock,
        interval_s: float,
        timeout_s: float = SCRAPE_TIMEOUT_S,
        path: str = "/metrics",
        beside: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self._sink = sink
        self._endpoint = endpoint
        self._clock = clock
        self._interval_ns = int(interval_s * NS_PER_S)
        self._timeout_s = timeout_s
        self._path = path
        self._beside = beside
        self._sink_lock = threading.Lock()
        self._stop_asked = threading.Event()
        self._thread: threading.Thread | None = None
        self._sink_error: OSError | None = None
        self.num_scrapes = 0
        self.num_failed = 0

    def start(self) -> None:
        """Scrape once ("before"), then keep scraping at the interval from a thread."""
        self.scrape("before")
        self._thread = threading.Thread(target=self._keep_scraping, name="metric-scraper", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread, then scrape once more ("after"); safe to call again.

        Raises RecordsError when a line could not be written.
        """
        if self._thread is None:
            return
        self._stop_asked.set()
        self._thread.join()
        self._thread = None
        self.scrape("after")
        if self._sink_error is not None:
            raise RecordsError(
                f"a scrape cannot be written ({self._sink_error.strerror})", hint="Free some disk space"
            ) from self._sink_error

    def __enter__(self) -> Scraper:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def scrape(self, reason: Reason) -> int:
        """Scrape now from the calling thread; returns the HTTP status, 0 for no answer."""
        at_ns = self._clock.now_ns()
        reply = ask_endpoint(self._endpoint, self._path, deadline_s=self._timeout_s)
        status = reply.status
        line: dict[str, Any] = {
            "at_ns": at_ns,
            "done_ns": self._clock.now_ns(),
            "reason": reason,
            "status": status,
            "body": reply.body.decode("utf-8", "surrogateescape"),
            **self._beside(),
        }
        if reply.error:
            line["error"] = reply.error
        with self._sink_lock:
            self.num_scrapes += 1
            self.num_failed += status != 200
            try:
                self._sink.write(json.dumps(line).encode("ascii") + b"\n")
                self._sink.flush()
            except OSError as failure:
                self._sink_error = failure
        return status

    def _keep_scraping(self) -> None:
        due_ns = self._clock.now_ns()
        while True:
            # Missed instants are left out, not caught up: two scrapes at once would tell nothing new.
            now_ns = self._clock.now_ns()
            due_ns += self._interval_ns * max(1, -(-(now_ns - due_ns) // self._interval_ns))
            if self._stop_asked.wait((due_ns - now_ns) / self._clock.scale / NS_PER_S):
                return
            self.scrape("interval")
