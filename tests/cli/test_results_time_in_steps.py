"""What answers rest on can be chosen: the time in steps where every run measured it, A at other costs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.runner import run_experiment
from tests.support.command_line import harness
from tests.support.experiments import small_experiment

pytestmark = pytest.mark.same_everywhere


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("runs")
    run_experiment(small_experiment(backend="sim"), runs_root=root)
    return str(root)


def test_runs_whose_steps_nobody_stamped_are_refused_by_name(runs: str) -> None:
    for command in ("table", "report"):
        done = harness(command, "small", "--runs", runs, "--time-in-steps")
        assert done.returncode != 0
        assert "no engine core stamped the steps of" in done.stderr


def test_sealed_runs_are_priced_again_by_the_costs_that_a_reader_names_and_it_is_said(
    runs: str, tmp_path: Path
) -> None:
    dearer = tmp_path / "dearer.toml"
    dearer.write_text('name = "dearer"\nsource = "a test"\n[decode.f_ms]\n1 = 500.0\n[prefill]\nper_call_ms = 1.0\n')
    asked = ("table", "small", "--runs", runs)
    costs = ("--costs", str(dearer))
    as_made, priced = (json.loads(harness(*asked, *more, "--format", "json").stdout) for more in ((), costs))
    assert all(new["a_ns"] > 5 * old["a_ns"] for new, old in zip(priced, as_made, strict=True))
    assert all(new["b_ns"] == old["b_ns"] for new, old in zip(priced, as_made, strict=True))
    assert "by the costs of dearer" in " ".join(harness(*asked, *costs).stdout.split())


def test_costs_of_another_device_are_said_to_price_other_runs(runs: str) -> None:
    said = " ".join(harness("table", "small", "--runs", runs, "--costs", "emulated-gpu").stdout.split())
    assert "The costs of emulated-gpu (--costs) do not price these runs: A and B lie" in said
    assert "They are of another device, model or stack; name those of this server, or leave --costs out" in said
    assert "agreement would mean nothing" not in said
