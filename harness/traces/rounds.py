"""Rounds of an agent (TraceLab's unit): one model call each, with the inputs before it and the tools after it.

Reads TraceLab's JSON lines, Claude Code's logs (``~/.claude/projects/<project>/*.jsonl`` and
``subagents/agent-*.jsonl``) and Codex's (``~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl``). All three become
recordings the same way. Only types, ids, times and usage counts are read; no content, path or command leaves a line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from harness.plan.model import WaitKind
from harness.traces.base import (
    Progress,
    Read,
    Record,
    TraceFormat,
    counts_of,
    instant_ns,
    json_lines,
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
            base = place_of_turn = len(self._requests) - 1
            stream_tokens = turn.input_tokens + turn.visible_tokens
            after, ended_ns = (place_of_turn,), turn.end_ns
            for child in turn.children:
                if child in above or child not in self._by_session or len(above) > DEEPEST:
                    self._notes.drop("sub-agents without a recording, or in a circle", hidden_name(session))
                    continue
                last, child_end_ns = self._add(child, (place_of_turn,), turn.end_ns, above | {child})
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


TRACELAB = TraceFormat(
    "rounds of TraceLab's releases", through_rounds(tracelab_rounds), (frozenset({"round_index", "timing_events"}),)
)


SYNTHETIC = "<synthetic>"
OUTPUTS = ("text", "thinking", "redacted_thinking", "tool_use")
CLAUDE_USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


class _ClaudeLog:
    """A file of Claude Code, row by row. Rows of one assistant message share its id and repeat its usage."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        self._name, self._notes = name, notes
        self._chains: dict[str, _ClaudeChain] = {}
        self._side_roots: dict[str, str] = {}

    @property
    def rounds(self) -> Iterator[Round]:
        return (turn for chain in self._chains.values() for turn in chain.rounds)

    def take(self, record: Record, at: str) -> None:
        kind = text_of(record, "type")
        is_boundary = kind == "system" and text_of(record, "subtype") == "compact_boundary"
        if kind not in ("user", "assistant") and not is_boundary:
            return
        moment_ns = instant_ns(record.get("timestamp"))
        if moment_ns is None:
            self._notes.line_broken("a row without its time", at)
            return
        session = self._session(record)
        chain = self._chains.setdefault(session, _ClaudeChain(session))
        if is_boundary:
            chain.is_compacted = True
        elif kind == "user":
            chain.user(record, moment_ns, text_of(record, "sessionId") or self._name)
        elif text_of(record, "message", "model") != SYNTHETIC and not chain.assistant(record, moment_ns):
            self._notes.line_broken("an assistant row without its id or usage", at)

    def _session(self, record: Record) -> str:
        """The conversation that a row belongs to: the session, a sub-agent of it, or a side chain by its first row."""
        session = text_of(record, "sessionId") or self._name
        if record.get("isSidechain") is not True:
            return session
        if agent := text_of(record, "agentId"):
            return agent_session(session, agent)
        uuid = text_of(record, "uuid")
        root = self._side_roots.get(text_of(record, "parentUuid"), uuid)
        self._side_roots[uuid] = root
        self._notes.labels.add("side chains without a link run as sessions of their own")
        return agent_session(session, root)


def agent_session(session: str, agent: str) -> str:
    """The name of a sub-agent's conversation."""
    return f"{session}/{agent}"


