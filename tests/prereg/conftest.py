from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.workplace import Workplace, new_workplace


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A user's repository, entered: paths in its files are relative to it."""
    root = tmp_path / "repository"
    root.mkdir()
    monkeypatch.chdir(root)
    return new_workplace(root)
