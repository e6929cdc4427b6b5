"""Codex's logs: ``~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl``. A round closes at a ``token_count`` after an output.

A forked or sub-agent session's file begins with its parent's rows, stamped anew; ``session_meta`` may name the parent
(``forked_from_id``, ``parent_thread_id``, ``source.subagent.thread_spawn``). Only types, ids, times and usage counts
are read; no content, path or command leaves a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from harness.model.traces.base import Record, TraceFormat, counts_of, instant_ns, record_of, text_of
from harness.model.traces.recording import ReadNotes
from harness.model.traces.rounds import (
    BURST_NS,
    ENDS_ROUND,
    NO_PROMPT,
    REPLAYED,
    AgentLog,
    Conversation,
    Log,
    Round,
    logs_of,
    mark_replay,
    through_rounds,
)

CALLS = ("function_call", "custom_tool_call", "local_shell_call")
RESULTS = ("function_call_output", "custom_tool_call_output")
USAGE = ("input_tokens", "cached_input_tokens", "output_tokens", "reasoning_output_tokens")
TOTALS = (*USAGE, "total_tokens")
FORK_FIELDS = (("forked_from_id",), ("source", "subagent", "thread_spawn", "forked_from_id"))
PARENT_FIELDS = (("source", "subagent", "thread_spawn", "parent_thread_id"), ("parent_thread_id",))


class CodexLog(AgentLog):
    """A file of Codex, record by record. A file that was merged of several holds a session after each first record."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        super().__init__(name, notes)
        self._sessions = [_Session(name, notes)]

    def logs(self) -> Iterable[Log]:
        return [session.log() for session in self._sessions]

    def time_rank(self, record: Record) -> int:
        kind = text_of(record, "payload", "type")
        if text_of(record, "type") == "session_meta":
            return -1
        return ENDS_ROUND if kind == "token_count" else 0 if kind == "user_message" or kind in RESULTS else 1

    def take(self, record: Record, at: str) -> None:
        moment_ns = instant_ns(record.get("timestamp"))
        is_meta = text_of(record, "type") == "session_meta"
        if moment_ns is not None and not is_meta:
            self.came_at(moment_ns)
        if is_meta and self._sessions[-1].ended_before(text_of(record, "payload", "id"), moment_ns):
            self.notes.assume("sessions that follow another one in its file: taken as sessions of their own")
            self._sessions.append(_Session(self.name, self.notes))
        self._sessions[-1].take(record, moment_ns, at)


