"""The page "from question to decision" is followed to the letter, each command as it stands there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.server.ask import ask
from tests.support.processes import comes_true

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "question-to-decision.md"


@pytest.mark.same_everywhere
def test_a_newcomer_follows_the_page_to_a_decision(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    commands = re.findall(r"^\$ (.+)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    said: dict[str, str] = {}
    for command in commands:
        words = shlex.split(command)
        if words[0] == "python":
            started = subprocess.Popen([sys.executable, *words[1:-1]], stderr=subprocess.DEVNULL)
            request.addfinalizer(started.wait)
            request.addfinalizer(started.kill)
            port = int(words[words.index("--port") + 1])
            assert comes_true(lambda port=port: ask("127.0.0.1", port, "/health", deadline_s=10.0).status == 200, 60.0)
            continue
        called = [sys.executable, "-m", "harness", *words[1:]] if words[0] == "harness" else words
        done = subprocess.run(
            called, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300, env=os.environ
        )
        assert done.returncode == 0, f"{command}\n{done.stderr}"
        said[command] = done.stdout
    assert "NOT SUBJECT" in said["harness decide slots --runs runs/predicted --rule equivalence"]
    assert len(commands) >= 12
    assert (tmp_path / "slots.html").is_file()
    assert (tmp_path / "plans" / "frozen" / "slots.json").is_file()


def test_every_document_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text(encoding="utf-8")
    missing = [path.name for path in DOCS.glob("*.md") if path.name != "README.md" and f"({path.name})" not in index]
    assert missing == []
