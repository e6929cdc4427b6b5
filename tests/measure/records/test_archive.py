"""A published archive gives its runs to commands and to Python, whole and checked, or not at all."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest

import harness
from harness.errors import RecordsError, SpecError
from harness.judge.prereg import publish
from harness.measure.records.archive import open_into, unpack
from tests.support import command_line
from tests.support.workplace import new_workplace

SQL = "select condition, replicate, is_valid from runs order by all"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an archive whose run base/1 is INVALID, and with no repository around it."""
    root, alone = (tmp_path_factory.mktemp(name) for name in ("repository", "alone"))
    place = new_workplace(root)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(root)
        place.allow_retries(0)
        publish(place.run_confirmatory(place.freeze().path, busy=["base/1"]), alone / "small.zip")
    return alone


@pytest.fixture
def alone(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copy(published / "small.zip", tmp_path / "small.zip")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(*words: str) -> str:
    # What a call unpacks ends with its process, which these calls are not.
    done = command_line.harness(*words, environment={"COLUMNS": "200", "TMPDIR": str(Path.cwd().parent)})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("is_opened", [True, False], ids=["opened", "as it is"])
def test_its_runs_are_read_by_table_query_decide_compare_and_python(alone: Path, *, is_opened: bool) -> None:
    address, runs = "small.zip", "small.zip"
    if is_opened:
        assert "opened: 6 runs of small, 1 of them INVALID" in said("open", "small.zip", "-o", "opened")
        address, runs = "opened", "opened/runs"
    assert "6 runs, 1 INVALID and not counted" in said("table", address)
    rows = json.loads(said("query", SQL, "--runs", runs, "--format", "json"))
    assert [row["is_valid"] for row in rows] == [True, False, True, True, True, True]
    assert "PASS  mine: more (2 of 3 blocks)" in said("decide", address)
    assert "cost_s_per_token" in said("compare", address)
    assert [run.label for run in harness.open_runs(address) if not run.is_valid] == ["base/1"]
    assert sorted(path.name for path in alone.iterdir()) == sorted({"small.zip", address})


def test_the_report_of_an_archive_is_written_here_and_the_archive_stays_as_it_is(alone: Path) -> None:
    said("open", "small.zip", "-o", "opened")
    for address in ("small.zip", "opened"):
        said("report", address)
        assert (alone / "small.html").is_file()
        (alone / "small.html").unlink()
    said("prereg", "check", "opened")


def test_opening_gives_all_or_nothing_and_replaces_nothing(alone: Path) -> None:
    with zipfile.ZipFile("small.zip") as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    files["runs/small/base/0/plan.jsonl"] += b"x"
    with zipfile.ZipFile("changed.zip", "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    with pytest.raises(RecordsError, match=r"plan\.jsonl differs from its checksum"):
        open_into(Path("changed.zip"), Path("changed"))
    with pytest.raises(RecordsError, match=r"plan\.jsonl differs from its checksum"):
        harness.open_runs("changed.zip")
    assert sorted(path.name for path in alone.iterdir()) == ["changed.zip", "small.zip"]
    (alone / "small").mkdir()
    with pytest.raises(SpecError, match="exists already"):
        open_into(Path("small.zip"), Path("small"))


def test_nothing_is_unpacked_where_files_were_added(alone: Path) -> None:
    with zipfile.ZipFile("small.zip", "a") as packed:
        packed.writestr("runs/small/base/0/added", "")
    (alone / "folder").mkdir()
    with pytest.raises(RecordsError, match="runs/small/base/0/added is missing or was added"):
        unpack(Path("small.zip"), alone / "folder")
    assert list((alone / "folder").iterdir()) == []


def test_what_is_no_archive_is_refused_in_one_line(alone: Path) -> None:
    (alone / "no.zip").write_bytes(b"PK no")
    (alone / "text.zip").write_text("# A page\n")
    with zipfile.ZipFile("foreign.zip", "w") as packed:
        packed.writestr("README.md", "")
    expected = (
        ("no.zip", 1, "cannot be unpacked"),
        ("gone.zip", 2, "there is no such file"),
        ("text.zip", 2, "is no archive of a published experiment"),
        ("foreign.zip", 2, "is no archive of a published experiment"),
    )
    for command in (("open",), ("prereg", "check")):
        for name, code, said in expected:
            done = command_line.harness(*command, name)
            assert (done.returncode, said in done.stderr) == (code, True)
            assert "Traceback" not in done.stderr
    assert not (alone / "no").exists()
