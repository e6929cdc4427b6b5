"""Traces with named blocks: Mooncake's and Bailian's production requests, requests that wait for others, and Weka.

Equal names of blocks mean equal tokens up to and including that block. In the agentic form a request starts ``delay``
and ``tool_wait_ms`` after the last request of ``wait_for`` has ended. Weka (cc-traces) has one agent session a line,
with chained block hashes, think times and nested sub-agents; it is built to the format's description, without a public
sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from harness.clock import NS_PER_MS, NS_PER_S
from harness.plan.model import WAIT_KINDS, WaitKind, has_ended
from harness.traces.base import (
    Progress,
    Read,
    Record,
    TraceFormat,
    list_of,
    parsed_lines,
    record_of,
    seconds_ns,
    text_of,
    tokens_of,
)
from harness.traces.recording import ReadNotes, RecordedRequest, Recording, hidden_name

MOONCAKE_BLOCK_TOKENS = 512
BAILIAN_BLOCK_TOKENS = 16
Arrival = tuple[int, RecordedRequest]


class BlockNames:
    """The file's own block names as numbers from 0, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def numbers(self, names: Iterable[object]) -> tuple[int, ...] | None:
        """None where a name is neither a number nor a text."""
        numbers: list[int] = []
        for name in names:
            if not isinstance(name, (int, str)):
                return None
            numbers.append(self._numbers.setdefault(name, len(self._numbers)))
        return tuple(numbers)


def kept_tokens(blocks: tuple[int, ...], before: tuple[int, ...], block_tokens: int, streamed: int, prompt: int) -> int:
    """Tokens of the previous prompt and answer that a prompt begins with, by the blocks of both prompts.

    streamed: tokens of the previous prompt and its answer. Where all whole blocks of the previous prompt come again, so
    does its answer; else only the common leading blocks come again (a compaction or an edit).
    """
    common = 0
    for mine, theirs in zip(blocks, before, strict=False):
        if mine != theirs:
            break
        common += 1
    if common == len(before) and prompt >= streamed:
        return streamed
    return min(common * block_tokens, streamed, prompt)


