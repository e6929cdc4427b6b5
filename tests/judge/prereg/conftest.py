"""Repositories of a user, entered: each is made once, and every test gets a copy that it may change."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from harness.judge.prereg import authorize, publish
from tests.support.workplace import Workplace, new_workplace


@pytest.fixture(scope="session")
def new_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("new") / "repository"
    root.mkdir()
    return new_workplace(root).root


@pytest.fixture(scope="session")
def measured_repository(new_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as patched:
        place = entered(new_repository, tmp_path_factory.mktemp("measured"), patched)
        place.run_confirmatory(place.freeze().path)
        place.git("repack", "-q", "-a", "-d")
    return place.root


@pytest.fixture(scope="session")
def open_repository(new_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All frozen runs are sealed, and one is INVALID and may be repeated once."""
    with pytest.MonkeyPatch.context() as patched:
        place = entered(new_repository, tmp_path_factory.mktemp("open"), patched)
        place.allow_retries(1)
        place.run_confirmatory(place.freeze().path, busy=["base/1"])
        place.git("repack", "-q", "-a", "-d")
    return place.root


@pytest.fixture(scope="session")
def with_invalid(new_repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The archive of an experiment with a killed start, a run that stayed INVALID, and one that was repeated."""
    with pytest.MonkeyPatch.context() as patched:
        place = entered(new_repository, tmp_path_factory.mktemp("invalid"), patched)
        question = 'question = "Does one more compiled size <b> cost less?"\n'
        place.experiment_file.write_text(question + place.experiment_file.read_text())
        place.allow_retries(1)
        frozen = place.freeze().path
        _, authorization = authorize(frozen, runs_root=place.runs)
        authorization.ledger.start(authorization.planned.runs[0])
        place.run_confirmatory(frozen, busy=["base/1", "more/2"])
        place.run_confirmatory(frozen, busy=["base/1"], resume=True, retry_invalid=True)
        publish(place.sealed, place.root / "small.zip")
    return place.root / "small.zip"


@pytest.fixture
def place(new_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A user's repository; paths in its files are relative to it."""
    return entered(new_repository, tmp_path, monkeypatch)


@pytest.fixture
def measured(measured_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A repository whose experiment was frozen and then run."""
    return entered(measured_repository, tmp_path, monkeypatch)


@pytest.fixture
def still_open(open_repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A repository with an INVALID frozen run that may still be repeated."""
    return entered(open_repository, tmp_path, monkeypatch)


def entered(repository: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A copy of a repository, in which the test then is."""
    root = shutil.copytree(repository, folder / "repository")
    monkeypatch.chdir(root)
    return Workplace(root)
