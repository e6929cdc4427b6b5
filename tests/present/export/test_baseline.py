"""A baseline folder holds what the gate needs, says the same as its runs, and opens only as it was saved."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest

from harness.errors import RecordsError, SpecError
from harness.judge.decisions.gate import gate_policy, gate_run, judge
from harness.measure.records.run import SealedRun
from harness.present.export.baseline import is_baseline, load_baseline, save_baseline
from harness.runner import run_experiment
from tests.support.experiments import small_experiment


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[SealedRun]:
    spec = small_experiment(backend="sim", replicates=3)
    return list(run_experiment(spec, runs_root=tmp_path_factory.mktemp("baseline")).require_valid().runs)


@pytest.fixture(scope="module")
def saved(runs: list[SealedRun], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "small"
    save_baseline(folder, runs)
    return folder


def test_it_says_what_the_sealed_runs_say(runs: list[SealedRun], saved: Path) -> None:
    new = [gate_run(run) for run in runs]
    assert is_baseline(saved)
    assert load_baseline(saved) == new
    assert judge(new, load_baseline(saved), gate_policy()) == judge(new, new, gate_policy())


def test_the_plain_tool_for_sums_reads_its_hashes(saved: Path) -> None:
    lines = (saved / "SHA256SUMS").read_text().splitlines()
    for line in lines:
        sha256, name = line.split("  ")
        assert hashlib.sha256((saved / name).read_bytes()).hexdigest() == sha256
    assert len(lines) == 1 + 6


def test_no_text_of_a_prompt_and_no_log_is_in_it(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {"SHA256SUMS", "figures.csv", "manifests"}
    assert sum(path.stat().st_size for path in saved.rglob("*.*")) < 200_000


@pytest.mark.parametrize("name", ["figures.csv", "manifests/base/1.json", "SHA256SUMS"])
def test_any_changed_byte_is_refused(saved: Path, tmp_path: Path, name: str) -> None:
    content = (saved / name).read_bytes()
    for place in range(0, len(content), max(1, len(content) // 40)):
        folder = tmp_path / str(place)
        shutil.copytree(saved, folder)
        (folder / name).write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(RecordsError, match=r"differs|missing|added|no readable"):
            load_baseline(folder)


def test_a_missing_and_an_added_file_are_refused(saved: Path, tmp_path: Path) -> None:
    for name, what in (("less", r"0\.json is missing or was added"), ("more", r"notes\.txt is missing or was added")):
        folder = tmp_path / name
        shutil.copytree(saved, folder)
        if name == "less":
            (folder / "manifests/more/0.json").unlink()
        else:
            (folder / "notes.txt").write_text("mine")
        with pytest.raises(RecordsError, match=what):
            load_baseline(folder)


def test_a_folder_of_other_files_is_never_replaced(runs: list[SealedRun], saved: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SpecError, match="is there already"):
        save_baseline(tmp_path, runs, may_replace=True)
    with pytest.raises(SpecError, match="--force"):
        save_baseline(saved, runs)
    again = tmp_path / "again"
    shutil.copytree(saved, again)
    save_baseline(again, runs[:3], may_replace=True)
    assert len(load_baseline(again)) == 3
