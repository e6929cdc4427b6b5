"""The commands of the search as a person uses them: found, resumed, explained, refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.cli import main

SPACE = """\
name = "tiny"
max_num_seqs = [4]
buckets.most = 3
baseline = { max_num_seqs = 4, decode_buckets = [4] }
named.grid = { max_num_seqs = 4, decode_buckets = [1, 2, 4] }
inputs = { users = [2, 3], search_seeds = [1], evaluation_seeds = [2], replicates = 1 }
prediction = { draws = 20, replicates = 1 }
"""


def harness(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit status, everything printed) of one command."""
    monkeypatch.setattr("sys.argv", ["harness", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    printed = capsys.readouterr()
    return int(left.value.code or 0), printed.out + printed.err


@pytest.fixture
def space(tmp_path: Path) -> str:
    path = tmp_path / "tiny.toml"
    path.write_text(SPACE, encoding="utf-8")
    return str(path)


def test_a_search_prints_the_best_the_front_and_the_sensitivity(
    space: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = harness(monkeypatch, capsys, "search", space, "-o", str(tmp_path / "found"))
    assert status == 0
    assert "3 candidates, 0 left out by constraints, 3 judged on all plans" in text
    assert "Pareto front" in text
    assert "sensitivity" in text
    assert (tmp_path / "found" / "ledger.parquet").is_file()
    assert harness(monkeypatch, capsys, "search", space, "-o", str(tmp_path / "found")) == (0, text)


def test_predictions_name_ablations_as_computed(
    space: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = harness(monkeypatch, capsys, "predict", "ratios", space, "--ablation", "lru-slots")
    assert status == 0
    assert "computed, not measured" in text
    status, text = harness(monkeypatch, capsys, "predict", "ratios", space, "--ablation", "magic")
    assert (status, "lru-slots" in text) == (2, True)


def test_search_and_evaluation_seeds_that_meet_are_refused(
    space: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = harness(monkeypatch, capsys, "search", space, "--set", "inputs.evaluation_seeds=[1]")
    assert status == 2
    assert "share [1]" in text


def test_an_unknown_space_lists_those_that_ship(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text = harness(monkeypatch, capsys, "search", "papers")
    assert status == 2
    assert "paper" in text
