"""The commands of the search as a person uses them: found, resumed, explained, refused in one line."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import command_line

pytestmark = pytest.mark.same_everywhere

SPACE = """\
name = "tiny"
max_num_seqs = [4]
buckets.most = 3
baseline = { max_num_seqs = 4, decode_buckets = [4] }
named.grid = { max_num_seqs = 4, decode_buckets = [1, 2, 4] }
inputs = { users = [2, 3], search_seeds = [1], evaluation_seeds = [2], replicates = 1 }
prediction = { draws = 20, replicates = 1 }
"""


def harness(*words: str) -> tuple[int, str]:
    """(exit status, everything printed) of one command."""
    done = command_line.harness(*words)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def space(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(SPACE, encoding="utf-8")
    return str(path)


def test_a_search_prints_the_best_the_front_and_the_sensitivity(space: str, tmp_path: Path) -> None:
    status, text = harness("search", space, "-o", str(tmp_path / "found"))
    assert status == 0
    assert "3 candidates, 0 left out by constraints, 3 judged on all plans" in text
    assert "Pareto front" in text
    assert "sensitivity" in text
    assert (tmp_path / "found" / "ledger.parquet").is_file()
    assert harness("search", space, "-o", str(tmp_path / "found")) == (0, text)


def test_predictions_name_ablations_as_computed(space: str) -> None:
    status, text = harness("predict", "ratios", space, "--ablation", "lru-slots")
    assert status == 0
    assert "computed, not measured" in text
    status, text = harness("predict", "ratios", space, "--ablation", "magic")
    assert (status, "lru-slots" in text) == (2, True)


def test_a_prediction_says_its_error_what_was_not_measured_and_where_it_turns() -> None:
    status, text = harness("simulate", "demo")
    assert status == 0
    said = " ".join(text.split())
    for condition in ("bucket6-waits / base-waits", "bucket6-nowaits / base-nowaits"):
        found = re.search(rf"{condition}: (0\.\d{{4}}) \+- (0\.\d{{4}}) \(mean of \d+ draws\), [^:]*", said)
        assert found is not None, said
        ratio, error = map(float, found.groups())
        assert error <= 0.1 * max(1 - ratio, 0.02) + 1e-4
        assert "f(6) was not measured, but interpolated; the answer turns where f(6) is" in found[0]
    assert "predicted for the mean of its 3 plans" in said
    rows = [
        line.split()[0] for line in text.splitlines() if line.startswith(("base-", "bucket6-")) and " / " not in line
    ]
    assert rows == ["base-waits", "bucket6-waits", "base-nowaits", "bucket6-nowaits"]


def test_what_takes_long_is_said_before_it_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "about" not in harness("simulate", "demo", "--draws", "2")[1]
    monkeypatch.setattr("harness.cli.predict.LONG_S", 0.0)
    _, text = harness("simulate", "demo", "--draws", "2")
    assert "simulating 12 runs, 2 draws of each: about" in text


def test_one_draw_is_nominal_and_too_few_draws_are_said_to_be_too_few() -> None:
    assert "(nominal simulation)" in harness("simulate", "demo", "--draws", "1")[1]
    assert "not sure: an error of 0.0" in harness("simulate", "demo", "--draws", "3")[1]


def test_named_configurations_have_an_error_and_a_break_even() -> None:
    status, text = harness("predict", "ratios", "paper")
    assert status == 0
    assert re.search(r"slots-and-grid +8 .* 0\.\d{4} \+- 0\.\d{4} .* \+\d+\.\d %", text)
    said = " ".join(text.split())
    assert "grid-only: break-even at f(6); f(6) was not measured, but interpolated" in said


@pytest.mark.parametrize("command", [("predict", "ratios"), ("search",)])
def test_an_experiment_in_place_of_a_space_is_called_one(command: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('name = "mine"\n[[condition]]\nname = "base"\n', encoding="utf-8")
    for experiment in ("demo", str(file)):
        status, text = harness(*command, experiment)
        assert status == 2
        said = " ".join(text.split())
        assert "is an experiment, and a search space is wanted" in said
        assert f"harness simulate {experiment}" in said
        assert "unknown key" not in said
