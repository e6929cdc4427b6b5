"""opencode's exported sessions (``opencode export``): ``info``, and ``messages`` with their parts."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from harness.clock import NS_PER_MS
from harness.extras.formats.trajectories import UNSTATED
from harness.model.traces.account import ReadNotes
from harness.model.traces.base import trace_format
from harness.model.traces.calls import ATTEMPTS, LAST_NS, UNTIMED, Call, Conversation, Log, mark_replay
from harness.model.traces.links import of_documents
from harness.model.traces.values import (
    Record,
    counts_of,
    list_of,
    record_of,
    records_of,
    seconds_ns,
    text_of,
    tokens_of,
)

HELD_TO = "1.18.33"
COUNTS = ("input", "read", "write", "output", "reasoning")
NO_END = "answers without text: they are taken to end where their first tool starts, or with their message"


def opencode_logs(document: Record, at: str, notes: ReadNotes) -> Iterator[Log]:
    """The calls of an exported session. Where no tool of another one names it, its parent is that of its own word."""
    info, messages = record_of(document, "info"), list_of(document, "messages")
    if not text_of(info, "id") or not messages:
        notes.row_broken("no session with its id and its messages", at)
        return
    notes.num_rows += len(messages) - 1
    notes.check_release("opencode", text_of(info, "version"), HELD_TO)
    session = _Session(info, notes)
    for place, message in enumerate(map(record_of, messages)):
        session.take(message, f"{at}, message {place}")
    session.hold(record_of(info, "tokens"))
    yield session.log()


class _Session(Conversation):
    """The messages of one exported session."""

    def __init__(self, info: Record, notes: ReadNotes) -> None:
        super().__init__(text_of(info, "id"), notes)
        self.parent = text_of(info, "parentID")
        self._began_ns = self._instant_ns(info, "created") or 0

    def hold(self, tokens: Record) -> None:
        """Compare the sums that the session states with those of its calls."""
        if (counts := _counts(tokens)) is not None:
            prompts = (one.input_tokens + (one.prefix_tokens or 0) + (one.created_tokens or 0) for one in self.calls)
            self.notes.hold(f"prompt tokens {UNSTATED}", sum(filter(None, counts[:3])), prompts)
            answers = (turn.output_tokens + turn.reasoning_tokens for turn in self.calls)
            self.notes.hold(f"output tokens {UNSTATED}", sum(counts[3:]), answers)

    def log(self) -> Log:
        """The calls so far; those from before the session began are its parent's."""
        mark_replay(self.calls, [turn.end_ns for turn in self.calls], self._began_ns, is_fork=False)
        return self.known()

    def take(self, message: Record, at: str) -> None:
        """Read one message."""
        self.num_rows += 1
        info, parts = record_of(message, "info"), records_of(message, "parts")
        created_ns, role = seconds_ns(record_of(info, "time").get("created"), NS_PER_MS), text_of(info, "role")
        moment_ns = self.notes.date_ns(created_ns, NS_PER_MS)
        if role not in ("user", "assistant"):
            self.row_unknown(f"role {role}", at)
        elif moment_ns is None:
            self.row_broken("a message without its time", at)
        elif role == "user":
            self.notes.part()
            is_by_program = all(True in (part.get("synthetic"), part.get("auto")) for part in parts)
            self.take_input(moment_ns, is_human=not is_by_program, is_hint=is_by_program)
        else:
            self._answer(info, parts, moment_ns, at)
        self.look(message)

    def _answer(self, info: Record, parts: list[Record], moment_ns: int, at: str) -> None:
        counts = _counts(tokens := record_of(info, "tokens"))
        ends = [place for place, part in enumerate(parts, 1) if text_of(part, "type") == "step-finish"]
        if len(ends) > 1:  # an answer of several calls, as of older releases: it states the counts of the last one
            self.notes.num_rows += len(ends) - 1
            for start, end in pairwise([0, *ends]):
                self._answer(info | {"tokens": parts[end - 1].get("tokens")}, parts[start:end], moment_ns, at)
                last_ns = self.calls[-1].end_ns if self.calls else moment_ns
                moment_ns = max((at_ns for at_ns, _ in self._inputs), default=last_ns)
            return
        if counts is not None and not any(counts) and {text_of(part, "type") for part in parts} == {"tool"}:
            self.notes.pass_over("tools that a person started: no model was asked")
            self._take_tools((self.calls or [Call(self.session, moment_ns, moment_ns)])[-1], parts)
            # It holds a person's, if not joined.
            self.is_strange = any(text_of(part, "tool") == "task" for part in parts)
            self.skip(self.lost, LAST_NS * (not self.is_strange))
            return
        if counts is None or not any(counts[:3]):
            self.lose(() if counts else map((tokens | record_of(tokens, "cache")).get, COUNTS), at)
            return
        ended_ns = self._end_ns(info, parts)
        turn = self.add(ended_ns, ("opencode", moment_ns, ended_ns, *counts), at)
        # It was asked for when its message was made: tools and people were ready by then.
        turn.submitted_ns = moment_ns
        turn.input_tokens, turn.prefix_tokens, turn.created_tokens, turn.output_tokens, turn.reasoning_tokens = counts
        turn.total_tokens, turn.provider = tokens_of(tokens.get("total")) or None, text_of(info, "providerID")
        turn.has_cache_apart = turn.has_reasoning_apart = True
        self._take_tools(turn, parts)
        self.is_compacted = info.get("summary") is True
        self.is_over = bool(text_of(info, "error", "name"))
        self.notes.assume(ATTEMPTS, sum(text_of(part, "type") == "retry" for part in parts))

    def _take_tools(self, turn: Call, parts: list[Record]) -> None:
        for part in (part for part in parts if text_of(part, "type") == "tool"):
            state = record_of(part, "state")
            start_ns, end_ns = self._instant_ns(state, "start"), self._instant_ns(state, "end")
            if start_ns is not None and end_ns is not None:
                self.call(text_of(part, "callID"), turn, start_ns, text_of(part, "tool"))
                self.result(text_of(part, "callID"), max(start_ns, end_ns), text_of(state, "error"))
            if child := text_of(state, "metadata", "sessionId"):
                turn.children[child] = UNTIMED if end_ns is None else end_ns

    def _end_ns(self, info: Record, parts: list[Record]) -> int:
        """When the last text or reasoning ended, or the first tool started: the words of its call are of the answer."""
        said = (part for part in parts if text_of(part, "type") in ("text", "reasoning"))
        ends = [end for part in said if (end := self._instant_ns(part, "end"))]
        starts = [start for part in parts if (start := self._instant_ns(record_of(part, "state"), "start"))]
        self.notes.assume(NO_END, not ends)
        ends += sorted(starts)[:1]
        return max(ends or [self._instant_ns(info, "completed") or self._instant_ns(info, "created") or 0])

    def _instant_ns(self, record: Record, name: str) -> int | None:
        return seconds_ns(record_of(record, "time").get(name), self.notes.unit_ns(NS_PER_MS))


def _counts(tokens: Record) -> tuple[int, int | None, int | None, int, int] | None:
    """Counts of the prompt, read from the cache, written to it, of the answer, and of its reasoning, each by itself."""
    table = tokens | record_of(tokens, "cache")
    fresh, read, written, answer, reasoning = (tokens_of(table.get(name)) for name in COUNTS)
    if fresh is None or answer is None or counts_of(table, COUNTS) is None:
        return None
    return fresh, read, written, answer, reasoning or 0


FORMAT = trace_format(__file__, "opencode", of_documents(opencode_logs), held_to=HELD_TO)
