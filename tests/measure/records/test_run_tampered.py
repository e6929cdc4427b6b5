"""What happens to a sealed run afterwards is noticed, by ``verify`` and by whatever reads it: one line, and no hang."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.logs.derive import rebuild
from harness.analysis.summary import summarise
from harness.errors import RecordsError
from harness.measure.records import layout
from harness.measure.records.disk import file_entry
from harness.measure.records.manifest import Finding
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.model.spec import ConditionSpec, ExperimentSpec, WorkloadSpec
from harness.runner import run_experiment
from tests.support.command_line import harness
from tests.support.experiments import small_experiment

SPEC = ExperimentSpec(
    name="tiny",
    base_seed=5,
    replicates=1,
    backend="sim",
    workload=WorkloadSpec(num_sessions=3, requests_per_session=2),
    condition=(ConditionSpec(name="base"), ConditionSpec(name="no-waits", treatment="no-waits")),
)
READ_BY_THE_TABLE = (
    "requests.parquet",
    layout.PLAN,
    layout.COST_MODEL,
    "derived/steps.parquet",
    "derived/kv_events.parquet",
)


@pytest.fixture(scope="module")
def sealed_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sealed")
    run_experiment(SPEC, runs_root=root)
    return root


@pytest.fixture
def store(sealed_once: Path, tmp_path: Path) -> RunStore:
    return RunStore(shutil.copytree(sealed_once, tmp_path / "runs"))


@pytest.fixture
def run(store: RunStore) -> SealedRun:
    return store.run("tiny", "base", 0)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def link(path: Path) -> None:
    moved = path.rename(path.parents[3] / f"copy-{path.name}")
    path.symlink_to(moved)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


CHANGES: tuple[Callable[[Path], None], ...] = (flip, cut, Path.unlink, link, pipe, endless)


def files_of(run: SealedRun) -> list[str]:
    """Every file of the run that holds a byte."""
    found = [path.relative_to(run.path).as_posix() for path in run.path.rglob("*") if path.is_file()]
    return sorted(name for name in found if (run.path / name).stat().st_size)


def forge(run: SealedRun, **changes: Any) -> None:
    """Edit the manifest and give it a seal that fits: what a hash of the file itself cannot show."""
    run.file(layout.MANIFEST).write_text(run.manifest.model_copy(update=changes).to_json())


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_verify_names_every_file_that_was_changed(store: RunStore, run: SealedRun, change: Callable[[Path], None]):
    names = files_of(run)
    assert {*READ_BY_THE_TABLE, layout.MANIFEST, "derived/metrics.parquet"} <= set(names)
    for name in names:
        kept = (run.path / name).read_bytes()
        change(run.path / name)
        with pytest.raises(RecordsError) as caught:
            store.verify()
        assert name in str(caught.value)
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).write_bytes(kept)
    assert store.verify() == 2


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_table_reads_no_file_that_was_changed(store: RunStore, run: SealedRun, change: Callable[[Path], None]):
    for name in READ_BY_THE_TABLE:
        kept = (run.path / name).read_bytes()
        change(run.path / name)
        with pytest.raises(RecordsError):
            summarise(store.sealed("tiny"))
        (run.path / name).unlink(missing_ok=True)
        (run.path / name).write_bytes(kept)
    assert summarise(store.sealed("tiny")).conditions


def test_no_bit_of_a_derived_table_is_without_meaning(store: RunStore, run: SealedRun):
    """Also one that changes no value: an unused byte of a page's head or of the file's foot."""
    path = run.path / layout.table_path("steps")
    sealed = path.read_bytes()
    unnoticed = []
    for place in range(0, len(sealed), 61):
        path.write_bytes(sealed[:place] + bytes([sealed[place] ^ 1]) + sealed[place + 1 :])
        with suppress(RecordsError):
            unnoticed.append((place, store.run("tiny", "base", 0).table("steps")))
    assert unnoticed == []
    path.write_bytes(sealed)
    assert store.run("tiny", "base", 0).table("steps") == run.table("steps")


@pytest.mark.parametrize("change", [flip, endless], ids=lambda change: change.__name__)
def test_every_command_says_in_one_line_that_a_derived_table_was_changed(
    store: RunStore, run: SealedRun, change: Callable[[Path], None]
):
    change(run.path / "derived" / "steps.parquet")
    for words in (["verify"], ["table", "tiny"], ["query", "select count(*) from steps"]):
        result = harness(*words, "--runs", str(store.root))
        assert (result.returncode, result.stderr.count("\n")) == (1, 1), result.stderr
        assert "steps.parquet" in result.stderr


def test_resuming_keeps_no_run_that_was_changed(store: RunStore, run: SealedRun):
    flip(run.path / layout.PLAN)
    with pytest.raises(RecordsError, match=r"plan\.jsonl: differs"):
        run_experiment(SPEC, runs_root=store.root, resume=True)


@pytest.mark.parametrize(
    "name",
    ["../../elsewhere", "/etc/hostname", "./plan.jsonl", "a//b", "derived/steps.parquet", "manifest.json", "a\x00"],
)
def test_a_manifest_names_only_files_of_its_run(store: RunStore, run: SealedRun, name: str):
    forge(run, files={**run.manifest.files, name: file_entry(run.file(layout.PLAN))})
    with pytest.raises(RecordsError, match="cannot be a file of a run"):
        store.sealed()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan_hash": "0" * 64}, "names plan 000000000000"),
        ({"planned_requests": 7}, "names 7 planned requests, the table has 6"),
        ({"findings": (Finding(code="x", severity="invalid", evidence="1"),)}, "names reasons why the run is INVALID"),
        ({"invalid_reasons": ("x",)}, "names reasons why the run is INVALID"),
    ],
)
def test_a_manifest_that_contradicts_its_run_is_noticed(
    store: RunStore, run: SealedRun, changes: dict[str, Any], words: str
):
    forge(run, **changes)
    with pytest.raises(RecordsError, match=words):
        store.verify()


def test_another_plan_under_a_fitting_manifest_is_noticed(store: RunStore, run: SealedRun, tmp_path: Path):
    run_experiment(SPEC.model_copy(update={"base_seed": 6}), runs_root=tmp_path / "other")
    other = RunStore(tmp_path / "other").run("tiny", "base", 0)
    shutil.copy(other.file(layout.PLAN), run.path / layout.PLAN)
    files = {**run.manifest.files, layout.PLAN: file_entry(run.path / layout.PLAN)}
    forge(run, files=files, plan_hash=other.manifest.plan_hash)
    with pytest.raises(RecordsError, match="not the plan that the requests of this run follow"):
        store.verify()


def test_a_run_copied_as_another_replicate_is_noticed(store: RunStore, run: SealedRun):
    copy = SealedRun(shutil.copytree(run.path, run.path.with_name("1")), run.manifest)
    forge(copy, replicate=1)
    with pytest.raises(RecordsError, match=r"is draw 0 of seed 5, and replicate 1 has draw 1 .*: this run was copied"):
        store.verify()


@pytest.mark.parametrize("name", ["00", "\u0663", "\u00b2", "1e0"])
def test_a_run_under_a_name_that_no_run_has_counts_nowhere_and_fails_verify(store: RunStore, run: SealedRun, name: str):
    shutil.copytree(run.path, run.path.with_name(name))
    assert [sealed.key for sealed in store.sealed()] == [("tiny", "base", 0), ("tiny", "no-waits", 0)]
    assert store.foreign() == [run.path.with_name(name)]
    with pytest.raises(RecordsError, match="is not the name of a run"):
        store.verify()


def test_a_run_that_is_a_link_is_refused(store: RunStore, run: SealedRun):
    run.path.with_name("0").rename(store.root / "moved")
    run.path.symlink_to(store.root / "moved")
    with pytest.raises(RecordsError, match="is a symbolic link"):
        store.sealed()


@pytest.mark.parametrize("name", ["*", "/tiny", "../runs/tiny"])
def test_an_experiment_is_asked_for_by_its_name_alone(store: RunStore, name: str):
    assert store.sealed(name) == []


@pytest.fixture(scope="module")
def emulated_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a log, which the simulator's have not."""
    root = tmp_path_factory.mktemp("emulated")
    run_experiment(small_experiment(condition=[{"name": "base"}]), runs_root=root)
    return root


