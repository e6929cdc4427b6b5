"""Other people's words on a terminal: a server's or a file's, shown as they are read, never obeyed.

Neither rich markup nor control characters in them have an effect, and none of them is lost.
Next: the commands print errors, reasons and table cells with it.
"""

from __future__ import annotations

from rich.markup import escape

from harness.live.client.answer import printable

MAX_CHARS = 4_000


def said(text: object) -> str:
    """Somebody else's words as part of a rich text, on one line."""
    shown = escape(printable(str(text), MAX_CHARS))
    # A backslash at the end would escape the markup that follows.
    return f"{shown} " if shown.endswith("\\") else shown


def said_plainly(text: str) -> str:
    """Somebody else's words for a stream that knows no markup; line by line."""
    return "\n".join(printable(line, MAX_CHARS) for line in text.split("\n"))
