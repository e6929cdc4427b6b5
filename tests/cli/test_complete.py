"""What a shell offers after Tab: names of experiments that ship, and of those with sealed runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command_line import harness


def offered(words: str, cwd: Path) -> list[str]:
    shell = {"_HARNESS_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    return harness(environment=shell, cwd=cwd).stdout.split()


@pytest.mark.same_everywhere
def test_a_shell_completes_the_names_of_experiments(tmp_path: Path) -> None:
    folder = tmp_path / "today" / "mine" / "base" / "0"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    assert offered("harness run dem", tmp_path) == ["demo"]
    assert offered("harness table --runs today mi", tmp_path) == ["mine"]
