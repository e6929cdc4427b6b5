"""OpenTelemetry GenAI spans: chats become requests, and a chat waits for the chats that ended before it began.

Files hold flat spans in one document, or OTLP JSON. Lengths are usage counts where the span has them, by any name of
``NAMES``; else they are estimated from the number of characters, and the plan states that. No text leaves a span.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pydantic_core import from_json

from harness.extras.formats.otlp import DOCUMENTS, flat_spans, is_otlp
from harness.extras.formats.trajectories import NO_CACHE
from harness.model.plan.model import WaitKind
from harness.model.traces.account import INCLUDED, PLACEHOLDER, SHARE_OF_UNKNOWN, TYPE_NAME, ReadNotes
from harness.model.traces.base import (
    CHARACTERS_PER_TOKEN,
    Progress,
    Record,
    TraceFormat,
    instant_ns,
    is_placeholder,
    json_records,
    list_of,
    parsed_json,
    record_of,
    text_of,
    tokens_of,
)
from harness.model.traces.drawn import DrawnWaits
from harness.model.traces.recording import RecordedRequest, Recording, hidden_name

MOST_LOOKED_AT = 64
LONG_ID = re.compile("[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3,}")
ESTIMATED = "chats whose lengths are estimated from characters, 4 to a token"
CHATS = ("chat", "text_completion", "generate_content", "completion", "llm")
OPERATIONS = ("gen_ai.operation.name", "openinference.span.kind", "llm.request.type", "traceloop.span.kind")
MODELS = ("gen_ai.request.model", "gen_ai.response.model", "llm.model_name")
PROVIDERS = ("gen_ai.provider.name", "gen_ai.system", "llm.provider", "llm.system")
HELD_TO = "1.37.0"
AROUND, TOOLS = "around calls", "what a call leads to: its time is part of the wait"
PASSED = {
    **dict.fromkeys(("invoke_agent", "invoke_workflow", "agent", "chain", "workflow", "task", "create_agent"), AROUND),
    **dict.fromkeys(("execute_tool", "tool", "retriever", "retrieval", "guardrail", "prompt"), TOOLS),
    **dict.fromkeys(("embeddings", "embedding", "rerank", "reranker", "evaluator"), "a request to another model"),
    "no operation": "a span without a model, an operation or counts",
}
# The conventions of OpenTelemetry, OpenLLMetry, OpenInference, and the AI SDK.
NAMES = {
    "prompt": (
        *("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt"),
        *("llm.usage.prompt_tokens", "ai.usage.inputTokens", "ai.usage.promptTokens"),
    ),
    "generate": (
        *("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion"),
        *("llm.usage.completion_tokens", "ai.usage.outputTokens", "ai.usage.completionTokens"),
    ),
    "cached": (
        *("gen_ai.usage.cache_read.input_tokens", "gen_ai.usage.cache_read_input_tokens", "gen_ai.usage.cached_tokens"),
        *("llm.token_count.prompt_details.cache_read", "llm.usage.cache_read_input_tokens"),
        *("gen_ai.usage.cached_input_tokens", "gen_ai.usage.prompt_tokens_details.cached_tokens"),
        *("gen_ai.usage.details.cache_read_tokens", "ai.usage.cachedInputTokens"),
    ),
    "created": (
        *("gen_ai.usage.cache_creation.input_tokens", "gen_ai.usage.cache_creation_input_tokens"),
        *("llm.token_count.prompt_details.cache_write", "llm.usage.cache_creation_input_tokens"),
        "gen_ai.usage.details.cache_write_tokens",
    ),
}
COUNTS = frozenset(name for names in NAMES.values() for name in names)
LIKE_CACHED = re.compile(r"(usage|token).*cache|cache.*token", re.IGNORECASE)
AS_PART = "cached tokens taken as a part of the prompt: no call of the file contradicts it"
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

    def wraps(self, other: _Chat) -> bool:
        """Whether the other chat is the same call, in this one's time."""
        is_around = self.start_ns <= other.start_ns and other.end_ns <= self.end_ns
        return is_around and (self.prompt, self.generate) == (other.prompt, other.generate)


