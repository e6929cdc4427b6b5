"""Other people's words on a terminal: a server's or a file's, shown as they are read, never obeyed.

Neither rich markup nor control characters in them have an effect, and none of them is lost.
"""

from __future__ import annotations

import os
import shutil
import sys
from typing import TYPE_CHECKING, TextIO

from harness.client.answer import NOT_PRINTABLE, printable

if TYPE_CHECKING:
    from rich.console import Console

MAX_CHARS = 4_000
# How a terminal of ASCII alone is told what the tables say with other letters.
IN_ASCII = {
    "\u00d7": "x",
    "\u2013": "-",
    "\u2212": "-",
    "\u2020": "+",
    "\u2264": "<=",
    "\u2265": ">=",
    "\u03c4": "tau",
    "\u2192": "->",
}
# Where output goes to a file or a pipe, nothing needs to fit a screen.
PIPE_WIDTH = 200


def in_ascii(error: UnicodeError) -> tuple[str, int]:
    """An error handler of encodings: the letter's word in ASCII, or a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(IN_ASCII.get(letter, "?") for letter in error.object[error.start : error.end]), error.end


def terminal(*, is_error: bool = False) -> Console:
    """Standard output, or error, as rich writes on it; lines fold at a terminal's width and nowhere else."""
    from rich.console import Console

    return Console(width=None if _has_width(sys.stderr if is_error else sys.stdout) else PIPE_WIDTH, stderr=is_error)


def terminal_width() -> int:
    """Columns of standard output, for what is drawn without rich."""
    return shutil.get_terminal_size().columns if _has_width(sys.stdout) else PIPE_WIDTH


def _has_width(stream: TextIO) -> bool:
    return stream.isatty() or "COLUMNS" in os.environ


def said_in_lines(text: str) -> str:
    """A drawn table with somebody else's words in it: spaces stay, what a terminal would obey is spelled out."""
    return "\n".join(NOT_PRINTABLE.sub(lambda found: ascii(found[0])[1:-1], line) for line in text.split("\n"))


def said(text: object) -> str:
    """Somebody else's words as part of a rich text, on one line."""
    from rich.markup import escape

    shown = escape(printable(str(text), MAX_CHARS))
    # A backslash at the end would escape the markup that follows.
    return f"{shown} " if shown.endswith("\\") else shown


def said_plainly(text: str) -> str:
    """Somebody else's words for a stream that knows no markup; line by line."""
    return "\n".join(printable(line, MAX_CHARS) for line in text.split("\n"))
