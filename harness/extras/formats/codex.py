"""Codex's logs, ``~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl``; ``codex.toml`` has the types of rows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from harness.model.traces.account import ReadNotes
from harness.model.traces.base import by_type, read_tables, trace_format
from harness.model.traces.calls import BACK, BURST_NS, LATE_NS, REPLAYED, AgentLog, Call, Conversation, Log, mark_replay
from harness.model.traces.links import REVIEWED, reader_of
from harness.model.traces.values import Record, counts_of, instant_ns, record_of, text_of, tokens_of

HELD_TO = "0.171.0"
TABLES = read_tables(Path(__file__).with_suffix(".toml"))
PASSED, ROLES, ITEMS, LABELS = (by_type(TABLES[name]) for name in ("passed", "roles", "items", "labels"))
NAMES: dict[str, list[str]] = TABLES["names"]
ENDINGS = {"_call": "output", "_output": "result"}


class CodexLog(AgentLog):
    """A file of Codex, record by record. A file that was merged of several holds a session after each first record."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        super().__init__(name, notes)
        self._sessions = [_Session(name, notes)]

    def logs(self) -> Iterable[Log]:
        return [session.log() for session in self._sessions]

    def take(self, record: Record, at: str) -> None:
        moment_ns = instant_ns(record.get("timestamp"))
        is_meta = text_of(record, "type") == "session_meta"
        if moment_ns is not None and not is_meta:
            self.came_at(moment_ns)
        if is_meta and self._sessions[-1].ended_before(text_of(record, "payload", "id"), moment_ns):
            self.notes.assume("sessions that follow another one in its file: taken as sessions of their own")
            self._sessions.append(_Session(self.name, self.notes))
        self._sessions[-1].lost = BACK if at in self.backs else self._sessions[-1].lost
        self._sessions[-1].take(record, moment_ns, at)


