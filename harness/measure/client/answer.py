"""Reads one answer of an OpenAI-compatible server, a completion or a chat: token ids, text, stamps and counts.

Bytes go in as they arrived, each piece with the stamps of its receive. Tokens are counted from ``token_ids``, or taken
from usage. There is no socket and no clock here.
"""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any, TypeAlias

import pydantic_core

from harness.errors import MAX_ERROR_CHARS, printable
from harness.secrets import without_secrets

# Lower statuses of HTTP are not the answer yet (100 Continue).
MIN_FINAL_STATUS = 200
EVENT_END = b"\n\n"
DATA_PREFIX = b"data:"
DONE_MARK = b"[DONE]"
# A stream of events may begin with it.
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
# Names of events that carry the documents of an answer.
ANSWER_EVENTS = (b"", b"message")
# Bytes kept of the body of an error response, for the row.
MAX_ERROR_BYTES = 64 << 10
COMPRESSED = "compressed, which was not asked for. Turn compression off in the proxy, or ask the server's own address"
MAX_ID_CHARS = 256
# By it a gateway finds the server that holds a session's KV (session affinity of llm-d's router).
SESSION_TOKEN_HEADER = "x-session-token"
# Token ids and counts are 32-bit in every record. Shifted by so many bits, a valid number is 0; a negative number
# leaves its sign.
COUNT_BITS = 31
# Far more than 100,000 tokens, or the ids of as long a prompt, take.
MAX_ANSWER_BYTES = 64 << 20
MAX_EVENT_BYTES = 4 << 20
# In place of a missing kernel stamp.
NO_KERNEL_STAMP = -1
_TAGS = re.compile(r"<[^>]*>")
_from_json: Any = pydantic_core.from_json

# What an answer may contain where nothing depends on it, by code: the words of a finding.
NONE_TOLERATED: frozenset[str] = frozenset()
_ID_REMEDY = 'requests are found in the server\'s log by it. Without that log: backend = "attached"'

# One receive: CLOCK_MONOTONIC ns after the call, the kernel's stamp (CLOCK_REALTIME ns), bytes. A plain tuple, because
# there is one per chunk of the run.
Piece: TypeAlias = tuple[int, int, bytes]
# One event that carried choices: the two stamps of its receive, its number of token ids, and whether the receive held
# other events too (they share its stamps).
ChunkStamp: TypeAlias = tuple[int, int, int, bool]


