"""OpenTelemetry GenAI spans: chats become requests, and a chat waits for the chats that ended before it began.

Files hold flat spans in one document, or OTLP JSON. Lengths are usage counts where the span has them, by any name of
``NAMES``; else they are estimated from the number of characters, and the plan states that. No text leaves a span.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.extras.formats.otel_spans import HELD_TO, PASSED, Chat, Doubt, read_span, trace_of
from harness.extras.formats.otlp import DOCUMENTS, flat_spans
from harness.extras.formats.trajectories import NO_CACHE
from harness.model.plan.model import WaitKind
from harness.model.traces.account import INCLUDED, ReadNotes
from harness.model.traces.base import Progress, TraceFormat, json_records, list_of, record_of
from harness.model.traces.drawn import DrawnWaits
from harness.model.traces.recording import RecordedRequest, Recording, hidden_name

MOST_LOOKED_AT = 64
LONG_ID = re.compile("[0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3,}")
FIRST_CACHED = "cached tokens of a first call: the prompts that they are of are not in its conversation"
ALONE = "traces of one call each: nothing says which calls are of one conversation"
BESIDE = "chats with the counts of one that lasted around them: they may be one call, instrumented twice"
AS_PART = "cached tokens taken as a part of the prompt: no call of the file contradicts it"


def _recordings(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
    """One recording per conversation (else per trace); traces of several files are one where their ids are global."""
    by_trace: dict[str, list[Chat]] = {}
    doubts: dict[str, Doubt] = {}
    drawn = DrawnWaits(notes)
    first_ns: dict[str, int] = {}
    seen: set[tuple[object, ...]] = set()
    for place, path in enumerate(files):
        chats = list(_innermost(_chats(path, f"{place}/", doubts, notes, progress), notes))
        _include_cached(chats, notes)
        for chat in chats:
            if chat.span and chat.value in seen:
                notes.drop("spans that came before", chat.at)
                continue
            seen.add(chat.value)
            by_trace.setdefault(_scoped(chat.trace, f"{place}/"), []).append(chat)
    clocks = {name: "" if _is_global(chats[0].trace) else name.partition("/")[0] for name, chats in by_trace.items()}
    for name, chats in by_trace.items():
        chats.sort(key=lambda chat: (chat.start_ns, chat.end_ns))
        first_ns[clocks[name]] = min(first_ns.get(clocks[name], chats[0].start_ns), chats[0].start_ns)
    notes.assume(ALONE, len(by_trace) * (len(by_trace) > 1 and all(len(chats) == 1 for chats in by_trace.values())))
    notes.assume("files whose instants are counted from the first of each", len(first_ns) * (len(first_ns) > 1))
    for name, chats in by_trace.items():
        requests = list(_requests(chats, notes))
        if why := doubts[name].why(chats):
            for at, one in enumerate(requests):
                if one.after:
                    requests[at] = one._replace(wait_ns=drawn.unknown(why, name, at), is_drawn=True)
        yield Recording(hidden_name(name), chats[0].start_ns - first_ns[clocks[name]], tuple(requests))


def _include_cached(chats: list[Chat], notes: ReadNotes) -> None:
    """Add cached tokens to the prompts of a provider that counts them apart; label what is only assumed."""
    apart = {chat.provider for chat in chats if chat.is_apart}
    for chat in chats:
        if chat.provider in apart:
            chat.prompt += (chat.cached or 0) + chat.created
        notes.assume(INCLUDED if chat.provider in apart else AS_PART, chat.provider in apart or bool(chat.cached))


def _scoped(name: str, scope: str) -> str:
    """The name of a trace over all files."""
    return name if _is_global(name) else f"{scope}{name}"


def _is_global(name: str) -> bool:
    """Whether an id names one thing in every file: a W3C trace id or a UUID; short names may repeat by chance."""
    return LONG_ID.search(name) is not None


def _chats(path: Path, scope: str, doubts: dict[str, Doubt], notes: ReadNotes, progress: Progress | None) -> list[Chat]:
    """The chat spans of a file; every other span is counted."""
    chats: list[Chat] = []
    for at, document in json_records(path, notes, progress):
        flat = list_of(document["spans"]) if "spans" in document else [document]  # a line may be one span by itself
        spans = list(flat_spans(document) if document.keys() & set(DOCUMENTS) else map(record_of, flat))
        notes.holds(len(spans))
        for place, span in enumerate(spans):
            doubt = doubts.setdefault(_scoped(trace_of(span), scope), Doubt())
            doubt.num_spans += 1
            chats += read_span(span, f"{at}, span {place}", doubt, notes)
    return chats


def _innermost(chats: list[Chat], notes: ReadNotes) -> Iterator[Chat]:
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


def _requests(chats: list[Chat], notes: ReadNotes) -> Iterator[RecordedRequest]:
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
        notes.assume(FIRST_CACHED, not ended and bool(chat.cached))
        notes.assume(BESIDE, place > 0 and chats[place - 1].wraps(chat))
        kind: WaitKind = "tool" if after else "none"
        after |= {base} if keep and len(ended) == MOST_LOOKED_AT else set()
        wait_ns = chat.start_ns - last_end_ns
        yield RecordedRequest(
            base if keep else None, tuple(sorted(after)), wait_ns, kind, chat.prompt, keep, chat.generate
        )


def _kept(before: Chat, chat: Chat) -> int:
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
