"""Trajectories of agents: model calls in order, with the times and counts that a file happens to have.

A call without a time gets the tool time that the file has, else an unknown wait. What had to be assumed is labelled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from harness.model.traces.account import ReadNotes, Unread
from harness.model.traces.base import Record, record_of, tokens_of
from harness.model.traces.calls import UNTIMED, Call, Log

# Tokens that a server read from its cache, and wrote to it, by the names of OpenAI, Anthropic and OpenHands.
CACHE = (
    ("cached_tokens", "cache_read_input_tokens", "cache_read_tokens"),
    ("cache_creation_tokens", "cache_creation_input_tokens", "cache_write_tokens"),
)
GAPS = "waits that are gaps between answers: they hold the time of the next answer too"
UNSTATED = "that the file states and its calls do not have"


class TrajectoryCalls:
    """The calls of one trajectory, and what came since the last of them. num_rows: of the trajectory."""

    def __init__(self, num_rows: int, notes: ReadNotes) -> None:
        self._notes = notes
        self.unread = Unread(notes)
        self.unread.num_rows = num_rows
        self.calls: Log = []
        self.asked_ns: int | None = None
        self._is_human = False
        self.lost = ""
        """Why the wait of the next call is not known; "" where it is."""

    def ask(self, moment_ns: int | None, *, is_human: bool) -> None:
        """A row asks the model: a person's message or a tool's result, at an instant that the file may not have."""
        self._notes.part()
        self.asked_ns, self._is_human = moment_ns, self._is_human or is_human

    def lose(self, usage: Record, at: str) -> None:
        """An answer has no sound counts."""
        self.lost = self._notes.not_counted(usage, at)

    def add(self, usage: Usage, at: str, ended_ns: int | None) -> Call:
        """An answer, at an instant that the file may not have; it takes what was asked so far."""
        self._notes.call()
        self.unread.begin(is_first=not self.calls)
        asked_ns, ended_ns = (UNTIMED if each is None else each for each in (self.asked_ns, ended_ns))
        call = Call("", asked_ns, ended_ns, usage.prompt, usage.cached, usage.generate, at=at)
        call.kind = "human" if self._is_human else "tool"
        call.created_tokens, call.total_tokens, call.unknown_wait = usage.created, usage.total, self.lost
        self.asked_ns, self._is_human, self.lost = None, False, ""
        self.calls.append(call)
        return call

    def log(self, session: str) -> Log:
        """The calls at their instants, where each has its end, else one after another."""
        has_times = all(call.end_ns != UNTIMED for call in self.calls)
        ended_ns = 0
        for place, call in enumerate(self.calls):
            if has_times:
                self._notes.assume(GAPS, bool(place and call.submitted_ns == UNTIMED))
                call.submitted_ns = min(call.submitted_ns, call.end_ns) if call.submitted_ns != UNTIMED else call.end_ns
            else:
                call.submitted_ns = call.end_ns = ended_ns + (call.wait_ns or 0)
                call.unknown_wait = call.unknown_wait or ("the recording has no times" if call.wait_ns is None else "")
            call.session, call.index, call.unknown_wait = session, place, self.unread.why or call.unknown_wait
            if place:
                self.calls[place - 1].tool_spans.append((ended_ns, max(call.submitted_ns, ended_ns)))
            ended_ns = call.end_ns
        return self.calls


class Usage(NamedTuple):
    """The counts of one call. cached: None where they do not say; created: written to the cache; total: as stated."""

    prompt: int
    generate: int
    cached: int | None = None
    created: int = 0
    total: int | None = None


def usage_of(usage: Record) -> Usage | None:
    """The counts of a usage object of OpenAI's APIs; None where it has a value that is none, or lacks one.

    A prompt of no token is no call; ``links`` counts it.
    """
    of_prompt = "prompt" if usage.get("prompt_tokens") is not None else "input"
    of_answer = "completion" if of_prompt == "prompt" else "output"
    details = record_of(usage.get(f"{of_prompt}_tokens_details"))
    prompt, generate = tokens_of(usage.get(f"{of_prompt}_tokens")), tokens_of(usage.get(f"{of_answer}_tokens"))
    cached, created = (_most(names, usage, details) for names in CACHE)
    if prompt is None or generate is None or -1 in (cached, created):
        return None
    return Usage(prompt, generate, cached, created or 0, tokens_of(usage.get("total_tokens")) or None)


def _most(names: Iterable[str], *tables: Record) -> int | None:
    """The largest count by any of these names; None where there is none, -1 where one is no number of tokens."""
    given = [tokens_of(table[name]) for table in tables for name in names if table.get(name) is not None]
    counts = [count for count in given if count is not None]
    return max(counts, default=None) if len(counts) == len(given) else -1
