"""Weka's agent sessions (semianalysisai/cc-traces-weka on Hugging Face): one a line or a file, with sub-agents."""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from harness.clock import NS_PER_MS, NS_PER_S
from harness.extras.formats.blocks import TOO_MANY_NAMES, BlockNames
from harness.model.plan.model import WaitKind
from harness.model.traces.account import PLACEHOLDER_TOKENS, ReadNotes
from harness.model.traces.base import json_records, read_tables, trace_format
from harness.model.traces.calls import LATE_NS, Call, Log
from harness.model.traces.links import MOST_LOOKED_AT, UNLINKED, num_common, recordings_of
from harness.model.traces.recording import Recording, hidden_name
from harness.model.traces.values import Record, list_of, record_of, records_of, seconds_ns, text_of, tokens_of

MOST_INPUT_TOKENS = 1_000_000  # the publisher's note: more is an overcount
TYPES = ("n", "s", "")
AFTER: dict[str, WaitKind] = {"tool_result": "tool", "tool_use": "tool", "text": "human", "end_turn": "human"}
LABELS = read_tables(Path(__file__).with_name("labels.toml"))
GAPS, RELATIVE, ENDED, UNSURE, PART_NAMED, FEW_NAMES, ROUNDED, INTERLEAVED, APART, NO_LENGTH = LABELS["weka"].values()


