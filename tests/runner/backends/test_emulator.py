"""A backend turns a server's configuration into one exact command, and starts nothing."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from harness.children import own_command
from harness.clock import ScaledClock
from harness.measure.server.life import LOOPBACK
from harness.model.spec import ServerSpec
from harness.runner.backends.emulator import EmulatorBackend
from harness.runner.run import LaunchOptions
from tests.support.forked_children import started_anew
from tests.support.processes import WITHIN_S, serving

SERVER = ServerSpec(max_num_seqs=8, decode_buckets=(1, 2, 4, 6, 8))


def test_the_emulator_is_launched_from_one_readable_file_that_a_manifest_names_without_its_folder(
    tmp_path: Path,
) -> None:
    plan = EmulatorBackend().launch(SERVER, LaunchOptions(0, tmp_path, time_scale=4.0, log_format="precise"))
    config_path = tmp_path / "server.config.json"
    config = json.loads(config_path.read_text())
    assert plan.argv == own_command("harness.measure.emulator.__main__:main", "--config", config_path)
    assert config["server"] == SERVER.model_dump(mode="json")
    assert (config["time_scale"], config["port"], config["log_format"]) == (4.0, plan.port, "precise")
    assert plan.port != 0, "a free one"
    assert (plan.host, plan.model) == (LOOPBACK, config["model"])
    assert config["trace_path"] == str(plan.files["device_trace"])
    assert plan.requested == config
    record = plan.to_json()
    assert json.loads(json.dumps(record)) == record
    assert record["files"] == {"config": "server.config.json", "device_trace": "device_trace.jsonl"}


@pytest.mark.live
def test_the_emulator_starts_answers_logs_and_goes(tmp_path: Path) -> None:
    plan = EmulatorBackend().launch(SERVER, LaunchOptions(0, tmp_path, time_scale=4.0, log_format="precise"))
    with started_anew(), serving(plan, tmp_path, ScaledClock(4.0)) as server:
        models = httpx.get(f"http://{plan.host}:{plan.port}/v1/models", trust_env=False, timeout=WITHIN_S).json()
        assert models["data"][0]["id"] == plan.model
        report = server.stop()
    assert report.killed == ()
    assert report.is_port_free
    assert not Path(f"/proc/{server.pid}").exists()
    assert b"Application startup complete" in (tmp_path / "server.log").read_bytes()
