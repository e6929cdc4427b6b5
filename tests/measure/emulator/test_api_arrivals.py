"""When a request arrives: with its last byte. The emulator's own work on it is no time of the model, and no stall."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from harness.clock import NS_PER_S, ScaledClock
from harness.measure.emulator import api
from harness.measure.emulator import server as server_module
from harness.measure.emulator.config import EmulatorConfig, Fault
from harness.measure.emulator.driver import RealTimeDriver
from harness.measure.emulator.server import EmulatorServer
from harness.measure.emulator.step_log import read_trace


async def ask(server: EmulatorServer) -> dict[str, Any]:
    """The answer to one request of 2,000 tokens, which asks for two."""
    driver = RealTimeDriver(server.core, server.clock, server.reporter, server.config)
    async with TestClient(TestServer(api.Api(driver, server.config).application())) as client:
        answer = await client.post("/v1/completions", json={"prompt": [1] * 2000, "max_tokens": 2})
        assert answer.status == 200
        body = await answer.json()
    driver.close()
    return body


def answer_of(server: EmulatorServer) -> dict[str, Any]:
    """The answer to that request; the server is closed."""
    try:
        return asyncio.run(ask(server))
    finally:
        server.close()
        server.socket.close()


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
    answer_of(server)
    arrivals = [
        arrival_ns for step in read_trace(tmp_path / "trace.jsonl") for _name, arrival_ns in step.get("arrivals", ())
    ]
    assert len(arrivals) == len(parsed_ns) == 1
    assert arrivals[0] <= parsed_ns[0]


class SkippingClock(ScaledClock):
    """The machine's clock; ``skip`` lets time pass at once."""

    skipped_ns = 0

    def skip(self, ns: int) -> None:
        self.skipped_ns += ns

    def from_monotonic_ns(self, monotonic_ns: int) -> int:
        return super().from_monotonic_ns(monotonic_ns) + self.skipped_ns

    def to_monotonic_ns(self, model_ns: int) -> int:
        return super().to_monotonic_ns(model_ns - self.skipped_ns)


def moves_after_work_of(work_s: float, folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """By how much each stall beyond 30 s moved the schedule (ns), where a prefill lasts 36 s.

    The emulator works ``work_s`` on the request before it hands it to the idle engine.
    """
    monkeypatch.setattr(server_module, "ScaledClock", SkippingClock)
    config = EmulatorConfig(trace_path=str(folder / "trace.jsonl"), port=0, stall_limit_ms=30_000, step_factor=100)
    server = EmulatorServer(config)
    clock = server.clock
    parse = api.parse_request

    def slow(*arguments: Any) -> Any:
        clock.skip(round(work_s * NS_PER_S))
        return parse(*arguments)

    monkeypatch.setattr(api, "parse_request", slow)
    answer_of(server)
    return [row["moved_ns"] for row in read_trace(folder / "trace.jsonl") if row["kind"] == "STALL"]


def test_work_that_ends_before_the_first_step_would_is_no_stall_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert moves_after_work_of(35.8, tmp_path, monkeypatch) == []


def test_what_is_still_late_when_the_first_step_ends_moves_the_schedule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (moved_ns,) = moves_after_work_of(6000, tmp_path, monkeypatch)
    assert moved_ns >= 5900 * NS_PER_S


def test_an_engine_that_crashes_in_the_process_of_somebody_else_says_why_and_ends_no_process(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    answer = answer_of(EmulatorServer(EmulatorConfig(port=0, fault=Fault(crash_after_steps=1))))
    assert answer["choices"][0]["finish_reason"] == "abort"
    assert "EngineCore encountered a fatal error." in capfd.readouterr().err
    assert "EngineCore encountered a fatal error." in caplog.text
