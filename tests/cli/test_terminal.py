"""What a server says is shown and not obeyed: markup in it is text, escapes in it are spelled out.

On a terminal of 80 columns no line is longer; in a pipe none is folded.
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import shlex
import string
import struct
import sys
import termios
from contextlib import suppress
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from harness.cli import main
from harness.cli.terminal import escape_markup, printable_lines
from harness.runner import run_experiment
from tests.support.command_line import WIDTH, harness, lines_beyond
from tests.support.experiments import small_experiment
from tests.support.forked import start_forked


def on_terminal(text: str) -> str:
    screen = io.StringIO()
    Console(file=screen, force_terminal=True, width=200, color_system=None).print(f"[red]INVALID[/]: {text}, end")
    return screen.getvalue()


@pytest.mark.parametrize(
    "words",
    ["[/x]", "[type=missing] field", "[bold]loud[/bold]", "a\\[b]", "[/]", "ends with a backslash \\", "[link=x]y"],
)
def test_markup_is_text(words: str) -> None:
    assert words in on_terminal(escape_markup(words))


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07gone", r"\x1b[2J\x1b]0;title\x07gone"),
        ("two\r\nlines", "two lines"),
        ("half a pair \ud800", r"half a pair \ud800"),
        ("turned \u202e round", r"turned \u202e round"),
    ],
)
def test_control_characters_are_spelled_out(words: str, shown: str) -> None:
    assert shown in on_terminal(escape_markup(words))
    assert "\x1b" not in printable_lines(words)


def test_lines_of_a_message_stay_lines() -> None:
    assert printable_lines("one\ntwo\x1b[0m") == "one\ntwo\\x1b[0m"


STYLES = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


def on_a_terminal(commands: tuple[str, ...], folder: Path) -> dict[str, str]:
    """What each command writes to a real terminal of 80 columns, without its colours."""
    outer, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", 24, WIDTH, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    of_process = {"cwd": folder, "variables": variables | {"TERM": "xterm"}, "out": Path(os.devnull)}
    started = start_forked(_call, commands, DupFd(inner), **of_process, err=Path(os.devnull))
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
    shown = "\n".join(line.rpartition("\r")[2] for line in lines).split(ENDED)
    return dict(zip(commands, shown[:-1], strict=True))


ENDED = "a command has ended\n"


def _call(commands: tuple[str, ...], terminal: Any) -> None:
    number = terminal.detach()
    for stream in (0, 1, 2):
        os.dup2(number, stream)
    os.close(number)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w") for stream in (1, 2))
    for command in commands:
        sys.argv = ["harness", *shlex.split(command)]
        with suppress(SystemExit):
            main()
        sys.stderr.flush()
        print(ENDED, end="", flush=True)


@pytest.mark.same_everywhere
def test_a_real_terminal_of_80_columns_shows_whole_lines(titled: Path) -> None:
    commands = ("simulate demo --draws 3", "watch --runs runs --once", "run nothing.toml")
    for command, shown in on_a_terminal(commands, titled).items():
        assert shown.strip(), command
        assert lines_beyond(shown) == [], command


ESC = "\x1b]0;mine\x07\x1b[2J\x9b31m"


@pytest.fixture(scope="module")
def titled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs whose title and question would set a terminal's title and clear its screen."""
    folder = tmp_path_factory.mktemp("titled")
    spec = small_experiment(backend="sim", replicates=3, title=f"a title {ESC}", question=f"which {ESC}?")
    run_experiment(spec, runs_root=folder / "runs")
    return folder


@pytest.mark.same_everywhere
def test_escapes_in_a_file_reach_no_terminal(titled: Path) -> None:
    forms = ("", " --format csv", " --format markdown", " --format latex")
    commands = (*(f"table small{form}" for form in forms), "compare small", "runs --runs runs")
    commands += (
        "watch --once --runs runs",
        *(f"query 'select chr(27) || chr(7)' --runs runs{form}" for form in forms[:2]),
    )
    for command, shown in on_a_terminal(commands, titled).items():
        assert "Traceback" not in shown
        assert not {*ESC} - {*string.printable} & {*shown}, shown
        assert "x1b" in shown or command not in ("table small", "table small --format markdown"), shown


@pytest.mark.same_everywhere
def test_escapes_in_a_file_reach_no_page_and_no_file_for_people(titled: Path) -> None:
    for form in ("markdown", "latex"):
        done = harness("table", "small", "--format", form, cwd=titled)
        assert done.returncode == 0, done.stderr
        assert r"x1b[2J" in done.stdout
        assert "\x1b" not in done.stdout
    done = harness("report", "small", "-o", "page.html", cwd=titled)
    assert done.returncode == 0, done.stderr
    page = (titled / "page.html").read_text(encoding="utf-8")
    assert r"\x1b[2J" in page
    assert not {*ESC} - {*string.printable} & {*page}


@pytest.mark.same_everywhere
def test_a_pipe_gets_each_line_whole(tmp_path: Path) -> None:
    assert "COLUMNS" not in os.environ
    done = harness("simulate", "demo", "--draws", "3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    [ratio] = [line for line in done.stdout.splitlines() if line.startswith("bucket6-waits / base-waits: ")]
    assert ratio.endswith("higher than given")
    assert len(ratio) > WIDTH
