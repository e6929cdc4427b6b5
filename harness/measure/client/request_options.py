"""What a request carries besides its prompt, filled in for each request: JSON of its body, and HTTP headers.

There is no socket and no clock here. Values of environment variables are in no record: they are noted as secrets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SpecError
from harness.model.spec.request import PLACEHOLDER, RequestSpec
from harness.secrets import environment_secret

Values = Mapping[str, int | float | str | None]


class RequestOptions:
    """The options of a replay's requests.

    Raises SpecError where an environment variable is missing.
    """

    def __init__(self, spec: RequestSpec) -> None:
        self.length_key = b"max_completion_tokens" if spec.max_completion_tokens else b"max_tokens"
        self.temperature = f"{spec.temperature:g}".encode()
        names = {match[3] for text in spec.headers.values() for match in PLACEHOLDER.finditer(text) if match[2]}
        self._environment = {f"env:{name}": _variable(name) for name in sorted(names)}
        self._body, self._headers = spec.extra_body, spec.headers
        is_filled = bool(PLACEHOLDER.search(json.dumps(spec.extra_body)))
        self._constant_body = None if is_filled else _members(spec.extra_body)
        self._constant_headers = None if spec.headers else ""

    def body(self, values: Callable[[], Values]) -> bytes:
        """The further members of the JSON body, each with a comma before it."""
        return _members(_filled(self._body, values())) if self._constant_body is None else self._constant_body

    def headers(self, values: Callable[[], Values]) -> dict[str, str]:
        """The further headers; those whose value is one placeholder without a value are left out."""
        if self._constant_headers is not None:
            return {}
        known = {**values(), **self._environment}
        filled = {name: _filled(text, known) for name, text in self._headers.items()}
        return {name: str(text) for name, text in filled.items() if text is not None}


def request_values(
    session: int, turn: int, names: tuple[str, str], wait_ns: int | None, lengths: tuple[int, int]
) -> Values:
    """What placeholders stand for. names: of the session and the request. wait_ns: None for a session's last request.
    lengths: prompt and answer."""
    return {
        "session": session,
        "turn": turn,
        "session_id": names[0],
        "request_id": names[1],
        "expected_wait_s": None if wait_ns is None else wait_ns / NS_PER_S,
        "expected_wait_ms": None if wait_ns is None else wait_ns / NS_PER_MS,
        "prompt_tokens": lengths[0],
        "generate_tokens": lengths[1],
    }


def _members(body: Mapping[str, Any]) -> bytes:
    return b"".join(f",{json.dumps(name)}:{json.dumps(value)}".encode() for name, value in body.items())


def _filled(value: Any, values: Values) -> Any:
    """The value with its placeholders filled in; a text that is one placeholder becomes what stands for it."""
    if isinstance(value, str):
        whole = PLACEHOLDER.fullmatch(value)
        if whole and not whole[1]:
            return values[_name_of(whole)]
        return PLACEHOLDER.sub(lambda match: _text_for(match, values), value)
    if isinstance(value, dict):
        items = cast("dict[str, Any]", value).items()
        return {_as_text(_filled(name, values)): _filled(item, values) for name, item in items}
    if isinstance(value, list | tuple):
        return [_filled(item, values) for item in cast("list[Any]", value)]
    return value


def _text_for(placeholder: re.Match[str], values: Values) -> str:
    literal = placeholder[1]
    return f"{{{literal}}}" if literal else _as_text(values[_name_of(placeholder)])


def _name_of(placeholder: re.Match[str]) -> str:
    return (placeholder[2] or "") + placeholder[3]


def _as_text(value: object) -> str:
    return "none" if value is None else str(value)


def _variable(name: str) -> str:
    text = environment_secret(name)
    if not text:
        raise SpecError(
            f"the environment has no usable text in {name}",
            where="workload.request.headers",
            hint=f"export {name}=...",
        )
    return text
