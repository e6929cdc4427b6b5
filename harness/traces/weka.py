"""Weka (cc-traces): one agent session a line, with chained block hashes, think times and nested sub-agents.

Built to the format's description, without a public sample. Times inside a sub-agent may be relative to it or to its
session: times before the sub-agent's start are taken as relative to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.plan.model import WaitKind
from harness.traces.base import (
    Progress,
    Record,
    TraceFormat,
    list_of,
    parsed_lines,
    record_of,
    seconds_ns,
    text_of,
    tokens_of,
)
from harness.traces.mooncake import BlockNames, kept_tokens
from harness.traces.recording import ReadNotes, RecordedRequest, Recording, hidden_name

MOST_INPUT_TOKENS = 1_000_000  # the publisher's note: more is an overcount
DEEPEST = 32
AFTER: dict[str, WaitKind] = {"tool_use": "tool", "end_turn": "human"}


class _Session:
    """One line: its requests and those of its sub-agents, in one list."""

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
                if agent in seen or depth >= DEEPEST:
                    self._notes.drop("a sub-agent that was there before, or too deep", self._at)
                    continue
                seen.add(agent)
                place, end_ns = self._child(entry, (last,) if last >= 0 else started_by, ended_ns, depth)
                if place >= 0 and text_of(entry, "status") != "async_launched":
                    after, ended_ns = (*after, place), max(ended_ns, end_ns)
                continue
            one = self._request(entry, last, after, ended_ns, kind)
            if one is None:
                self._notes.drop("a request without its lengths or time, or above a million tokens", self._at)
                continue
            request, end_ns = one
            self._requests.append(request)
            last = len(self._requests) - 1
            after, ended_ns = (last,), end_ns
            kind = AFTER.get(text_of(entry, "stop"), "none")
        return last, ended_ns

    def _child(self, entry: Record, after: tuple[int, ...], parent_end_ns: int, depth: int) -> tuple[int, int]:
        began_ns = seconds_ns(entry.get("t")) or parent_end_ns
        requests = [record_of(one) for one in list_of(entry.get("requests"))]
        first_ns = min((at for one in requests if (at := seconds_ns(one.get("t"))) is not None), default=0)
        if first_ns < began_ns:
            requests = [
                {**one, "t": one["t"] + began_ns / 1e9} if isinstance(one.get("t"), (int, float)) else one
                for one in requests
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


def _recordings(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Recording]:
    """A recording for each line. It shares no block name: keep_tokens says what repeats."""

    def session(record: Record, at: str) -> tuple[str, list[RecordedRequest]] | None:
        block_tokens = tokens_of(record.get("block_size", 64))
        if not list_of(record.get("requests")) or not block_tokens:
            return None
        return text_of(record, "id") or at, _Session(block_tokens, at, notes).requests(record)

    for _, (name, requests) in parsed_lines(
        files, notes, progress, session, "a session without its requests or block size"
    ):
        if requests:
            yield Recording(hidden_name(name), 0, tuple(one._replace(blocks=()) for one in requests))


FORMAT = TraceFormat(
    "agent sessions with chained block hashes (cc-traces)", _recordings, (frozenset({"requests", "hash_id_scope"}),)
)
