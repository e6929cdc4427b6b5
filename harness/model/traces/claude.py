"""Claude Code's logs: ``~/.claude/projects/<project>/*.jsonl`` and ``subagents/agent-*.jsonl``."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable
from dataclasses import replace
from pathlib import Path

from harness.model.traces.account import ReadNotes
from harness.model.traces.base import by_type, read_tables, trace_format
from harness.model.traces.calls import ATTEMPTS, BACK, AgentLog, Call, Conversation, Log, texts_of
from harness.model.traces.links import REPEATED, UNLINKED, reader_of
from harness.model.traces.values import Record, counts_of, instant_ns, record_of, records_of, text_of, tokens_of

HELD_TO = "2.1.157"
TABLES = read_tables(Path(__file__).with_suffix(".toml"))
PASSED, NAMES = by_type(TABLES["passed"]), TABLES["names"]
SAID, USAGE, OWN_PASSES, SUMMARISER, INTERRUPTED, OTHER_MODEL = NAMES.values()
# Counts of an answer, and of each pass that it lists by its type.
Counts = list[tuple[str, list[int | None]]]


class Chain(Conversation):
    """One conversation of a ``ClaudeLog``; a side chain is a conversation too. kinds: the types of its rows."""

    kinds: tuple[str, ...] = ("user", "assistant", "attachment", "compaction")
    follows: Call | None = None

    def take(self, kind: str, record: Record, moment_ns: int, at: str) -> None:
        """Read one row of these kinds."""
        raise NotImplementedError

    def log(self) -> Log:
        """The calls so far."""
        for turn in self.known()[:1]:
            turn.follows = self.follows
        return self.calls


class _ClaudeChain(Chain):
    def __init__(self, session: str, notes: ReadNotes) -> None:
        super().__init__(session, notes)
        self._answers: dict[Hashable, tuple[Call, Counts]] = {}
        self._by_name: dict[str, tuple[str, str]] = {}  # the latest answer of an id

    def take(self, kind: str, record: Record, moment_ns: int, at: str) -> None:
        message = record_of(record, "message")
        parts = records_of(message, "content")
        if kind == "assistant":
            self._answer(record, parts, moment_ns, at)
            return
        results = [part for part in parts if text_of(part, "type") == "tool_result"]
        origin = text_of(record, "origin", "kind")
        is_own = origin in ("", "human")  # others: of another session, or a schedule, no tool and no person
        is_hint = is_own and (kind != "user" or True in map(record.get, ("isMeta", "isCompactSummary")))
        if kind == "compaction":
            self.compact(at)
        said = message.get("content")
        is_stop = any(one.startswith("[Request interrupted by") for one in texts_of(said))
        self.notes.assume(INTERRUPTED, is_stop and self.notes.is_first(self.row or at, at))
        if mode := text_of(record, "permissionMode"):
            self.may_ask = mode not in ("bypassPermissions", "dontAsk")
        if origin == "task-notification":
            self.take_input(moment_ns, is_human=False)
            self.is_woken = True
        elif not results:
            self.take_input(moment_ns, is_human=not is_hint if is_own else None, is_hint=is_hint, said=said)
        for part in results:
            ran_ms = record_of(record, "toolUseResult").get("durationMs")
            turn = self.result(text_of(part, "tool_use_id"), moment_ns, part.get("content"), ran_ms)
            agent = text_of(record, "toolUseResult", "agentId")
            if turn is not None and agent:
                turn.children[f"{text_of(record, 'sessionId') or self.session}/{agent}"] = moment_ns
            elif turn is not None:
                turn.num_agents += "totalTokens" in record_of(record, "toolUseResult")
        self.notes.part()

    def _answer(self, record: Record, parts: list[Record], moment_ns: int, at: str) -> None:
        message = record_of(record, "message")
        name, counts = text_of(message, "id"), _counts(record_of(message, "usage"))
        if record.get("isApiErrorMessage") is True:
            failed = "calls that failed, after all tries: the program tells their error"
            self.notes.drop_call(failed if self.notes.is_first(self.row or at, at) else REPEATED, at)
            self.skip("a call before theirs failed")
            return
        if text_of(message, "model") == "<synthetic>":
            self.notes.pass_over("messages that the program wrote in the model's name")
            return
        if not name or not counts:
            self.row_broken("an assistant row without its id or usage", at)
            return
        # A gateway may give every answer the same id; the id of the request then tells them apart.
        identity, known = (name, text_of(record, "requestId")), self._by_name.get(name)
        identity = self._by_name[name] = known if known and "" in (known[1], identity[1]) else identity
        self.notes.part(identity in self._answers)
        turn, _ = self._answers.get(identity) or (self.add(moment_ns, identity, at), counts)
        # Usage repeats with every block of the message; the last usage counts the whole answer.
        if (counts[0][1][-1] or 0) >= turn.output_tokens:
            _set_lengths(turn, counts[0][1])
            self._answers[identity] = (turn, counts)
        turn.end_ns = max(turn.end_ns, moment_ns) if parts else turn.end_ns
        turn.answer_characters += sum(len(text_of(part, "text")) + len(text_of(part, "thinking")) for part in parts)
        for part in parts:
            if text_of(part, "type") == "tool_use":
                self.call(text_of(part, "id"), turn, moment_ns, text_of(part, "name"))
                said = json.dumps(part.get("input"), separators=(",", ":"))
                turn.answer_characters += len(text_of(part, "name")) + len(said)

    def log(self) -> Log:
        """The calls, one for each pass of the session's model."""
        super().log()
        return [each for turn, counts in self._answers.values() for each in _passes(turn, counts, self.notes)]


