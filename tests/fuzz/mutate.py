"""Changed texts for a target: seeds with numbers, values, words, bytes and lines that no honest writer would put there.

The same random numbers give the same texts everywhere. Nothing is read here.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

NUMBER = re.compile(rb"-?\d+(?:\.\d+)?")
ASSIGNED = re.compile(rb"[=:]\s*")
_NUMBERS = (
    *("0", "-1", "1", "2147483648", "9223372036854775808", "1e400", "1e999999999", "1000000000000000000", "-1e308"),
    *("1e-400", "NaN", "Infinity", "0.1", "1e9"),
)
_WORDS = (
    *("", "null", "true", "[]", "{}", '""', "[1]", '{"a": 1}', "\x00", "\u202e", "\ufeff", "\u0663", "[/x]", "\x1b[2J"),
    *("../..", "/dev/zero", "=", '"', "\n", "\r", "#", "[[", "{" * 50, "\u2028", "\ud7ff", "'", ",", "-"),
)
ODD_NUMBERS = tuple(word.encode() for word in _NUMBERS)
ODD = (*ODD_NUMBERS, *(word.encode() for word in _WORDS), b"\xff\xfe", b"\xed\xa0\x80")
# What makes a parser slow or deep; seldom, since each costs as much as a hundred others.
LONG = (b"[" * 100_000, b"9" * 5_000, b"x" * 70_000, b'{"a":' * 3_000, b"a.b." * 5_000, b"\n" * 20_000, b"(" * 5_000)
LONG_IN = 200
ODD_VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**31, 2**63, 10**40, -(10**40), 0.5, 1e300, -0.0),
    *("", "x" * 3000, "NaN", "\ud800", "\x1b[31m", [], {}, [[]] * 5, {"id": {}}),
    *("2026-03-01T10:00:00Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+14:00"),
)


def changed(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """One of the seeds with one to four changes."""
    data = rng.choice(seeds)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        data = rng.choice(CHANGES)(data, rng)
    if rng.random() < 0.1:
        other = rng.choice(seeds)
        data = data[: rng.randrange(len(data) + 1)] + other[rng.randrange(len(other) + 1) :]
    return data


def _odd(rng: random.Random) -> bytes:
    return rng.choice(LONG) if rng.randrange(LONG_IN) == 0 else rng.choice(ODD)


def _odd_number(data: bytes, rng: random.Random) -> bytes:
    found = NUMBER.search(data, rng.randrange(len(data) + 1)) or NUMBER.search(data)
    return _odd_word(data, rng) if found is None else data[: found.start()] + _odd(rng) + data[found.end() :]


def _odd_value(data: bytes, rng: random.Random) -> bytes:
    """What stands behind a ``=`` or ``:``, up to the end of its line or the next comma."""
    found = ASSIGNED.search(data, rng.randrange(len(data) + 1)) or ASSIGNED.search(data)
    if found is None:
        return _odd_word(data, rng)
    end = min(
        (at for at in (data.find(b"\n", found.end()), data.find(b",", found.end())) if at >= 0), default=len(data)
    )
    return data[: found.end()] + _odd(rng) + data[end:]


def _odd_word(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(len(data) + 1)
    return data[:place] + _odd(rng) + data[place + rng.randrange(8) :]


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


def _damaged(value: Any, rng: random.Random) -> Any:
    """A value with a key gone, a list many times as long, or a value of another kind within."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        table = dict(cast("dict[str, Any]", value))
        key = rng.choice(list(table))
        if rng.random() < 0.15:
            del table[key]
        else:
            table[key] = _damaged(table[key], rng)
        return table
    if isinstance(value, list) and value and rng.random() < 0.8:
        members = list(cast("list[Any]", value))
        place = rng.randrange(len(members))
        members[place] = _damaged(members[place], rng)
        return members * rng.choice((1, 1, 1, 40))
    return rng.choice(ODD_VALUES)


def _structure(data: bytes, rng: random.Random) -> bytes:
    """A JSON document, or one line of JSON lines, with a key gone or a value of another kind."""
    if data[:1] not in (b"{", b"["):
        return _odd_value(data, rng)
    lines = [data] if data[1:2] in (b"\n", b"\r") else data.split(b"\n")
    place = rng.randrange(len(lines))
    try:
        document: Any = json.loads(lines[place])
        lines[place] = json.dumps(_damaged(document, rng)).encode("utf-8", "replace")
    except (ValueError, RecursionError):
        return _odd_number(data, rng)
    return b"\n".join(lines)


CHANGES: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    *(_structure, _structure, _structure, _odd_number, _odd_number, _odd_value, _odd_value),
    *(_odd_word, _flipped, _lines_changed, _cut),
)
