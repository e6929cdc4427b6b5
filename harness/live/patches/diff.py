"""Unified diffs applied to the letter: every line a hunk names must stand exactly where the hunk says.

No fuzz, no offset, no partial result; text in, text out, nothing is read or written here.
Next: ``shipped`` checks hashes before and after; ``audit`` judges what was added.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.errors import SpecError

_HEADER = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_NO_NEWLINE = "\\"
Mark = Literal[" ", "-", "+"]


@dataclass(frozen=True, slots=True)
class Hunk:
    """One hunk. ``old_start`` and ``new_start`` count lines from 1; ``lines`` are (mark, text with its line end)."""

    old_start: int
    new_start: int
    lines: tuple[tuple[str, str], ...]

    def side(self, mark: Mark) -> list[str]:
        """The hunk's lines before ("-") or after ("+") the change."""
        return [text for kind, text in self.lines if kind in (" ", mark)]


@dataclass(frozen=True, slots=True)
class FileDiff:
    """The change to one file. ``target`` is its path without the a/ and b/ prefixes."""

    target: str
    hunks: tuple[Hunk, ...]

    def apply(self, text: str) -> str:
        """``text`` after the change; SpecError names the first line that is not as the diff says."""
        return self._replace(text, "-", "+")

    def revert(self, text: str) -> str:
        """The text that ``apply`` made ``text`` from."""
        return self._replace(text, "+", "-")

    def _replace(self, text: str, old: Mark, new: Mark) -> str:
        lines = _split(text)
        result: list[str] = []
        done = 0
        for hunk in self.hunks:
            start = (hunk.old_start if old == "-" else hunk.new_start) - 1
            expected = hunk.side(old)
            if start < done:
                raise SpecError(f"its hunk at line {start + 1} overlaps the one before", where=self.target)
            for offset, line in enumerate(expected):
                found = lines[start + offset] if start + offset < len(lines) else None
                if found != line:
                    raise SpecError(
                        f"line {start + offset + 1} is {_quoted(found)}, the patch expects {_quoted(line)}",
                        where=self.target,
                        hint="Nothing was changed; use the patch made for this version",
                    )
            result += lines[done:start] + hunk.side(new)
            done = start + len(expected)
        return "".join(result + lines[done:])


def parse_diff(text: str) -> FileDiff:
    """The diff of exactly one existing file; anything else in ``text`` is a SpecError naming its line."""
    lines = _split(text)
    if len(lines) < 3 or not lines[0].startswith("--- a/") or not lines[1].startswith("+++ b/"):
        raise SpecError("does not start with '--- a/FILE' and '+++ b/FILE'", where="patch line 1")
    old, new = (line.rstrip("\n").split("\t")[0][6:] for line in lines[:2])
    if old != new or old.startswith("/") or ".." in old.split("/"):
        raise SpecError(f"names {old!r} and {new!r}, not one file of the package", where="patch line 1")
    hunks: list[Hunk] = []
    at = 2
    while at < len(lines):
        hunk, at = _parse_hunk(lines, at)
        hunks.append(hunk)
    return FileDiff(old, tuple(hunks))


def _parse_hunk(lines: Sequence[str], at: int) -> tuple[Hunk, int]:
    """The hunk whose header is line ``at`` (from 0), and the index of the line after it."""
    header = _HEADER.match(lines[at])
    if header is None:
        raise SpecError(f"is not a hunk header: {_quoted(lines[at])}", where=f"patch line {at + 1}")
    left_old, left_new = int(header[2] or 1), int(header[4] or 1)
    body: list[tuple[str, str]] = []
    first, at = at, at + 1
    while left_old or left_new:
        line = lines[at] if at < len(lines) else ""
        mark = line[:1]
        if mark not in (" ", "-", "+"):
            raise SpecError(f"its hunk is cut short at {_quoted(line or None)}", where=f"patch line {at + 1}")
        body.append((mark, line[1:]))
        left_old -= mark != "+"
        left_new -= mark != "-"
        at += 1
        if at < len(lines) and lines[at].startswith(_NO_NEWLINE):
            body[-1] = (mark, body[-1][1].removesuffix("\n"))
            at += 1
    if left_old < 0 or left_new < 0:
        raise SpecError("its hunk holds more lines than its header says", where=f"patch line {first + 1}")
    return Hunk(int(header[1]), int(header[3]), tuple(body)), at


def _split(text: str) -> list[str]:
    """Lines with their ends. Only a newline ends one: Python source may hold form feeds, which splitlines() cuts at."""
    return io.StringIO(text, newline="\n").readlines()


def _quoted(line: str | None) -> str:
    return "the end of the file" if line is None else repr(line.rstrip("\n"))