class ClaudeLog(AgentLog):
    """A file of Claude Code, row by row, or of a program whose rows have the same ids and links."""

    program, held_to, passed = "Claude Code", HELD_TO, PASSED
    conversation: type[Chain] = _ClaudeChain

    def __init__(self, name: str, notes: ReadNotes) -> None:
        super().__init__(name, notes)
        self._chains: dict[str, Chain] = {}
        self._side_roots: dict[str, str] = {}
        self._rows, self._parents = set[str](), set[str]()
        self._session_of: dict[str, str] = {}
        self._call_at: dict[str, Call] = {}  # the last call up to a row
        self._is_back = self._is_strange = False

    def logs(self) -> Iterable[Log]:
        missing = self._parents - self._rows
        self.notes.assume("rows that name a row before them which is not in their file: rows are missing", len(missing))
        return [chain.log() for chain in self._chains.values()]

    def kind_of(self, record: Record) -> str:
        """The type of a row, by which ``passed`` and its conversation know it."""
        return "compaction" if text_of(record, "subtype") == "compact_boundary" else text_of(record, "type")

    def take(self, record: Record, at: str) -> None:
        kind, row, moment_ns = self.kind_of(record), text_of(record, "uuid"), instant_ns(record.get("timestamp"))
        if row in self._rows:
            self.notes.leave("rows that their own file holds already", at, 1)
            return
        self._rows |= {row} - {""}
        self._parents |= {text_of(record, name) for name in ("parentUuid", "logicalParentUuid")} - {""}
        if (above := self._call_at.get(text_of(record, "parentUuid"))) is not None:
            self._call_at[row] = above
        self.notes.check_release(self.program, text_of(record, "version"), self.held_to)
        self._is_back = self._is_back or at in self.backs
        if self.notes.passes(kind, self.passed):
            self._is_strange = not self.notes.look(record, kind) or self._is_strange
            is_attempt = text_of(record, "subtype") == "api_error" and self.notes.is_first(row or at, at)
            self.notes.assume(ATTEMPTS, is_attempt)
            return
        chain = self._chain(record, row)
        chain.row, chain.num_rows = row, chain.num_rows + 1
        chain.lost, self._is_back = BACK if self._is_back else chain.lost, False
        chain.is_strange, self._is_strange = chain.is_strange or self._is_strange, False
        if kind not in chain.kinds:
            chain.row_unknown(kind, at)
        elif moment_ns is None:
            chain.row_broken("a row without its time", at)
        elif kind == "user" and not any(get(record, "message", name) for get in (text_of, records_of) for name in SAID):
            chain.row_broken("a user's row without its message", at)
        else:
            self.came_at(moment_ns)
            num_calls = len(chain.calls)
            chain.take(kind, record, moment_ns, at)
            chain.look(record)
            if len(chain.calls) > num_calls:
                chain.calls[-1].is_summary = text_of(record, "agentId").startswith(SUMMARISER)
                self._call_at[row] = turn = chain.calls[-1]
                turn.rewound_to = above if above not in chain.calls[-2:] else None

    def _chain(self, record: Record, row: str) -> Chain:
        """The conversation of a row, which this row may begin."""
        session, is_aside = self._session(record), record.get("isSidechain") is True
        above = self._session_of.get(text_of(record, "parentUuid") or "-", "")
        if session not in self._chains:
            chain = self._chains[session] = self.conversation(session, self.notes)
            # A session goes on from the one that its first row follows: copies may keep that row's id.
            if "/" in session and text_of(record, "agentId"):
                chain.parent = text_of(record, "sessionId") or self.name
            elif above and not is_aside:
                chain.follows = next(reversed(self._chains[above].calls), None)
        elif not is_aside and above.partition("/")[0] not in ("", session):
            self._chains[session].lost = "a row before theirs is of another session"
        self._session_of[row] = session
        return self._chains[session]

    def _session(self, record: Record) -> str:
        """The conversation that a row belongs to: the session, a sub-agent of it, or a side chain by its first row."""
        session = text_of(record, "sessionId") or self.name
        self.notes.assume("rows that name no session: taken as of that of their file", not text_of(record, "sessionId"))
        if record.get("isSidechain") is not True:
            return session
        if agent := text_of(record, "agentId"):
            return session if agent.startswith(SUMMARISER) else f"{session}/{agent}"
        uuid = text_of(record, "uuid")
        root = self._side_roots.get(text_of(record, "parentUuid"), uuid)
        self.notes.assume(UNLINKED, root == uuid)
        self._side_roots[uuid] = root
        return f"{session}/{root}"


