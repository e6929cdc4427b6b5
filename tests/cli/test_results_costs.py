"""``harness table --costs``: costs of another device are called that, and not a contradiction of the channels."""

from __future__ import annotations

from pathlib import Path

from harness.runner import run_experiment
from tests.support.command_line import harness
from tests.support.experiments import small_experiment


def test_costs_of_another_device_are_said_to_price_other_runs(tmp_path: Path) -> None:
    run_experiment(small_experiment(backend="sim"), runs_root=tmp_path)
    done = harness("table", "small", "--runs", str(tmp_path), "--costs", "emulated-gpu")
    said = " ".join(done.stdout.split())
    assert "The costs of emulated-gpu (--costs) do not price these runs: A and B lie" in said
    assert "They are of another device, model or stack; name those of this server, or leave --costs out" in said
    assert "agreement would mean nothing" not in said
