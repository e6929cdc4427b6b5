"""Production traces that name a prompt's blocks by hash: Mooncake, Bailian, and agentic Mooncake with its ``wait_for``.

Equal names mean equal tokens up to and including that block. Without sessions a request is replayed at its recorded
arrival; with ``wait_for`` it waits for those requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from harness.plan.model import WAIT_KINDS, WaitKind
from harness.traces.form import ReadNotes, RecordedRequest, Recording, hidden_name
from harness.traces.lines import Progress, Record, json_lines, list_of, seconds_ns, text_of, tokens_of

NS_PER_MS = 1_000_000


class BlockFormat(NamedTuple):
    """How a publisher writes it. unit_ns: of ``timestamp``."""

    block_tokens: int
    unit_ns: int


FORMATS = {
    "mooncake": BlockFormat(512, NS_PER_MS),
    "agentic-mooncake": BlockFormat(512, NS_PER_MS),
    "bailian": BlockFormat(16, 1_000_000_000),
}


class BlockNames:
    """The file's own block names as numbers from 0, in order of appearance."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def numbers(self, names: Iterable[object]) -> tuple[int, ...] | None:
        """None where a name is neither a number nor a text."""
        found: list[int] = []
        for name in names:
            if not isinstance(name, (int, str)):
                return None
            found.append(self._numbers.setdefault(name, len(self._numbers)))
        return tuple(found)


def kept_tokens(blocks: tuple[int, ...], before: tuple[int, ...], block_tokens: int, streamed: int, prompt: int) -> int:
    """How much of the stream before a prompt begins with, by the blocks of both.

    streamed: tokens of the previous prompt and its answer. Where all whole blocks of the previous prompt come again, so
    does its answer; else only the blocks that both begin with (a compaction or an edit).
    """
    common = 0
    for mine, theirs in zip(blocks, before, strict=False):
        if mine != theirs:
            break
        common += 1
    if common == len(before) and prompt >= streamed:
        return streamed
    return min(common * block_tokens, streamed, prompt)