class _Session(Conversation):
    """The records of one session."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        super().__init__(name)
        self.notes = notes
        self._open: Round | None = None
        self._fork_of = ""
        self._began_ns: int | None = None
        self._has_meta = False
        self._closed_ns: list[int] = []
        self._totals: list[int] | None = None
        self._history = hash(())

    def ended_before(self, name: str, moment_ns: int | None) -> bool:
        """Whether a session_meta of this id begins another session: what a fork repeats comes at its start."""
        if not self._has_meta or name == self.session or moment_ns is None or self._began_ns is None:
            return False
        return moment_ns - self._began_ns >= BURST_NS and bool(self.rounds)

    def log(self) -> Log:
        """The rounds so far."""
        if self._open is not None:
            self.notes.drop("calls without a token count: interrupted, or the file is cut off", self._open.at)
        mark_replay(self.rounds, self._closed_ns, self._began_ns or 0, is_fork=bool(self._fork_of))
        for turn in self.rounds:
            turn.fork_of = self._fork_of or self.parent
        return self.rounds

    def take(self, record: Record, moment_ns: int | None, at: str) -> None:
        """Read one record."""
        payload = record_of(record.get("payload"))
        if text_of(record, "type") == "session_meta":
            self._began_ns = moment_ns if self._began_ns is None else self._began_ns
            self._meta(payload)
        elif text_of(record, "type") == "compacted":
            self.is_compacted = True
        elif moment_ns is None:
            self.notes.line_broken("a record without its time", at)
        else:
            self._began_ns = moment_ns if self._began_ns is None else self._began_ns
            self._end_replay(moment_ns, self._began_ns)
            self._event(payload, moment_ns, at)

    def _meta(self, payload: Record) -> None:
        """A file's first session_meta says what it is; one with another id comes from a session that it repeats."""
        name = text_of(payload, "id")
        if self._has_meta:
            self._fork_of = self._fork_of or (name if name != self.session else "")
            return
        self._has_meta = True
        self.session = name or self.session
        self._fork_of = next((fork for path in FORK_FIELDS if (fork := text_of(payload, *path))), "")
        self.parent = next((above for path in PARENT_FIELDS if (above := text_of(payload, *path))), "")

    def _end_replay(self, moment_ns: int, began_ns: int) -> None:
        """Close what a fork repeated without a token count, so that its own first call does not take it over."""
        opened = self._open
        if opened is not None and self._fork_of and opened.end_ns - began_ns < BURST_NS <= moment_ns - began_ns:
            self.notes.drop(REPLAYED, opened.at)
            self._open = None

    def _event(self, payload: Record, moment_ns: int, at: str) -> None:
        kind, call = text_of(payload, "type"), text_of(payload, "call_id")
        if kind == "user_message":
            self.take_input(moment_ns, is_human=True)
        elif kind in RESULTS:
            self.take_input(moment_ns, is_human=False)
            self.result(call, moment_ns)
        elif kind in CALLS:
            self.call(call, self._output(moment_ns, at), moment_ns)
        elif kind == "reasoning" or (kind == "message" and text_of(payload, "role") == "assistant"):
            self._output(moment_ns, at)
        elif kind == "token_count" and payload.get("info") is not None:
            self._count(record_of(payload["info"]), moment_ns, at)

    def _output(self, moment_ns: int, at: str) -> Round:
        """The round that this output belongs to."""
        if self._open is None:
            self._open = self.begin(moment_ns)
            self._open.at = at
        self._open.end_ns = max(self._open.end_ns, moment_ns)
        return self._open

    def _count(self, info: Record, moment_ns: int, at: str) -> None:
        totals, usage = counts_of(info.get("total_token_usage"), TOTALS), counts_of(info.get("last_token_usage"), USAGE)
        if totals is not None and totals == self._totals:
            return  # told again, with new rate limits
        if self._open is None:
            is_call = totals is not None and self._totals is not None
            self.notes.assume("token counts without an output, as of a compaction: no request is made of them", is_call)
            self._totals = totals
            return
        if usage is None and totals is not None:
            usage = [now - before for now, before in zip(totals, self._totals or [0] * len(totals), strict=True)][:4]
            self.notes.assume("calls whose usage is the step of the running totals")
        if usage is None or min(usage) < 0:
            self.notes.line_broken("a token count without its numbers", at)
            return
        self._check_totals(totals, usage)
        if usage[0]:
            self._close(self._open, usage, totals or (), moment_ns)
        else:
            self.notes.drop(NO_PROMPT, at)
        self._totals, self._open = totals, None

    def _check_totals(self, totals: list[int] | None, usage: list[int]) -> None:
        if totals is None or (not self._totals and (self._fork_of or self.parent)):
            return
        sums = [counts[4] or counts[0] + counts[2] for counts in (totals, self._totals or [0] * 5)]
        if sums[0] - sums[1] != usage[0] + usage[2]:
            self.notes.assume("steps of the running totals that are not the next call: calls are missing or changed")

    def _close(self, turn: Round, usage: list[int], totals: Sequence[int], moment_ns: int) -> None:
        turn.input_tokens, turn.prefix_tokens, turn.output_tokens, hidden = usage
        turn.visible_tokens = max(turn.output_tokens - hidden, 0)
        self._history = hash((self._history, *usage, *totals))
        turn.history = ("codex", self._history)
        turn.identity = ("codex", turn.end_ns, moment_ns, *usage, *totals)
        self._closed_ns.append(moment_ns)
        self.rounds.append(turn)


codex_logs = partial(logs_of, CodexLog)
FORMAT = TraceFormat(
    "Codex's rollout logs",
    through_rounds(codex_logs),
    (
        "a call stands in one file: a fork or a sub-agent begins with its parent's calls, stamped anew; those whose "
        "usage counts and running totals equal the parent's from its start are dropped and counted, and the fork goes "
        "on from the parent's call",
        "the parent's file is there: a burst of calls at the start of a fork's file is dropped and counted as well",
        "a token_count is a new call: one whose running total did not change is passed over",
        "the running totals are the calls: a step that is not the next call is labelled",
        "rows come in order of time: a file out of order is sorted, and labelled",
        "every call has a token count: one without is dropped and counted",
    ),
    (frozenset({"timestamp", "type", "payload"}),),
)
