"""Changed texts at a door: what comes back is a value or a HarnessError in one line, soon; anything else is a find.

The same seed changes the same texts everywhere. Finds and their inputs are kept by whoever knocks.
Next: ``__main__`` for as long as it is told, ``test_doors`` for a moment.
"""

from __future__ import annotations

import random
import re
import signal
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from harness.errors import HarnessError
from tests.doors.doors import Door

HANGS_AFTER_S = 20
NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
_WORDS = (
    *(
        "",
        "0",
        "-1",
        "2147483648",
        "9223372036854775808",
        "1e400",
        "1e999999999",
        "1000000000000000000",
        "-1e308",
        "1e-400",
        "NaN",
        "Infinity",
        "null",
    ),
    *("true", "[]", "{}", '""', "\x00", "\u202e", "\ufeff", "\u0663", "[/x]", "\x1b[2J", "../..", "/dev/zero"),
    *("=", '"', "\n", "\r", "#", "[[", "{" * 50, "[" * 100_000, "9" * 5000, "x" * 70_000),
)
ODD = (*(word.encode() for word in _WORDS), b"\xff\xfe", b"\xed\xa0\x80")


class Find(NamedTuple):
    """An input that a door did not answer as it promises."""

    door: str
    content: bytes
    what: str


class TooLong(BaseException):
    """Raised by the alarm inside a door that hangs; no door may catch it."""


def changed(seed: bytes, rng: random.Random) -> bytes:
    """One to four changes: a number for an odd one, bytes flipped, lines gone, doubled or swapped, the end cut off."""
    data = seed
    for _ in range(rng.randrange(1, 5)):
        data = rng.choice((_odd_number, _odd_word, _flipped, _lines_changed, _cut))(data, rng)
    return data


def _odd_number(data: bytes, rng: random.Random) -> bytes:
    numbers = list(NUMBER.finditer(data))
    if not numbers:
        return _odd_word(data, rng)
    found = rng.choice(numbers)
    return data[: found.start()] + rng.choice(ODD) + data[found.end() :]


def _odd_word(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + rng.choice(ODD) + data[place + rng.randrange(8) :]


def _flipped(data: bytes, rng: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.randrange(1, 4) if changed else 0):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _lines_changed(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one : one + 1] = rng.choice(([], [lines[one]] * 2, [lines[other]]))
    return b"\n".join(lines)


def _cut(data: bytes, rng: random.Random) -> bytes:
    return data[: rng.randrange(len(data) + 1)]


def inputs(door: Door, rng: random.Random) -> Iterator[bytes]:
    """Changed seeds without end."""
    while True:
        yield changed(rng.choice(door.seeds), rng)


def knock(door: Door, content: bytes) -> Find | None:
    """Give one input to a door; a find when it does not answer as promised."""
    with tempfile.TemporaryDirectory(prefix="doors-") as folder:
        path = Path(folder) / "input.toml"
        path.write_bytes(content)
        before = signal.signal(signal.SIGALRM, _too_long)
        signal.alarm(HANGS_AFTER_S)
        try:
            door.enter(path)
        except HarnessError as error:
            return Find(door.name, content, f"several lines: {error}") if "\n" in str(error) else None
        except TooLong:
            return Find(door.name, content, f"hangs: more than {HANGS_AFTER_S} s")
        except Exception:
            return Find(door.name, content, traceback.format_exc(limit=-4))
        finally:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, before)
    return None


def _too_long(_number: int, _frame: FrameType | None) -> None:
    raise TooLong
