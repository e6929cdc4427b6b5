"""How a command line and its ``--set`` changes are recorded: parsed first, so that no spelling hides a secret.

Values of keys that no specification has are replaced by "redacted".
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from harness.model.spec.changes import setting_value
from harness.model.spec.experiment import ConditionSpec, ExperimentSpec
from harness.model.spec.sections import ClientSpec, LimitsSpec
from harness.model.spec.server import ServerSpec
from harness.model.spec.workload import WorkloadSpec
from harness.redact import REDACTED, redacted_arguments, redacted_value

_SPECS = (ExperimentSpec, ConditionSpec, ServerSpec, WorkloadSpec, ClientSpec, LimitsSpec)
KNOWN_KEYS = frozenset(key for spec in _SPECS for key in spec.model_fields) - {"env", "extra_args"}
SET = "--set"


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
