"""The tree of commands: what help shows at 80 columns, typos, and what the bare words answer."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

from harness.cli.tree import GROUPS, HEADINGS, app
from tests.support.command_line import harness


def walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*words, name))


EVERY = [words for words in walk(typer.main.get_command(app)) if words != ("server", "emulator")]


@cache
def help_of(*words: str, flag: str = "--help", columns: int = 80) -> str:
    shown = CliRunner().invoke(app, [*words, flag], prog_name="harness", env={"COLUMNS": str(columns)})
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_of_a_command_fits_80_columns_and_has_an_example(words: tuple[str, ...]) -> None:
    shown = help_of(*words)
    assert max(map(len, shown.splitlines())) <= 80
    assert "Example: harness " in " ".join(shown.split())
    assert help_of(*words, flag="-h") == shown
    frame = re.compile("[\u2500-\u257f]+")
    cut = set(frame.sub(" ", shown).split()) - set(frame.sub(" ", help_of(*words, columns=400)).split())
    assert cut == set()


def test_help_shows_at_most_twenty_commands_and_the_groups_in_a_line_each() -> None:
    names = [name for shown in HEADINGS.values() for name in shown]
    assert len(set(names) - set(GROUPS)) <= 20
    lines = help_of().splitlines()
    for name in names:
        (line,) = [line for line in lines if line.startswith(f"│ {name} ")]
        assert line.rstrip(" │").endswith("."), line


def test_an_option_has_one_spelling_everywhere() -> None:
    for words in EVERY:
        spelt = {" ".join(line.split()) for line in help_of(*words).splitlines()}
        assert not any(line.startswith("│ --output ") and "-o" not in line.split() for line in spelt), words
        assert not any(line.startswith(("│ --to ", "│ --root ", "│ --json ", "│ --out ", "│ --dir ")) for line in spelt)


def test_an_experiment_beside_is_run_by_its_name_even_where_one_ships_under_it(tmp_path: Path) -> None:
    assert harness("init", "slots", cwd=tmp_path).returncode == 0
    assert "twelve-slots/2" in harness("run", "slots", "--dry-run", cwd=tmp_path).stdout
    (tmp_path / "demo.toml").write_text((tmp_path / "slots.toml").read_text())
    mine = harness("run", "demo", "--dry-run", cwd=tmp_path)
    assert "twelve-slots/2" in mine.stdout
    assert "demo.toml of this folder, not the shipped experiment" in mine.stderr


def test_harness_alone_names_three_first_steps_that_exist() -> None:
    shown = harness()
    assert shown.returncode == 0
    steps = [line.split() for line in shown.stdout.splitlines() if line.startswith("  harness")]
    assert len(steps) == 3
    assert {words[1] for words in steps} <= {name for names in HEADINGS.values() for name in names}


def test_words_that_a_newcomer_tries_are_answered(tmp_path: Path) -> None:
    assert harness("version").stdout == harness("--version").stdout
    assert harness("version").stdout.startswith("rbln-harness 0.")
    assert harness("help").stdout == harness("--help").stdout
    assert harness("demo", "--backend", "sim", "--replicates", "1", cwd=tmp_path).returncode == 0
    listed = harness("list", cwd=tmp_path).stdout
    assert "base-waits/0" in listed
    assert listed == harness("runs", cwd=tmp_path).stdout


def test_the_command_line_works_without_docstrings() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "harness", "--help"],
        env={**os.environ, "PYTHONOPTIMIZE": "2"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        (("repotr",), "Did you mean 'report'"),
        (("emulater",), "Did you mean 'server emulator'"),
        (("export", "demo"), "Did you mean 'trace export', 'records export'"),
        (("predict", "nosie"), "Did you mean 'noise'"),
        (("server", "patch", "aply"), "Did you mean 'apply'"),
        (("trace", "shwo", "coding-agent"), "Did you mean 'show'"),
        (("run", "demo", "--rnus", "x"), "--runs"),
    ],
)
def test_a_typo_proposes_the_nearest_command_or_option(words: tuple[str, ...], proposed: str) -> None:
    refused = harness(*words)
    assert refused.returncode == 2
    assert proposed in refused.stderr
