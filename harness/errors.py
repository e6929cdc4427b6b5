"""The HarnessError tree and the process exit codes.

HarnessError (1)
├── SpecError (2)            what a person wrote cannot be run: TOML, plan, trace file, arguments
│   └── PlanError (2)        a plan is inconsistent, or its file does not match its name
├── ServerError (1)          the server did not start, died, or did not stop
├── RecordsError (1)         records cannot be written, or were damaged
├── RunInvalidError (3)           a run finished but broke an invariant
└── RuleFailedError (4)           a decision rule said FAIL

Errors are raised low and caught once, in ``harness.cli``. What the measured server did wrong during a replay
is a row with a status, not an exception.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from enum import IntEnum

from harness.secrets import without_secrets


class ExitCode(IntEnum):
    """Exit status of every ``harness`` command."""

    PASS = 0
    HARNESS_FAULT = 1
    BAD_SPEC = 2
    RUN_INVALID = 3
    RULE_FAILED = 4
    CANNOT_TELL = 5
    INTERRUPTED = 130


MAX_ERROR_CHARS = 300
MAX_LINE_CHARS = 4_000
# Control characters, escapes included, and surrogates: a server's text must not control a terminal.
NOT_PRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str, max_chars: int = MAX_ERROR_CHARS) -> str:
    """A server's text on one line, safe for any terminal and table: without secrets, unprintable characters escaped."""
    # Before it is cut: a part of a key may be enough.
    text = without_secrets(text)
    if text.isalnum() and len(text) <= max_chars:
        return text
    line = in_escapes(" ".join(text[: 4 * max_chars].split()))
    return line if len(line) <= max_chars else line[: max_chars - 1] + "…"


def escape_controls(text: str) -> str:
    """Text that may come from a file, an archive or a server, for a terminal or a page: control characters and those
    that reorder the text around them are spelled out, as \\x1b; line breaks stay.

    Whatever is printed and every page passes here; a test holds that nothing else prints.
    """
    return "\n".join(map(in_escapes, text.split("\n"))) if NOT_PRINTABLE.search(text) else text


def in_escapes(text: str) -> str:
    """``text`` on one line: a name in it may hold line breaks and control characters, which are written as \\n."""
    return NOT_PRINTABLE.sub(lambda match: ascii(match[0])[1:-1], text)


def printable_lines(text: str) -> str:
    """Untrusted text for a stream without markup, line by line."""
    return "\n".join(printable(line, MAX_LINE_CHARS) for line in text.split("\n"))


def in_one_line(error: BaseException) -> str:
    """The message of a library's error, without line breaks."""
    return " ".join(str(error).split())


class HarnessError(Exception):
    """An error for the user, one line: what is wrong, where, and what to do next.

    what: one clause, no trailing period. where: a path, key or address. hint: an imperative sentence. below: lines that
    follow the first one, such as the last ones of a log. faults: where it stands for several, see ``check_all``.
    """

    exit_code: ExitCode = ExitCode.HARNESS_FAULT

    def __init__(
        self, what: str, *, where: str | None = None, hint: str | None = None, below: Iterable[str] = ()
    ) -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.hint = hint
        self.below = tuple(below)
        self.faults: tuple[HarnessError, ...] = ()

    @classmethod
    @contextmanager
    def on_os_error(cls, what: str, *, where: object, hint: str | None = None) -> Generator[None]:
        """Raise this error, with the system's reason behind ``what``, where the block raises an OSError."""
        try:
            yield
        except OSError as error:
            raise cls(f"{what} ({error.strerror})", where=str(where), hint=hint) from error

    def __str__(self) -> str:
        line = self.what if self.where is None else f"{self.where}: {self.what}"
        first = line if self.hint is None else f"{line}. {self.hint}"
        return "\n  ".join(map(in_escapes, (first, *self.below)))


def faults_of(*checks: Callable[[], object]) -> list[HarnessError]:
    """What these checks refuse, each fault once, in their order."""
    found: dict[str, HarnessError] = {}
    for check in checks:
        try:
            check()
        except HarnessError as error:
            found.update((str(fault), fault) for fault in error.faults or (error,))
    return list(found.values())


def check_all(*checks: Callable[[], object], where: str) -> None:
    """Make every check, then raise one error for all that they refuse: the fault itself, or a line for each."""
    raise_all(faults_of(*checks), where=where)


def raise_all(faults: Sequence[HarnessError], *, where: str) -> None:
    """Raise one error for all of these, of the first one's kind; nothing where there are none."""
    if len(faults) == 1:
        raise faults[0]
    if faults:
        error = type(faults[0])(f"{len(faults)} faults", where=where, hint="Mend each", below=map(str, faults))
        error.faults = tuple(faults)
        raise error


class SpecError(HarnessError):
    """What a person wrote cannot be run."""

    exit_code = ExitCode.BAD_SPEC


def unknown_name(what: str, name: str, known: Iterable[str]) -> SpecError:
    """The error for a name that is none of those known: it lists them, a near one first. what: a table, a condition."""
    listed = list(known)
    near = difflib.get_close_matches(name, listed, n=1)
    meant = f"Did you mean {near[0]!r}? " if near else ""
    return SpecError(f"there is no {what} {name!r}", hint=f"{meant}Use one of {', '.join(listed) or '(none)'}")


class PlanError(SpecError):
    """A plan is inconsistent, or a plan file does not match the hash in its name."""


class ServerError(HarnessError):
    """The server under test did not start, died, or did not stop."""


class RecordsError(HarnessError):
    """Records cannot be written or were damaged after sealing."""


class RunInvalidError(HarnessError):
    """A run finished but broke an invariant of the method."""

    exit_code = ExitCode.RUN_INVALID


class RuleFailedError(HarnessError):
    """A decision rule said FAIL."""

    exit_code = ExitCode.RULE_FAILED


class UndecidedError(HarnessError):
    """No decision rule said FAIL, and not every one that was asked could say PASS."""

    exit_code = ExitCode.CANNOT_TELL
