"""Changes of an experiment's table before it is parsed, ``--set`` and ``--over``, and how a command line is recorded.

Nothing is validated here. What is recorded is parsed first, so that no spelling hides a secret; values of keys that no
specification has are replaced by "redacted".
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from harness.errors import SpecError
from harness.model.spec.base import tomllib
from harness.model.spec.experiment import ConditionSpec, ExperimentSpec
from harness.model.spec.sections import ClientSpec, LimitsSpec
from harness.model.spec.server import ServerSpec
from harness.model.spec.workload import WorkloadSpec
from harness.redact import REDACTED, redacted_arguments, redacted_value

_SPECS = (ExperimentSpec, ConditionSpec, ServerSpec, WorkloadSpec, ClientSpec, LimitsSpec)
KNOWN_KEYS = frozenset(key for spec in _SPECS for key in spec.model_fields) - {"env", "extra_args"}
SET = "--set"


def setting_value(text: str) -> Any:
    """The value of ``key=text`` in TOML's syntax; a string where it is not valid TOML."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def override_table(table: Mapping[str, Any], changes: Sequence[str]) -> dict[str, Any]:
    """A deep copy of ``table`` with each "dotted.key=value" applied; raises SpecError on a malformed change."""
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
            named = [item for item in cast("list[Any]", target) if isinstance(item, dict) and item.get("name") == part]
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


def swept_table(table: dict[str, Any], over: str) -> dict[str, Any]:
    """The experiment with a condition per value of ``over``, each the baseline condition with that one change.

    Raises SpecError where ``over`` names no key of a server or a workload, or fewer than two values.
    """
    tables = {"server": ServerSpec, "workload": WorkloadSpec}
    key, _, text = over.partition("=")
    where, _, name = key.strip().partition(".")
    parts = [part.strip() for part in text.split(",") if part.strip()]
    values = [override_table({}, [f"value={part}"])["value"] for part in parts]
    if not name and (homes := [home for home, spec in tables.items() if where in spec.model_fields]):
        raise SpecError(f"{where!r} is a key of [{homes[0]}]", where="--over", hint=f"Write --over {homes[0]}.{over}")
    if where not in tables or not name or len(values) < 2 or len(set(map(str, values))) < len(values):
        hint = "Write e.g. --over workload.num_sessions=2,4,8"
        raise SpecError(f"{over!r} is not KEY=VALUE,VALUE,... with two different values", where="--over", hint=hint)
    conditions: list[dict[str, Any]] = table.get("condition") or [{"name": "base"}]
    base = next((each for each in conditions if each.get("name") == table.get("baseline")), conditions[0])
    short = name.replace("_", "-")
    made = [
        override_table(
            {**base, "name": f"{short}-{value}".lower(), "baseline": "", "factors": {name: value}},
            [f"{where}.{name}={part}"],
        )
        for value, part in zip(values, parts, strict=True)
    ]
    return {
        **table,
        "name": f"{table.get('name', 'experiment')}-sweep-{short}"[:64],
        "baseline": made[0]["name"],
        "condition": made,
        "title": f"{table.get('title') or table.get('name')}: {key.strip()}",
        "question": f"How do cost and latency change with {key.strip()}?",
        "analysis": "",
        "rules": [],
    }


def recorded_changes(changes: Sequence[str]) -> tuple[str, ...]:
    """The changes of ``--set`` for a record: each value parsed, then redacted by its key."""
    return tuple(map(_recorded_change, changes))


def recorded_command(words: Sequence[str]) -> tuple[str, ...]:
    """The words of a harness command for a record, with its ``--set`` changes."""
    kept: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        name, equals, change = word.partition("=")
        if name != SET:
            others.append(word)
            continue
        kept += [*redacted_arguments(others), SET, _recorded_change(change if equals else next(rest, ""))]
        others = []
    return (*kept, *redacted_arguments(others))


def _recorded_change(change: str) -> str:
    key, equals, text = change.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(part.replace("-", "_").isidentifier() for part in parts):
        return REDACTED
    try:
        return _redacted_change(change, parts, setting_value(text.strip()))
    except RecursionError:  # No key is nested so deeply.
        return REDACTED


def _redacted_change(change: str, parts: Sequence[str], value: Any) -> str:
    nested: Any = value
    for part in reversed(parts):
        nested = {part: nested}
    kept = redacted_value(nested, KNOWN_KEYS)
    for part in parts:
        kept = kept[part] if isinstance(kept, dict) else kept
    if kept == value:
        return change
    return f"{change.partition('=')[0]}={kept if isinstance(kept, str) else json.dumps(kept, default=str)}"
