"""Spans as chats: which spans are calls of a model, and how many tokens each has.

Counts come by any name of ``NAMES``; without, they are estimated from characters, and labelled. No text leaves a span.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from harness.model.traces.account import PLACEHOLDER, SHARE_OF_UNKNOWN, TYPE_NAME, ReadNotes
from harness.model.traces.base import (
    Record,
    by_type,
    instant_ns,
    is_placeholder,
    list_of,
    parsed_json,
    read_tables,
    record_of,
    text_of,
    tokens_in,
    tokens_of,
)

HELD_TO = "1.37.0"
TABLES = read_tables(Path(__file__).with_name("otel.toml"))
PASSED, NAMES = by_type(TABLES["passed"]), TABLES["counts"]
CHATS, OPERATIONS, MODELS, PROVIDERS, CONVERSATIONS = TABLES["names"].values()
COUNTS = frozenset(by_type(NAMES))
LIKE_CACHED = re.compile(r"(usage|token).*cache|cache.*token", re.IGNORECASE)
ESTIMATED = "chats whose lengths are estimated from characters, 4 to a token"
Message = tuple[bytes, int]  # digest and tokens of one message


@dataclass
class Chat:
    """One chat span. messages: digests and lengths of its prompt, [] where the span has none."""

    trace: str
    span: str
    parent: str
    at: str
    agent: str
    start_ns: int
    end_ns: int
    prompt: int
    generate: int
    cached: int | None
    created: int
    messages: list[Message]
    provider: str
    is_named: bool

    @property
    def value(self) -> tuple[object, ...]:
        """What two copies of a span have in common."""
        return (self.trace, self.span, self.start_ns, self.end_ns, self.prompt, self.generate)

    @property
    def is_apart(self) -> bool:
        """Whether its prompt cannot hold its cached tokens, so that its file counts them apart."""
        return (self.cached or 0) + self.created > self.prompt

    def wraps(self, other: Chat) -> bool:
        """Whether the other chat is the same call, in this one's time."""
        is_around = self.start_ns <= other.start_ns and other.end_ns <= self.end_ns
        return is_around and (self.prompt, self.generate) == (other.prompt, other.generate)


@dataclass
class Doubt:
    """Spans of a trace that may be calls and could not be read. unread: (start, end) of each in ns."""

    num_spans: int = 0
    unread: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def why(self, chats: list[Chat]) -> str:
        """Why no wait between these chats is known; "" where all are."""
        if all(chat.end_ns <= chats[0].start_ns for chat in chats):
            return "all spans of their trace have the same time"
        last_ns, first_ns = max(chat.start_ns for chat in chats), min(chat.end_ns for chat in chats)
        is_between = any(start < last_ns and end > first_ns for start, end in self.unread)
        is_much = len(self.unread) > SHARE_OF_UNKNOWN * self.num_spans
        return "their trace has calls that could not be read" if is_between or is_much else ""


def read_span(span: Record, at: str, doubt: Doubt, notes: ReadNotes) -> list[Chat]:
    """The chat of a span; [] where it is none, fails, or cannot be read."""
    attributes = record_of(span.get("attributes"))
    notes.check_release("the semantic conventions", text_of(span, "schema").rpartition("/")[2], HELD_TO)
    operation = _named(attributes, OPERATIONS).lower()
    is_call = operation in CHATS or (not operation and (_has_counts(attributes) or any(map(attributes.get, MODELS))))
    start_ns, end_ns = _instant(span, "start"), _instant(span, "end")
    has_times = start_ns is not None and end_ns is not None and 0 <= start_ns <= end_ns
    unread = (start_ns or 0, end_ns or 1 << 63)
    if not isinstance(span.get("attributes"), dict) and not text_of(span, "span_id"):
        notes.row_broken("no span", at)
    elif not is_call:
        if not notes.passes(operation or "no operation", PASSED):
            notes.row_unknown(f"operation {operation}", at)
            doubt.unread.append(unread)
    elif not has_times:
        notes.row_broken("a chat span without its times", at)
        doubt.unread.append(unread)
    elif _has_failed(span) and not _has_counts(attributes):
        notes.call()
        notes.drop("calls that failed: their time is part of the wait", at)
    elif isinstance(chat := _chat(span, unread, at, notes), str):
        notes.row_broken(chat, at)
        doubt.unread.append(unread)
    else:
        notes.call()
        return [chat]
    return []


def _has_counts(attributes: Record) -> bool:
    return any(name in attributes for name in COUNTS)


