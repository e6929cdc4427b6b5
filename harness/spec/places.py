"""Where a key stands: its line in the TOML file, and its name as a person would say it.

Lines are found by their headings and keys and only shown; tomllib has read the file before. Nothing here checks a
value.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, cast

Place: TypeAlias = tuple[int | str, ...]

_HEADING = re.compile(r"\s*(\[\[?)\s*([A-Za-z0-9_.\"' -]+?)\s*\]\]?\s*(?:#.*)?$")
_KEY = re.compile(r"\s*([A-Za-z0-9_\"'-]+(?:\s*\.\s*[A-Za-z0-9_\"'-]+)*)\s*=")


def key_lines(path: Path) -> dict[Place, int]:
    """Line, from 1, of each heading and key of a TOML file; empty where there is no such file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return {}
    found: dict[Place, int] = {}
    counts: dict[Place, int] = {}
    table: Place = ()
    for number, line in enumerate(text.splitlines(), 1):
        if heading := _HEADING.match(line):
            table = _parts(heading[2])
            if heading[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = (*table, counts[table])
            elif table[:1] in counts:  # [condition.server] belongs to the latest [[condition]]
                table = (*table[:1], counts[table[:1]], *table[1:])
            found.setdefault(table, number)
        elif key := _KEY.match(line):
            found.setdefault((*table, *_parts(key[1])), number)
    return found


def line_of(place: Place, lines: Mapping[Place, int]) -> int | None:
    """The line of a place, or of the nearest thing around it that stands on a line of its own."""
    return next((lines[place[:size]] for size in range(len(place), 0, -1) if place[:size] in lines), None)


def key_name(place: Place, table: Mapping[str, Any] | None) -> str:
    """ "condition[twelve].server.kv_slots": an element of a list by its name, where it has one."""
    said = ""
    value: object = table
    for part in place:
        inner = _inner(value, part)
        if isinstance(part, int):
            name = cast("Mapping[str, object]", inner).get("name") if isinstance(inner, Mapping) else None
            said += f"[{name}]" if isinstance(name, str) else f"[{part}]"
        else:
            said += f".{part}" if said else part
        value = inner
    return said


def _inner(value: object, part: int | str) -> object:
    if isinstance(part, str):
        return cast("Mapping[str, object]", value).get(part) if isinstance(value, Mapping) else None
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    return cast("Sequence[object]", value)[part] if is_list and part < len(cast("Sequence[object]", value)) else None


def _parts(dotted: str) -> Place:
    return tuple(part.strip(" \"'") for part in dotted.split("."))
