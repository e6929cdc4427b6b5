"""When a request arrives: with its last byte. The emulator's own work on it is neither the model's nor a stall."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from harness.clock import NS_PER_S, ScaledClock
from harness.measure.emulator import api
from harness.measure.emulator import server as server_module
from harness.measure.emulator.config import EmulatorConfig
from harness.measure.emulator.driver import RealTimeDriver
from harness.measure.emulator.server import EmulatorServer
from harness.measure.emulator.step_log import read_trace


async def ask(server: EmulatorServer, num_requests: int) -> None:
    """So many requests at once, all of them answered."""
    driver = RealTimeDriver(server.core, server.clock, server.reporter, server.config)
    async with TestClient(TestServer(api.Api(driver, server.config).application())) as client:
        body = {"prompt": [1, 2, 3], "max_tokens": 20}
        answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for _ in range(num_requests)))
        assert [answer.status for answer in answers] == [200] * num_requests
        for answer in answers:
            await answer.read()
    driver.close()


def test_the_emulators_own_work_on_a_request_is_no_time_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = EmulatorServer(EmulatorConfig(trace_path=str(tmp_path / "trace.jsonl"), port=0))
    parsed_ns: list[int] = []
    parse = api.parse_request

    def noted(*arguments: Any) -> Any:
        parsed_ns.append(server.clock.now_ns())
        return parse(*arguments)

    monkeypatch.setattr(api, "parse_request", noted)

    try:
        asyncio.run(ask(server, 1))
    finally:
        server.close()
        server.socket.close()
    arrivals = [
        arrival_ns for step in read_trace(tmp_path / "trace.jsonl") for _name, arrival_ns in step.get("arrivals", ())
    ]
    assert len(arrivals) == len(parsed_ns) == 1
    assert arrivals[0] <= parsed_ns[0]


class SkippingClock(ScaledClock):
    """The machine's clock; ``skip`` lets time pass at once."""

    skipped_ns = 0

    def skip(self, seconds: int) -> None:
        self.skipped_ns += seconds * NS_PER_S

    def from_monotonic_ns(self, monotonic_ns: int) -> int:
        return super().from_monotonic_ns(monotonic_ns) + self.skipped_ns

    def to_monotonic_ns(self, model_ns: int) -> int:
        return super().to_monotonic_ns(model_ns - self.skipped_ns)


def stalls_of(folder: Path, monkeypatch: pytest.MonkeyPatch, num_requests: int, *, is_work: bool) -> list[int]:
    """By how much each stall moved the schedule (ns); limit: a minute.

    Ten minutes pass with each request: while the emulator works on it, or after.
    """
    monkeypatch.setattr(server_module, "ScaledClock", SkippingClock)
    server = EmulatorServer(EmulatorConfig(trace_path=str(folder / "trace.jsonl"), port=0, stall_limit_ms=60_000))
    clock = server.clock
    assert isinstance(clock, SkippingClock)
    parse = api.parse_request

    def slow(*arguments: Any) -> Any:
        if is_work:
            clock.skip(600)
        else:
            asyncio.get_running_loop().call_soon(clock.skip, 600)
        return parse(*arguments)

    monkeypatch.setattr(api, "parse_request", slow)
    try:
        asyncio.run(ask(server, num_requests))
    finally:
        server.close()
        server.socket.close()
    return [row["moved_ns"] for row in read_trace(folder / "trace.jsonl") if row["kind"] == "STALL"]


@pytest.mark.parametrize("num_requests", [1, 5])
def test_long_work_on_requests_is_no_stall_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_requests: int
) -> None:
    assert stalls_of(tmp_path, monkeypatch, num_requests, is_work=True) == []


def test_time_that_passes_after_the_work_on_a_request_is_a_stall(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (moved_ns,) = stalls_of(tmp_path, monkeypatch, 1, is_work=False)
    assert moved_ns >= 600 * NS_PER_S
