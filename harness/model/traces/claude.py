"""Claude Code's logs: ``~/.claude/projects/<project>/*.jsonl`` and ``subagents/agent-*.jsonl``.

Rows of one assistant message share its id. Only types, ids, times, lengths and usage counts are read; no content, path
or command leaves a line.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from functools import partial
from pathlib import Path

from harness.model.traces.account import ReadNotes
from harness.model.traces.base import (
    Record,
    TraceFormat,
    by_type,
    instant_ns,
    list_of,
    read_tables,
    record_of,
    text_of,
)
from harness.model.traces.claude_passes import Answer, answer_of, count, rounds_of
from harness.model.traces.rounds import AgentLog, Conversation, Log, Round, logs_of, through_rounds

HELD_TO = "2.1.157"
PASSED = by_type(read_tables(Path(__file__).with_suffix(".toml"))["passed"])
SYNTHETIC = "<synthetic>"
INPUTS = ("text", "image", "document", "tool_result", "tool_reference")


class ClaudeLog(AgentLog):
    """A file of Claude Code, row by row."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        super().__init__(name, notes)
        self._chains: dict[str, _Chain] = {}
        self._side_roots: dict[str, str] = {}
        self._rows: set[str] = set()
        self._parents: set[str] = set()
        self._session_of: dict[str, str] = {}

    def logs(self) -> Iterable[Log]:
        missing = self._parents - self._rows
        self.notes.assume("rows that name a row before them which is not in their file: rows are missing", len(missing))
        return [chain.log() for chain in self._chains.values()]

    def take(self, record: Record, at: str) -> None:
        kind, row, moment_ns = text_of(record, "type"), text_of(record, "uuid"), instant_ns(record.get("timestamp"))
        if row in self._rows:
            self.notes.leave("rows that their own file holds already", at, 1)
            return
        self._rows |= {row} - {""}
        self._parents |= {text_of(record, "parentUuid")} - {""}
        self.notes.check_release("Claude Code", text_of(record, "version"), HELD_TO)
        if kind in PASSED and text_of(record, "subtype") != "compact_boundary":
            self.notes.pass_over(f"{kind}: {PASSED[kind]}")
            return
        chain = self._chain(record, row)
        chain.unread.num_rows += 1
        if kind not in ("user", "assistant", "attachment", "system"):
            chain.unread.unknown(kind, at)
        elif moment_ns is None:
            chain.unread.broken("a row without its time", at)
        else:
            self.came_at(moment_ns)
            chain.take(record, moment_ns, text_of(record, "sessionId") or self.name, at)

    def _chain(self, record: Record, row: str) -> _Chain:
        """The conversation of a row, which this row may begin."""
        session = self._session(record)
        if session not in self._chains:
            chain = self._chains[session] = _Chain(session, self.notes)
            # A session goes on from the one that its first row follows: copies may keep that row's id.
            above = self._session_of.get(text_of(record, "parentUuid") or "-", "")
            if above and record.get("isSidechain") is not True:
                chain.follows = next(reversed(self._chains[above].rounds), None)
        self._session_of[row] = session
        return self._chains[session]

    def _session(self, record: Record) -> str:
        """The conversation that a row belongs to: the session, a sub-agent of it, or a side chain by its first row."""
        session = text_of(record, "sessionId") or self.name
        if record.get("isSidechain") is not True:
            return session
        if agent := text_of(record, "agentId"):
            return f"{session}/{agent}"
        uuid = text_of(record, "uuid")
        root = self._side_roots.get(text_of(record, "parentUuid"), uuid)
        if root == uuid:
            self.notes.assume("side chains without a link run as sessions of their own")
        self._side_roots[uuid] = root
        return f"{session}/{root}"


class _Chain(Conversation):
    """One conversation of Claude Code; a side chain is a conversation too."""

    def __init__(self, session: str, notes: ReadNotes) -> None:
        super().__init__(session, notes)
        self.follows: Round | None = None
        self._by_message: dict[tuple[str, str], Round] = {}
        self._answers: dict[Hashable, Answer] = {}

    def take(self, record: Record, moment_ns: int, session: str, at: str) -> None:
        """Read one row of a known type; session: the one that its sub-agents belong to."""
        kind, parts = text_of(record, "type"), list_of(record_of(record.get("message")).get("content"))
        if kind == "assistant":
            self._answer(record, moment_ns, at)
            return
        results = [part for part in map(record_of, parts) if text_of(part, "type") == "tool_result"]
        is_hint = kind != "user" or record.get("isMeta") is True
        if kind == "system":
            self.is_compacted = True
            self.notes.leave("calls that summarised a conversation: the log does not hold them", at)
        is_typed = text_of(record, "origin", "kind") in ("", "human")  # else a task that ended, or another agent
        self.take_input(moment_ns, is_human=is_typed and not results and not is_hint, is_hint=is_hint)
        for part in results:
            turn = self.result(text_of(part, "tool_use_id"), moment_ns)
            if turn is not None and (agent := text_of(record, "toolUseResult", "agentId")):
                turn.children.append(f"{session}/{agent}")
        kinds = (text_of(part, "type") or "without a type" for part in map(record_of, parts))
        if unknown := next((kind for kind in kinds if kind not in INPUTS), ""):
            self.unread.unknown(f"user content {unknown}", at)
        else:
            self.notes.part()

    def _answer(self, record: Record, moment_ns: int, at: str) -> None:
        message = record_of(record.get("message"))
        answer, name = answer_of(record_of(message.get("usage"))), text_of(message, "id")
        if text_of(message, "model") == SYNTHETIC:
            self.notes.pass_over("messages that the program wrote in the model's name")
            return
        if not name or answer is None:
            self.unread.broken("an assistant row without its id or usage", at)
            return
        # A gateway may give every answer the same id; the id of the request then tells them apart.
        identity = (name, text_of(record, "requestId"))
        if identity in self._by_message:
            self.notes.part()
        else:
            self.notes.call()
            turn = self._by_message[identity] = self.begin(moment_ns)
            turn.identity, turn.at = identity, at
            turn.follows = None if self.rounds else self.follows
            self.rounds.append(turn)
        turn = self._by_message[identity]
        # Usage repeats with every block of the message; the last usage counts the whole answer.
        if answer.usage[3] >= turn.output_tokens:
            count(turn, answer.usage)
            self._answers[identity] = answer
        parts = list(map(record_of, list_of(message.get("content"))))
        turn.end_ns = max(turn.end_ns, moment_ns) if parts else turn.end_ns
        turn.answer_characters += sum(map(_characters, parts))
        for part in parts:
            if text_of(part, "type") == "tool_use":
                self.call(text_of(part, "id"), turn, moment_ns, text_of(part, "name"))

    def log(self) -> Log:
        """The rounds, one for each pass of the session's model."""
        return [each for turn in self.known() for each in rounds_of(turn, self._answers[turn.identity], self.notes)]


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
        "is passed over and counted; a row that names a missing row before it is labelled",
        "a call has usage: a call that counts no prompt token is dropped and counted",
        "a side chain names its agent: without, it runs as a session of its own, labelled",
    ),
    (frozenset({"type", "sessionId", "uuid"}), frozenset({"type", "sessionId", "message"})),
    passed=PASSED,
    held_to=f"Claude Code {HELD_TO}",
)
