"""Weka's agent sessions (cc-traces): one a line, with chained block hashes, think times and nested sub-agents.

Built to the format's description (semianalysisai/cc-traces-weka on Hugging Face), without a sample at hand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.extras.formats.blocks import TOO_MANY_NAMES, BlockNames, kept_tokens
from harness.model.plan.model import WaitKind
from harness.model.traces.account import PLACEHOLDER_TOKENS, ReadNotes
from harness.model.traces.base import (
    Progress,
    Record,
    TraceFormat,
    json_lines,
    list_of,
    record_of,
    seconds_ns,
    text_of,
    tokens_of,
)
from harness.model.traces.drawn import DrawnWaits
from harness.model.traces.recording import RecordedRequest, Recording, hidden_name

MOST_INPUT_TOKENS = 1_000_000  # the publisher's note: more is an overcount
DEEPEST_AGENT = 32
TYPES = ("n", "s", "")
AFTER: dict[str, WaitKind] = {"tool_use": "tool", "end_turn": "human"}


class _Session:
    """One line of Weka: its requests and those of its sub-agents, in one list.

    Times inside a sub-agent that are before its start are taken as relative to it.
    """

    def __init__(self, block_tokens: int, at: str, notes: ReadNotes) -> None:
        self._block_tokens, self._at, self._notes = block_tokens, at, notes
        # Names belong to the session: the same number in another session is another block.
        self._names = BlockNames()
        self._requests: list[RecordedRequest] = []
        self._drawn = DrawnWaits(notes)
        self._has_end = True

    def requests(self, record: Record) -> list[RecordedRequest]:
        self._notes.num_rows -= 1  # its entries are the rows
        self._chain(list_of(record.get("requests")), (), 0, 0)
        return self._requests

    def _chain(self, entries: list[object], started_by: tuple[int, ...], start_ns: int, depth: int) -> tuple[int, int]:
        """Add an agent's requests; returns (place of the last, its end). (-1, start) when it has none."""
        after, ended_ns, last = started_by, start_ns, -1
        self._notes.num_rows += len(entries)
        entries = self._in_order(entries)
        kind: WaitKind = "none"
        unknown_wait = ""
        seen: set[str] = set()
        for entry in map(record_of, entries):
            if text_of(entry, "type") == "subagent":
                agent = text_of(entry, "agent_id")
                if agent in seen or depth >= DEEPEST_AGENT:
                    self._notes.leave("a sub-agent that was there before, or too deep", self._at, 1)
                    continue
                seen.add(agent)
                self._notes.part()
                place, end_ns = self._child(entry, (last,) if last >= 0 else started_by, ended_ns, depth)
                if place >= 0 and text_of(entry, "status") != "async_launched":
                    after, ended_ns = (*after, place), max(ended_ns, end_ns)
                continue
            if (form := text_of(entry, "type")) not in TYPES:
                self._notes.row_unknown(f"request {form}", self._at)
                unknown_wait = "an entry before them is of an unknown type"
                continue
            read = self._request(entry, last, after, ended_ns, kind)
            if isinstance(read, str):
                self._notes.row_broken(read, self._at)
                unknown_wait = "an entry before them could not be read"
                continue
            self._notes.call()
            request, end_ns = read
            if unknown_wait and request.after:
                wait_ns = self._drawn.unknown(unknown_wait, self._at, len(self._requests))
                request = request._replace(wait_ns=wait_ns, is_drawn=True)
            unknown_wait = ""
            self._requests.append(request)
            last = len(self._requests) - 1
            after, ended_ns = (last,), end_ns
            kind = AFTER.get(text_of(entry, "stop"), "none")
        return last, ended_ns

    def _in_order(self, entries: list[object]) -> list[object]:
        """Entries by their time, where all have one."""
        times = [seconds_ns(record_of(entry).get("t")) for entry in entries]
        known = [at for at in times if at is not None]
        if len(known) < len(times):
            return entries
        places = self._notes.in_order(range(len(entries)), known.__getitem__, "requests out of order of time")
        return [entries[place] for place in places]

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
    ) -> tuple[RecordedRequest, int] | str:
        prompt, generate = tokens_of(entry.get("in")), tokens_of(entry.get("out"))
        at_ns, spent_ns = seconds_ns(entry.get("t")), seconds_ns(entry.get("api_time") or 0)
        names = self._names.numbers(list_of(entry.get("hash_ids")))
        if not prompt or prompt > MOST_INPUT_TOKENS or generate is None or at_ns is None or names is None:
            return "a request without its lengths or time, or above a million tokens"
        if len(names) > -(-prompt // self._block_tokens):
            return TOO_MANY_NAMES
        if 0 < generate <= PLACEHOLDER_TOKENS and text_of(entry, "stop") == "tool_use":
            self._notes.assume("answers that call a tool in 1 or 2 tokens: likely placeholders, kept as recorded")
        think_ns = seconds_ns(entry.get("think_time"))
        wait_ns = think_ns if think_ns is not None and len(after) == 1 else at_ns - ended_ns
        is_gap = think_ns is None and last >= 0 and not self._has_end
        self._notes.assume("waits that are gaps between sendings: they hold the time of the answer before too", is_gap)
        self._notes.assume("overlapping requests start at once", bool(after) and wait_ns < 0)
        self._has_end = entry.get("api_time") is not None
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
            last if keep else None, after, max(wait_ns, 0), kind, prompt, keep, self._notes.answered(generate), blocks
        )
        return request, at_ns + (spent_ns or 0)


def _recordings(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
    """A recording for each line. It shares no block name: keep_tokens says what repeats."""
    seen: dict[bytes, str] = {}
    names: set[str] = set()

    def session(record: Record, at: str) -> tuple[str, list[RecordedRequest]] | None:
        block_tokens = notes.options.block_tokens or tokens_of(record.get("block_size", 64))
        if not list_of(record.get("requests")) or not block_tokens:
            return None
        name = text_of(record, "id") or f"session {len(seen)}"
        digest = hashlib.sha256(json.dumps([text_of(record, "id"), record["requests"]]).encode()).digest()
        if seen.setdefault(digest, at) != at:
            notes.leave("sessions that came before", at, 1)
            return name, []
        if name in names:
            notes.assume("sessions with the id of another session and other requests: kept")
            name = f"{name} {len(seen)}"
        names.add(name)
        return name, _Session(block_tokens, at, notes).requests(record)

    for at, record in (line for path in files for line in json_lines(path, notes, progress)):
        if (read := session(record, at)) is None:
            notes.row_broken("a session without its requests or block size", at)
            continue
        name, requests = read
        if requests:
            yield Recording(hidden_name(name), 0, tuple(request._replace(blocks=()) for request in requests))


FORMAT = TraceFormat(
    "agent sessions with chained block hashes (cc-traces)",
    _recordings,
    (
        "a session stands once: one whose id and requests came before is passed over and counted",
        "requests come in order of `t`: they are sorted, and labelled",
        "a sub-agent stands once: a second one of the same id is passed over and counted",
        "hash_ids name whole blocks of `block_size`: a request with more names than its prompt has blocks is broken "
        "and counted; --block-tokens sets the size; a name for the part at the end is passed over",
        "`out` counts the answer: 0 is taken as 1, a tool call in 1 or 2 tokens is labelled",
        "when sessions began against one another: all start together",
    ),
    (frozenset({"requests", "hash_id_scope"}), frozenset({"requests", "block_size"})),
    is_special=True,
)
