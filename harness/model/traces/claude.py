"""Claude Code's logs: ``~/.claude/projects/<project>/*.jsonl`` and ``subagents/agent-*.jsonl``.

Rows of one assistant message share its id. Only types, ids, times, lengths and usage counts are read; no content, path
or command leaves a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import partial

from harness.model.traces.base import Record, TraceFormat, counts_of, instant_ns, list_of, record_of, text_of
from harness.model.traces.recording import ReadNotes
from harness.model.traces.rounds import NO_PROMPT, AgentLog, Conversation, Log, Round, logs_of, through_rounds

SYNTHETIC = "<synthetic>"
OUTPUTS = ("text", "thinking", "redacted_thinking", "tool_use")
USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


class ClaudeLog(AgentLog):
    """A file of Claude Code, row by row."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        super().__init__(name, notes)
        self._chains: dict[str, _Chain] = {}
        self._side_roots: dict[str, str] = {}
        self._rows: set[str] = set()
        self._session_of: dict[str, str] = {}

    def logs(self) -> Iterable[Log]:
        return [chain.with_prompts(self.notes) for chain in self._chains.values()]

    def take(self, record: Record, at: str) -> None:
        kind = text_of(record, "type")
        is_boundary = kind == "system" and text_of(record, "subtype") == "compact_boundary"
        if kind not in ("user", "assistant") and not is_boundary:
            return
        moment_ns = instant_ns(record.get("timestamp"))
        if moment_ns is None:
            self.notes.line_broken("a row without its time", at)
            return
        self.came_at(moment_ns)
        row = text_of(record, "uuid")
        if row in self._rows:
            self.notes.drop("rows that their own file holds already", at)
            return
        self._rows |= {row} - {""}
        session = self._session(record)
        if session not in self._chains:
            self._chains[session] = _Chain(session)
            self._chains[session].follows = self._last_round(record)
        self._session_of[row] = session
        chain = self._chains[session]
        if is_boundary:
            chain.is_compacted = True
        elif kind == "user":
            chain.user(record, moment_ns, text_of(record, "sessionId") or self.name)
        elif text_of(record, "message", "model") != SYNTHETIC and not chain.assistant(record, moment_ns, at):
            self.notes.line_broken("an assistant row without its id or usage", at)

    def _last_round(self, record: Record) -> Round | None:
        """The last call so far of the session that a new session's first row follows: copies may keep its id."""
        session = self._session_of.get(text_of(record, "parentUuid") or "-")
        is_side = record.get("isSidechain") is True
        rounds = self._chains[session].rounds if session is not None and not is_side else []
        return rounds[-1] if rounds else None

    def _session(self, record: Record) -> str:
        """The conversation that a row belongs to: the session, a sub-agent of it, or a side chain by its first row."""
        session = text_of(record, "sessionId") or self.name
        if record.get("isSidechain") is not True:
            return session
        if agent := text_of(record, "agentId"):
            return agent_session(session, agent)
        uuid = text_of(record, "uuid")
        root = self._side_roots.get(text_of(record, "parentUuid"), uuid)
        if root == uuid:
            self.notes.assume("side chains without a link run as sessions of their own")
        self._side_roots[uuid] = root
        return agent_session(session, root)


def agent_session(session: str, agent: str) -> str:
    """The name of a sub-agent's conversation."""
    return f"{session}/{agent}"


class _Chain(Conversation):
    """One conversation of Claude Code; a side chain is a conversation too."""

    def __init__(self, session: str) -> None:
        super().__init__(session)
        self.follows: Round | None = None
        self._by_message: dict[tuple[str, str], Round] = {}

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

    def assistant(self, record: Record, moment_ns: int, at: str) -> bool:
        message = record_of(record.get("message"))
        usage, name = counts_of(message.get("usage"), USAGE), text_of(message, "id")
        if not name or usage is None:
            return False
        fresh, created, cached, output = usage
        # A gateway may give every answer the same id; the id of the request then tells them apart.
        identity = (name, text_of(record, "requestId"))
        turn = self._by_message.get(identity)
        if turn is None:
            turn = self._by_message[identity] = self.begin(moment_ns)
            turn.identity, turn.at = identity, at
            turn.follows = None if self.rounds else self.follows
            self.rounds.append(turn)
        # Usage repeats with every block of the message; the last usage counts the whole answer.
        if output >= turn.output_tokens:
            turn.input_tokens, turn.prefix_tokens = fresh + created + cached, cached
            turn.output_tokens = turn.visible_tokens = output
        parts = [record_of(part) for part in list_of(message.get("content"))]
        if any(text_of(part, "type") in OUTPUTS for part in parts):
            turn.end_ns = max(turn.end_ns, moment_ns)
        for part in parts:
            turn.answer_characters += _characters(part)
            if text_of(part, "type") == "tool_use":
                self.call(text_of(part, "id"), turn, moment_ns)
        return True

    def with_prompts(self, notes: ReadNotes) -> Log:
        """The rounds whose prompt is known to have tokens."""
        for turn in self.rounds:
            if not turn.input_tokens:
                notes.drop(NO_PROMPT, turn.at)
        return [turn for turn in self.rounds if turn.input_tokens]


def _characters(part: Record) -> int:
    """Length of one block of an answer."""
    if text_of(part, "type") == "tool_use":
        return len(text_of(part, "name")) + len(json.dumps(part.get("input"), separators=(",", ":")))
    return len(text_of(part, "text")) + len(text_of(part, "thinking"))


claude_logs = partial(logs_of, ClaudeLog)
FORMAT = TraceFormat(
    "Claude Code's session logs, with sub-agents",
    through_rounds(claude_logs),
    (
        "a message stands in one file: a resumed or forked session may begin with a copy of another's; a call counts "
        "once, in the session that made it, by its message id over all files of the import",
        "output_tokens counts the answer: a placeholder of a few tokens beside a long answer is estimated from "
        "characters, and labelled",
        "rows come in order of time, once each: a file out of order is sorted and labelled, a row id that came before "
        "is dropped and counted",
        "a call has usage: a call that counts no prompt token is dropped and counted",
        "a side chain names its agent: without, it runs as a session of its own, labelled",
    ),
    (frozenset({"type", "sessionId", "uuid"}), frozenset({"type", "sessionId", "message"})),
)
