"""Requests that wait for others: agentic Mooncake (NVIDIA Dynamo), and Mooncake sessions (NVIDIA AIPerf)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from itertools import count, pairwise
from pathlib import Path

from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.extras.formats import blocks
from harness.extras.formats.mooncake import REPEATED
from harness.model.plan.model import WAIT_KINDS, WaitKind, has_ended
from harness.model.traces.account import DrawnWaits, ReadNotes, tokens_in
from harness.model.traces.base import read_tables, trace_format
from harness.model.traces.links import PARTLY, doubt_of, kept_tokens
from harness.model.traces.recording import RecordedRequest, Recording, hidden_name
from harness.model.traces.values import Record, first_of, list_of, seconds_ns, text_of, tokens_of

LABELS = read_tables(Path(__file__).with_name("labels.toml"))["agentic"]
ALONE, BY_DELAY, BY_INSTANT, WHOSE, UNSAID, BESIDE, BOTH, FIRST, UNDATED, LOST, AT_INSTANT = LABELS.values()
Names = tuple[blocks.BlockNames, blocks.NameOrder]  # of all files, and those of one
Key = tuple[int, str]  # a request's file and id: two files may use the same ids


@dataclass
class _Call:
    """One request as read. name: the id that the row gives it, "" for none.

    wait_for: None where the row has no such key; after: what it waits for, once that is known. is_next: it goes on
    from the row of its session before it, which only a ``delay`` says.
    """

    key: Key
    name: str
    at: str
    session: str
    wait_for: list[str] | None
    has_delay: bool
    at_ns: int | None
    wait_ns: int
    prompt: int
    generate: int
    blocks: tuple[int, ...]
    is_reset: bool
    kind: WaitKind | None
    keep: int | None
    abort_ns: int
    abort_tokens: int
    after: list[Key] = field(default_factory=list[Key])
    is_next: bool = False
    is_drawn: bool = False

    def draw_wait(self, drawn: DrawnWaits) -> None:
        """Take a drawn wait: what the row says is missing, or not all of it."""
        self.is_drawn, self.wait_ns = True, drawn.wait_ns(self.session, self.key[1])

    @property
    def value(self) -> tuple[object, ...]:
        """Everything that the row says of its request, without the file."""
        session = "" if self.session == self.key[1] else self.session
        lengths = (self.prompt, self.generate, self.blocks)
        return self.name, session, self.at_ns, self.wait_ns, *lengths, tuple(self.wait_for or ())


def _recordings(files: Iterable[Path], notes: ReadNotes) -> Iterator[Recording]:
    """One recording for all requests that wait for one another."""
    paths = list(files)
    names, orders = blocks.BlockNames(), [blocks.NameOrder() for _ in paths]
    calls: dict[Key, _Call] = {}
    held: dict[tuple[object, ...], int] = {}
    for place, path in enumerate(paths):
        rows = list(_calls(path, place, (names, orders[place]), notes))
        # A file that repeats rows of an earlier one goes on with its ids; others have ids of their own.
        scope = next((held[call.value] for call in rows if call.value in held), place)
        for call in rows:
            call.key = (scope, call.key[1])
            if call.value in held:
                notes.drop(REPEATED, call.at)
            elif call.key in calls:
                notes.drop("an id that came before", call.at)
            else:
                calls[call.key] = call
        held |= {call.value: scope for call in rows}
    if blocks.are_anew(orders, notes, is_one_set=notes.dropped[REPEATED] > 0):
        for call in calls.values():
            call.blocks = names.numbers(call.blocks, call.key[0]) or ()
    lengths = ((call.prompt, len(call.blocks)) for call in calls.values())
    size = blocks.settled_block_tokens(lengths, blocks.MOONCAKE_BLOCK_TOKENS, notes, str(paths[0]) if paths else "")
    _settle(calls, size, notes)
    trees = list(_trees(calls, notes))
    recordings = [_recording(tree, size, notes) for tree in trees]
    first_ns = min((recording.start_ns for recording in recordings), default=0)
    if any(recording.start_ns > first_ns for recording in recordings):
        notes.arrivals = "recorded"
    yield from (replace(recording, start_ns=recording.start_ns - first_ns) for recording in recordings)


def _calls(path: Path, place: int, names: Names, notes: ReadNotes) -> Iterator[_Call]:
    """The rows of a file; one with more block names than its prompt has blocks of any size is broken."""
    unit_ns = notes.unit_ns(NS_PER_MS)
    numbers = count(1)

    def call(record: Record, at: str) -> _Call | None:
        number = next(numbers)
        if "dependencies" in record:
            hint = "Give rows with `wait_for`, `delay` and `tool_wait_ms` (version 1)"
            raise SpecError("has `dependencies` (Dynamo's version 2), which no reader exists for", where=at, hint=hint)
        if record.get("input_length") is None and (text := text_of(record, "text_input")):
            record = record | {"input_length": tokens_in(len(text))}
            notes.assume("prompt tokens estimated from the characters of text_input, 4 to a token")
        lengths, named = blocks.lengths_of(record), names[0].numbers(record.get("hash_ids"))
        times = _times(record, unit_ns)
        is_sound = isinstance(record.get("wait_for") or [], list) and record.get("prefix_reset") in (None, True, False)
        if lengths is None or named is None or times is None or not is_sound:
            notes.assume(LOST, bool(record.get("session_id")))
            return None
        names[1].add(list_of(record.get("hash_ids")), named)
        waits = list_of(record, "wait_for") and first_of(record, "delay", "delay_ms", "tool_wait_ms") is None
        notes.assume("requests that wait for others and have no delay: taken to start at once", bool(waits))
        said: WaitKind | None = next((kind for kind in WAIT_KINDS if kind == text_of(record, "wait_kind")), None)
        tool_ns = seconds_ns(record.get("tool_wait_ms") or 0, unit_ns) or 0
        kind = said or ("tool" if 0 < times[1] <= 2 * tool_ns else None)
        if tool_ns and not said:
            notes.hold(PARTLY, tool_ns // NS_PER_MS, [times[1] // NS_PER_MS])
        notes.assume(WHOSE, bool(list_of(record.get("wait_for")) and times[1] and not kind))
        name, session, wait_for = (record.get(key) for key in ("request_id", "session_id", "wait_for"))
        identity = str(name) if isinstance(name, (str, int)) else f"file {place}, row {number}"
        session = str(session) if isinstance(session, (str, int)) and session != "" else identity
        before = [str(each) for each in list_of(wait_for)] if isinstance(wait_for, list) else None
        own = (place, identity), identity if isinstance(name, (str, int)) else "", at, session, before
        left_ns = seconds_ns(record.get("abort_after_ms"), NS_PER_MS) or 0
        left_tokens = min(tokens_of(record.get("abort_after_tokens")) or 0, max(lengths[1] - 1, 0))
        has_delay = first_of(record, "delay", "delay_ms") is not None
        told = named, bool(record.get("prefix_reset")), kind, tokens_of(record.get("keep_tokens"))
        return _Call(*own, has_delay, *times, *lengths, *told, left_ns, left_tokens)

    for _, each in blocks.parsed_lines([path], notes, call, "a request without its lengths or times"):
        yield each


def _times(record: Record, unit_ns: int) -> tuple[int | None, int] | None:
    """(instant or None, wait) of a row; None where one is no time, or is negative."""
    given = first_of(record, "timestamp", "created_time")
    times = first_of(record, "delay", "delay_ms"), record.get("tool_wait_ms"), given
    values = [seconds_ns(0 if each is None else each, unit_ns) for each in times]
    known = [value for value in values if value is not None]
    return (None if given is None else known[2], known[0] + known[1]) if len(known) == len(values) else None


def _settle(calls: dict[Key, _Call], block_tokens: int, notes: ReadNotes) -> None:
    """Say what each request waits for, and how long its prompt is; rows with too many names are taken out."""
    for key in [key for key, call in calls.items() if len(call.blocks) > -(-call.prompt // block_tokens)]:
        notes.row_broken(blocks.TOO_MANY_NAMES, calls[key].at, was_call=True)
        del calls[key]
    files_of: dict[str, list[Key]] = {}
    for key in calls:
        files_of.setdefault(key[1], []).append(key)
    sessions: dict[tuple[int, str], list[_Call]] = {}
    drawn = DrawnWaits(notes)
    num_alone = sum(call.session == call.key[1] for call in calls.values())
    notes.assume(ALONE, num_alone * (num_alone < len(calls)))
    if any(call.wait_for is not None for call in calls.values()):
        notes.assume(UNSAID, sum(call.wait_for is None and call.at_ns is None for call in calls.values()))
    for call in calls.values():
        sessions.setdefault((call.key[0], call.session), []).append(call)
        for name in call.wait_for or ():
            here = (call.key[0], name)
            found = [here] if here in calls else files_of.get(name, [])
            if len(found) == 1:
                call.after += found
            else:
                notes.leave("waits for a request that is not in the file", call.at)
                call.draw_wait(drawn)
    _follow(list(sessions.values()), drawn, notes)
    first_ns = min((call.at_ns for call in calls.values() if call.at_ns is not None), default=None)
    for call in calls.values():
        call.blocks = call.blocks[: call.prompt // block_tokens]
        notes.assume(UNDATED, is_undated := first_ns is not None and call.at_ns is None and not call.after)
        call.at_ns = first_ns if is_undated else call.at_ns


def _follow(sessions: list[list[_Call]], drawn: DrawnWaits, notes: ReadNotes) -> None:
    """Put the rows of each session in order, and let them follow one another."""
    for turns in sessions:
        if not any(turn.at_ns is None or turn.wait_for for turn in turns):
            turns[:] = notes.in_order(turns, lambda turn: turn.at_ns or 0, "rows of a session out of order of time")
    # Rows name what is new where they name blocks, and none the block that the row before it begins with.
    pairs = [pair for turns in sessions for pair in pairwise(turns) if pair[1].wait_for is None]
    named = [(before.blocks[0], turn.blocks[0]) for before, turn in pairs if before.blocks and turn.blocks]
    name_new = bool(named) and all(before != turn for before, turn in named)
    are_new = notes.options.lengths == "new" or (not notes.options.lengths and name_new)
    for turns in sessions:
        _chain(turns, drawn, notes, are_new=are_new)
    _lengthen([turns for turns in sessions if any(turn.is_next for turn in turns)], notes)


def _chain(turns: list[_Call], drawn: DrawnWaits, notes: ReadNotes, *, are_new: bool) -> None:
    """Let the rows of a session that say so, that count what is new, or that have no time, follow the row before."""
    for before, turn in pairwise(turns):
        if turn.wait_for is not None:
            continue
        if turn.has_delay or turn.at_ns is None or (are_new and before.at_ns is not None):
            turn.is_next = True
            turn.after.append(before.key)
            if turn.has_delay:
                turn.kind = turn.kind or "human"
                notes.assume(BY_DELAY)
                notes.assume(BOTH, turn.at_ns is not None)
            elif turn.at_ns is not None and before.at_ns is not None:
                turn.wait_ns, turn.kind = turn.at_ns - before.at_ns, turn.kind or "none"
                notes.assume(BY_INSTANT)
            else:
                turn.draw_wait(drawn)
        else:
            notes.assume(AT_INSTANT)


def _lengthen(sessions: list[list[_Call]], notes: ReadNotes) -> None:
    """Make the lengths of rows that follow by ``delay`` those of whole prompts: AIPerf's count only what is new.

    Raises SpecError where only growing lengths could tell which they count, and the person did not say.
    """
    pairs = [(before, turn) for turns in sessions for before, turn in pairwise(turns) if turn.is_next]
    if not pairs or any(turn.keep is not None for _, turn in pairs):
        return
    given = notes.options.lengths
    is_whole, grown = given == "whole", [turn for one, turn in pairs if turn.prompt >= one.prompt + one.generate]
    if not given and any(before.blocks and turn.blocks for before, turn in pairs):
        is_whole = any(before.blocks[:1] == turn.blocks[:1] for before, turn in pairs if before.blocks)
    elif not given and grown:
        what = "nothing says whether input_length counts the whole prompt or, as AIPerf does, what is new after "
        what += f"the row before: {len(grown)} of {len(pairs)} rows could be either, and no row names its blocks"
        raise SpecError(what, where=grown[0].at, hint="Say which: --lengths new, or --lengths whole")
    what = "their whole prompt" if is_whole else "what is new after the row before, as AIPerf does"
    said = ", as --lengths says" if given else ""
    notes.assume(f"rows of a session whose input_length is taken to count {what}{said}", len(pairs))
    for before, turn in pairs if not is_whole else ():
        left = before.abort_tokens if before.abort_ns or before.abort_tokens else before.generate
        turn.keep = before.prompt + left
        turn.prompt += turn.keep
        turn.blocks = ()


def _trees(calls: Mapping[Key, _Call], notes: ReadNotes) -> Iterator[list[_Call]]:
    """Requests that wait for one another; each comes after all that it waits for."""
    order = _sorted(calls)
    if len(order) < len(calls):
        in_circle = calls[min(calls.keys() - set(order))]
        notes.drop("requests that wait for themselves in a circle", in_circle.at, len(calls) - len(order))
    tree_of: dict[Key, list[Key]] = {}
    for key in order:
        joined = list({id(tree_of[before]): tree_of[before] for before in calls[key].after}.values())
        tree = max(joined, key=len, default=[])
        for other in (each for each in joined if each is not tree):
            tree += other
            tree_of.update(dict.fromkeys(other, tree))
        tree.append(key)
        tree_of[key] = tree
    places = {key: place for place, key in enumerate(order)}
    for tree in {id(tree): tree for tree in tree_of.values()}.values():
        yield [calls[key] for key in sorted(tree, key=places.__getitem__)]


def _sorted(calls: Mapping[Key, _Call]) -> list[Key]:
    """Keys in an order in which all that a request waits for comes before it, without those on a circle."""
    sorter: TopologicalSorter[Key] = TopologicalSorter(dict.fromkeys(calls, ()))
    for key, call in calls.items():
        sorter.add(key, *call.after)
    with suppress(CycleError):  # the sorter still gives what does not depend on the circle
        sorter.prepare()
    order: list[Key] = []
    while ready := sorter.get_ready():
        order += ready
        sorter.done(*ready)
    return order


def _recording(tree: list[_Call], block_tokens: int, notes: ReadNotes) -> Recording:
    places = {call.key: place for place, call in enumerate(tree)}
    afters = [tuple(sorted({places[key] for key in call.after})) for call in tree]
    last: dict[tuple[int, str], _Call] = {}
    requests: list[RecordedRequest] = []
    start_ns = min(call.at_ns or 0 for call, after in zip(tree, afters, strict=True) if not after)
    for place, (call, after) in enumerate(zip(tree, afters, strict=True)):
        before = last.get((call.key[0], call.session))
        keep, base = 0, None
        # Only a request that it waited for, directly or not, is sure to have ended.
        if before is not None and not call.is_reset and has_ended(afters, places[before.key], place):
            base = places[before.key]
            streamed = requests[base].stream_tokens
            keep = kept_tokens(call.blocks, before.blocks, block_tokens, streamed, call.prompt)
            keep = keep if call.keep is None else min(call.keep, streamed, call.prompt)
            why = "" if call.keep is not None else doubt_of(call.blocks, before.blocks)
            notes.assume(why, bool(why) and call.prompt >= streamed)
        notes.assume(BESIDE, before is not None and base is None and not call.is_reset)
        notes.assume(FIRST, bool(call.wait_ns) and not (after or call.is_drawn))
        wait_ns = call.wait_ns if after else max((call.at_ns or 0) - start_ns, 0) + call.wait_ns * call.is_drawn
        kind: WaitKind = (call.kind or ("tool" if call.is_drawn else "none")) if after else "none"
        lengths = (call.prompt, keep, notes.answered(call.generate))
        left = (call.abort_ns, 0 if call.abort_ns else call.abort_tokens)
        requests.append(RecordedRequest(base, after, wait_ns, kind, *lengths, call.blocks, *left, call.is_drawn))
        last[call.key[0], call.session] = call
    return Recording(hidden_name(f"{tree[0].key[0]}/{tree[0].key[1]}"), start_ns, tuple(requests))


FORMAT = trace_format(__file__, "agentic-mooncake", _recordings)
