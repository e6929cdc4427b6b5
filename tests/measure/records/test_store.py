"""Sealed runs that travel: whole, once, and byte for byte, or not at all."""

from __future__ import annotations

import hashlib
import io
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import RecordsError
from harness.measure.records.store import Archive, RunStore, packed, received
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
