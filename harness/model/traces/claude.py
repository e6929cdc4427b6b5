"""Claude Code's logs: ``~/.claude/projects/<project>/*.jsonl`` and ``subagents/agent-*.jsonl``.

Rows of one assistant message share its id. Only types, ids, times, lengths and usage counts are read; no content, path
or command leaves a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from harness.model.traces.account import ReadNotes
from harness.model.traces.base import Record, TraceFormat, counts_of, instant_ns, list_of, record_of, text_of
from harness.model.traces.passed import CLAUDE as PASSED
from harness.model.traces.rounds import AgentLog, Conversation, Log, Round, logs_of, through_rounds

HELD_TO = "2.1.157"
SYNTHETIC = "<synthetic>"
INPUTS = ("text", "image", "document", "tool_result", "tool_reference")
# Passes of one answer by the session's own model; of others by an advisor, or by the model it fell back to.
OWN_PASSES = ("message", "compaction")
OTHER_MODEL = "passes of another model within an answer: an advisor's, or one that took over"
USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")


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
        return [chain.with_passes() for chain in self._chains.values()]

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
            self._chains[session] = _Chain(session, self.notes)
            self._chains[session].follows = self._last_round(record)
        self._session_of[row] = session
        return self._chains[session]

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

    def __init__(self, session: str, notes: ReadNotes) -> None:
        super().__init__(session, notes)
        self.follows: Round | None = None
        self._by_message: dict[tuple[str, str], Round] = {}
        self._passes: dict[tuple[str, str], tuple[list[tuple[str, list[int]]], list[int]]] = {}

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
        self.take_input(moment_ns, is_human=not results and not is_hint, is_hint=is_hint)
        for part in results:
            turn = self.result(text_of(part, "tool_use_id"), moment_ns)
            if turn is not None and (agent := text_of(record, "toolUseResult", "agentId")):
                turn.children.append(agent_session(session, agent))
        kinds = (text_of(part, "type") or "without a type" for part in map(record_of, parts))
        if unknown := next((kind for kind in kinds if kind not in INPUTS), ""):
            self.unread.unknown(f"user content {unknown}", at)
        else:
            self.notes.part()

    def _answer(self, record: Record, moment_ns: int, at: str) -> None:
        message = record_of(record.get("message"))
        usage, name = counts_of(message.get("usage"), USAGE), text_of(message, "id")
        passes = _passes(record_of(message.get("usage")).get("iterations"))
        if text_of(message, "model") == SYNTHETIC:
            self.notes.pass_over("messages that the program wrote in the model's name")
            return
        if not name or usage is None or passes is None:
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
        if usage[3] >= turn.output_tokens:
            _count(turn, usage)
            self._passes[identity] = (passes, usage)
        parts = list(map(record_of, list_of(message.get("content"))))
        turn.end_ns = max(turn.end_ns, moment_ns) if parts else turn.end_ns
        turn.answer_characters += sum(map(_characters, parts))
        for part in parts:
            if text_of(part, "type") == "tool_use":
                self.call(text_of(part, "id"), turn, moment_ns, text_of(part, "name"))

    def with_passes(self) -> Log:
        """The rounds, one for each pass of the session's model; the last one of an answer has its tools."""
        self.known()
        for identity, (passes, usage) in self._passes.items():
            own = [counts for kind, counts in passes if kind in OWN_PASSES]
            if not own or len(passes) < 2:
                continue
            turn = self._by_message[identity]
            sums = [list(map(sum, zip(*rows, strict=True))) for rows in (own, [counts for _, counts in passes])]
            if usage not in sums:
                self.notes.hold("answers whose usage is not the sum of its passes", sum(usage), sums[1])
            self.notes.num_more += len(passes) - 1
            self.notes.drop(OTHER_MODEL, turn.at, len(passes) - len(own))
            self.notes.assume("answers of several passes of the model: each pass is a call", len(own) > 1)
            before = [replace(turn, tool_spans=[], children=[], answer_characters=0) for _ in own[1:]]
            place = next(place for place, each in enumerate(self.rounds) if each is turn)
            self.rounds[place:place] = before
            for number, (each, counts) in enumerate(zip((*before, turn), own, strict=True)):
                _count(each, counts)
                each.identity = turn.identity if each is turn else (turn.identity, number)
                if number:
                    each.submitted_ns, each.is_human, each.follows = each.end_ns, False, None
                    each.unknown_wait = "an answer of several passes has one time for all of them"
        return self.rounds


def _count(turn: Round, usage: Sequence[int]) -> None:
    """Set the lengths of a round from counts of ``USAGE``."""
    fresh, created, cached, output = usage
    turn.input_tokens, turn.prefix_tokens = fresh + created + cached, cached
    turn.output_tokens = turn.visible_tokens = output


def _passes(iterations: object) -> list[tuple[str, list[int]]] | None:
    """(type, counts) of each pass of an answer, [] where they are not told; None where they cannot be read."""
    rows = [(text_of(each, "type"), counts_of(each, USAGE)) for each in map(record_of, list_of(iterations))]
    known = [(kind, counts) for kind, counts in rows if counts is not None]
    return known if len(known) == len(rows) else None


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
