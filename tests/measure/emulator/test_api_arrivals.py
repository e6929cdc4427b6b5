"""When a request arrives: with its last byte, before the emulator's own work on it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from harness.measure.emulator import api
from harness.measure.emulator.config import EmulatorConfig
from harness.measure.emulator.driver import RealTimeDriver
from harness.measure.emulator.server import EmulatorServer
from harness.measure.emulator.step_log import read_trace


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

    async def ask() -> int:
        driver = RealTimeDriver(server.core, server.clock, server.reporter, server.config)
        async with TestClient(TestServer(api.Api(driver, server.config).application())) as client:
            answer = await client.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 2})
            await answer.read()
        driver.close()
        return answer.status

    try:
        assert asyncio.run(ask()) == 200
    finally:
        server.close()
        server.socket.close()
    arrivals = [
        arrival_ns for step in read_trace(tmp_path / "trace.jsonl") for _name, arrival_ns in step.get("arrivals", ())
    ]
    assert len(arrivals) == len(parsed_ns) == 1
    assert arrivals[0] <= parsed_ns[0]
