"""OpenTelemetry GenAI spans: chats become requests, and a chat waits for the chats that ended before it began.

Files hold flat spans in one document, or OTLP JSON. Lengths are usage counts where the span has them; else they are
estimated from the number of characters, and the plan states that. No text of a message leaves a span.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import from_json

from harness.extras.formats.otlp import flat_spans
from harness.model.plan.model import WaitKind
from harness.model.traces.base import (
    Progress,
    Record,
    TraceFormat,
    instant_ns,
    json_records,
    list_of,
    parsed_json,
    record_of,
    text_of,
    tokens_of,
)
from harness.model.traces.recording import ReadNotes, RecordedRequest, Recording, hidden_name
from harness.model.traces.rounds import CHARACTERS_PER_TOKEN, PLACEHOLDER, is_placeholder

MOST_LOOKED_AT = 64
LONG_ID = re.compile("[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3,}")
ESTIMATED = "chats whose lengths are estimated from characters, 4 to a token"
CHATS = ("chat", "text_completion", "generate_content")
Message = tuple[bytes, int]  # digest and tokens of one message


@dataclass
class _Chat:
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
    messages: list[Message]

    @property
    def value(self) -> tuple[object, ...]:
        """What two copies of a span have in common."""
        return (self.trace, self.span, self.start_ns, self.end_ns, self.prompt, self.generate)

    def wraps(self, other: _Chat) -> bool:
        """Whether the other chat is the same call, in this one's time."""
        is_around = self.start_ns <= other.start_ns and other.end_ns <= self.end_ns
        return is_around and (self.prompt, self.generate) == (other.prompt, other.generate)