class _ClaudeChain(Conversation):
    """One conversation of Claude Code; a side chain is a conversation too."""

    def __init__(self, session: str) -> None:
        super().__init__(session)
        self._by_message: dict[str, Round] = {}

    def user(self, record: Record, moment_ns: int, session: str) -> None:
        if record.get("isMeta") is True:
            return
        content = record_of(record.get("message")).get("content")
        results = [part for part in map(record_of, list_of(content)) if text_of(part, "type") == "tool_result"]
        self.take_input(moment_ns, is_human=not results)
        for part in results:
            turn = self.result(text_of(part, "tool_use_id"), moment_ns)
            if turn is not None and (agent := text_of(record, "toolUseResult", "agentId")):
                turn.children.append(agent_session(session, agent))

    def assistant(self, record: Record, moment_ns: int) -> bool:
        message = record_of(record.get("message"))
        usage, name = counts_of(message.get("usage"), CLAUDE_USAGE), text_of(message, "id")
        if not name or usage is None:
            return False
        fresh, created, cached, output = usage
        turn = self._by_message.get(name)
        if turn is None:
            turn = self._by_message[name] = self.begin(moment_ns)
            self.rounds.append(turn)
        # Usage repeats with every block of the message; the last usage counts the whole answer.
        if output >= turn.output_tokens:
            turn.input_tokens, turn.prefix_tokens = fresh + created + cached, cached
            turn.output_tokens = turn.visible_tokens = output
        parts = [record_of(part) for part in list_of(message.get("content"))]
        if any(text_of(part, "type") in OUTPUTS for part in parts):
            turn.end_ns = max(turn.end_ns, moment_ns)
        for part in parts:
            if text_of(part, "type") == "tool_use":
                self.call(text_of(part, "id"), turn, moment_ns)
        return True


CALLS = ("function_call", "custom_tool_call", "local_shell_call")
RESULTS = ("function_call_output", "custom_tool_call_output")


CODEX_USAGE = ("input_tokens", "cached_input_tokens", "output_tokens", "reasoning_output_tokens")


class _CodexLog(Conversation):
    """A file of Codex, record by record. A round closes at a ``token_count`` that follows an output."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        super().__init__(name)
        self._notes = notes
        self._open: Round | None = None

    def take(self, record: Record, at: str) -> None:
        payload = record_of(record.get("payload"))
        if text_of(record, "type") == "session_meta":
            self.session = text_of(payload, "id") or self.session
            self.parent = text_of(payload, "source", "subagent", "thread_spawn", "parent_thread_id")
            return
        if text_of(record, "type") == "compacted":
            self.is_compacted = True
            return
        moment_ns = instant_ns(record.get("timestamp"))
        if moment_ns is None:
            self._notes.line_broken("a record without its time", at)
            return
        self._event(payload, moment_ns, at)

    def _event(self, payload: Record, moment_ns: int, at: str) -> None:
        kind, call = text_of(payload, "type"), text_of(payload, "call_id")
        if kind == "user_message":
            self.take_input(moment_ns, is_human=True)
        elif kind in RESULTS:
            self.take_input(moment_ns, is_human=False)
            self.result(call, moment_ns)
        elif kind in CALLS:
            self.call(call, self._output(moment_ns), moment_ns)
        elif kind == "reasoning" or (kind == "message" and text_of(payload, "role") == "assistant"):
            self._output(moment_ns)
        elif kind == "token_count" and self._open is not None and payload.get("info") is not None:
            self._close(self._open, counts_of(record_of(payload["info"]).get("last_token_usage"), CODEX_USAGE), at)

    def _output(self, moment_ns: int) -> Round:
        """The round that this output belongs to."""
        if self._open is None:
            self._open = self.begin(moment_ns)
        self._open.end_ns = max(self._open.end_ns, moment_ns)
        return self._open

    def _close(self, turn: Round, usage: list[int] | None, at: str) -> None:
        if usage is None:
            self._notes.line_broken("a token count without its numbers", at)
            return
        turn.input_tokens, turn.prefix_tokens, turn.output_tokens, hidden = usage
        turn.visible_tokens = max(turn.output_tokens - hidden, 0)
        self.rounds.append(turn)
        self._open = None


def _rounds_of_logs(
    log: type[_ClaudeLog] | type[_CodexLog], files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None
) -> Iterator[Round]:
    for path in files:
        reader = log(path.stem, notes)
        for at, record in json_lines(path, notes, progress):
            reader.take(record, at)
        yield from reader.rounds


claude_rounds, codex_rounds = partial(_rounds_of_logs, _ClaudeLog), partial(_rounds_of_logs, _CodexLog)
CLAUDE = TraceFormat(
    "Claude Code's session logs, with sub-agents",
    through_rounds(claude_rounds),
    (frozenset({"type", "sessionId", "uuid"}), frozenset({"type", "sessionId", "message"})),
)
CODEX = TraceFormat(
    "Codex's rollout logs", through_rounds(codex_rounds), (frozenset({"timestamp", "type", "payload"}),)
)
