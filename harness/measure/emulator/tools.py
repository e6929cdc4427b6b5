"""Scripted tool calls of an emulated chat: which tool an answer calls, and the arguments around its generated words.

What a tool makes of them is the tool's: a text of a shell command begins with ``: ``, which runs nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

STEP = re.compile(r"(?:([A-Za-z0-9_.-]{1,64})=)?([0-9]{1,6})")
NO_COMMAND = ": "
COMMANDS = ("command", "cmd", "script")
FILLER = "\0"
# Values of arguments that are no text, by the type in the tool's schema.
EMPTY: Mapping[str, Any] = {"integer": 1, "number": 1, "boolean": False, "array": [], "object": {}}


class ToolCall(NamedTuple):
    """A call of a tool in an answer of so many tokens. before, after: of its arguments' JSON, around the words."""

    name: str
    num_tokens: int
    before: str
    after: str


def script_of(text: str) -> tuple[tuple[str, int], ...]:
    """(tool, tokens) of each answer in turn, from ``[NAME=]TOKENS,...``; ValueError for any other text."""
    steps = [STEP.fullmatch(part.strip()) for part in text.split(",")] if text else []
    if None in steps:
        raise ValueError(f"{text!r} is not [NAME=]TOKENS,...: tool and tokens of each answer in turn, 0 for a text")
    return tuple((step[1] or "", int(step[2])) for step in steps if step)


def scripted_call(
    script: Sequence[tuple[str, int]], tools: Sequence[Mapping[str, Any]], num_answers: int
) -> ToolCall | None:
    """The call of the answer after so many others, None for a text. A name that is no tool's is the first tool's."""
    name, num_tokens = script[num_answers] if num_answers < len(script) else ("", 0)
    functions = [_table(tool.get("function")) for tool in tools]
    if not num_tokens or not functions:
        return None
    found = next((function for function in functions if function.get("name") == name), functions[0])
    arguments = json.dumps(_arguments(_table(found.get("parameters")))).partition(json.dumps(FILLER)[1:-1])
    return ToolCall(str(found.get("name", "")), num_tokens, arguments[0], arguments[2])


def words_of(message: Mapping[str, Any]) -> str:
    """The generated words in the tool calls of a message, which the next prompt repeats."""
    calls = cast("list[Any]", message.get("tool_calls") or [])
    return "".join(_words(_table(_table(call).get("function")).get("arguments")) for call in calls)


def _words(arguments: object) -> str:
    try:
        values = json.loads(arguments).values() if isinstance(arguments, str) else ()
    except (ValueError, AttributeError):
        return str(arguments)
    return max((value for value in values if isinstance(value, str)), key=len, default="").removeprefix(NO_COMMAND)


def _arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Values of the arguments that a tool requires; its last text holds the words."""
    properties = _table(schema.get("properties"))
    required = [str(name) for name in cast("list[Any]", schema.get("required") or list(properties)[:1])]
    fields = {name: _table(properties.get(name)) for name in required}
    texts = [name for name, field in fields.items() if field.get("type", "string") == "string" and "enum" not in field]
    values: dict[str, Any] = {}
    for name, field in fields.items():
        if name in texts:
            begin = NO_COMMAND if name in COMMANDS else ""
            values[name] = begin + FILLER if name == texts[-1] else begin or "x"
        else:
            values[name] = next(iter(field.get("enum", ())), EMPTY.get(str(field.get("type"))))
    return values


def _table(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
