"""``--set key=value``: one key of a TOML table changed on the command line, with TOML's own value syntax.

Values that are not TOML are taken as strings, so that ``--set backend=emulator`` works. Nothing is validated here.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, cast

from harness.errors import SpecError


def asked_again(changes: Sequence[str], backend: str | None, replicates: int | None, devices: str | None = None) -> str:
    """What was said beside an experiment's file, as the command that continues it must say it again."""
    said = "".join(f" --set {shlex.quote(change)}" for change in changes)
    options = {"backend": backend, "replicates": replicates, "devices": devices}
    return said + "".join(f" --{name} {value}" for name, value in options.items() if value)


def override_table(table: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """A deep copy of ``table`` with each "dotted.key=value" applied; raises SpecError on a malformed change."""
    from harness.spec.recorded import setting_value

    result = copy.deepcopy(dict(table))
    for change in changes:
        key, separator, text = change.partition("=")
        parts = key.strip().split(".")
        if not separator or not all(parts):
            raise SpecError(f"{change!r} is not KEY=VALUE", where="--set", hint="Write e.g. --set server.kv_slots=16")
        target = _table_of(result, parts[:-1], key)
        target[parts[-1]] = setting_value(text.strip())
    return result


def _table_of(table: dict[str, Any], parts: Sequence[str], key: str) -> dict[str, Any]:
    """The table below ``parts``, made where it is absent; an element of a list goes by its name."""
    target: Any = table
    for part in parts:
        if isinstance(target, list):
            named = [one for one in cast("list[Any]", target) if isinstance(one, dict) and one.get("name") == part]
            if not named:
                raise SpecError(f"{key!r}: nothing is named {part!r}", where="--set", hint="Check the dotted key")
            target = named[0]
        else:
            target = target.setdefault(part, {})
        if not isinstance(target, dict | list):
            raise SpecError(f"{key!r}: {part!r} is not a table", where="--set", hint="Check the dotted key")
    if isinstance(target, list):
        raise SpecError(f"{key!r} names no element of {parts[-1]}", where="--set", hint=f"Say {parts[-1]}.NAME.KEY")
    return target