def _reader(block_tokens: int, unit_ns: int) -> Read:
    """unit_ns: of ``timestamp``."""

    def read(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
        names = BlockNames()
        first_ns: int | None = None

        def arrival(record: Record, _: str) -> Arrival | None:
            at_ns, lengths = seconds_ns(record.get("timestamp"), unit_ns), lengths_of(record)
            numbers = names.numbers(list_of(record.get("hash_ids")))
            if at_ns is None or at_ns < 0 or lengths is None or numbers is None:
                return None
            prompt, generate = lengths
            return at_ns, RecordedRequest(None, (), 0, "none", prompt, 0, generate, numbers[: prompt // block_tokens])

        broken = "a request without its time, lengths or block names"
        for at, (at_ns, request) in parsed_lines(files, notes, progress, arrival, broken):
            first_ns = at_ns if first_ns is None else first_ns
            yield Recording(hidden_name(at), max(at_ns - first_ns, 0), (request,))

    return read


def lengths_of(record: Record) -> tuple[int, int] | None:
    """(prompt, answer) in tokens; None where they make no request."""
    prompt, generate = tokens_of(record.get("input_length")), tokens_of(record.get("output_length"))
    return (prompt, max(generate, 1)) if prompt and generate is not None else None


@dataclass
class _Call:
    """One agentic request as read."""

    name: str
    session: str
    wait_for: list[str]
    wait_ns: int
    at_ns: int
    prompt: int
    generate: int
    blocks: tuple[int, ...]
    is_reset: bool
    kind: WaitKind | None
    keep: int | None
    abort_ns: int
    abort_tokens: int


def _agentic(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
    """One recording for all requests that wait for one another."""
    names = BlockNames()
    calls: dict[str, _Call] = {}
    broken = "a request without its id, lengths or times"
    for at, call in parsed_lines(files, notes, progress, lambda record, _: _call(record, names), broken):
        if call.name in calls:
            notes.drop("an id that came before", at)
        else:
            calls[call.name] = call
    for tree in _trees(calls, notes):
        yield _recording(tree)


def _call(record: Record, names: BlockNames) -> _Call | None:
    lengths = lengths_of(record)
    waits = [seconds_ns(record.get(key) or 0, NS_PER_MS) for key in ("delay", "tool_wait_ms")]
    at_ns = seconds_ns(record.get("timestamp") or 0, NS_PER_MS)
    blocks = names.numbers(list_of(record.get("hash_ids")))
    name = record.get("request_id")
    if lengths is None or blocks is None or at_ns is None or not isinstance(name, (str, int)):
        return None
    if waits[0] is None or waits[1] is None or min(waits[0], waits[1], at_ns) < 0:
        return None
    abort_ns = seconds_ns(record.get("abort_after_ms") or 0, NS_PER_MS)
    prompt, generate = lengths
    return _Call(
        name=str(name),
        session=text_of(record, "session_id") or str(name),
        wait_for=[str(before) for before in list_of(record.get("wait_for"))],
        wait_ns=waits[0] + waits[1],
        at_ns=at_ns,
        prompt=prompt,
        generate=generate,
        blocks=blocks[: prompt // MOONCAKE_BLOCK_TOKENS],
        is_reset=record.get("prefix_reset") is True,
        keep=tokens_of(record.get("keep_tokens")),
        abort_ns=max(abort_ns or 0, 0),
        abort_tokens=min(tokens_of(record.get("abort_after_tokens")) or 0, generate - 1),
        kind=next((kind for kind in WAIT_KINDS if kind == record.get("wait_kind")), None),
    )


def _trees(calls: dict[str, _Call], notes: ReadNotes) -> Iterator[list[_Call]]:
    """Requests that wait for one another; each comes after all that it waits for."""
    for call in calls.values():
        known = [name for name in call.wait_for if name in calls]
        if len(known) < len(call.wait_for):
            notes.drop("waits for a request that is not in the file", hidden_name(call.name))
        call.wait_for = known
    order = _sorted(calls)
    if len(order) < len(calls):
        in_circle = next(name for name in calls if name not in set(order))
        notes.drop("requests that wait for themselves in a circle", hidden_name(in_circle), len(calls) - len(order))
    trees: dict[int, list[str]] = {}
    tree_of: dict[str, int] = {}
    for name in order:
        joined = {tree_of[before] for before in calls[name].wait_for}
        tree = min(joined) if joined else len(tree_of)
        for other in joined - {tree}:
            for moved in trees.pop(other):
                tree_of[moved] = tree
                trees[tree].append(moved)
        trees.setdefault(tree, []).append(name)
        tree_of[name] = tree
    places = {name: place for place, name in enumerate(order)}
    for names in trees.values():
        yield [calls[name] for name in sorted(names, key=places.__getitem__)]


def _sorted(calls: dict[str, _Call]) -> list[str]:
    """Names in an order in which all that a request waits for comes before it, without those on a circle."""
    sorter: TopologicalSorter[str] = TopologicalSorter(dict.fromkeys(calls, ()))
    for name, call in calls.items():
        sorter.add(name, *call.wait_for)
    with suppress(CycleError):  # the sorter still gives what does not depend on the circle
        sorter.prepare()
    order: list[str] = []
    while ready := sorter.get_ready():
        order += ready
        sorter.done(*ready)
    return order


def _recording(tree: list[_Call]) -> Recording:
    places = {call.name: place for place, call in enumerate(tree)}
    afters = [tuple(sorted(places[name] for name in call.wait_for)) for call in tree]
    last: dict[str, _Call] = {}
    requests: list[RecordedRequest] = []
    start_ns = min(call.at_ns for call, after in zip(tree, afters, strict=True) if not after)
    for place, (call, after) in enumerate(zip(tree, afters, strict=True)):
        before = last.get(call.session)
        keep, base = 0, None
        # Only a request that it waited for, directly or not, is sure to have ended.
        if before is not None and not call.is_reset and has_ended(afters, places[before.name], place):
            base = places[before.name]
            streamed = requests[base].stream_tokens
            keep = kept_tokens(call.blocks, before.blocks, MOONCAKE_BLOCK_TOKENS, streamed, call.prompt)
            keep = keep if call.keep is None else min(call.keep, streamed, call.prompt)
        requests.append(
            RecordedRequest(
                base,
                after,
                call.wait_ns if after else max(call.at_ns - start_ns, 0) + call.wait_ns,
                call.kind or ("tool" if after and call.wait_ns else "none"),
                call.prompt,
                keep,
                call.generate,
                call.blocks,
                call.abort_ns,
                0 if call.abort_ns else call.abort_tokens,
            )
        )
        last[call.session] = call
    return Recording(hidden_name(tree[0].name), start_ns, tuple(requests))


MOONCAKE = TraceFormat(
    "production requests with 512-token blocks",
    _reader(MOONCAKE_BLOCK_TOKENS, NS_PER_MS),
    (frozenset({"timestamp", "input_length", "output_length", "hash_ids"}),),
    "recorded",
    MOONCAKE_BLOCK_TOKENS,
)
BAILIAN = TraceFormat(
    "production requests with chat ids and 16-token blocks",
    _reader(BAILIAN_BLOCK_TOKENS, NS_PER_S),
    (frozenset({"chat_id", "parent_chat_id", "input_length"}),),
    "recorded",
    BAILIAN_BLOCK_TOKENS,
)
AGENTIC = TraceFormat(
    "requests that wait for others (agentic_mooncake)",
    _agentic,
    (frozenset({"request_id", "input_length", "wait_for"}),),
    block_tokens=MOONCAKE_BLOCK_TOKENS,
)


MOST_INPUT_TOKENS = 1_000_000  # the publisher's note: more is an overcount
DEEPEST_AGENT = 32
AFTER: dict[str, WaitKind] = {"tool_use": "tool", "end_turn": "human"}


class _WekaSession:
    """One line of Weka: its requests and those of its sub-agents, in one list.

    Times inside a sub-agent that are before its start are taken as relative to it.
    """

    def __init__(self, block_tokens: int, at: str, notes: ReadNotes) -> None:
        self._block_tokens, self._at, self._notes = block_tokens, at, notes
        # Names belong to the session: the same number in another session is another block.
        self._names = BlockNames()
        self._requests: list[RecordedRequest] = []

    def requests(self, record: Record) -> list[RecordedRequest]:
        self._chain(list_of(record.get("requests")), (), 0, 0)
        return self._requests

    def _chain(self, entries: list[object], started_by: tuple[int, ...], start_ns: int, depth: int) -> tuple[int, int]:
        """Add an agent's requests; returns (place of the last, its end). (-1, start) when it has none."""
        after, ended_ns, last = started_by, start_ns, -1
        kind: WaitKind = "none"
        seen: set[str] = set()
        for entry in map(record_of, entries):
            if text_of(entry, "type") == "subagent":
                agent = text_of(entry, "agent_id")
                if agent in seen or depth >= DEEPEST_AGENT:
                    self._notes.drop("a sub-agent that was there before, or too deep", self._at)
                    continue
                seen.add(agent)
                place, end_ns = self._child(entry, (last,) if last >= 0 else started_by, ended_ns, depth)
                if place >= 0 and text_of(entry, "status") != "async_launched":
                    after, ended_ns = (*after, place), max(ended_ns, end_ns)
                continue
            read = self._request(entry, last, after, ended_ns, kind)
            if read is None:
                self._notes.drop("a request without its lengths or time, or above a million tokens", self._at)
                continue
            request, end_ns = read
            self._requests.append(request)
            last = len(self._requests) - 1
            after, ended_ns = (last,), end_ns
            kind = AFTER.get(text_of(entry, "stop"), "none")
        return last, ended_ns

    def _child(self, entry: Record, after: tuple[int, ...], parent_end_ns: int, depth: int) -> tuple[int, int]:
        began_ns = seconds_ns(entry.get("t")) or parent_end_ns
        requests = [record_of(request) for request in list_of(entry.get("requests"))]
        first_ns = min((at for request in requests if (at := seconds_ns(request.get("t"))) is not None), default=0)
        if first_ns < began_ns:
            requests = [
                {**each, "t": each["t"] + began_ns / 1e9} if isinstance(each.get("t"), (int, float)) else each
                for each in requests
            ]
        return self._chain(list(requests), after, parent_end_ns, depth + 1)

    def _request(
        self, entry: Record, last: int, after: tuple[int, ...], ended_ns: int, kind: WaitKind
    ) -> tuple[RecordedRequest, int] | None:
        prompt, generate = tokens_of(entry.get("in")), tokens_of(entry.get("out"))
        at_ns, spent_ns = seconds_ns(entry.get("t")), seconds_ns(entry.get("api_time") or 0)
        names = self._names.numbers(list_of(entry.get("hash_ids")))
        if not prompt or prompt > MOST_INPUT_TOKENS or generate is None or at_ns is None or names is None:
            return None
        think_ns = seconds_ns(entry.get("think_time"))
        wait_ns = think_ns if think_ns is not None and len(after) == 1 else at_ns - ended_ns
        # A partial last block carries a name in older sets; only whole blocks are shared.
        blocks = names[: prompt // self._block_tokens]
        keep = 0
        if last >= 0:
            before = self._requests[last]
            streamed = before.prompt_tokens + before.generate_tokens
            keep = kept_tokens(blocks, before.blocks, self._block_tokens, streamed, prompt)
        if not self._requests:
            wait_ns = 0
        request = RecordedRequest(
            last if keep else None, after, max(wait_ns, 0), kind, prompt, keep, max(generate, 1), blocks
        )
        return request, at_ns + (spent_ns or 0)


def _weka(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
    """A recording for each line. It shares no block name: keep_tokens says what repeats."""

    def session(record: Record, at: str) -> tuple[str, list[RecordedRequest]] | None:
        block_tokens = tokens_of(record.get("block_size", 64))
        if not list_of(record.get("requests")) or not block_tokens:
            return None
        return text_of(record, "id") or at, _WekaSession(block_tokens, at, notes).requests(record)

    for _, (name, requests) in parsed_lines(
        files, notes, progress, session, "a session without its requests or block size"
    ):
        if requests:
            yield Recording(hidden_name(name), 0, tuple(request._replace(blocks=()) for request in requests))


WEKA = TraceFormat(
    "agent sessions with chained block hashes (cc-traces)", _weka, (frozenset({"requests", "hash_id_scope"}),)
)
