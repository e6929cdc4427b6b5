"""Checked values of JSON: objects and arrays by their keys, counts of tokens, instants and durations."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta, timezone
from typing import Any, cast

from pydantic_core import from_json

from harness.model.traces.recording import MOST_TOKENS

Record = dict[str, Any]
EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def parsed_json(line: bytes) -> object:
    """The value of a JSON text; None where it is not JSON."""
    try:
        return from_json(line, allow_inf_nan=False)
    except ValueError:
        return None


def tokens_of(value: object) -> int | None:
    """A number of tokens, also where a text has its digits; None for other values (fractions, negative, absurd)."""
    if isinstance(value, str) and len(value) <= 12 and value.isascii() and value.isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MOST_TOKENS:
        return None
    return int(value) if value == int(value) else None


def counts_of(usage: object, names: Iterable[str]) -> list[int] | None:
    """The counts of a usage object by name, 0 where there is none; None where it is empty or holds other values."""
    table = record_of(usage)
    counts = [tokens_of(0 if table.get(name) is None else table[name]) for name in names]
    return [count for count in counts if count is not None] if table and None not in counts else None


def seconds_ns(value: object, unit_ns: int = 1_000_000_000) -> int | None:
    """A duration or instant in ``unit_ns`` as ns; None for any other value than a finite number from 0 on."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e15:
        return None
    return round(value * unit_ns)


def instant_ns(text: object) -> int | None:
    """An ISO 8601 instant as ns since 1970, UTC where it names no zone; None for any other value."""
    if not isinstance(text, str) or len(text) > 64:
        return None
    # Fractions of a second in 3 or 6 digits are what Python 3.10 reads.
    in_six = re.sub(r"\.(\d*)", lambda found: f".{found[1][:6]:0<6}", text.replace("Z", "+00:00"), count=1)
    try:
        moment = datetime.fromisoformat(in_six)
    except ValueError:
        return None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=timezone.utc)
    return (moment - EPOCH) // timedelta(microseconds=1) * 1_000


def first_of(record: Record, *names: str) -> object:
    """The first value by these names that is not null; None where there is none."""
    return next((record[name] for name in names if record.get(name) is not None), None)


def _at(value: object, path: Iterable[str]) -> object:
    for key in path:
        value = cast("Record", value).get(key) if isinstance(value, dict) else None
    return value


def words_at(value: object, path: Sequence[str]) -> Iterator[tuple[bool, str]]:
    """(whether it is a key, the key of an object or the value) at a path of keys, in each member of arrays on it."""
    if isinstance(value, list):
        yield from (word for each in cast("list[object]", value) for word in words_at(each, path))
    elif path:
        yield from words_at(record_of(value).get(path[0]), path[1:])
    elif value is not None:
        yield from ((True, key) for key in record_of(value)) if isinstance(value, dict) else ((False, str(value)),)


def text_of(value: object, *path: str) -> str:
    """The string at a path of keys, "" where there is no string."""
    found = _at(value, path)
    return found if isinstance(found, str) else ""


def record_of(value: object, *path: str) -> Record:
    """The JSON object at a path of keys, {} where there is none."""
    found = _at(value, path)
    return cast("Record", found) if isinstance(found, dict) else {}


def list_of(value: object, *path: str) -> list[object]:
    """The JSON array at a path of keys, [] where there is none."""
    found = _at(value, path)
    return cast("list[object]", found) if isinstance(found, list) else []


def records_of(value: object, *path: str) -> list[Record]:
    """The members of the JSON array at a path of keys, {} for one that is no object."""
    return list(map(record_of, list_of(value, *path)))