class _Session:
    """The calls of one session and of its sub-agents."""

    def __init__(self, size: int, at: str, notes: ReadNotes, shared: BlockNames | None, how: Sequence[bool]) -> None:
        self._block_tokens, self._at, self._notes = size, at, notes
        self._is_end, self._is_relative, self._is_apart = how
        # Else names belong to the session, or to an agent of it: the same number in another one is another block.
        self._shared, self._names = shared, shared or BlockNames()
        self.logs: list[Log] = []

    def read(self, entries: list[object], name: str, starter: Call | None, began_ns: int, depth: int) -> Log:
        """The calls of an agent, whose own agents become logs too. starter, began_ns: who started it, and when."""
        self._notes.num_rows += len(entries)
        log: Log = []
        unknown_wait, before, seen = "", Record(), set[str]()
        is_whole = not any((seconds_ns(record_of(entry).get("t")) or 0) % NS_PER_S for entry in entries)
        for entry in map(record_of, self._in_order(entries)):
            form, agent = text_of(entry, "type"), text_of(entry, "agent_id") or hidden_name(json.dumps(entry))
            if form == "subagent" and (agent in seen or depth >= 32 or not list_of(entry, "requests")):
                self._notes.leave("a sub-agent that was there before, too deep, or without requests", self._at, 1)
            elif form == "subagent":
                seen.add(agent)
                self._notes.part()
                self._agent(entry, f"{name}/{agent}", log[-1] if log else starter, began_ns, depth)
            elif form not in TYPES:
                self._notes.row_unknown(f"request {form}", self._at)
                unknown_wait = "an entry before them is of an unknown type"
            elif isinstance(call := self._call(entry, name, log, began_ns), str):
                self._notes.row_broken(call, self._at)
                unknown_wait = "an entry before them could not be read"
            else:
                self._notes.num_calls += 1
                inputs = list_of(entry.get("input_types")) or [before.get("stop")]
                said: list[WaitKind] = [AFTER[each] for each in AFTER if each in inputs]
                call.kind, call.is_unstated = said[0] if said else "none", True
                call.unknown_wait, unknown_wait = unknown_wait, ""
                if log:
                    late_ns, common = log[-1].end_ns - call.submitted_ns, num_common(call.blocks, log[-1].blocks)
                    if is_whole and 0 < late_ns < LATE_NS and common == len(log[-1].blocks):
                        self._notes.assume(ROUNDED)
                        call.submitted_ns, call.end_ns = call.submitted_ns + late_ns, call.end_ns + late_ns + 1
                    self._notes.assume(GAPS, call.wait_ns is None and seconds_ns(before.get("api_time")) is None)
                    self._notes.assume(INTERLEAVED, call.submitted_ns < log[-1].end_ns)
                    # A text behind a call of a tool, or in another prompt, may be a program's, to another agent.
                    ended = [each for each in log[-MOST_LOOKED_AT:] if each.end_ns <= call.submitted_ns]
                    last = max(ended, key=lambda each: (each.end_ns, each.is_unanswered), default=call)
                    is_other = num_common(call.blocks, last.blocks) < len(last.blocks) - 1
                    call.kind = "none" if call.kind == "human" and (last.is_unanswered or is_other) else call.kind
                call.is_unanswered = text_of(entry, "stop") == "tool_use"
                log.append(call)
                before = entry
        if log:
            self.logs.append(log)
        return log

    def _agent(self, entry: Record, name: str, starter: Call | None, began_ns: int, depth: int) -> None:
        first_ns = _began_ns(entry, self._is_end)
        self._notes.assume(ENDED, first_ns != _began_ns(entry, False))
        self._notes.assume(RELATIVE, self._is_relative)
        self._notes.assume(APART, self._is_apart)
        began_ns += first_ns if self._is_relative else 0
        log = self.read(list_of(entry, "requests"), name, starter, began_ns, depth + 1)
        self._notes.assume(UNLINKED, bool(log) and starter is None)
        if log and starter is not None:
            starter.children[name] = max(call.end_ns for call in log)
            self._notes.assume(UNSURE, self._is_relative and not _is_near(began_ns, [starter.end_ns]))
            self._notes.assume(NO_LENGTH, sum(each.end_ns == each.submitted_ns for each in (starter, log[-1])))
            log[0].is_background = text_of(entry, "status") == "async_launched"

    def _in_order(self, entries: list[object]) -> list[object]:
        """Entries by their time, where all have one."""
        rows = [(at, entry) for entry in entries if (at := seconds_ns(record_of(entry).get("t"))) is not None]
        if len(rows) < len(entries):
            return entries
        rows = self._notes.in_order(rows, lambda row: row[0], "requests out of order of time")
        return [entry for _, entry in sorted(rows, key=lambda row: _began_ns(record_of(row[1]), self._is_end))]

    def _call(self, entry: Record, name: str, log: Log, began_ns: int) -> Call | str:
        """The call of an entry; else what is wrong with it."""
        prompt, generate = tokens_of(entry.get("in")), tokens_of(entry.get("out"))
        at_ns, spent_ns = seconds_ns(entry.get("t")), seconds_ns(entry.get("api_time"))
        names = self._names.numbers(entry.get("hash_ids"), name * self._is_apart)
        if not prompt or prompt > MOST_INPUT_TOKENS or generate is None or at_ns is None or names is None:
            return "a request without its lengths or time, or above a million tokens"
        if len(names) > -(-prompt // self._block_tokens):
            return TOO_MANY_NAMES
        self._notes.assume(FEW_NAMES, len(names) < prompt // self._block_tokens)
        if len(names) > prompt // self._block_tokens:
            self._notes.hold(PART_NAMED, prompt, [self._block_tokens * len(names)])
        if 0 < generate <= PLACEHOLDER_TOKENS and text_of(entry, "stop") == "tool_use":
            self._notes.assume("answers that call a tool in 1 or 2 tokens: likely placeholders, kept as recorded")
        call = Call(name, began_ns + at_ns, began_ns + at_ns + (spent_ns or 0), prompt, None, generate, at=self._at)
        call.index, call.is_concurrent = len(log), True
        # A first one comes after no call of its own.
        call.wait_ns = seconds_ns(entry.get("think_time")) if log else None
        call.block_tokens, call.blocks = self._block_tokens, names[: prompt // self._block_tokens]
        call.provider = text_of(entry, "model")
        call.names = call.blocks if self._shared else ()
        return call


def _began_ns(entry: Record, is_end: bool) -> int:
    """When an entry began: at its time; or, for a sub-agent whose time is its end, so long before as it took."""
    took_ns = seconds_ns(entry.get("duration_ms"), NS_PER_MS) if is_end and "requests" in entry else 0
    return max((seconds_ns(entry.get("t")) or 0) - (took_ns or 0), 0)


def _is_near(began_ns: int, ends_ns: Sequence[int]) -> bool:
    """Whether a sub-agent begins as one of these answers, in order, ends."""
    place = bisect_left(ends_ns, began_ns - 2 * LATE_NS)
    return place < len(ends_ns) and ends_ns[place] <= began_ns + LATE_NS


def _times_of_agents(path: Path) -> tuple[bool, bool]:
    """Of a file's sub-agents: whether their time is their end, and whether times within count from their begin."""
    num_near, are_before = [0, 0], [False, False]

    def look(record: Record) -> None:
        entries = records_of(record, "requests")
        calls = [each for each in entries if "requests" not in each]
        ends_ns = sorted(_began_ns(each, False) + (seconds_ns(each.get("api_time")) or 0) for each in calls)
        for each in (each for each in entries if "requests" in each):
            times = [at_ns for one in records_of(each, "requests") if (at_ns := seconds_ns(one.get("t"))) is not None]
            for is_end in (False, True):
                began_ns = _began_ns(each, is_end)
                num_near[is_end] += _is_near(began_ns, ends_ns)
                are_before[is_end] |= min(times, default=1 << 62) < began_ns - LATE_NS * is_end
            look(each)

    for *_, record in json_records(path, ReadNotes()):
        look(record)
    is_end = num_near[True] > num_near[False]
    return is_end, are_before[is_end]


def _recordings(files: Iterable[Path], notes: ReadNotes) -> Iterator[Recording]:
    """A recording for each session."""
    seen, names, shared = set[bytes](), set[str](), BlockNames()
    for path in files:
        times = _times_of_agents(path)
        for _, at, record in json_records(path, notes):
            entries = list_of(record, "requests")
            block_tokens = notes.options.block_tokens or tokens_of(record.get("block_size", 64))
            if not entries or not block_tokens:
                notes.row_broken("a session without its requests or block size", at)
                continue
            name = text_of(record, "id") or f"session {len(seen)}"
            digest = hashlib.sha256(json.dumps([text_of(record, "id"), entries]).encode()).digest()
            if digest in seen:
                notes.leave("sessions that came before", at, 1)
                continue
            seen.add(digest)
            if name in names:
                notes.assume("sessions with the id of another session and other requests: kept")
                name = f"{name} {len(seen)}"
            names.add(name)
            notes.num_rows -= 1  # its entries are the rows
            scope = text_of(record, "hash_id_scope")
            is_global = scope == "global" and notes.block_tokens in (None, block_tokens)
            notes.block_tokens = block_tokens if is_global else notes.block_tokens
            how = (*times, scope not in ("local", "global"))
            session = _Session(block_tokens, at, notes, shared if is_global else None, how)
            session.read(entries, name, None, 0, 0)
            yield from recordings_of(session.logs, notes)


FORMAT = trace_format(__file__, "weka", _recordings)
