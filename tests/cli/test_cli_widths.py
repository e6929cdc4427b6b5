"""Commands on a terminal of 80 columns: no line is longer, no word is cut; in a pipe nothing is folded."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import shlex
import struct
import sys
import termios
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from harness.cli import main
from harness.table import Table, folded, to_rich
from tests.support.command_line import WIDTH, harness, lines_beyond
from tests.support.forked import start_forked

pytestmark = pytest.mark.same_everywhere

STYLES = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")
NARROWEST_WORDS = 12
COMMANDS = (
    *("explain experiment", "explain server", "explain tables", "explain distributions", "doctor"),
    *("table demo --runs runs --predicted", "table demo --runs runs --reuse-by-wait"),
    *("run demo --dry-run --runs none", "predict ratios paper --set prediction.draws=20", "power demo --runs runs"),
    "compare runs/demo/base-waits --baseline runs/demo/bucket6-waits",
    "gate runs/demo/bucket6-waits --against runs/demo/base-waits",
)
"""Beside the example of each command, which ``test_cli_examples`` runs at this width."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sealed runs of the demo in ``runs``."""
    folder = tmp_path_factory.mktemp("widths")
    words = ("--backend", "sim", "--replicates", "3", "--runs", "runs")
    assert harness("run", "demo", *words, cwd=folder).returncode == 0
    return folder


def on_a_terminal(words: list[str], folder: Path) -> str:
    """What a command writes to a real terminal of 80 columns, without its colours."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    of_process = {"cwd": folder, "variables": variables | {"TERM": "xterm"}, "out": Path(os.devnull)}
    started = start_forked(_call, words, DupFd(inner), **of_process, err=Path(os.devnull))
    os.close(inner)
    seen = bytearray()
    try:
        while part := os.read(outer, 65_536):
            seen += part
    except OSError:
        pass  # Linux says so that the other side is closed
    os.close(outer)
    started.join()
    lines = STYLES.sub("", seen.decode()).replace("\r\n", "\n").split("\n")
    # What a progress bar drew and took away again is no line.
    return "\n".join(line.rpartition("\r")[2] for line in lines)


def _call(words: list[str], terminal: Any) -> None:
    sys.argv, number = ["harness", *words], terminal.detach()
    for stream in (0, 1, 2):
        os.dup2(number, stream)
    os.close(number)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w") for stream in (1, 2))
    main()


@pytest.mark.parametrize("command", COMMANDS)
def test_at_80_columns_no_line_is_longer(command: str, place: Path) -> None:
    done = harness(*shlex.split(command), cwd=place, environment={"COLUMNS": str(WIDTH)})
    assert done.stdout.strip(), done.stderr
    assert lines_beyond(done.stdout) == []


@pytest.mark.parametrize(
    "command",
    [
        "simulate demo --draws 3",
        "watch --runs runs --once",
        "run nothing.toml",
    ],
)
def test_a_real_terminal_of_80_columns_shows_whole_lines(command: str, place: Path) -> None:
    shown = on_a_terminal(shlex.split(command), place)
    assert shown.strip()
    assert lines_beyond(shown) == []


def test_a_pipe_gets_each_line_whole(place: Path) -> None:
    assert "COLUMNS" not in os.environ
    done = harness("simulate", "demo", "--draws", "3", cwd=place)
    assert done.returncode == 0, done.stderr
    [ratio] = [line for line in done.stdout.splitlines() if line.startswith("bucket6-waits / base-waits: ")]
    assert ratio.endswith("higher than given")
    assert len(ratio) > WIDTH


WORDS = st.text("abcd,.(){}\u2013", min_size=1, max_size=24)
LINES = st.lists(WORDS, min_size=1, max_size=30).map(" ".join)


@given(LINES, st.integers(20, 100), st.integers(0, 40))
def test_a_folded_line_has_the_same_words_and_no_longer_lines(line: str, width: int, hang: int) -> None:
    lines = folded(line, width, hang)
    assert " ".join(lines).split() == line.split()
    assert lines_beyond("\n".join(lines), width) == []


@given(LINES, st.lists(WORDS, min_size=1, max_size=20), st.integers(40, 100))
def test_a_folded_command_is_one_command_to_a_shell(before: str, options: list[str], width: int) -> None:
    command = f"harness run {' '.join(options)}"
    lines = "\n".join(folded(f"{before}: {command}", width))
    joined = re.sub(r" \\\n +", " ", lines)
    assert joined.endswith(command)
    assert lines_beyond(lines, width) == []


NUMBERS = st.integers(0, 10**6).map(str) | st.just("0.9567\u201310.2405")
CELLS = st.lists(st.lists(WORDS, min_size=1, max_size=12).map(" ".join) | NUMBERS, min_size=4, max_size=4)


@given(st.lists(CELLS, min_size=1, max_size=4), st.integers(64, 200))
def test_a_table_cuts_no_word_and_folds_none_into_a_narrow_column(cells: list[list[str]], width: int) -> None:
    table = Table("", "", ("name", "one", "two", "three"), tuple(map(tuple, cells)))
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(to_rich(table, width))
    shown = captured.get()
    assert max(map(len, shown.splitlines())) <= width
    assert set(" ".join(cell for row in cells for cell in row).split()) <= set(shown.split())
    short = [cell for row in cells for cell in row if len(cell) <= NARROWEST_WORDS]
    assert [cell for cell in short if cell not in shown] == []