def _has_failed(span: Record) -> bool:
    """Whether a span says that it ended in an error: by its status in any form, or by the error's type."""
    status = span.get("status")
    code = status if isinstance(status, (str, int)) else next(iter(record_of(status).values()), "")
    codes = {str(each).upper() for each in (code, *record_of(status).values())}
    return bool(codes & {"2", "ERROR", "STATUS_CODE_ERROR", "STATUSCODE.ERROR"}) or bool(
        text_of(record_of(span.get("attributes")), "error.type")
    )


def trace_of(span: Record) -> str:
    """The conversation that a span names, else its trace."""
    return _named(record_of(span.get("attributes")), CONVERSATIONS) or text_of(span, "trace_id")


def _instant(span: Record, name: str) -> int | None:
    value = span.get(f"{name}_ns")
    return value if isinstance(value, int) else instant_ns(span.get(f"{name}_time"))


def _chat(span: Record, times_ns: tuple[int, int], at: str, notes: ReadNotes) -> Chat | str:
    """The chat of a span with times; else what is wrong with its counts."""
    attributes = record_of(span.get("attributes"))
    messages = _messages(attributes.get("gen_ai.input.messages"))
    counts = {what: _count(attributes, names) for what, names in NAMES.items()}
    if -1 in counts.values():
        return "a chat span with a count that is no number of tokens"
    prompt, generate = counts["prompt"], counts["generate"]
    answer = attributes.get("gen_ai.output.text") or attributes.get("gen_ai.output.messages") or ""
    characters = len(answer) if isinstance(answer, str) else len(repr(answer))
    if not prompt or generate is None:
        if not (prompt or messages) or (generate is None and not characters):
            return "a chat span without token counts, or messages to estimate them from"
        notes.assume(ESTIMATED)
        generate = generate or tokens_in(characters)
        prompt = prompt or sum(tokens for _, tokens in messages)
    elif is_placeholder(generate, said := _characters_of(attributes)):
        notes.assume(PLACEHOLDER)
        generate = tokens_in(said)
    for name in attributes.keys() - COUNTS:
        if LIKE_CACHED.search(name) and tokens_of(attributes[name]) is not None and TYPE_NAME.fullmatch(name):
            notes.assume(f"counts by a name that is not known, {name}: not read")
    service = text_of(span, "resource_attributes", "service.name")
    return Chat(
        trace=trace_of(span),
        span=text_of(span, "span_id"),
        parent=text_of(span, "parent_span_id"),
        at=at,
        agent=text_of(attributes, "gen_ai.agent.name") or service,
        start_ns=times_ns[0],
        end_ns=times_ns[1],
        prompt=prompt,
        generate=notes.answered(generate),
        cached=counts["cached"],
        created=counts["created"] or 0,
        messages=messages,
        provider=_named(attributes, PROVIDERS) or service,
        is_named=bool(_named(attributes, OPERATIONS)),
    )


def _named(attributes: Record, names: Iterable[str]) -> str:
    """The first text by these names, "" where there is none."""
    return next((text for name in names if (text := text_of(attributes, name))), "")


def _count(attributes: Record, names: Iterable[str]) -> int | None:
    """The first of these counts; None where there is none, -1 where its value is no number of tokens."""
    value = next((attributes[name] for name in names if attributes.get(name) is not None), None)
    count = tokens_of(value)
    return -1 if count is None and value is not None else count


def _characters_of(attributes: Record) -> int:
    """Length of an answer's texts and of the arguments of its calls, without the form around them; 0 where none are."""
    answer = attributes.get("gen_ai.output.text")
    if isinstance(answer, str):
        return len(answer)
    messages = attributes.get("gen_ai.output.messages")
    parsed = parsed_json(messages.encode("utf-8", "replace")) if isinstance(messages, str) else messages
    parts = [part for message in list_of(parsed) for part in (message, *list_of(record_of(message).get("parts")))]
    values = (record_of(part).get(key) for part in parts for key in ("content", "text", "arguments"))
    return sum(len(value if isinstance(value, str) else json.dumps(value)) for value in values if value)


def _messages(value: object) -> list[Message]:
    """What is compared between prompts: a digest of each message, and how long it is."""
    parts = list_of(parsed_json(value.encode("utf-8", "replace")) if isinstance(value, str) else value)
    return [(hashlib.sha256(repr(part).encode()).digest()[:16], tokens_in(len(repr(part)))) for part in parts]
