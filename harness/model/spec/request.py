"""What each request of a workload carries besides its prompt: the name of its length, temperature, body, headers.

Texts may hold placeholders, which the client fills in for each request. Nothing is filled in or sent here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from pydantic import Field, field_validator

from harness.model.spec.base import Spec
from harness.redact import is_secret

VALUES = {
    "session": "number of the session in the plan; a part of a session has a number of its own",
    "turn": "number of the request in its session, from 0",
    "session_id": "name of the session, of all its parts, unique to this run",
    "request_id": "name of the request, unique to this run",
    "expected_wait_s": "planned wait until the session goes on, in seconds; null for its last request",
    "expected_wait_ms": "the same in milliseconds",
    "prompt_tokens": "planned prompt",
    "generate_tokens": "planned answer",
}
"""Placeholders, and what stands for each."""
PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}|\{(env:)?(\w+)\}")
# What the harness itself writes into each request.
OWN_KEYS = frozenset(
    (
        *("model", "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "seed", "ignore_eos"),
        *("stream", "stream_options", "request_id", "return_token_ids"),
    )
)
OWN_HEADERS = frozenset(
    ("host", "content-type", "content-length", "transfer-encoding", "connection", "accept", "x-request-id")
)
_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


KEEP_KV = "keep_kv_ms"
"""Key of a body by which a request tells a server that pins KV when its session returns."""


class RequestSpec(Spec):
    """What each request carries besides its prompt. A condition's table replaces that of the experiment.

    Texts in extra_body and headers may hold the request's values as {session}, {turn}, {session_id}, {request_id},
    {expected_wait_s}, {expected_wait_ms}, {prompt_tokens}, {generate_tokens}; {{word}} stands for {word}.
    """

    max_completion_tokens: bool = Field(
        default=False, description="send the answer's length as max_completion_tokens instead of max_tokens"
    )
    temperature: float = Field(default=0.0, ge=0)
    extra_body: dict[str, Any] = Field(
        default={}, description="further keys of the JSON body; a text that is one placeholder becomes a JSON value"
    )
    headers: dict[str, str] = Field(
        default={}, description="further HTTP headers; {env:NAME} takes an environment variable, which is not recorded"
    )

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @field_validator("extra_body")
    @classmethod
    def _check_body(cls, body: dict[str, Any]) -> dict[str, Any]:
        try:
            json.dumps(body, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"must be JSON: {error}") from error
        if own := sorted(OWN_KEYS & body.keys()):
            raise ValueError(f"must not hold {', '.join(own)}: the harness writes that itself")
        for text in _texts_of(body):
            _check_placeholders(text, may_use_environment=False)
        return body

    @field_validator("headers")
    @classmethod
    def _check_headers(cls, headers: dict[str, str]) -> dict[str, str]:
        for name, text in headers.items():
            if not _HEADER_NAME.fullmatch(name):
                raise ValueError(f"{name!r} is not the name of a header")
            if name.lower() in OWN_HEADERS:
                raise ValueError(f"must not hold {name}: the harness writes that itself")
            if not text.isascii() or not text.isprintable():
                raise ValueError(f"{name} must be printable ASCII")
            if is_secret(name) and not PLACEHOLDER.search(text):
                raise ValueError(f"{name} may be a secret, and this file is recorded: write {{env:NAME}}")
            _check_placeholders(text, may_use_environment=True)
        return headers


def _texts_of(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, item in cast("Mapping[str, object]", value).items():
            yield name
            yield from _texts_of(item)
    elif isinstance(value, Sequence):
        for item in cast("Sequence[object]", value):
            yield from _texts_of(item)


def _check_placeholders(text: str, *, may_use_environment: bool) -> None:
    for literal, environment, name in PLACEHOLDER.findall(text):
        if environment and not may_use_environment:
            raise ValueError("takes {env:NAME} in headers only")
        if not literal and not environment and name not in VALUES:
            known = ", ".join(VALUES)
            raise ValueError(f"knows no {{{name}}}: known are {known}; write {{{{{name}}}}} for the text itself")
