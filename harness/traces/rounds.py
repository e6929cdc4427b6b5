"""Rounds of an agent (TraceLab's unit): one model call each, with the inputs before it and the tools after it.

Reads TraceLab's JSON lines. Claude Code and Codex logs become rounds first, so that all three become recordings the
same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from harness.plan.model import WaitKind
from harness.traces.base import (
    Progress,
    Read,
    Record,
    TraceFormat,
    instant_ns,
    list_of,
    parsed_lines,
    record_of,
    text_of,
    tokens_of,
)
from harness.traces.recording import ReadNotes, RecordedRequest, Recording, hidden_name

Span = tuple[int, int]
DEEPEST = 32  # sub-agents of sub-agents


@dataclass
class Round:
    """One model call. Instants in ns since 1970, lengths in tokens.

    submitted_ns: the latest user message or tool result before it; end_ns: the last text, reasoning or tool call.
    prefix_tokens: what the provider's cache held of the input. visible_tokens: output that the next prompt can hold.
    children: sessions of the sub-agents that its tools started. parent: the session that started this session, where
    only that is known. is_reset: the stream begins anew.
    """

    session: str
    submitted_ns: int
    end_ns: int
    input_tokens: int
    prefix_tokens: int
    output_tokens: int
    visible_tokens: int
    is_human: bool = False
    tool_spans: list[Span] = field(default_factory=list[Span])
    children: list[str] = field(default_factory=list[str])
    parent: str = ""
    is_reset: bool = False
    index: int = 0


class Conversation:
    """The rounds of one conversation in an agent's log, and the inputs since the last round began."""

    def __init__(self, session: str) -> None:
        self.session, self.parent = session, ""
        self.rounds: list[Round] = []
        self.is_compacted = False
        self._inputs: list[tuple[int, bool]] = []
        self._calls: dict[str, tuple[Round, int]] = {}

    def take_input(self, moment_ns: int, *, is_human: bool) -> None:
        """A user's message, or the result of a tool."""
        self._inputs.append((moment_ns, is_human))

    def begin(self, moment_ns: int) -> Round:
        """The round whose first output came at ``moment_ns``; it takes the inputs so far."""
        ended_ns = self.rounds[-1].end_ns if self.rounds else moment_ns
        submitted_ns = max((at for at, _ in self._inputs), default=ended_ns)
        is_human = self._inputs[0][1] if self._inputs else False
        turn = Round(self.session, submitted_ns, moment_ns, 0, 0, 0, 0, is_human, parent=self.parent)
        turn.index, turn.is_reset, self.is_compacted = len(self.rounds), self.is_compacted, False
        self._inputs.clear()
        return turn

    def call(self, name: str, turn: Round, moment_ns: int) -> None:
        """This turn called a tool."""
        self._calls[name] = (turn, moment_ns)

    def result(self, name: str, moment_ns: int) -> Round | None:
        """The round of the call whose result came at ``moment_ns``; None when the call is unknown."""
        if name not in self._calls:
            return None
        turn, started_ns = self._calls[name]
        turn.tool_spans.append((started_ns, max(moment_ns, started_ns)))
        return turn


def recordings_of(rounds: Iterable[Round], notes: ReadNotes) -> Iterator[Recording]:
    """Every root session with its sub-agents, in order of their first submission; times from the first of all."""
    by_session: dict[str, list[Round]] = {}
    for turn in rounds:
        by_session.setdefault(turn.session, []).append(turn)
    for group in by_session.values():
        group.sort(key=lambda turn: (turn.submitted_ns, turn.index))
    _adopt(by_session)
    children = {child for group in by_session.values() for turn in group for child in turn.children}
    roots = [name for name in by_session if name not in children]
    roots.sort(key=lambda name: by_session[name][0].submitted_ns)
    first_ns = by_session[roots[0]][0].submitted_ns if roots else 0
    for name in roots:
        start_ns = by_session[name][0].submitted_ns
        yield Recording(hidden_name(name), start_ns - first_ns, tuple(_Tree(by_session, notes).requests(name)))


def _adopt(by_session: dict[str, list[Round]]) -> None:
    """Link each session that names only its parent to the parent's last round that had ended before it began."""
    for name, group in by_session.items():
        above = by_session.get(group[0].parent, [])
        before = [turn for turn in above if turn.end_ns <= group[0].submitted_ns]
        if before and group[0].parent != name:
            before[-1].children.append(name)


