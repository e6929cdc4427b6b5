"""What is compiled before a run: no more than it needs, and once."""

from __future__ import annotations

import pytest

from harness.model.spec import load_experiment
from harness.runner.machine_code import PARTS, make, missing, parts_of
from tests.support.checkout import ROOT

SHIPPED = ROOT / "plans" / "experiments"

pytestmark = pytest.mark.same_everywhere


@pytest.mark.parametrize(
    ("experiment", "backend", "parts"),
    [
        ("demo", "emulator", ["simulator", "engine"]),
        ("demo", "sim", ["simulator"]),
        ("gpu-kv-memory", "emulator", ["paged simulator"]),
        ("gpu-kv-memory", "sim", ["paged simulator"]),
    ],
)
def test_a_run_waits_for_no_machine_code_that_it_does_not_load(experiment: str, backend: str, parts: list[str]) -> None:
    spec = load_experiment(SHIPPED / f"{experiment}.toml")
    assert parts_of(spec.model_copy(update={"backend": backend})) == parts


def test_what_was_made_is_not_missed_again() -> None:
    make(["engine"])
    assert "engine" not in missing(list(PARTS))
