"""A backend turns a server's configuration into one exact command, and starts nothing."""

from __future__ import annotations

import json
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from harness.clock import ScaledClock
from harness.errors import ServerError, SpecError
from harness.live.backends.registry import BACKENDS, EmulatorBackend, backend_named, check_time_scale
from harness.live.server.process import ServerProcess, free_port
from harness.spec import ServerSpec
from tests.support.processes import HOST, is_alive

SERVER = ServerSpec(max_num_seqs=8, decode_buckets=(1, 2, 4, 6, 8))


def test_the_emulator_is_launched_from_one_readable_file(tmp_path: Path) -> None:
    port = free_port()
    plan = backend_named("emulator").launch(
        SERVER, port=port, run_folder=tmp_path, time_scale=4.0, log_format="precise"
    )
    config_path = tmp_path / "server.config.json"
    config = json.loads(config_path.read_text())
    assert plan.argv == (sys.executable, "-m", "harness.emulator", "--config", str(config_path))
    assert config["server"] == SERVER.model_dump(mode="json")
    assert (config["time_scale"], config["port"], config["log_format"]) == (4.0, port, "precise")
    assert (plan.host, plan.port, plan.model) == (HOST, port, config["model"])
    assert config["trace_path"] == str(plan.files["device_trace"])
    assert plan.requested == config


def test_what_a_manifest_keeps_is_json_and_names_files_without_their_folder(tmp_path: Path) -> None:
    plan = EmulatorBackend().launch(SERVER, port=0, run_folder=tmp_path)
    record = plan.to_json()
    assert json.loads(json.dumps(record)) == record
    assert record["files"] == {"config": "server.config.json", "device_trace": "device_trace.jsonl"}


def test_port_zero_becomes_a_free_port(tmp_path: Path) -> None:
    first = EmulatorBackend().launch(SERVER, port=0, run_folder=tmp_path)
    assert first.port != 0
    assert json.loads((tmp_path / "server.config.json").read_text())["port"] == first.port


def test_a_busy_port_stops_before_anything_is_written(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(1)
        port = listener.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} is in use"):
            EmulatorBackend().launch(SERVER, port=port, run_folder=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    with pytest.raises(SpecError, match=r"unknown backend 'gpu'.*emulator"):
        backend_named("gpu")
    assert all(backend.name == name and backend.label for name, backend in BACKENDS.items())


def test_a_real_device_keeps_its_own_time() -> None:
    @dataclass(frozen=True)
    class Device(EmulatorBackend):
        name: str = "device"
        allows_time_scale: bool = False

    check_time_scale(Device(), 1.0)
    with pytest.raises(SpecError, match="device runs in real time and cannot be scaled by 4"):
        check_time_scale(Device(), 4.0)


@pytest.mark.live
def test_the_emulator_starts_answers_logs_and_goes(tmp_path: Path) -> None:
    plan = EmulatorBackend().launch(SERVER, port=0, run_folder=tmp_path, time_scale=4.0, log_format="precise")
    with ServerProcess.start(
        plan.argv,
        env=plan.env,
        log_path=tmp_path / "server.log",
        stamps_path=tmp_path / "server.log.stamps",
        clock=ScaledClock(4.0),
    ) as server:
        server.wait_healthy(plan.host, plan.port, deadline_s=60)
        models = httpx.get(f"http://{plan.host}:{plan.port}/v1/models", trust_env=False).json()
        assert models["data"][0]["id"] == plan.model
        report = server.stop()
    assert report.killed == ()
    assert report.is_port_free
    assert not is_alive(server.pid)
    assert b"Application startup complete" in (tmp_path / "server.log").read_bytes()
