"""What a server says is shown and not obeyed: markup in it is text, escapes in it are spelled out."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from harness.cli.terminal import escape_markup, printable_lines


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
