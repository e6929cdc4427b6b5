"""The example in the help of each command runs as it stands there, in a folder with runs of the demo.

At 80 columns, no line of what it says is longer.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main

from harness.cli.tree import app
from tests.support.command_line import WIDTH, harness, lines_beyond
from tests.support.sound_traces import claude_rows

# Why an example is not run here, by the words it begins with.
NOT_RUN = {
    "doctor --url": "needs a server",
    "fleet status": "needs runs of a fleet",
    "fleet worker": "runs until it is ended",
    "paper rules": "takes minutes",
    "paper signs": "takes minutes",
    "fleet replicas": "needs runs of several replicas",
    "predict replay": "needs sessions that a server recorded",
    "predict noise": "needs runs of a real server",
    "gate": "needs a baseline; its exit code is the answer",
    "predict ratios": "the page about searches runs it",
    "open": "needs a published archive",
    "prereg check": "needs a published archive",
    "prereg publish": "needs a frozen experiment's runs and a key",
    "search paper": "takes minutes",
    "server": "needs an NPU, its stack or the twin; an emulator runs until it is ended",
    "stack": "needs a release of the stack",
}
# What keeps an example short, by the words it begins with.
SMALL = ("--backend", "sim", "--replicates", "3")
TESTED_WITH = {
    "run ": ("--replicates", "1"),
    "sweep": ("--replicates", "1"),
}


def examples(command: Any) -> Iterator[str]:
    yield from re.findall(r"Example:\s+`harness ([^`]+)`", command.help or "")
    for inner in getattr(command, "commands", {}).values():
        yield from examples(inner)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path
    assert harness("run", "demo", *SMALL, "--runs", "runs/today", cwd=place).returncode == 0
    for day in ("monday", "tuesday", "may", "june", "july"):
        shutil.copytree(place / "runs" / "today", place / "runs" / day)
    assert harness("plan", "build", "demo", "-o", "plans", cwd=place).returncode == 0
    shutil.copy(next((place / "plans").glob("*.jsonl")), place / "plan.jsonl")
    recording = place / ".claude" / "projects"
    recording.mkdir(parents=True)
    (recording / "session.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in claude_rows("s")))
    assert harness("init", cwd=place).returncode == 0
    (place / ".gitignore").write_text("/*\n!/mine.toml\n!/plans\n/plans/*\n!/plans/frozen\n")
    for command in ("init -q", "add mine.toml", "commit -qm first"):
        identity = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        subprocess.run(["git", *identity, *command.split()], cwd=place, check=True)
    return place


@pytest.mark.timeout(900)
def test_the_example_of_each_command_runs(folder: Path) -> None:
    variables = {
        "HOME": str(folder),
        **{f"GIT_{who}_{what}": "a" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
    }
    failed: dict[str, str] = {}
    for example in sorted(set(examples(typer.main.get_command(app)))):
        if example.startswith(tuple(NOT_RUN)):
            continue
        words = [word.replace("~", str(folder)) for word in shlex.split(example)]
        words += next((more for start, more in TESTED_WITH.items() if example.startswith(start)), ())
        done = harness(*words, cwd=folder, environment={**os.environ, **variables, "COLUMNS": str(WIDTH)})
        # 5: the runs of the folder decide nothing, and that is what the command says.
        decided = ("decide", "prereg publish", "prereg check")
        allowed = (0, 5) if example.startswith(decided) else (0,)
        if done.returncode not in allowed or not done.stdout.strip():
            failed[example] = done.stderr
        if not example.startswith("query") and "--format" not in words:
            assert lines_beyond(done.stdout) == [], example
    assert failed == {}