def _recordings(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
    """One recording per conversation (else per trace); traces of several files are one where their ids are global."""
    by_trace: dict[str, list[_Chat]] = {}
    first_ns: dict[str, int] = {}
    seen: set[tuple[object, ...]] = set()
    for place, path in enumerate(files):
        chats = _chats(path, notes, progress)
        for chat in _innermost(chats, notes):
            name = chat.trace if _is_global(chat.trace) else f"{place}/{chat.trace}"
            if chat.span and chat.value in seen:
                notes.drop("spans that came before", chat.at)
                continue
            seen.add(chat.value)
            by_trace.setdefault(name, []).append(chat)
    for name, chats in by_trace.items():
        chats.sort(key=lambda chat: (chat.start_ns, chat.end_ns))
        clock = "" if _is_global(chats[0].trace) else name.partition("/")[0]
        first_ns[clock] = min(first_ns.get(clock, chats[0].start_ns), chats[0].start_ns)
    notes.assume("files whose instants are counted from the first of each", len(first_ns) * (len(first_ns) > 1))
    for name, chats in by_trace.items():
        clock = "" if _is_global(chats[0].trace) else name.partition("/")[0]
        has_times = any(chat.end_ns > chats[0].start_ns for chat in chats)
        if len(chats) > 1 and not has_times:
            notes.assume("traces whose spans all have the same time: no wait of theirs is known")
        yield Recording(hidden_name(name), chats[0].start_ns - first_ns[clock], tuple(_requests(chats)))


def _is_global(name: str) -> bool:
    """Whether an id names one thing in every file: a W3C trace id or a UUID; short names may repeat by chance."""
    return LONG_ID.search(name) is not None


def _chats(path: Path, notes: ReadNotes, progress: Progress | None) -> list[_Chat]:
    """The chat spans of a file."""
    chats: list[_Chat] = []
    for at, document in json_records(path, notes, progress):
        spans = flat_spans(document) if "resourceSpans" in document else map(record_of, _spans(document))
        for place, span in enumerate(spans):
            if text_of(span, "attributes", "gen_ai.operation.name") not in CHATS:
                continue
            chat = _chat(span, f"{at}, span {place}", notes)
            if chat is None:
                notes.line_broken("a chat span without its times", f"{at}, span {place}")
            else:
                chats.append(chat)
    return chats


def _spans(document: Record) -> list[object]:
    """The spans of a flat document; a line may be one span by itself."""
    return list_of(document["spans"]) if "spans" in document else [document]


def _innermost(chats: list[_Chat], notes: ReadNotes) -> Iterator[_Chat]:
    """Chats without those around a chat of the same counts: two instrumentations of one call."""
    inner: dict[tuple[str, str], list[_Chat]] = {}
    for chat in chats:
        inner.setdefault((chat.trace, chat.parent), []).append(chat)
    for chat in chats:
        below = inner.get((chat.trace, chat.span), []) if chat.span else []
        if any(chat.wraps(other) for other in below if other is not chat):
            notes.drop("chats that wrap another chat: one call, instrumented twice", chat.at)
        else:
            yield chat


def _instant(span: Record, name: str) -> int | None:
    value = span.get(f"{name}_ns")
    return value if isinstance(value, int) else instant_ns(span.get(f"{name}_time"))


def _chat(span: Record, at: str, notes: ReadNotes) -> _Chat | None:
    attributes = record_of(span.get("attributes"))
    start_ns, end_ns = _instant(span, "start"), _instant(span, "end")
    if start_ns is None or end_ns is None or not 0 <= start_ns <= end_ns:
        return None
    messages = _messages(attributes.get("gen_ai.input.messages"))
    prompt = _usage(attributes, "input_tokens", "prompt_tokens")
    generate = _usage(attributes, "output_tokens", "completion_tokens")
    answer = attributes.get("gen_ai.output.text") or attributes.get("gen_ai.output.messages") or ""
    characters = len(answer) if isinstance(answer, str) else len(repr(answer))
    if not prompt or generate is None:
        notes.assume(ESTIMATED)
        generate = generate or _tokens(characters)
        prompt = prompt or max(sum(tokens for _, tokens in messages), 1)
    elif is_placeholder(generate, said := _characters_of(attributes)):
        notes.assume(PLACEHOLDER)
        generate = _tokens(said)
    notes.assume("answers of no token taken as 1 token", generate == 0)
    conversation = text_of(attributes, "gen_ai.conversation.id")
    return _Chat(
        trace=conversation or text_of(span, "trace_id"),
        span=text_of(span, "span_id"),
        parent=text_of(span, "parent_span_id"),
        at=at,
        agent=text_of(attributes, "gen_ai.agent.name") or text_of(span, "resource_attributes", "service.name"),
        start_ns=start_ns,
        end_ns=end_ns,
        prompt=prompt,
        generate=max(generate, 1),
        cached=_usage(attributes, "cache_read.input_tokens", "cached_tokens"),
        messages=messages,
    )


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


def _usage(attributes: Record, *names: str) -> int | None:
    counts = (tokens_of(attributes.get(f"gen_ai.usage.{name}")) for name in names)
    return next((count for count in counts if count is not None), None)


def _messages(value: object) -> list[Message]:
    """What is compared between prompts: a digest of each message, and how long it is."""
    if not isinstance(value, str):
        return []
    try:
        parts = list_of(from_json(value.encode("utf-8", "replace")))
    except ValueError:
        return []
    return [(hashlib.sha256(repr(part).encode()).digest()[:16], _tokens(len(repr(part)))) for part in parts]


def _tokens(characters: int) -> int:
    return -(-characters // CHARACTERS_PER_TOKEN)


def _requests(chats: list[_Chat]) -> Iterator[RecordedRequest]:
    """A chat waits for the chats that ended before it began and that no other of those waited for.

    Of very many of either kind the last to end are looked at, so that a document's size bounds the time it takes.
    """
    by_end = sorted(range(len(chats)), key=lambda place: (chats[place].end_ns, place))
    num_ended = latest_start_ns = 0
    for place, chat in enumerate(chats):
        while by_end[num_ended] < place and chats[by_end[num_ended]].end_ns <= chat.start_ns:
            latest_start_ns = max(latest_start_ns, chats[by_end[num_ended]].start_ns)
            num_ended += 1
        ended = by_end[max(0, num_ended - MOST_LOOKED_AT) : num_ended]
        after = {earlier for earlier in ended if chats[earlier].end_ns > latest_start_ns} | set(ended[-1:])
        last_end_ns = max((chats[earlier].end_ns for earlier in after), default=chats[0].start_ns)
        # Of several that share as much the latest: it is the conversation's last turn.
        keep, base = max(((_kept(chats[earlier], chat), earlier) for earlier in ended), default=(0, -1))
        kind: WaitKind = "tool" if after else "none"
        after |= {base} if keep and len(ended) == MOST_LOOKED_AT else set()
        wait_ns = chat.start_ns - last_end_ns
        yield RecordedRequest(
            base if keep else None, tuple(sorted(after)), wait_ns, kind, chat.prompt, keep, chat.generate
        )


def _kept(before: _Chat, chat: _Chat) -> int:
    """Tokens of the earlier chat's prompt and answer that this prompt begins with."""
    streamed = before.prompt + before.generate
    if chat.agent != before.agent:
        return 0
    if chat.cached is not None:
        return min(chat.cached, streamed, chat.prompt)
    if not before.messages or not chat.messages:
        return streamed if chat.prompt >= streamed else 0
    common = 0
    for mine, theirs in zip(chat.messages, before.messages, strict=False):
        if mine[0] != theirs[0]:
            break
        common += 1
    if common == len(before.messages) and len(chat.messages) > common:
        return min(streamed, chat.prompt)
    return min(sum(tokens for _, tokens in chat.messages[:common]), streamed, chat.prompt)


FORMAT = TraceFormat(
    "OpenTelemetry GenAI spans, flat or as OTLP JSON",
    _recordings,
    (
        "spans come in order, a trace in one file: they are sorted by start, and joined over files where "
        "ids are long enough to be unique",
        "a span stands once: one with the ids, times and counts of an earlier one is dropped and counted",
        "a call has one span: a chat around a chat with the same counts is dropped and counted",
        "usage is there: lengths without it are estimated from characters, and labelled, as is a count of a few tokens "
        "beside a long answer",
        "files have one clock: those with short ids count from their own first instant, labelled",
    ),
    (frozenset({"spans"}), frozenset({"resourceSpans"}), frozenset({"trace_id", "span_id", "attributes"})),
    "recorded",
    suffixes=(".json", ".jsonl", ".json.gz", ".jsonl.gz"),
)