class _Tree:
    """A root session and its sub-agents as one list, in which a request comes after all that it waits for."""

    def __init__(self, by_session: dict[str, list[Round]], notes: ReadNotes) -> None:
        self._by_session, self._notes = by_session, notes
        self._requests: list[RecordedRequest] = []

    def requests(self, root: str) -> list[RecordedRequest]:
        self._add(root, (), 0, {root})
        return self._requests

    def _add(self, session: str, started_by: tuple[int, ...], started_ns: int, above: set[str]) -> tuple[int, int]:
        """Add a session's requests; returns (place, end) of its last one."""
        base: int | None = None
        stream_tokens = 0
        after, ended_ns = started_by, started_ns
        kind: WaitKind = "none"
        for place, turn in enumerate(self._by_session[session]):
            keep = 0 if turn.is_reset else min(turn.prefix_tokens, stream_tokens, turn.input_tokens)
            wait_ns = 0 if place == 0 and not started_by else turn.submitted_ns - ended_ns
            if wait_ns < 0:
                # It did not wait for a round that ended later, so it starts at once.
                self._notes.labels.add("overlapping rounds start at once")
                wait_ns = 0
            if place:
                kind = "human" if turn.is_human else "tool"
            self._requests.append(
                RecordedRequest(
                    base if keep else None,
                    after,
                    wait_ns,
                    kind,
                    max(turn.input_tokens, 1),
                    keep,
                    max(turn.output_tokens, 1),
                )
            )
            base = own = len(self._requests) - 1
            stream_tokens = turn.input_tokens + turn.visible_tokens
            after, ended_ns = (own,), turn.end_ns
            for child in turn.children:
                if child in above or child not in self._by_session or len(above) > DEEPEST:
                    self._notes.drop("sub-agents without a recording, or in a circle", hidden_name(session))
                    continue
                last, child_end_ns = self._add(child, (own,), turn.end_ns, above | {child})
                if any(end >= child_end_ns for _, end in turn.tool_spans):
                    # The parent waited for this child: its wait counts from the end of the last child.
                    after, ended_ns = (*after, last), max(ended_ns, child_end_ns)
        return after[0], ended_ns


def _round_of(record: Record, _: str) -> Round | None:
    events = [record_of(event) for event in list_of(record.get("timing_events"))]
    at = [(text_of(event, "event_type"), instant_ns(event.get("timestamp"))) for event in events]
    inputs = [moment for kind, moment in at if kind in ("user_message", "tool_result") and moment is not None]
    outputs = [moment for kind, moment in at if kind in ("text", "reasoning", "tool_call") and moment is not None]
    total, prefix = tokens_of(record.get("input_tokens_total")), tokens_of(record.get("prefix_tokens"))
    output = tokens_of(record.get("output_tokens"))
    session = text_of(record, "session_id")
    if not inputs or not outputs or total is None or output is None or not session:
        return None
    tools = [record_of(tool) for tool in list_of(record.get("tools"))]
    spans = [(instant_ns(tool.get("emitted_at")), instant_ns(tool.get("result_at"))) for tool in tools]
    hidden = tokens_of(record.get("reasoning_output_tokens")) or 0
    is_codex = text_of(record, "provider") == "codex"
    return Round(
        session=session,
        submitted_ns=max(inputs),
        end_ns=max(outputs),
        input_tokens=total,
        prefix_tokens=prefix or 0,
        output_tokens=output,
        visible_tokens=max(output - hidden, 0) if is_codex else output,
        is_human=text_of(record, "first_input_event_type") == "user_message",
        tool_spans=[(start, end) for start, end in spans if start is not None and end is not None and end >= start],
        index=tokens_of(record.get("round_index")) or 0,
    )


def tracelab_rounds(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Round]:
    """The rounds of TraceLab's own JSON lines."""
    for _, turn in parsed_lines(files, notes, progress, _round_of, "a round without its tokens or times"):
        yield turn


def through_rounds(rounds: Callable[[Iterable[Path], ReadNotes, Progress | None], Iterable[Round]]) -> Read:
    """A reader of recordings from a reader of rounds."""
    return lambda files, notes, progress: recordings_of(rounds(files, notes, progress), notes)


FORMAT = TraceFormat(
    "rounds of TraceLab's releases", through_rounds(tracelab_rounds), (frozenset({"round_index", "timing_events"}),)
)
