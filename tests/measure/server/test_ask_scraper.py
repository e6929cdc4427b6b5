"""Scrapes are lines, whatever the server does."""

from __future__ import annotations

import io
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S, MonotonicClock, ScaledClock
from harness.errors import RecordsError
from harness.measure.server.ask import Get, Scraper, ask_url
from harness.measure.server.process import free_port
from tests.support.processes import HOST, NO_PORT, WITHIN_S, comes_true, start_tiny_server

pytestmark = pytest.mark.live
METRICS = 'requests_total{word="café"} 7\n'


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    port = free_port()
    with start_tiny_server(tmp_path_factory.mktemp("server"), port) as server:
        server.wait_healthy(HOST, port, deadline_s=WITHIN_S)
        yield port


def metrics_of(port: int, prefix: str = "") -> Get:
    return lambda deadline_s: ask_url(f"http://{HOST}:{port}{prefix}/metrics", deadline_s=deadline_s)


def lines_of(sink: io.BytesIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in sink.getvalue().splitlines()]


def test_a_run_is_scraped_before_at_the_interval_and_after(port: int) -> None:
    sink, clock = io.BytesIO(), ScaledClock(4.0)
    began_ns = clock.now_ns()
    with Scraper(sink, metrics_of(port), clock=clock, interval_s=0.2) as scraper:
        assert comes_true(lambda: scraper.num_scrapes >= 4)
    lines = lines_of(sink)
    assert [line["reason"] for line in lines[:1]] == ["before"]
    assert {line["reason"] for line in lines[1:-1]} == {"interval"}
    assert lines[-1]["reason"] == "after"
    assert {line["status"] for line in lines} == {200}
    assert {line["body"] for line in lines} == {METRICS}
    instants = [instant for line in lines for instant in (line["at_ns"], line["done_ns"])]
    assert instants == sorted(instants)
    assert began_ns <= instants[0]
    assert instants[-1] <= clock.now_ns()
    # In model time: never sooner than the interval allows.
    interval_at_ns = [line["at_ns"] for line in lines[1:-1]]
    assert interval_at_ns[-1] - interval_at_ns[0] > (len(interval_at_ns) - 2) * 0.2 * NS_PER_S
    assert (scraper.num_scrapes, scraper.num_failed) == (len(lines), 0)


def test_a_server_that_is_gone_gives_a_line_and_no_exception() -> None:
    sink = io.BytesIO()
    with Scraper(sink, metrics_of(NO_PORT), clock=MonotonicClock(), interval_s=60):
        pass
    lines = lines_of(sink)
    assert [(line["reason"], line["status"], line["body"]) for line in lines] == [("before", 0, ""), ("after", 0, "")]
    assert lines[0]["error"].startswith("ConnectionRefusedError")


def test_a_silent_server_gives_a_line_after_the_timeout() -> None:
    with socket.socket() as silent:
        silent.bind((HOST, 0))
        silent.listen(1)
        sink = io.BytesIO()
        port = silent.getsockname()[1]
        scraper = Scraper(sink, metrics_of(port), clock=MonotonicClock(), interval_s=60)
        scraper.timeout_s = 0.05
        assert scraper.scrape("interval") == 0
    assert lines_of(sink)[0]["error"].startswith("TimeoutError")


def test_a_refusal_keeps_its_status_and_body(port: int) -> None:
    sink = io.BytesIO()
    scraper = Scraper(sink, metrics_of(port, "/unhealthy"), clock=MonotonicClock(), interval_s=60)
    assert scraper.scrape("before") == 503
    assert lines_of(sink)[0]["body"] == "ok"
    assert scraper.num_failed == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_at_the_end_not_during_the_replay(port: int) -> None:
    with Path("/dev/full").open("wb", buffering=0) as sink:
        scraper = Scraper(sink, metrics_of(port), clock=MonotonicClock(), interval_s=60)
        scraper.start()
        with pytest.raises(RecordsError, match="No space left"):
            scraper.stop()