def arrivals_of(
    files: Iterable[Path], kind: str, notes: ReadNotes, progress: Progress | None = None
) -> Iterator[Recording]:
    """Mooncake and Bailian: every request by itself, at its recorded arrival."""
    form, names = FORMATS[kind], BlockNames()
    first_ns: int | None = None
    for path in files:
        for at, record in json_lines(path, notes, progress):
            at_ns = seconds_ns(record.get("timestamp"), form.unit_ns)
            lengths = _lengths(record)
            numbers = names.numbers(list_of(record.get("hash_ids")))
            if at_ns is None or at_ns < 0 or lengths is None or numbers is None:
                notes.line_broken("a request without its time, lengths or block names", at)
                continue
            first_ns = at_ns if first_ns is None else first_ns
            prompt, generate = lengths
            blocks = numbers[: prompt // form.block_tokens]
            one = RecordedRequest(None, (), 0, "none", prompt, 0, generate, blocks)
            yield Recording(hidden_name(at), max(at_ns - first_ns, 0), (one,))


def _lengths(record: Record) -> tuple[int, int] | None:
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
    place: int = -1
    after: list[_Call] = field(default_factory=list["_Call"])


def agentic_of(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
    """agentic Mooncake: a request starts ``delay`` and ``tool_wait_ms`` after the last of ``wait_for`` has ended."""
    names = BlockNames()
    calls: dict[str, _Call] = {}
    for path in files:
        for at, record in json_lines(path, notes, progress):
            one = _call(record, names)
            if one is None:
                notes.line_broken("a request without its id, lengths or times", at)
            elif one.name in calls:
                notes.drop("an id that came before", at)
            else:
                calls[one.name] = one
    for tree in _trees(calls, notes):
        yield _recording(tree)


def _call(record: Record, names: BlockNames) -> _Call | None:
    lengths = _lengths(record)
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
        blocks=blocks[: prompt // FORMATS["agentic-mooncake"].block_tokens],
        is_reset=record.get("prefix_reset") is True,
        keep=tokens_of(record.get("keep_tokens")),
        abort_ns=max(abort_ns or 0, 0),
        abort_tokens=min(tokens_of(record.get("abort_after_tokens")) or 0, generate - 1),
        kind=next((kind for kind in WAIT_KINDS if kind == record.get("wait_kind")), None),
    )


def _trees(calls: dict[str, _Call], notes: ReadNotes) -> Iterator[list[_Call]]:
    """Requests that wait for one another, in an order in which all that one waits for comes before it."""
    for one in calls.values():
        one.after = [calls[name] for name in one.wait_for if name in calls]
        if len(one.after) < len(one.wait_for):
            notes.drop("waits for a request that is not in the file", hidden_name(one.name))
    order = _sorted(list(calls.values()))
    if len(order) < len(calls):
        circle = next(one for one in calls.values() if one.place < 0)
        notes.drop("requests that wait for themselves in a circle", hidden_name(circle.name), len(calls) - len(order))
    trees: dict[int, list[_Call]] = {}
    tree_of: dict[str, int] = {}
    for one in order:
        owners = {tree_of[before.name] for before in one.after}
        own = min(owners) if owners else len(tree_of)
        for other in owners - {own}:
            for moved in trees.pop(other):
                tree_of[moved.name] = own
                trees[own].append(moved)
        trees.setdefault(own, []).append(one)
        tree_of[one.name] = own
    for tree in trees.values():
        yield sorted(tree, key=lambda one: one.place)


def _sorted(calls: list[_Call]) -> list[_Call]:
    """Kahn's order; what lies on a circle is not in it."""
    missing = {one.name: len(one.after) for one in calls}
    followers: dict[str, list[_Call]] = {}
    for one in calls:
        for before in one.after:
            followers.setdefault(before.name, []).append(one)
    ready = [one for one in calls if not one.after]
    order: list[_Call] = []
    for one in ready:
        one.place = len(order)
        order.append(one)
        for follower in followers.get(one.name, []):
            missing[follower.name] -= 1
            if missing[follower.name] == 0:
                ready.append(follower)
    return order


def _waited_for(one: _Call, earlier: _Call) -> bool:
    open_calls, seen = list(one.after), set[str]()
    while open_calls:
        call = open_calls.pop()
        if call is earlier:
            return True
        if call.place > earlier.place and call.name not in seen:
            seen.add(call.name)
            open_calls.extend(call.after)
    return False


def _recording(tree: list[_Call]) -> Recording:
    block_tokens = FORMATS["agentic-mooncake"].block_tokens
    places = {one.name: place for place, one in enumerate(tree)}
    last: dict[str, _Call] = {}
    requests: list[RecordedRequest] = []
    start_ns = min(one.at_ns for one in tree if not one.after)
    for one in tree:
        before = last.get(one.session)
        keep, base = 0, None
        # Only what it waited for, however far, is sure to have ended.
        if before is not None and not one.is_reset and _waited_for(one, before):
            streamed = requests[places[before.name]].stream_tokens
            keep, base = kept_tokens(one.blocks, before.blocks, block_tokens, streamed, one.prompt), places[before.name]
            keep = keep if one.keep is None else min(one.keep, streamed, one.prompt)
        after = tuple(sorted(places[other.name] for other in one.after))
        wait_ns = one.wait_ns if after else max(one.at_ns - start_ns, 0) + one.wait_ns
        kind = one.kind or ("tool" if after and wait_ns else "none")
        left = one.abort_ns, 0 if one.abort_ns else one.abort_tokens
        lengths = one.prompt, keep, one.generate, one.blocks
        requests.append(RecordedRequest(base, after, wait_ns, kind, *lengths, *left))
        last[one.session] = one
    return Recording(hidden_name(tree[0].name), start_ns, tuple(requests))