class _Session(Conversation):
    """The records of one session."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        super().__init__(name, notes)
        self._open: Call | None = None
        self._turns: dict[str, list[int]] = {}  # how many calls stood before each input, by its kind
        self._fork_of, self._cut, self._is_aborted = "", 0, False
        self._began_ns: int | None = None
        self._has_meta = self._is_agent = self._is_reviewed = False
        self._closed_ns: list[int] = []
        self._totals: list[int] | None = None
        # Usage that the other kind of row may tell again: of the last count, and of the last record.
        self._counted: list[int] | None = None
        self._recorded: list[int] | None = None
        # Where the first count of no token since the last call ended a summary without a count, "" where it did not.
        self._emptied_at: str | None = None
        self._is_bare = False  # no row holds the last call's output, as of a summary
        self._ordinal: int | None = None
        self._history = hash(())

    def ended_before(self, name: str, moment_ns: int | None) -> bool:
        """Whether a session_meta of this id begins another session: what a fork repeats comes at its start."""
        is_other = self._has_meta and name != self.session and bool(self.calls)
        return is_other and moment_ns is not None and moment_ns - (self._began_ns or 0) >= BURST_NS

    def log(self) -> Log:
        """The calls so far."""
        self._leave(LABELS["uncounted"])
        self.known()
        mark_replay(self.calls, self._closed_ns, self._began_ns or 0, is_fork=bool(self._fork_of))
        for place, turn in enumerate(self.calls):
            # A sub-agent was started then; the result before a fork's first own call came to its parent.
            if place and self.calls[place - 1].is_replay and not (turn.is_replay or self.parent):
                copied_ns = max(self._began_ns or 0, self._closed_ns[place - 1]) + BURST_NS
                is_copied = turn.kind == "tool" and turn.submitted_ns < copied_ns
                turn.unknown_wait = turn.unknown_wait or (LABELS["copied"] if is_copied else "")
            turn.fork_of, turn.cut = self._fork_of, self._cut
            turn.session = self.session  # its first record may come late
            turn.parent = self.parent or "-" * self._is_agent  # a review, or an agent of the program, names none
        return self.calls

    def take(self, record: Record, moment_ns: int | None, at: str) -> None:
        """Read one record."""
        payload, kind = record_of(record, "payload"), text_of(record, "type")
        self.num_rows += 1
        if isinstance(number := record.get("ordinal"), int):  # by which newer releases number the rows
            num_missing = number - self._ordinal - 1 if self._ordinal is not None else 0
            self.notes.assume("rows that are missing by their ordinal", max(num_missing, 0))
            self.num_unread += num_missing > 0
            self._ordinal = number
        self._began_ns = moment_ns if self._began_ns is None else self._began_ns
        self.may_ask = payload.get("approval_policy", "") != "never" if kind == "turn_context" else self.may_ask
        if kind == "session_meta":
            self._meta(payload)
            self.notes.part()
        elif moment_ns is None or self._began_ns is None:
            self.row_broken("a record without its time", at)
        else:
            opened_ns = self._open.end_ns if self._open is not None and self._fork_of else moment_ns
            if opened_ns - self._began_ns < BURST_NS <= moment_ns - self._began_ns:
                self._leave(REPLAYED)  # what a fork repeated without a count: its own first call does not take it over
            is_inside = kind in ("event_msg", "response_item")
            self._event(payload, (text_of(payload, "type") if is_inside else kind), moment_ns, f"{kind}/", at)
            if self.is_compacted and self._emptied_at:  # of these two rows either may come first
                self.compact(self._emptied_at)
                self._emptied_at = ""
        self.look(record)
        self.look(payload, text_of(payload, "type"))

    def _meta(self, payload: Record) -> None:
        """A file's first session_meta says what it is; one with another id comes from a session that it repeats."""
        name = text_of(payload, "id")
        if self._has_meta:
            self._fork_of = self._fork_of or (name if name != self.session else "")
            return
        self.notes.check_release("Codex", text_of(payload, "cli_version"), HELD_TO)
        self._has_meta, self.session = True, name or self.session
        spawn = record_of(payload, "source", "subagent", "thread_spawn")
        self._fork_of, self.parent = (text_of(spawn, name) or text_of(payload, name) for name in NAMES["above"])
        self._is_agent = bool(record_of(payload, "source").get("subagent"))
        base = record_of(payload, "history_base")  # the rows that it goes on from, and does not copy
        self._fork_of = text_of(base, "thread_id") or self._fork_of
        self._cut = tokens_of(base.get("end_ordinal_exclusive")) or 0

    def _leave(self, reason: str) -> None:
        """Leave out the open round, which nothing counts."""
        if self._open is not None:
            self.notes.leave(reason, self._open.at)
            self.lost = "a call before theirs has no token count" if reason == LABELS["uncounted"] else ""
            self.is_compacted, self._back_to = self._open.is_reset, self._open.rewound_to
            self._open = None

    def _event(self, payload: Record, kind: str, moment_ns: int, form: str, at: str) -> None:
        role, call = role_of(payload, kind, form), text_of(payload, "call_id")
        if self._is_of_review(payload, kind, role, moment_ns, at):
            kind, role = "review", "passed"
        if role in ("count", "record"):
            (self._count if role == "count" else self._usage_record)(payload, moment_ns, at)
        elif role == "passed":
            self.notes.pass_over(f"{kind}: {PASSED[kind]}")
            self._end(kind, payload, moment_ns, at)
        elif role == "unknown":
            self.row_unknown(f"{form}{kind} {text_of(payload, 'item', 'type')}".strip(), at)
        else:
            self.notes.part()
            self.is_compacted = self.is_compacted or kind == "compacted"
            self.is_over = self.is_over or (kind == "compacted" and bool(self._inputs))  # no row tells of its call
            if role == "result" and call:
                self.result(call, moment_ns, payload.get("output"))
            elif role in NAMES["inputs"]:
                self._ask(kind, role, moment_ns, payload.get("content"))
            elif self._open is not None or role == "output":
                turn = self._output(moment_ns, at)
                # Only a tool that runs beside the model has an output of the same id.
                if call and kind.endswith("_call"):
                    self.call(call, turn, moment_ns, tool := text_of(payload, "name"))
                    turn.joins = turn.joins or tool in ("wait", "wait_agent")

    def _is_of_review(self, payload: Record, kind: str, role: str, moment_ns: int, at: str) -> bool:
        """Whether a row is Codex's own answer for a review; a review may begin with it, or end."""
        told = {kind, text_of(payload, "item", "type")}
        is_exit, is_entry = (not told.isdisjoint(names) for names in (NAMES["exits"], NAMES["entries"]))
        self.lost = REVIEWED if is_exit or is_entry else self.lost
        if is_exit and not (self._is_reviewed or self.calls):
            self.notes.leave(LABELS["reviews"], at)
        for turn in self.calls[-1:] if is_exit and not self._is_reviewed else ():
            turn.num_agents += 1
            turn.tool_spans.append((turn.end_ns, moment_ns))
        self._is_reviewed = is_exit or (self._is_reviewed and role != "turn")
        if is_answer := self._is_reviewed and (kind, role) == ("message", "output"):
            self._inputs, self._is_reviewed = [], False
        return is_answer

    def _ask(self, kind: str, role: str, moment_ns: int, said: object) -> None:
        if role == "turn" and self._is_aborted:  # what came of the turn that a person ended asks for nothing
            self.skip(self.lost)
            self._is_aborted = False
        self._turns.setdefault(kind, []).append(len(self.calls))
        self.take_input(moment_ns, is_human=role in ("person", "turn"), is_hint=role in ("hint", "turn"), said=said)

    def _end(self, kind: str, payload: Record, moment_ns: int, at: str) -> None:
        """A person ended a turn, or took back so many of the last ones, or the program says which agent it started."""
        num_turns = tokens_of(payload.get("num_turns")) or 0
        if kind == "turn_aborted":
            # A tool that runs, or is stopped just now, has not asked the model; what a fork repeats is its parent's.
            latest = {is_human for at_ns, is_human in self._inputs if moment_ns - at_ns < LATE_NS}
            is_asked = any((self._began_ns or 0) <= at_ns <= moment_ns - LATE_NS for at_ns, _ in self._inputs)
            if self._open is None and is_asked and False not in latest and not self._unanswered:
                self.end_without_row(at)
            self._leave(LABELS["uncounted"])
            self.is_over = self._is_aborted = True
        elif kind == "error" and self._open is None:
            self.end_without_row(at)
        elif kind == "sub_agent_activity" and payload.get("kind") == "started":
            self.start(text_of(payload, "event_id"), text_of(payload, "agent_thread_id"))
        elif kind == "thread_rolled_back" and num_turns:
            begins = max((self._turns.get(each, []) for each in ("user_message", "item_completed")), key=len)
            self.go_back(self.calls[: (begins[-num_turns:] or [len(self.calls)])[0]])
            for places in self._turns.values():
                del places[-num_turns:]

    def _output(self, moment_ns: int, at: str) -> Call:
        """The round that this output belongs to; what was asked for after the open round's output is of another one."""
        if self._open is not None and self.is_asked(moment_ns):
            self._leave(LABELS["uncounted"])
        if self._open is None:
            self._open = self.begin(moment_ns)
            self._open.at = at
        self._open.end_ns = max(self._open.end_ns, moment_ns)
        return self._open

    def _count(self, payload: Record, moment_ns: int, at: str) -> None:
        info = record_of(payload, "info")
        totals = counts_of(info.get("total_token_usage"), NAMES["totals"])
        usage = counts_of(info.get("last_token_usage"), NAMES["usage"])
        if (totals is not None and totals == self._totals) or (usage is not None and usage == self._recorded):
            self.notes.pass_over("token_count: told again")
            if usage is not None and not any(usage) and self.calls and self._emptied_at is None:
                self._emptied_at = "" if self._is_bare or moment_ns - self._closed_ns[-1] < LATE_NS else at
            self._totals, self._recorded = totals or self._totals, None
            return
        if self._open is None and (usage is None or totals is None or self._totals is None):
            self.notes.pass_over("token_count: without an output before it")
            self._totals = totals
            return
        if usage is None and totals is not None:
            usage = [now - before for now, before in zip(totals, self._totals or [0] * len(totals), strict=True)][:4]
            self.notes.assume("calls whose usage is the step of the running totals")
        if usage is None or min(usage) < 0:
            self.notes.row_broken("a token count without its numbers", at)
            return
        if totals is not None and (self._totals or not (self._fork_of or self.parent)):
            sums = [counts[4] or counts[0] + counts[2] for counts in (totals, self._totals or [0] * 5)]
            self.notes.hold(LABELS["steps"], sums[0] - sums[1], (usage[0], usage[2]))
        self.notes.assume(LABELS["bare"], self._open is None)
        turn, last = self._close(usage, totals or (), moment_ns, at), record_of(info, "last_token_usage")
        turn.total_tokens = tokens_of(last.get("total_tokens")) or None
        if last and last.get("cached_input_tokens") is None:
            turn.prefix_tokens = None
        self._totals = totals

    def _usage_record(self, payload: Record, moment_ns: int, at: str) -> None:
        """The usage of one answer by its id: of the open round, or of one without a row of output, as a compaction."""
        usage, name = counts_of(payload.get("usage"), NAMES["usage"]), text_of(payload, "response_id")
        if usage is None:
            self.notes.row_broken("a token count without its numbers", at)
        elif self._open is None and self.calls and self._counted == usage:
            self.notes.pass_over("token_usage_record: told again")
            self._counted = None
        else:
            self._close(usage, (name,), moment_ns, at)
            self._recorded, self._counted = usage, None

    def _close(self, usage: list[int], totals: Sequence[object], moment_ns: int, at: str) -> Call:
        """The open round, or one of which no row holds the output, is a call of this usage."""
        self._is_bare = self._open is None
        turn = self._open or self._output(moment_ns, at)
        self._open, self._counted, self._recorded, self._emptied_at = None, usage, None, None
        turn.row = -1 if self._ordinal is None else self._ordinal
        self.notes.num_calls += 1
        turn.input_tokens, turn.prefix_tokens, turn.output_tokens, turn.reasoning_tokens = usage
        self._history = hash((self._history, *usage))  # a fork copies counts, and no records of usage
        turn.history = ("codex", self._history)
        turn.identity = ("codex", turn.end_ns, moment_ns, *usage, *totals)
        self._closed_ns.append(moment_ns)
        self.calls.append(turn)
        return turn


def role_of(payload: Record, kind: str, form: str) -> str:
    """What a row is to its session: a role of ``ROLES`` or ``ENDINGS``, "passed" or "unknown"."""
    if kind in ("item_completed", "item_started"):
        return ITEMS.get(text_of(payload, "item", "type"), "unknown")
    names = (f"{form}{kind} {text_of(payload, 'role')}", f"{form}{kind}", kind)
    role = next((ROLES[name] for name in names if name in ROLES), "passed" if kind in PASSED else "unknown")
    if form == "response_item/" and role in ("passed", "unknown"):
        role = next((ENDINGS[end] for end in ENDINGS if kind.endswith(end)), role)
    return "passed" if role == "count" and payload.get("info") is None else role


FORMAT = trace_format(__file__, "codex", reader_of(CodexLog), passed=PASSED, held_to=f"Codex {HELD_TO}")