def _recordings(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
    """One recording per conversation (else per trace); traces of several files are one where their ids are global."""
    by_trace: dict[str, list[_Chat]] = {}
    doubts: dict[str, _Doubt] = {}
    drawn = DrawnWaits(notes)
    first_ns: dict[str, int] = {}
    seen: set[tuple[object, ...]] = set()
    for place, path in enumerate(files):
        chats = list(_innermost(_chats(path, f"{place}/", doubts, notes, progress), notes))
        _include_cached(chats, notes)
        for chat in chats:
            name = _scoped(chat.trace, f"{place}/")
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
        why = doubts[name].why(chats) if has_times else "all spans of their trace have the same time"
        requests = list(_requests(chats, notes))
        for at, one in enumerate(requests if why else ()):
            if one.after:
                notes.assume(f"waits that are unknown: {why}")
                requests[at] = one._replace(wait_ns=drawn.wait_ns(name, str(at)), is_drawn=True)
        yield Recording(hidden_name(name), chats[0].start_ns - first_ns[clock], tuple(requests))


@dataclass
class _Doubt:
    """Spans of a trace that may be calls and could not be read. unread: (start, end) of each in ns."""

    num_spans: int = 0
    unread: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])

    def why(self, chats: list[_Chat]) -> str:
        """Why no wait between these chats is known; "" where all are."""
        last_ns, first_ns = max(chat.start_ns for chat in chats), min(chat.end_ns for chat in chats)
        is_between = any(start < last_ns and end > first_ns for start, end in self.unread)
        is_much = len(self.unread) > SHARE_OF_UNKNOWN * self.num_spans
        return "their trace has calls that could not be read" if is_between or is_much else ""


def _scoped(name: str, scope: str) -> str:
    """The name of a trace over all files."""
    return name if _is_global(name) else f"{scope}{name}"


def _include_cached(chats: list[_Chat], notes: ReadNotes) -> None:
    """Add cached tokens to the prompts of a provider that counts them apart; label what is only assumed."""
    apart = {chat.provider for chat in chats if chat.is_apart}
    for chat in chats:
        if chat.provider in apart:
            chat.prompt += (chat.cached or 0) + chat.created
        notes.assume(INCLUDED if chat.provider in apart else AS_PART, chat.provider in apart or bool(chat.cached))


def _is_global(name: str) -> bool:
    """Whether an id names one thing in every file: a W3C trace id or a UUID; short names may repeat by chance."""
    return LONG_ID.search(name) is not None


def _chats(
    path: Path, scope: str, doubts: dict[str, _Doubt], notes: ReadNotes, progress: Progress | None
) -> list[_Chat]:
    """The chat spans of a file; every other span is counted."""
    chats: list[_Chat] = []
    for at, document in json_records(path, notes, progress):
        spans = list(flat_spans(document) if is_otlp(document) else map(record_of, _spans(document)))
        notes.holds(len(spans))
        for place, span in enumerate(spans):
            doubt = doubts.setdefault(_scoped(_trace(span), scope), _Doubt())
            doubt.num_spans += 1
            chat = _read(span, f"{at}, span {place}", doubt, notes)
            chats += [] if chat is None else [chat]
    return chats


def _read(span: Record, at: str, doubt: _Doubt, notes: ReadNotes) -> _Chat | None:
    """The chat of a span; None where it is none, fails, or cannot be read."""
    attributes = record_of(span.get("attributes"))
    notes.check_release("the semantic conventions", text_of(span, "schema").rpartition("/")[2], HELD_TO)
    operation = next((name.lower() for key in OPERATIONS if (name := text_of(attributes, key))), "")
    is_call = operation in CHATS or (not operation and (_has_counts(attributes) or any(map(attributes.get, MODELS))))
    start_ns, end_ns = _instant(span, "start"), _instant(span, "end")
    has_times = start_ns is not None and end_ns is not None and 0 <= start_ns <= end_ns
    unread = (start_ns or 0, end_ns or 1 << 63)
    if not isinstance(span.get("attributes"), dict) and not text_of(span, "span_id"):
        notes.row_broken("no span", at)
    elif not is_call and (operation or "no operation") in PASSED:
        notes.pass_over(f"{operation or 'no operation'}: {PASSED[operation or 'no operation']}")
    elif not is_call:
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
        return chat
    return None


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


def _trace(span: Record) -> str:
    return text_of(span, "attributes", "gen_ai.conversation.id") or text_of(span, "trace_id")


