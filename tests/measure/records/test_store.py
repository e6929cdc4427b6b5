"""Sealed runs that travel: whole, once, and byte for byte, or not at all."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import RecordsError, SpecError
from harness.measure.records.store import Archive, RunStore, experiment_at, packed, received, sealed_runs, store_at
from harness.outputs import UNFINISHED
from harness.runner import run_experiment
from tests.support.experiments import small_experiment


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunStore, Archive]:
    root = tmp_path_factory.mktemp("there")
    runs = run_experiment(small_experiment(backend="sim", time_scale=1.0), runs_root=root).runs
    return RunStore(root), packed(runs)


def changed(archive: Archive, name: str, content: bytes) -> Archive:
    """The archive with one more file, which replaces an earlier one of that name when it is read."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar, tarfile.open(fileobj=io.BytesIO(archive.content)) as old:
        for member in old.getmembers():
            tar.addfile(member, old.extractfile(member))
        added = tarfile.TarInfo(name)
        added.size = len(content)
        tar.addfile(added, io.BytesIO(content))
    return Archive(archive.keys, hashlib.sha256(stream.getvalue()).hexdigest(), stream.getvalue())


def test_runs_arrive_as_they_were_sealed_and_a_second_time_change_nothing(
    sent: tuple[RunStore, Archive], tmp_path: Path
):
    there, archive = sent
    for _ in range(2):
        assert [run.key for run in received(tmp_path, archive)] == list(archive.keys)
    here = RunStore(tmp_path)
    assert [run.manifest for run in here.sealed()] == [run.manifest for run in there.sealed()]
    assert here.verify() == 2
    assert here.unsealed() == []


def test_an_experiment_is_found_by_its_name_its_file_and_its_folder(
    sent: tuple[RunStore, Archive], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    root = sent[0].root
    keys = [run.key for run in sent[0].sealed()]
    (tmp_path / "small.toml").write_text('name = "small"')
    (tmp_path / "small").mkdir()
    for here, addresses in (
        (tmp_path, ("small", "small.toml", root / "small", root)),
        (root, ("small", "./small", root)),
        (root / "small", ("small", root)),
    ):
        monkeypatch.chdir(here)
        for address in addresses:
            assert [run.key for run in sealed_runs(root, address)] == keys, (here, address)
    monkeypatch.chdir(root.parent)
    for address in (root / "small", root, "small"):
        found = experiment_at(address, root)
        assert (found.source, found.runs, found.table["name"]) == (root / "small", root, "small")
    assert {run.condition_spec.name for run in sent[0].sealed()} == {"base", "more"}


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("gone/small", "there is no such file or folder"),
        ("notes.txt", "there is no such file or folder"),
        ("notes.md", "is a file, and no experiment"),
        ("gone", "Experiments there: small"),
    ],
)
def test_what_is_no_experiment_is_refused_with_what_it_is(
    sent: tuple[RunStore, Archive], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, reason: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "notes.md").touch()
    with pytest.raises(SpecError) as refused:
        sealed_runs(sent[0].root, address)
    assert reason in str(refused.value)


def test_who_names_a_folder_above_is_told_where_runs_lie(tmp_path: Path):
    for number in range(5):
        run = tmp_path / f"runs-{number}" / "small" / "base" / "0"
        run.mkdir(parents=True)
        (run / "manifest.json").touch()
        with pytest.raises(SpecError) as refused:
            store_at(tmp_path)
        assert ("more" in str(refused.value)) == (number >= 3)
    assert f"runs-3, {tmp_path}/runs-4 and 2 more: say --runs {tmp_path}/runs-4" in str(refused.value)


def test_what_a_killed_driver_left_half_received_is_set_aside(sent: tuple[RunStore, Archive], tmp_path: Path):
    half = tmp_path / "small" / "base" / "0.partial"
    half.mkdir(parents=True)
    (half / "server.log").write_text("half")
    received(tmp_path, sent[1])
    assert RunStore(tmp_path).verify() == 2
    assert [folder.name for folder in RunStore(tmp_path).unsealed()] == ["0.aborted-1"]


@pytest.mark.parametrize("name", ["small/base/0/plan.jsonl", "small/base/0/added.log"])
def test_a_run_that_is_not_as_it_was_sealed_never_becomes_visible(
    sent: tuple[RunStore, Archive], tmp_path: Path, name: str
):
    with pytest.raises(RecordsError):
        received(tmp_path, changed(sent[1], name, b"other"))
    assert RunStore(tmp_path).sealed() == []


def test_an_archive_that_was_cut_or_leads_outside_is_refused(sent: tuple[RunStore, Archive], tmp_path: Path):
    with pytest.raises(RecordsError, match="damaged"):
        received(tmp_path, replace(sent[1], content=sent[1].content[:-100]))
    with pytest.raises(RecordsError, match="cannot be a file of a run"):
        received(tmp_path, changed(sent[1], "../outside", b""))
    assert not list(tmp_path.iterdir())


def test_a_table_that_was_never_finished_is_no_damage_where_tables_are_rebuilt_and_only_there(
    sent: tuple[RunStore, Archive], tmp_path: Path
):
    run, *_ = received(tmp_path, sent[1])
    unfinished = f".steps.parquet{UNFINISHED}"
    (run.path / "derived" / unfinished).touch()
    run.verify()
    (run.path / unfinished).touch()
    with pytest.raises(RecordsError, match="was added after sealing"):
        run.verify()


def test_a_folder_of_a_run_that_is_a_link_is_refused(sent: tuple[RunStore, Archive], tmp_path: Path):
    run, *_ = received(tmp_path / "runs", sent[1])
    (run.path / "derived").rename(tmp_path / "moved")
    (run.path / "derived").symlink_to(tmp_path / "moved")
    with pytest.raises(RecordsError, match=r"derived.* is a symbolic link"):
        run.verify()
