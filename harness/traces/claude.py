"""Claude Code's session logs (``~/.claude/projects/<project>/*.jsonl`` and ``subagents/agent-*.jsonl``) as rounds.

Reads types, ids, times, tool results' ids and usage counts; no content, path or command leaves a line. Rows of one
assistant message share its id and repeat its usage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.traces.base import (
    Progress,
    Record,
    TraceFormat,
    counts_of,
    instant_ns,
    json_lines,
    list_of,
    record_of,
    text_of,
)
from harness.traces.recording import ReadNotes
from harness.traces.rounds import Conversation, Round, through_rounds

SYNTHETIC = "<synthetic>"
OUTPUTS = ("text", "thinking", "redacted_thinking", "tool_use")
USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


def claude_rounds(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Round]:
    """The rounds of each file, side chains as sessions of their own."""
    for path in files:
        log = _Log(path.stem, notes)
        for at, record in json_lines(path, notes, progress):
            log.take(record, at)
        yield from log.rounds()


class _Log:
    """One file, row by row."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        self._name, self._notes = name, notes
        self._chains: dict[str, _Chain] = {}
        self._side_roots: dict[str, str] = {}

    def rounds(self) -> Iterator[Round]:
        for chain in self._chains.values():
            yield from chain.rounds

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
        chain = self._chains.setdefault(session, _Chain(session))
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
        own = text_of(record, "uuid")
        root = self._side_roots.get(text_of(record, "parentUuid"), own)
        self._side_roots[own] = root
        self._notes.labels.add("side chains without a link run as sessions of their own")
        return agent_session(session, root)


def agent_session(session: str, agent: str) -> str:
    """The name of a sub-agent's conversation."""
    return f"{session}/{agent}"


class _Chain(Conversation):
    """One conversation; rows of one message share its id."""

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
        usage, name = counts_of(message.get("usage"), USAGE), text_of(message, "id")
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


FORMAT = TraceFormat(
    "Claude Code's session logs, with sub-agents",
    through_rounds(claude_rounds),
    (frozenset({"type", "sessionId", "uuid"}), frozenset({"type", "sessionId", "message"})),
)
