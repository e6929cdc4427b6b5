"""Claude Code's logs: ``~/.claude/projects/<project>/*.jsonl`` and ``subagents/agent-*.jsonl``.

Rows of one assistant message share its id. Only types, ids, times, lengths and usage counts are read; no content, path
or command leaves a line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from harness.model.traces.base import ReadNotes, Record, TraceFormat, counts_of, instant_ns, list_of, record_of, text_of
from harness.model.traces.passed import CLAUDE as PASSED
from harness.model.traces.rounds import NO_PROMPT, AgentLog, Conversation, Log, Round, logs_of, through_rounds

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
        return [chain.with_prompts(self.notes) for chain in self._chains.values()]

    def take(self, record: Record, at: str) -> None:
        kind, subtype = text_of(record, "type"), text_of(record, "subtype")
        row, moment_ns = text_of(record, "uuid"), instant_ns(record.get("timestamp"))
        is_known = kind in ("user", "assistant", "attachment", *PASSED)
        if row in self._rows:
            self.notes.leave("rows that their own file holds already", at, 1)
            return
        self._rows |= {row} - {""}
        self._parents |= {text_of(record, "parentUuid")} - {""}
        self.notes.check_release("Claude Code", text_of(record, "version"), HELD_TO)
        if is_known and kind in PASSED and subtype != "compact_boundary":
            self.notes.pass_over(f"{kind}: {PASSED[kind]}")
            return
        if is_known and moment_ns is None:
            self.notes.row_broken("a row without its time", at)
            return
        chain = self._chain(record, row)
        chain.unread.num_rows += 1
        if not is_known:
            chain.unread.add()
            self.notes.row_unknown(kind, at)
            return
        self.came_at(moment_ns or 0)
        self._take(chain, record, moment_ns or 0, at)

    def _take(self, chain: _Chain, record: Record, moment_ns: int, at: str) -> None:
        kind = text_of(record, "type")
        if kind == "system":
            chain.is_compacted = True
            chain.take_input(moment_ns, is_human=False, is_hint=True)
        elif kind == "attachment":
            chain.take_input(moment_ns, is_human=False, is_hint=True)
        elif kind == "user":
            if unknown := chain.user(record, moment_ns, text_of(record, "sessionId") or self.name):
                chain.unread.add()
                self.notes.row_unknown(f"user content {unknown}", at)
                return
        elif text_of(record, "message", "model") == SYNTHETIC:
            self.notes.pass_over("messages that the program wrote in the model's name")
            return
        elif (num_calls := chain.assistant(record, moment_ns, at)) is None:
            chain.unread.add()
            self.notes.row_broken("an assistant row without its id or usage", at)
            return
        elif num_calls:
            self.notes.call()
            return
        self.notes.part()

    def _chain(self, record: Record, row: str) -> _Chain:
        """The conversation of a row, which this row may begin."""
        session = self._session(record)
        if session not in self._chains:
            self._chains[session] = _Chain(session)
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

    def __init__(self, session: str) -> None:
        super().__init__(session)
        self.follows: Round | None = None
        self._by_message: dict[tuple[str, str], Round] = {}
        self._passes: dict[tuple[str, str], tuple[list[tuple[str, list[int]]], list[int]]] = {}

    def user(self, record: Record, moment_ns: int, session: str) -> str:
        """Take what a person or a tool sent; returns a type of content that is not known, "" where all are."""
        content = record_of(record.get("message")).get("content")
        parts = list(map(record_of, list_of(content)))
        results = [part for part in parts if text_of(part, "type") == "tool_result"]
        is_hint = record.get("isMeta") is True
        self.take_input(moment_ns, is_human=not results and not is_hint, is_hint=is_hint)
        for part in results:
            turn = self.result(text_of(part, "tool_use_id"), moment_ns)
            if turn is not None and (agent := text_of(record, "toolUseResult", "agentId")):
                turn.children.append(agent_session(session, agent))
        kinds = (text_of(part, "type") or "without a type" for part in parts)
        return next((kind for kind in kinds if kind not in INPUTS), "")

    def assistant(self, record: Record, moment_ns: int, at: str) -> int | None:
        """Take a row of an answer; returns how many calls it begins, None where its id or usage cannot be read."""
        message = record_of(record.get("message"))
        usage, name = counts_of(message.get("usage"), USAGE), text_of(message, "id")
        passes = _passes(record_of(message.get("usage")).get("iterations"))
        if not name or usage is None or passes is None:
            return None
        fresh, created, cached, output = usage
        # A gateway may give every answer the same id; the id of the request then tells them apart.
        identity = (name, text_of(record, "requestId"))
        turn = self._by_message.get(identity)
        is_new = turn is None
        if turn is None:
            turn = self._by_message[identity] = self.begin(moment_ns)
            turn.identity, turn.at = identity, at
            turn.follows = None if self.rounds else self.follows
            self.rounds.append(turn)
        # Usage repeats with every block of the message; the last usage counts the whole answer.
        if output >= turn.output_tokens:
            turn.input_tokens, turn.prefix_tokens = fresh + created + cached, cached
            turn.output_tokens = turn.visible_tokens = output
            self._passes[identity] = (passes, usage)
        parts = [record_of(part) for part in list_of(message.get("content"))]
        turn.end_ns = max(turn.end_ns, moment_ns) if parts else turn.end_ns
        for part in parts:
            turn.answer_characters += _characters(part)
            if text_of(part, "type") == "tool_use":
                self.call(text_of(part, "id"), turn, moment_ns)
        return int(is_new)

    def with_prompts(self, notes: ReadNotes) -> Log:
        """The rounds whose prompt is known to have tokens, a round for each pass of the session's model."""
        self.known()
        for identity, (passes, usage) in self._passes.items():
            own = [counts for kind, counts in passes if kind in OWN_PASSES]
            if own and len(passes) > 1:
                self._split(self._by_message[identity], own, notes)
                sums = [[sum(column) for column in zip(*rows, strict=True)] for rows in (own, [c for _, c in passes])]
                if usage not in sums:
                    notes.hold("answers whose usage is not the sum of its passes", sum(usage), sum(sums[1]))
                notes.num_more += len(passes) - 1
                notes.drop(OTHER_MODEL, self._by_message[identity].at, len(passes) - len(own))
        for turn in self.rounds:
            if not turn.input_tokens:
                notes.drop(NO_PROMPT, turn.at)
        return [turn for turn in self.rounds if turn.input_tokens]

    def _split(self, turn: Round, own: Sequence[Sequence[int]], notes: ReadNotes) -> None:
        """Make an answer of several passes of the session's model as many rounds; the last one has its tools."""
        place = next(place for place, each in enumerate(self.rounds) if each is turn)
        before = [replace(turn, tool_spans=[], children=[], answer_characters=0) for _ in own[1:]]
        for number, (each, counts) in enumerate(zip((*before, turn), own, strict=True)):
            fresh, created, cached, output = counts
            each.input_tokens, each.prefix_tokens = fresh + created + cached, cached
            each.output_tokens = each.visible_tokens = output
            each.identity = turn.identity if each is turn else (turn.identity, number)
            if number:
                each.submitted_ns, each.is_human, each.follows = each.end_ns, False, None
                each.unknown_wait = "an answer of several passes has one time for all of them"
        self.rounds[place:place] = before
        notes.assume("answers of several passes of the model: each pass is a call", bool(before))


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