class ReceivedAnswer:
    """What one response contained so far. ``problem`` is empty while everything could be read.

    keeps_id_text: also keep the ids as decimal text, for the session's next prompt. is_strict: what vLLM never sends is
    a problem; else what no figure depends on is noted in ``tolerated``, by the codes of findings "tolerated-CODE".
    replica: what the response's header of that name says, see ``Target``. session_token: what a router wants with the
    session's next request.
    """

    __slots__ = (
        "_ends_in_cr",
        "_is_done",
        "_lacks_token_ids",
        "_num_bytes",
        "_rest",
        "_text_chunks",
        "cached_tokens",
        "chunks",
        "completion_tokens",
        "finish_reason",
        "id_texts",
        "is_strict",
        "keeps_id_text",
        "needs_token_ids",
        "not_before",
        "problem",
        "prompt_tokens",
        "replica",
        "replica_header",
        "response_id",
        "session_token",
        "stream",
        "texts",
        "token_ids",
        "tolerated",
    )

    def __init__(
        self, stream: bool, needs_token_ids: bool = True, keeps_id_text: bool = False, is_strict: bool = True
    ) -> None:
        self.stream = stream
        self.is_strict = is_strict
        self.tolerated = NONE_TOLERATED
        self.needs_token_ids = needs_token_ids
        self.keeps_id_text = keeps_id_text
        self.response_id = self.finish_reason = self.problem = self.replica = self.session_token = ""
        self.replica_header = b""
        self.token_ids: list[int] = []
        self.id_texts: list[str] = []
        self.texts: list[str] = []
        self.prompt_tokens: int | None = None
        self.completion_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.chunks: list[ChunkStamp] = []
        # By the stamp of a receive that is not exact: the earliest instant at which it can have come.
        self.not_before: dict[int, int] = {}
        # Place of the chunk, and its letters.
        self._text_chunks: list[tuple[int, int]] = []
        self._rest = bytearray()
        self._num_bytes = 0
        self._is_done = self._lacks_token_ids = self._ends_in_cr = False

    def feed(self, piece: Piece) -> None:
        """Take the next received piece of the body."""
        events = self._events_with(piece[2])
        is_coalesced = len(events) > 1
        for event in events:
            self._take_event(event, piece, is_coalesced)

    def _events_with(self, body: bytes) -> list[bytes]:
        """The events that these bytes complete. Incomplete events and whole answers wait in ``_rest``."""
        rest = self._rest
        self._num_bytes += len(body)
        if self._num_bytes > MAX_ANSWER_BYTES or (self.stream and len(rest) > MAX_EVENT_BYTES):
            self.problem = self.problem or "the answer is too long"
            rest.clear()
            return []
        if not self.stream:
            rest += body
            return []
        if b"\r" in body or self._ends_in_cr:
            body = self._with_line_feeds(body)
        if rest:
            # Look for the end only where it can be, and copy nothing before it has come.
            seen = max(0, len(rest) - 1)
            rest += body
            if rest.find(EVENT_END, seen) < 0:
                return []
            body = bytes(rest)
            rest.clear()
        *events, last = body.split(EVENT_END)
        rest += last
        return events

    def _with_line_feeds(self, body: bytes) -> bytes:
        """Lines may end with CR LF, LF or CR, and a CR LF may be torn between two receives."""
        has_lone_cr = self._ends_in_cr and not body.startswith(b"\n")
        if self._ends_in_cr:
            body = body.removeprefix(b"\n")
        self._ends_in_cr = body.endswith(b"\r")
        body = body.replace(b"\r\n", b"\n")
        if has_lone_cr or b"\r" in body[:-1]:
            self._tolerate("line-ends")
        return body.replace(b"\r", b"\n")

    def _tolerate(self, code: str) -> None:
        if code not in self.tolerated:
            self.tolerated |= {code}

    def close(self, last: Piece) -> None:
        """The body is complete; ``last`` is its last receive."""
        rest = bytes(self._rest).strip()
        self._rest.clear()
        if not self.stream:
            self._take_data(rest.removeprefix(BYTE_ORDER_MARK), last, False)
        elif rest and not self._take_whole(rest):
            self._take_event(rest, last, True)
        if self.stream and not self._is_done and not self.problem:
            self._end_without_done()
        if self.stream and not self.problem:
            self._count_text_chunks()
        self._check_counts()

    def _take_whole(self, body: bytes) -> bool:
        """Whether the answer is one JSON object and no stream; it is a problem then, in the server's words."""
        is_object = body.startswith(b"{") and _is_json(body)
        if is_object:
            self.problem = self.problem or f"no stream, but: {describe_error_body(body)}"
        return is_object

    def _end_without_done(self) -> None:
        """Only an answer that stated why it ended, and its usage, is known to be whole."""
        if self.is_strict:
            self.problem = "the stream ended without [DONE]"
        elif not self.finish_reason or self.prompt_tokens is None:
            lacks = "a finish reason" if not self.finish_reason else "usage"
            self.problem = f"the stream ended without [DONE] and without {lacks}: it may be cut off"
        else:
            self._tolerate("done-missing")

    def _take_event(self, event: bytes, piece: Piece, is_coalesced: bool) -> None:
        is_plain = b"\n" not in event and event.startswith(DATA_PREFIX)
        for data in (event[5:].strip(),) if is_plain else self._data_of(event):
            if data == DONE_MARK:
                if self._is_done and self.is_strict:
                    self.problem = self.problem or "the stream goes on after [DONE]"
                elif self._is_done:
                    self._tolerate("done-repeated")
                self._is_done = True
            elif self._is_done:
                self._refuse(data, "the stream goes on after [DONE]")
            else:
                self._take_data(data, piece, is_coalesced)

    def _data_of(self, event: bytes) -> list[bytes]:
        """The documents in an event of several lines, or with other fields than data."""
        name, lines = b"", list[bytes]()
        for line in event.removeprefix(BYTE_ORDER_MARK).split(b"\n"):
            # Comments (keep-alive pings) have no field.
            field, _, value = line.partition(b":")
            if field == b"data":
                lines.append(value.strip())
            elif field == b"event":
                name = value.strip()
        if len(lines) > 1 and _is_json(whole := b"\n".join(lines)):
            lines = [whole]
        if name not in ANSWER_EVENTS:
            if name == b"error":
                self.problem = self.problem or describe_error_body(b"\n".join(lines))
                return []
            self._tolerate("event-named")
            if not self.is_strict:
                return [data for data in lines if data == DONE_MARK or data.startswith(b"{")]
        return lines

    def _take_data(self, data: bytes, piece: Piece, is_coalesced: bool) -> None:
        try:
            document = scan_json(data)
        except ValueError:
            document = None
        if type(document) is dict:
            self._take_document(document, piece, is_coalesced)  # pyright: ignore[reportUnknownArgumentType]
        else:
            self._refuse(data, f"not a JSON object: {without_secrets(data)[:80]!r}")

    def _refuse(self, data: bytes, problem: str) -> None:
        """Data that is no document is a problem; but some servers send their keep-alives as data."""
        if self.is_strict or (data and not data.startswith(b":")):
            self.problem = self.problem or problem
        else:
            self._tolerate("event-without-answer")

    def _take_document(self, document: dict[str, Any], piece: Piece, is_coalesced: bool) -> None:
        if "error" in document:
            if self.is_strict or document["error"]:
                self.problem = self.problem or error_message(document) or "an error without a message"
                return
            self._tolerate("error-null")
        elif "choices" not in document and ("message" in document or "detail" in document):
            self.problem = self.problem or error_message(document)
            return
        try:
            self._read_fields(document, piece, is_coalesced)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            shape = printable(f"{type(error).__name__}: {error}")
            self.problem = self.problem or f"unexpected shape of the answer ({shape})"

    def _take_other(self, document: dict[str, Any]) -> None:
        """A document without a part of an answer: an error of another form, or a keep-alive."""
        if document.get("object") == "error" or "message" in document or "detail" in document:
            self.problem = self.problem or error_message(document)
        else:
            self._tolerate("event-without-answer")

    def _read_fields(self, document: dict[str, Any], piece: Piece, is_coalesced: bool) -> None:
        choices = document.get("choices") or ()
        if not choices and not self.is_strict and not ("choices" in document or "usage" in document):
            self._take_other(document)
            return
        response_id = document.get("id")
        if response_id != self.response_id or not response_id:
            self._note_id(response_id)
        for choice in choices:
            if len(choices) > 1 or choice.get("index"):
                raise ValueError("more than one choice")
            ids = choice.get("token_ids")
            if ids is None:
                # A last chunk that only states the finish reason carries no text and needs no ids.
                self._lacks_token_ids = self._note_text(choice) or self._lacks_token_ids
                ids = ()
            else:
                self._take_ids(ids)
            if not self.needs_token_ids:
                self.texts.append(_text_of(choice, "content"))
            self.chunks.append((piece[0], piece[1], len(ids), is_coalesced))
            if choice.get("finish_reason"):
                self.finish_reason = printable(str(choice["finish_reason"]), MAX_ID_CHARS)
        usage = document.get("usage")
        if usage:
            self._take_usage(usage)

    def _note_text(self, choice: dict[str, Any]) -> bool:
        """Whether a choice without ids carries text, if only a model's reasoning."""
        text = _text_of(choice, "content") or _text_of(choice, "reasoning_content") or _text_of(choice, "reasoning")
        if text:
            self._text_chunks.append((len(self.chunks), len(text)))
        return bool(text)

    def _count_text_chunks(self) -> None:
        """Without ids, a chunk of text is one token where there are as many of them as tokens.

        Where there are fewer, each is one token, and its share of the others by its letters. Where there are more,
        tokens are unknown.
        """
        others = (self.completion_tokens or 0) - len(self._text_chunks)
        if self.token_ids or others < 0 or not self._text_chunks:
            return
        ends = list(accumulate(length for _place, length in self._text_chunks))
        shares = [others * end // ends[-1] for end in ends]
        for (place, _length), share, before in zip(self._text_chunks, shares, [0, *shares], strict=False):
            received_ns, kernel_ns, _, is_coalesced = self.chunks[place]
            self.chunks[place] = (received_ns, kernel_ns, 1 + share - before, is_coalesced)

    def _note_id(self, response_id: object) -> None:
        """Take the first id. A strict answer has the same throughout: a server's log names requests by it."""
        if not self.is_strict and type(response_id) is int:
            self._tolerate("id-not-text")
            response_id = str(response_id)
        is_name = type(response_id) is str and 0 < len(response_id) <= MAX_ID_CHARS and response_id.isprintable()
        if is_name and not self.response_id:
            self.response_id = str(response_id)
        elif not self.is_strict:
            if not is_name:
                self._tolerate("id-absent" if response_id in (None, "") else "id-not-text")
            elif response_id != self.response_id:
                self._tolerate("id-changes")
        elif not is_name:
            raise ValueError(f"id {response_id!r:.80} is not a name: {_ID_REMEDY}")
        else:
            raise ValueError(f"id {response_id!r:.80} after {self.response_id!r:.80}: {_ID_REMEDY}")

    def _take_ids(self, ids: object) -> None:
        if type(ids) is not list:
            raise TypeError("token_ids are not a list")
        for token_id in ids:
            # ``type`` and not ``isinstance``: true and false are ints too.
            if type(token_id) is not int or token_id >> COUNT_BITS:
                self.problem = self.problem or "token_ids are not all token ids"
                return
        self.token_ids.extend(ids)
        if self.keeps_id_text:
            self.id_texts.extend(map(str, ids))

    def _take_usage(self, usage: dict[str, Any]) -> None:
        # Absent or null: the answer does not state it. Some servers leave a zero out, others never state it.
        details = usage.get("prompt_tokens_details")
        stated = details.get("cached_tokens") if details else None
        prompt: Any = usage.get("prompt_tokens")
        completion = usage.get("completion_tokens") or 0
        if not self.is_strict:
            prompt = self.prompt_tokens if prompt is None else prompt
            stated = self.cached_tokens if stated is None else stated
            if prompt is None:
                return
        cached = stated or 0
        if (
            not (type(prompt) is type(completion) is type(cached) is int)
            or (prompt | completion | cached) >> COUNT_BITS
        ):
            raise ValueError(f"usage counts {prompt!r:.40}, {completion!r:.40}, {cached!r:.40}")
        if cached > prompt:
            raise ValueError(f"usage counts {cached} cached of {prompt} prompt tokens")
        counts = (prompt, completion, stated)
        if self.prompt_tokens is not None and counts != (
            self.prompt_tokens,
            self.completion_tokens,
            self.cached_tokens,
        ):
            if self.is_strict:
                raise ValueError("two different usages")
            self._tolerate("usage-repeated")
        self.prompt_tokens, self.completion_tokens, self.cached_tokens = counts

    def keep_first(self, num_tokens: int) -> None:
        """Drop the ids behind the first ``num_tokens``: the client left there, whatever had arrived."""
        del self.token_ids[num_tokens:], self.id_texts[num_tokens:]

    @property
    def body(self) -> bytes:
        """What has arrived of an answer that is no stream, until ``close``."""
        return bytes(self._rest)

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


def _text_of(choice: dict[str, Any], name: str) -> str:
    """The text of a completion's choice, or the field ``name`` of a chat's message; "" where there is none."""
    message = choice.get("delta") or choice.get("message")
    if message is None:
        return str(choice.get("text") or "") if name == "content" else ""
    return str(message.get(name) or "")


def scan_json(text: bytes | bytearray) -> Any:
    """A JSON value; ValueError for anything else.

    Strict, and twice as fast as ``json.loads`` on the short documents of a stream. It refuses lone surrogates and
    deep nesting.
    """
    return _from_json(text, allow_inf_nan=False, cache_strings="keys")


def _is_json(text: bytes) -> bool:
    try:
        scan_json(text)
    except ValueError:
        return False
    return True


def error_message(document: dict[str, Any]) -> str:
    """The message of an OpenAI-style error body, shortened to a row's width."""
    error = document.get("error") or document.get("detail") or document
    message = error.get("message", error) if isinstance(error, dict) else error
    return printable(str(message))


def describe_error_body(body: bytes | bytearray) -> str:
    """The message of an error response in one line, whatever its form."""
    try:
        document = scan_json(body)
    except ValueError:
        document = None
    if isinstance(document, dict):
        return error_message(document)  # pyright: ignore[reportUnknownArgumentType]
    # Before it is cut: a part of a key may be enough.
    text = without_secrets(bytes(body))[: 4 * MAX_ERROR_CHARS].decode("utf-8", "replace")
    # Proxies answer with pages.
    text = printable(_TAGS.sub(" ", text) if text.lstrip().startswith("<") else text)
    return text or "the body is empty"