@pytest.fixture
def emulated(emulated_once: Path, tmp_path: Path) -> RunStore:
    return RunStore(shutil.copytree(emulated_once, tmp_path / "emulated"))


@pytest.mark.live
def test_a_deleted_derived_table_is_rebuilt_and_one_of_other_content_is_not_written(emulated: RunStore):
    run = emulated.run("small", "base", 0)
    (run.path / "derived" / "steps.parquet").unlink()
    rebuild(run)
    assert emulated.verify() == 1
    flip(run.path / layout.SERVER_LOG)
    with pytest.raises(RecordsError, match=r"server\.log: differs"):
        rebuild(emulated.run("small", "base", 0))


@pytest.mark.live
def test_a_reader_that_has_a_derived_table_open_keeps_it_while_it_is_rebuilt(emulated: RunStore):
    run = emulated.run("small", "base", 0)
    path = run.path / "derived" / "steps.parquet"
    with path.open("rb") as reader:
        before, inode = path.read_bytes(), path.stat().st_ino
        rebuild(run)
        assert path.stat().st_ino != inode
        assert reader.read() == before


def test_a_deleted_table_of_the_simulator_is_not_rebuilt_and_said_to_be_missing(run: SealedRun):
    path = run.path / "derived" / "steps.parquet"
    path.unlink()
    with pytest.raises(RecordsError, match=r"steps\.parquet: is missing .*Restore the file"):
        rebuild(run)
    assert not path.exists()
