"""OpenTelemetry GenAI spans: chats become requests, and a chat waits for the chats that ended before it began.

Lengths are usage counts where the span has them; else they are estimated from the number of characters, and the plan
states that. No text of a message leaves a span.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic_core import from_json

from harness.plan.model import WaitKind
from harness.traces.base import (
    Progress,
    Record,
    TraceFormat,
    instant_ns,
    list_of,
    record_of,
    text_of,
    tokens_of,
    whole_json,
)
from harness.traces.recording import ReadNotes, RecordedRequest, Recording, hidden_name

CHARACTERS_PER_TOKEN = 4
MOST_LOOKED_AT = 64
ESTIMATED = "lengths estimated from characters, 4 to a token"
CHATS = ("chat", "text_completion", "generate_content")
Message = tuple[bytes, int]  # digest and tokens of one message


@dataclass
class _Chat:
    """One chat span. messages: digests and lengths of its prompt, [] where the span has none."""

    trace: str
    agent: str
    start_ns: int
    end_ns: int
    prompt: int
    generate: int
    cached: int | None
    messages: list[Message]


def _recordings(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
    """One recording per conversation (else per trace) of each file."""
    for path in files:
        if progress is not None:
            progress(path.stat().st_size)
        by_trace: dict[str, list[_Chat]] = {}
        for place, span in enumerate(list_of(record_of(whole_json(path)).get("spans"))):
            notes.num_lines += 1
            at = f"span {place}"
            record = record_of(span)
            operation = text_of(record, "attributes", "gen_ai.operation.name")
            if operation not in CHATS:
                continue
            chat = _chat(record, notes)
            if chat is None:
                notes.line_broken("a chat span without its times", at)
            else:
                by_trace.setdefault(chat.trace, []).append(chat)
        first_ns = min((chat.start_ns for chats in by_trace.values() for chat in chats), default=0)
        for trace, chats in by_trace.items():
            chats.sort(key=lambda chat: (chat.start_ns, chat.end_ns))
            yield Recording(hidden_name(f"{path.name}/{trace}"), chats[0].start_ns - first_ns, tuple(_requests(chats)))


def _chat(span: Record, notes: ReadNotes) -> _Chat | None:
    attributes = record_of(span.get("attributes"))
    start_ns, end_ns = instant_ns(span.get("start_time")), instant_ns(span.get("end_time"))
    if start_ns is None or end_ns is None or end_ns < start_ns:
        return None
    messages = _messages(attributes.get("gen_ai.input.messages"))
    prompt = _usage(attributes, "input_tokens", "prompt_tokens")
    generate = _usage(attributes, "output_tokens", "completion_tokens")
    if prompt is None or generate is None:
        notes.labels.add(ESTIMATED)
        answer = attributes.get("gen_ai.output.text") or attributes.get("gen_ai.output.messages") or ""
        generate = generate or _tokens(len(str(answer)))
        prompt = prompt or max(sum(tokens for _, tokens in messages), 1)
    conversation = text_of(attributes, "gen_ai.conversation.id")
    return _Chat(
        trace=conversation or text_of(span, "trace_id"),
        agent=text_of(attributes, "gen_ai.agent.name") or text_of(span, "resource_attributes", "service.name"),
        start_ns=start_ns,
        end_ns=end_ns,
        prompt=max(prompt, 1),
        generate=max(generate, 1),
        cached=_usage(attributes, "cache_read.input_tokens", "cached_tokens"),
        messages=messages,
    )


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


FORMAT = TraceFormat("OpenTelemetry GenAI spans", _recordings, (frozenset({"spans"}),), "recorded", suffixes=(".json",))