def _counts(usage: Record) -> Counts:
    """The counts of an answer and of its passes; [] where one is no number of tokens, or has no input."""
    rows = [usage, *records_of(usage, "iterations")]
    sound = all(counts_of(row, USAGE) and row.get(USAGE[0]) is not None for row in rows)
    return [(text_of(row, "type"), [tokens_of(row.get(name)) for name in USAGE]) for row in rows] if sound else []


def _set_lengths(turn: Call, counts: list[int | None]) -> None:
    fresh, turn.created_tokens, turn.prefix_tokens, output = counts
    turn.input_tokens, turn.output_tokens, turn.has_cache_apart = fresh or 0, output or 0, True


def _passes(turn: Call, counts: Counts, notes: ReadNotes) -> Log:
    """A round for each pass of the session's model; the last one has the answer's tools."""
    (_, usage), *passes = [(kind, [count or 0 for count in row]) for kind, row in counts]
    own = [row for kind, row in passes if kind in OWN_PASSES]
    if not own or len(passes) < 2:
        return [turn]
    sums = [list(map(sum, zip(*rows, strict=True))) for rows in (own, [row for _, row in passes])]
    sums.append([*own[0][:-1], sums[0][-1]])  # beside an advisor: the input of the first pass, the output of all
    if usage not in sums:
        notes.hold("answers whose usage is not the sum of its passes", sum(usage), sums[1])
    notes.num_more += len(passes) - 1
    notes.drop(OTHER_MODEL, turn.at, len(passes) - len(own))
    notes.assume("answers of several passes of the model: each pass is a call", len(own) > 1)
    calls = [*(replace(turn, tool_spans=[], children=[], answer_characters=0) for _ in own[1:]), turn]
    given = [row for kind, row in counts[1:] if kind in OWN_PASSES]
    for number, (each, row) in enumerate(zip(calls, given, strict=True)):
        _set_lengths(each, row)
        each.identity = turn.identity if each is turn else (turn.identity, number)
        if number:
            each.submitted_ns, each.kind, each.follows, each.is_reset = each.end_ns, "tool", None, False
            each.unknown_wait = "an answer of several passes has one time for all of them"
    return calls


FORMAT = trace_format(__file__, "claude", reader_of(ClaudeLog), passed=PASSED, held_to=f"Claude Code {HELD_TO}")
