"""One answer of an OpenAI-compatible completions server, turned into token ids, stamps and counts.

Bytes go in as they arrived, each piece with the stamps of its receive; tokens are counted from ``token_ids``, never
from chunks or text. No socket and no clock here. Next: ``client_script`` decides what the answer means for its session.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, NamedTuple

EVENT_END = b"\n\n"
DATA_PREFIX = b"data:"
DONE_MARK = b"[DONE]"
MAX_ERROR_CHARS = 300
# ``json.loads`` guesses an encoding and looks up its options first, which costs as much as a short event.
decode_json = json.JSONDecoder().decode


class Piece(NamedTuple):
    """One receive. received_ns: CLOCK_MONOTONIC after the call. kernel: SCM_TIMESTAMPNS payload, empty when none."""

    received_ns: int
    kernel: bytes
    body: bytes


class ChunkStamp(NamedTuple):
    """One event that carried choices; ``is_coalesced``: its receive held other events too, so its stamp is theirs."""

    received_ns: int
    kernel: bytes
    num_tokens: int
    is_coalesced: bool


@dataclass(slots=True)
class Answer:
    """What one response said so far. ``problem`` is empty while everything could be understood."""

    stream: bool
    needs_token_ids: bool = True
    response_id: str = ""
    finish_reason: str = ""
    token_ids: list[int] = field(default_factory=list[int])
    texts: list[str] = field(default_factory=list[str])
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int = 0
    problem: str = ""
    chunks: list[ChunkStamp] = field(default_factory=list[ChunkStamp])
    _rest: bytes = b""
    _is_done: bool = False
    _lacks_token_ids: bool = False

    def feed(self, piece: Piece) -> None:
        """Take the next received piece of the body."""
        if not self.stream:
            self._rest += piece.body
            return
        body = self._rest + piece.body if self._rest else piece.body
        if b"\r" in body:
            body = body.replace(b"\r\n", b"\n")
        *events, self._rest = body.split(EVENT_END)
        is_coalesced = len(events) > 1
        for event in events:
            self._take_event(event, piece, is_coalesced)

    def close(self, last: Piece) -> None:
        """The body is complete; ``last`` is its last receive."""
        if self.stream:
            if self._rest.strip():
                self._take_event(self._rest, last, True)
            if not self._is_done and not self.problem:
                self.problem = "the stream ended without [DONE]"
        else:
            document = self._decode(self._rest)
            if document is not None:
                self._take_document(document, last, False)
        self._rest = b""
        self._check_counts()

    def _take_event(self, event: bytes, piece: Piece, is_coalesced: bool) -> None:
        for line in event.split(b"\n"):
            if not line.startswith(DATA_PREFIX):
                continue  # comments (keep-alive pings) and other fields of the event stream
            data = line[5:].strip()
            if data == DONE_MARK:
                self._is_done = True
                continue
            document = self._decode(data)
            if document is not None:
                self._take_document(document, piece, is_coalesced)

    def _decode(self, data: bytes) -> dict[str, Any] | None:
        try:
            document = decode_json(data.decode())
        except ValueError:
            document = None
        if isinstance(document, dict):
            return document  # pyright: ignore[reportReturnType]
        self.problem = self.problem or f"not a JSON object: {data[:80]!r}"
        return None

    def _take_document(self, document: dict[str, Any], piece: Piece, is_coalesced: bool) -> None:
        if "error" in document:
            self.problem = self.problem or error_message(document)
            return
        try:
            self._read_fields(document, piece, is_coalesced)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            self.problem = self.problem or f"unexpected shape of the answer ({type(error).__name__}: {error})"

    def _read_fields(self, document: dict[str, Any], piece: Piece, is_coalesced: bool) -> None:
        if not self.response_id:
            self.response_id = str(document.get("id") or "")
        for choice in document.get("choices") or ():
            ids = choice.get("token_ids")
            if ids is None:
                # A last chunk that only states the finish reason carries no text and needs no ids.
                self._lacks_token_ids = self._lacks_token_ids or bool(choice.get("text"))
                ids = []
            if not self.needs_token_ids:
                self.texts.append(str(choice.get("text") or ""))
            self.token_ids.extend(ids)
            self.chunks.append(ChunkStamp(piece.received_ns, piece.kernel, len(ids), is_coalesced))
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])
        usage = document.get("usage")
        if usage:
            self.prompt_tokens = int(usage["prompt_tokens"])
            self.completion_tokens = int(usage.get("completion_tokens") or 0)
            # Absent and null both mean that nothing was cached.
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = int(details.get("cached_tokens") or 0)

    @property
    def num_tokens(self) -> int | None:
        """Tokens generated: counted from ids where there are any, else what usage says, else unknown."""
        return len(self.token_ids) if self.token_ids else self.completion_tokens

    def _check_counts(self) -> None:
        if self.problem:
            return
        has_ids = not self._lacks_token_ids and bool(self.token_ids or not self.completion_tokens)
        if self.needs_token_ids and not has_ids:
            self.problem = "no token_ids in the answer: the server ignored return_token_ids, so nothing can continue it"
        elif self.prompt_tokens is None:
            self.problem = "no usage in the answer"
        elif has_ids and self.completion_tokens != len(self.token_ids):
            self.problem = f"usage says {self.completion_tokens} tokens, token_ids hold {len(self.token_ids)}"
        elif self.token_ids and set(map(type, self.token_ids)) != {int}:
            self.problem = "token_ids are not all integers"


def error_message(document: dict[str, Any]) -> str:
    """The message of an OpenAI-style error body, shortened to a row's width."""
    error = document.get("error", document)
    message = error.get("message", error) if isinstance(error, dict) else error
    return str(message)[:MAX_ERROR_CHARS]


def describe_error_body(body: bytes) -> str:
    """One line that says what a non-200 body said, whatever its form."""
    try:
        document = json.loads(body)
    except ValueError:
        document = None
    if isinstance(document, dict):
        return error_message(document)  # pyright: ignore[reportUnknownArgumentType]
    return body.decode("utf-8", "replace").strip()[:MAX_ERROR_CHARS]
