"""``--set key=value``: one key of a TOML table changed on the command line, with TOML's own value syntax.

Values that are not TOML are taken as strings, so that ``--set backend=emulator`` works. Nothing is validated here.
"""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

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
        target = result
        for part in parts[:-1]:
            child = target.setdefault(part, {})
            if not isinstance(child, dict):
                raise SpecError(f"{key!r}: {part!r} is not a table", where="--set", hint="Check the dotted key")
            target = child
        target[parts[-1]] = setting_value(text.strip())
    return result
