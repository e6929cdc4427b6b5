"""Trajectories of agents: model calls in order, with the times and counts that a file happens to have."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from harness.model.traces.base import read_tables
from harness.model.traces.calls import UNTIMED, Call, Conversation, Log
from harness.model.traces.values import Record, record_of, tokens_of

TABLES = read_tables(Path(__file__).with_name("labels.toml"))
CACHE, (NO_TIME, STOPPED, UNSTATED, UNDATED) = TABLES["cache"].values(), TABLES["trajectories"].values()


class Usage(NamedTuple):
    """The counts of one call. cached: None where they do not say; created: written to the cache; total: as stated."""

    prompt: int
    generate: int
    cached: int | None = None
    created: int = 0
    total: int | None = None


class TrajectoryCalls(Conversation):
    """The calls of one trajectory, whose instants the file may not have."""

    def ask(self, moment_ns: int | None, *, is_human: bool | None, is_hint: bool = False) -> None:
        """A row asks the model, as ``take_input``; one without a time comes with the row before."""
        self.notes.part()
        latest_ns = max((at_ns for at_ns, _ in self._inputs), default=UNTIMED)
        if moment_ns is None and is_human and self.calls and self._inputs:
            self.notes.assume(UNDATED)
            self._inputs = []  # a person's message beside a tool's result: the wait is not the tool's alone
        self.take_input(latest_ns if moment_ns is None else moment_ns, is_human=is_human, is_hint=is_hint)
        self.lost = "" if is_human and self.lost == STOPPED else self.lost

    def stop(self, at: str, *, ends_a_call: bool) -> None:
        """The agent stops: what a person says next tells when it goes on, or else the begin of the next call."""
        if ends_a_call:
            self.end_without_row(at)
        self.lost = self.lost or STOPPED

    def answer(self, usage: Usage, at: str, ended_ns: int | None, took_ns: int | None = None) -> Call:
        """A call; it takes what was asked so far."""
        if self.lost == STOPPED and ended_ns is not None and took_ns is not None and self.calls:
            self.take_input(max(ended_ns - took_ns, self.calls[-1].end_ns), is_human=True)
            self.lost = ""
        is_asked = bool(self._inputs or self._hints)
        call = self.add(UNTIMED if ended_ns is None else ended_ns, None, at)
        call.input_tokens, call.output_tokens, call.prefix_tokens, call.created_tokens, call.total_tokens = usage
        call.took_ns, call.has_end_alone, self.has_tools = took_ns, not is_asked, False
        return call

    def doubt(self, *, is_last_human: bool) -> str:  # noqa: ARG002  # rows say no more of tools
        return ""

    def log(self, session: str) -> Log:
        """The calls at their instants; one without, or before the call above it, comes right after that call."""
        ended_ns = next((call.end_ns for call in self.calls if call.end_ns != UNTIMED), 0)
        reason = NO_TIME if ended_ns else "the recording has no times"
        for place, call in enumerate(self.known()):
            asked_ns = UNTIMED if call.has_end_alone else call.submitted_ns
            if call.end_ns != UNTIMED and (not place or call.end_ns >= ended_ns):
                begun_ns = UNTIMED if call.took_ns is None else call.end_ns - call.took_ns
                asked_ns = begun_ns if asked_ns == UNTIMED and begun_ns >= ended_ns * bool(place) else asked_ns
                call.has_end_alone = asked_ns == UNTIMED
                call.submitted_ns = call.end_ns if asked_ns == UNTIMED else min(asked_ns, call.end_ns)
            else:
                call.submitted_ns = call.end_ns = ended_ns + (call.wait_ns or 0)
                call.unknown_end, call.has_end_alone = reason, False
                call.unknown_wait = call.unknown_wait or reason * (call.wait_ns is None)
            call.session = session
            if place:
                self.calls[place - 1].tool_spans.append((ended_ns, max(call.submitted_ns, ended_ns)))
            ended_ns = call.end_ns
        return self.calls


def usage_of(usage: Record) -> Usage | list[object]:
    """The counts of a usage object of OpenAI's APIs; its values where one is none, or null and needed."""
    of_prompt = "prompt" if usage.get("prompt_tokens") is not None else "input"
    of_answer = "completion" if usage.get("completion_tokens") is not None else "output"
    tables = usage, record_of(usage.get(f"{of_prompt}_tokens_details"))
    given = [[table[name] for table in tables for name in names if table.get(name) is not None] for names in CACHE]
    needed = [usage.get(f"{of_prompt}_tokens"), usage.get(f"{of_answer}_tokens")]
    prompt, generate = map(tokens_of, needed)
    counts = [[count for value in values if (count := tokens_of(value)) is not None] for values in given]
    if prompt is None or generate is None or [*map(len, counts)] != [*map(len, given)]:
        return [*needed, *given[0], *given[1]]
    cached, created = (max(each, default=None) for each in counts)
    return Usage(prompt, generate, cached, created or 0, tokens_of(usage.get("total_tokens")) or None)
