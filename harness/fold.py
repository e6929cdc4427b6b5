"""Lines for a terminal of a width: folded between words, never inside one, and commands so that they can be copied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

# A command that ends its line, after the words that lead to it and its indent.
_COMMAND = re.compile(r"^(?P<before> *|.*?[:;,] )(?P<command>harness [a-z][^\u201c\u201d]*)$")
_WORD = re.compile(r"\S+")


class Piece(NamedTuple):
    """A line of the terminal: what stands before and after a part of the line that is folded."""

    before: str
    start: int
    end: int
    after: str = ""


def folded(line: str, width: int, hang: int | None = None) -> list[str]:
    """``line`` in lines of at most ``width`` characters; ``hang``: spaces before the later ones, else two more.

    A longer word stands whole on a line of its own. A command at the end of the line goes on after a backslash, as a
    shell wants it.
    """
    return [piece.before + line[piece.start : piece.end] + piece.after for piece in pieces(line, width, hang)]


def pieces(line: str, width: int, hang: int | None = None) -> Iterator[Piece]:
    """Where ``folded`` breaks a line."""
    if len(line) <= width:
        yield Piece("", 0, len(line))
        return
    indent = len(line) - len(line.lstrip())
    hang = indent + 2 if hang is None else hang
    if max(map(len, line.split()), default=0) > width - hang:
        # A long word may still be whole with less before it.
        hang = min(hang, indent + 2)
    found = _COMMAND.match(line)
    if found is None:
        yield from _filled(line, (0, len(line)), width, (0, hang))
        return
    start, before = found.start("command"), found["before"].rstrip()
    if before:
        *whole, last = _filled(line, (0, len(before)), width, (0, hang))
        yield from whole
        if len(last.before) + len(line) - last.start <= width:
            yield last._replace(end=len(line))
            return
        yield last
        indent = hang
    yield from _filled(line, (start, len(line)), width, (indent, indent + 4), " \\")


def _filled(line: str, part: tuple[int, int], width: int, indents: tuple[int, int], after: str = "") -> Iterator[Piece]:
    """The words between two places, as many on a line as fit.

    indents: spaces before the first line and before later ones. after: what ends each line but the last.
    """
    begin = last = part[0]
    indent, hang = indents
    for word in _WORD.finditer(line, *part):
        end = word.end()
        if indent + end - begin + (len(after) if end < part[1] else 0) > width and last > begin:
            yield Piece(" " * indent, begin, last, after)
            indent, begin = hang, word.start()
        last = end
    yield Piece(" " * indent, begin, last)
