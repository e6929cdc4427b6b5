"""One answer of an OpenAI-compatible completions server, turned into token ids, stamps and counts.

Bytes go in as they arrived, each piece with the stamps of its receive; tokens are counted from ``token_ids``, never
from chunks or text. No socket and no clock here. Next: ``script`` decides what the answer means for its session.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeAlias

import pydantic_core

EVENT_END = b"\n\n"
# How vLLM begins an event that carries a document; the general form is parsed too.
PLAIN_EVENT = b"data: {"
DATA_PREFIX = b"data:"
DONE_MARK = b"[DONE]"
MAX_ERROR_CHARS = 300
# What stands for a kernel stamp where there is none.
NO_KERNEL_STAMP = -1
# Strict, and twice as fast as ``json.loads`` on the short documents of a stream.
scan_json: Any = pydantic_core.from_json

# One receive: CLOCK_MONOTONIC ns after the call, the kernel's stamp (CLOCK_REALTIME ns), bytes. A plain tuple, because
# there is one per chunk of the run.
Piece: TypeAlias = tuple[int, int, bytes]
# One event that carried choices: stamps of its receive, token ids in it, whether its receive held other events too (its
# stamps are then theirs).
ChunkStamp: TypeAlias = tuple[int, int, int, bool]
# One receive without its bytes: its two stamps, and how many events ended in it.
EventStamp: TypeAlias = tuple[int, int, int]


class Answer:
    """What one response said so far. ``problem`` is empty while everything could be understood.

    keeps_id_text: the ids are also wanted as decimal text, for the session's next prompt.
    """

    __slots__ = (
        "_is_done",
        "_lacks_token_ids",
        "_rest",
        "cached_tokens",
        "chunks",
        "completion_tokens",
        "finish_reason",
        "id_texts",
        "keeps_id_text",
        "needs_token_ids",
        "problem",
        "prompt_tokens",
        "response_id",
        "stream",
        "texts",
        "token_ids",
    )

    def __init__(self, stream: bool, needs_token_ids: bool = True, keeps_id_text: bool = False) -> None:
        self.stream = stream
        self.needs_token_ids = needs_token_ids
        self.keeps_id_text = keeps_id_text
        self.response_id = self.finish_reason = self.problem = ""
        self.token_ids: list[int] = []
        self.id_texts: list[str] = []
        self.texts: list[str] = []
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens = 0
        self.chunks: list[ChunkStamp] = []
        self._rest = b""
        self._is_done = self._lacks_token_ids = False

    def feed(self, piece: Piece) -> None:
        """Take the next received piece of the body."""
        body = self._rest + piece[2] if self._rest else piece[2]
        if not self.stream:
            self._rest = body
            return
        if b"\r" in body:
            body = body.replace(b"\r\n", b"\n")
        *events, self._rest = body.split(EVENT_END)
        is_coalesced = len(events) > 1
        for event in events:
            self._take_event(event, piece, is_coalesced)

    def feed_many(self, body: bytes, stamps: Sequence[EventStamp]) -> None:
        """Take several receives of a stream at once: their bytes, and for each how many events ended in it.

        The same as feeding them one by one, at half the cost; where the numbers do not fit the bytes, all events get
        the last stamps and count as coalesced.
        """
        body = self._rest + body if self._rest else body
        if not self.stream:
            self._rest = body
            return
        if b"\r" in body:
            body = body.replace(b"\r\n", b"\n")
        *events, self._rest = body.split(EVENT_END)
        pieces = [(received_ns, kernel, b"", count > 1) for received_ns, kernel, count in stamps for _ in range(count)]
        if len(pieces) != len(events):
            pieces = [(*stamps[-1][:2], b"", True)] * len(events)
        datas = [event[6:] for event in events if event.startswith(PLAIN_EVENT)]
        try:
            documents = scan_json(b"[%b]" % b",".join(datas), cache_strings="keys")
        except ValueError:
            documents = []
        # One of them is no document: each on its own then, so that the text of the problem names it.
        is_plain = len(documents) == len(datas)
        left = iter(documents)
        for event, (received_ns, kernel, data, is_coalesced) in zip(events, pieces, strict=True):
            if is_plain and event.startswith(PLAIN_EVENT):
                self._take_document(next(left), (received_ns, kernel, data), is_coalesced)
            else:
                self._take_event(event, (received_ns, kernel, data), is_coalesced)

    def take_whole(self, piece: Piece) -> None:
        """Take a whole answer that came in one receive; ``close`` is not called then."""
        if self.stream:
            self.feed(piece)
            self.close(piece)
        else:
            self._take_data(piece[2].strip(), piece, False)
            self._check_counts()

    def close(self, last: Piece) -> None:
        """The body is complete; ``last`` is its last receive."""
        if self.stream:
            if self._rest.strip():
                self._take_event(self._rest, last, True)
            if not self._is_done and not self.problem:
                self.problem = "the stream ended without [DONE]"
        else:
            self._take_data(self._rest.strip(), last, False)
        self._rest = b""
        self._check_counts()

    def _take_event(self, event: bytes, piece: Piece, is_coalesced: bool) -> None:
        for line in event.split(b"\n") if b"\n" in event else (event,):
            if not line.startswith(DATA_PREFIX):
                continue  # comments (keep-alive pings) and other fields of the event stream
            data = line[5:].strip()
            if data == DONE_MARK:
                self._is_done = True
            else:
                self._take_data(data, piece, is_coalesced)

    def _take_data(self, data: bytes, piece: Piece, is_coalesced: bool) -> None:
        try:
            document = scan_json(data, cache_strings="keys")
        except ValueError:
            document = None
        if type(document) is dict:
            self._take_document(document, piece, is_coalesced)  # pyright: ignore[reportUnknownArgumentType]
        else:
            self.problem = self.problem or f"not a JSON object: {data[:80]!r}"

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
                ids = ()
            else:
                self._take_ids(ids)
            if not self.needs_token_ids:
                self.texts.append(str(choice.get("text") or ""))
            self.chunks.append((piece[0], piece[1], len(ids), is_coalesced))
            if choice.get("finish_reason"):
                self.finish_reason = str(choice["finish_reason"])
        usage = document.get("usage")
        if usage:
            self.prompt_tokens = int(usage["prompt_tokens"])
            self.completion_tokens = int(usage.get("completion_tokens") or 0)
            # Absent and null both mean that nothing was cached.
            details = usage.get("prompt_tokens_details") or {}
            self.cached_tokens = int(details.get("cached_tokens") or 0)

    def _take_ids(self, ids: list[Any]) -> None:
        self.token_ids.extend(ids)
        for token_id in ids:
            # ``type`` and not ``isinstance``: true and false are ints too.
            if type(token_id) is not int:
                self.problem = self.problem or "token_ids are not all integers"
                return
        if self.keeps_id_text:
            self.id_texts.extend(map(str, ids))

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