def _spans(document: Record) -> list[object]:
    """The spans of a flat document; a line may be one span by itself."""
    return list_of(document["spans"]) if "spans" in document else [document]


def _innermost(chats: list[_Chat], notes: ReadNotes) -> Iterator[_Chat]:
    """Chats without those around another one: two instrumentations of one call, or an agent without an operation."""
    by_span = {(chat.trace, chat.span): chat for chat in chats if chat.span}
    around: dict[int, str] = {}
    for chat in chats:
        above = by_span.get((chat.trace, chat.parent))
        for _ in range(MOST_LOOKED_AT):
            if above is None or above is chat:
                break
            if above.wraps(chat):
                around[id(above)] = "chats that wrap another chat: one call, instrumented twice"
            elif not above.is_named:
                around[id(above)] = "spans with counts around other calls, and without an operation"
            above = by_span.get((above.trace, above.parent))
    for chat in chats:
        if id(chat) in around:
            notes.drop(around[id(chat)], chat.at)
        else:
            yield chat


def _instant(span: Record, name: str) -> int | None:
    value = span.get(f"{name}_ns")
    return value if isinstance(value, int) else instant_ns(span.get(f"{name}_time"))


def _chat(span: Record, times_ns: tuple[int, int], at: str, notes: ReadNotes) -> _Chat | str:
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
        generate = generate or _tokens(characters)
        prompt = prompt or sum(tokens for _, tokens in messages)
    elif is_placeholder(generate, said := _characters_of(attributes)):
        notes.assume(PLACEHOLDER)
        generate = _tokens(said)
    notes.assume("answers of no token taken as 1 token", generate == 0)
    for name in attributes.keys() - COUNTS:
        if LIKE_CACHED.search(name) and tokens_of(attributes[name]) is not None and TYPE_NAME.fullmatch(name):
            notes.assume(f"counts by a name that is not known, {name}: not read")
    service = text_of(span, "resource_attributes", "service.name")
    return _Chat(
        trace=_trace(span),
        span=text_of(span, "span_id"),
        parent=text_of(span, "parent_span_id"),
        at=at,
        agent=text_of(attributes, "gen_ai.agent.name") or service,
        start_ns=times_ns[0],
        end_ns=times_ns[1],
        prompt=prompt,
        generate=max(generate, 1),
        cached=counts["cached"],
        created=counts["created"] or 0,
        messages=messages,
        provider=next((name for key in PROVIDERS if (name := text_of(attributes, key))), service),
        is_named=any(text_of(attributes, key) for key in OPERATIONS),
    )


def _count(attributes: Record, names: Iterable[str]) -> int | None:
    """The first of these counts; None where there is none, -1 where its value is no number of tokens."""
    given = (attributes[name] for name in names if attributes.get(name) is not None)
    counts = [tokens_of(value) for value in given]
    return None if not counts else -1 if counts[0] is None else counts[0]


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
    if not isinstance(value, str):
        return []
    try:
        parts = list_of(from_json(value.encode("utf-8", "replace")))
    except ValueError:
        return []
    return [(hashlib.sha256(repr(part).encode()).digest()[:16], _tokens(len(repr(part)))) for part in parts]


def _tokens(characters: int) -> int:
    return -(-characters // CHARACTERS_PER_TOKEN)


def _requests(chats: list[_Chat], notes: ReadNotes) -> Iterator[RecordedRequest]:
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
        notes.assume(NO_CACHE, bool(ended) and chat.cached is None and not chat.messages)
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
        "a span says that it is a call: one with counts or a model and no operation is one, unless it is around "
        "others; one of an unknown operation is counted, and no wait of its trace is known",
        "an input count holds the cached tokens: where a call shows more of them, they are added for its provider's "
        "calls of the file; labelled either way",
        "a call succeeds: one with an error and no counts is dropped and counted, and its time is part of the wait",
        "usage is there: lengths without it are estimated from characters, and labelled, as is a count of a few tokens "
        "beside a long answer",
        "files have one clock: those with short ids count from their own first instant, labelled",
    ),
    tuple(map(frozenset, (["spans"], *([key] for key in DOCUMENTS), ["trace_id", "span_id", "attributes"]))),
    "recorded",
    suffixes=(".json", ".jsonl", ".json.gz", ".jsonl.gz"),
    passed=PASSED,
    held_to=f"semantic conventions {HELD_TO}",
)
