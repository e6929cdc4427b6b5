"""The tree of commands: what help shows at 80 columns, its examples, typos, and what the bare words answer.

Examples run as they stand in the help, in a folder with runs of the demo; no line of what they say is longer either.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
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
from tests.docs.test_commands import PAGES_WITH_COMMANDS, commands_run
from tests.support.command_line import WIDTH, harness, lines_beyond
from tests.support.sound_traces import claude_rows


def walk(command: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, (*words, name))


ROOT_COMMAND = typer.main.get_command(app)
EVERY = [words for words in walk(ROOT_COMMAND) if words != ("server", "emulator")]


def command_at(words: tuple[str, ...]) -> Any:
    command: Any = ROOT_COMMAND
    for name in words:
        command = command.commands[name]
    return command


@cache
def help_of(*words: str, flag: str = "--help", columns: int = WIDTH) -> str:
    shown = CliRunner().invoke(app, [*words, flag], prog_name="harness", env={"COLUMNS": str(columns)})
    assert shown.exit_code == 0, shown.output
    return shown.output


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_help_of_a_command_fits_80_columns_and_has_an_example(words: tuple[str, ...]) -> None:
    shown = help_of(*words)
    assert max(map(len, shown.splitlines())) <= WIDTH
    assert "Example: harness " in " ".join(shown.split())
    frame = re.compile("[\u2500-\u257f]+")
    cut = set(frame.sub(" ", shown).split()) - set(frame.sub(" ", help_of(*words, columns=400)).split())
    assert cut == set()


def test_h_is_help_everywhere() -> None:
    for words in (("run",), ("plan", "waits"), ("stack", "steps")):
        assert help_of(*words, flag="-h") == help_of(*words)
    own = [words for words in EVERY if any("-h" in option.opts for option in command_at(words).params)]
    assert own == [], "the rest have it from the root"


NOT_RUN = {
    "fleet worker": "runs until it is ended",
    "gate": "needs a baseline; its exit code is the answer",
    "paper rules": "takes minutes",
    "paper signs": "takes minutes",
    "predict noise": "needs runs of a real server",
    "predict replay": "needs sessions that a server recorded",
    "server": "needs an NPU, its stack or the twin; an emulator runs until it is ended",
    "stack": "needs a release of the stack",
}
"""Why an example runs nowhere, by the words it begins with."""
RUN_BY_A_PAGE = (
    *("doctor --url", "fleet status", "fleet replicas", "open", "predict ratios", "prereg check", "prereg publish"),
    "search paper",
)
"""What else needs what only a page of the guides has; ``tests/docs/test_commands.py`` runs it there, as wide."""
SMALL = ("--backend", "sim", "--replicates", "3", "--set", "prediction.draws=20")
TESTED_WITH = {
    "run ": ("--replicates", "1"),
    "sweep": ("--replicates", "1"),
    "simulate": ("--draws", "20"),
    "power demo --rule": ("--blocks", "20"),
    "prereg freeze": ("--set", "prediction.draws=20"),
}
"""What keeps an example short, by the words it begins with."""
ALSO = (
    *("explain experiment", "explain server", "explain tables", "explain distributions"),
    *("table demo --runs runs/today --predicted", "table demo --runs runs/today --reuse-by-wait"),
    *("power demo --runs runs/today", "compare runs/today/demo/base-waits --baseline runs/today/demo/bucket6-waits"),
    "gate runs/today/demo/base-waits --against runs/may/demo/base-waits",
)
"""Other forms whose lines are long."""


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
    every = sorted({*examples(ROOT_COMMAND), *ALSO})
    for example, following in zip(every, [*every[1:], ""], strict=True):
        if example.startswith((*NOT_RUN, *RUN_BY_A_PAGE)) and example not in ALSO:
            continue
        if following.startswith(f"{example} --"):
            # The same with more options.
            continue
        words = [word.replace("~", str(folder)) for word in shlex.split(example)]
        words += next((more for start, more in TESTED_WITH.items() if example.startswith(start)), ())
        done = harness(*words, cwd=folder, environment={**os.environ, **variables, "COLUMNS": str(WIDTH)})
        # 5: the runs of the folder decide nothing, and that is what the command says.
        allowed = (0, 5) if example.startswith(("decide", "gate", "paper tables")) else (0,)
        if done.returncode not in allowed or not done.stdout.strip():
            failed[example] = done.stderr
        if not example.startswith("query") and "--format" not in words:
            assert lines_beyond(done.stdout) == [], example
    assert failed == {}


def test_an_example_that_is_not_run_is_there_and_a_page_runs_it_or_there_is_a_reason() -> None:
    every = list(examples(ROOT_COMMAND))
    assert [start for start in (*NOT_RUN, *RUN_BY_A_PAGE) if not any(one.startswith(start) for one in every)] == []
    on_pages = [command.removeprefix("harness ") for name in PAGES_WITH_COMMANDS for _, command in commands_run(name)]
    assert [start for start in RUN_BY_A_PAGE if not any(one.startswith(start) for one in on_pages)] == []


def test_help_shows_at_most_twenty_commands_and_the_groups_in_a_line_each() -> None:
    names = [name for shown in HEADINGS.values() for name in shown]
    assert len(names) <= 20
    lines = help_of().splitlines()
    for name in (*names, *(group for group in GROUPS if " " not in group)):
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


def test_the_command_line_loads_no_heavy_package_before_a_command_does() -> None:
    """Where memory is limited, loading one may fail: only a command's errors become one line."""
    heavy = ("pyarrow", "numpy", "pydantic", "duckdb", "scipy", "matplotlib")
    listed = (
        "import sys, typer.main; from harness.cli.tree import app; list(typer.main.get_command(app).commands.values())"
    )
    # A table needs no figure: matplotlib alone takes as long as the command.
    tables = "import harness.present.report; print('matplotlib' in sys.modules)"
    # Only a fleet of several hosts needs Dask.
    fleet = (
        "import harness.runner, harness.runner.fleet.worker; print({'dask', 'distributed'} & {*sys.modules} == set())"
    )
    code = f"{listed}; print([name for name in {heavy} if name in sys.modules]); {tables}; {fleet}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "False", "True"]


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
