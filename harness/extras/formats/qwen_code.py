"""Qwen Code's sessions: rows have the ids and links of Claude Code's, and usage in the words of Gemini's API."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from harness.extras.formats.gemini_cli import set_counts, take_parts
from harness.model.traces.base import by_type, read_tables, trace_format
from harness.model.traces.calls import ATTEMPTS, DECIDED, Call, Log
from harness.model.traces.claude import Chain, ClaudeLog
from harness.model.traces.links import reader_of
from harness.model.traces.values import Record, counts_of, record_of, records_of, text_of

HELD_TO = "0.24.4"
TABLES = read_tables(Path(__file__).with_suffix(".toml"))
PASSED, COUNTS, TOLD = by_type(TABLES["passed"]), TABLES["counts"], TABLES["told"]
COMPRESS, BESIDE = TABLES["names"]["compress"], TABLES["names"]["beside"]


class _QwenChain(Chain):
    kinds = tuple(TABLES["kinds"])
    _told: tuple[Record, int, str] | None = None  # an answer in telemetry whose row has not come, its instant, place
    _untold: list[int] | None = None  # counts of an answer's row whose telemetry has not come
    _failed: tuple[str, int] = ("", -1)  # where an attempt failed last, and behind how many calls
    _called: tuple[str, ...] = ()  # the tools of the last answer, by name

    def log(self) -> Log:
        self._leave()
        return super().log()

    def _leave(self) -> None:
        """An answer that has no row of its own: of another prompt than the conversation's."""
        if self._told is not None:
            self.notes.pass_over(f"ui_telemetry: {PASSED['ui_telemetry']}")
            if self.notes.is_first(text_of(self._told[0], "uuid"), self._told[2]):
                self.notes.leave(BESIDE, self._told[2])
            self._told = None

    def take(self, kind: str, record: Record, moment_ns: int, at: str) -> None:
        parts, event = records_of(record, "message", "parts"), record_of(record, "systemPayload", "uiEvent")
        task = record_of(record, "systemPayload", "backgroundTask")
        self.may_ask = bool(self.parent)  # telemetry says of which tool a person was asked, but not of an agent's own
        if kind == "assistant":
            self._answer(record, parts, moment_ns, at)
        elif kind == "api_response":
            counts = counts_of(event, TOLD.values())
            if counts is not None and counts == self._untold:
                self._untold = None
                self.notes.part()
            else:
                self._leave()
                self._told = record, moment_ns, at
        else:
            self.notes.part()
            if kind == "chat_compression":
                self._compact(at)
            elif kind == "compress":
                self.take_input(moment_ns, is_human=True, is_hint=True)
            elif kind == "api_error":
                self.notes.assume(ATTEMPTS, self.notes.is_first(self.row or at, at))
                self._failed = at, len(self.calls)
            elif kind == "tool_call":  # an agent's tools have their telemetry here too
                self.is_allowed = self.is_allowed or text_of(event, "function_name") in self._called
            elif text_of(record, "subtype") == "notification" and task.get("kind") != "peer":
                self.take_input(moment_ns, is_human=False)
                self.is_woken = True
                name = text_of(task, "toolUseId") if task.get("kind") == "agent" else ""
                self.start(name, f"{self.session}/{text_of(task, 'taskId')}")
            else:
                is_by_program = text_of(record, "subtype") in ("cron", "goal_runtime", "notification")
                if kind == "user" and not is_by_program and self._failed[1] == len(self.calls):
                    self.end_without_row(self._failed[0])  # a person goes on where no attempt succeeded
                take_parts(self, parts, moment_ns, is_human=None if is_by_program else kind == "user")
                is_cancelled = text_of(record, "toolCallResult", "status") == "cancelled"
                self.is_allowed = self.is_allowed or is_cancelled  # by a person, before it ran or as it ran

    def _compact(self, at: str) -> None:
        """The summary has no row but its telemetry's; the next call is made at once, unless a person is asked."""
        usage = {} if self._told is None else record_of(self._told[0], "systemPayload", "uiEvent")
        if self._told is None or not counts_of(usage, TOLD.values()):
            self.compact(at)
            return
        (record, moment_ns, at), self._told = self._told, None
        self._set(self.add(moment_ns, ("qwen-code", text_of(record, "uuid")), at), record, usage, TOLD)
        self.take_input(moment_ns, is_human=False, is_hint=True)
        self.is_compacted = True

    def _set(self, turn: Call, record: Record, usage: Record, names: Mapping[str, str]) -> None:
        set_counts(turn, usage, names)
        turn.provider = text_of(record, "model")
        # A fork begins with copies of its parent's rows.
        turn.fork_of = text_of(record, "forkedFrom", "sessionId")
        turn.is_replay = bool(turn.fork_of)

    def _answer(self, record: Record, parts: list[Record], moment_ns: int, at: str) -> None:
        usage, tools = record_of(record, "usageMetadata"), [record_of(part, "functionCall") for part in parts]
        if not usage and any(tools) and "agentId" in record:
            # A sub-agent's calls of tools have rows of their own, which may be all that there is of an answer.
            turn = (self.calls or [Call(self.session, moment_ns, moment_ns)])[-1]
            if self.is_asked(moment_ns) or not (self.calls or self.lost):
                self.lose((), at)
            else:
                self.notes.part()
        elif not counts_of(usage, COUNTS.values()):
            self.lose(map(usage.get, COUNTS.values()), at)
            return
        else:
            turn = self.add(moment_ns, ("qwen-code", text_of(record, "uuid") or (moment_ns, at)), at)
            self._set(turn, record, usage, COUNTS)
            self._untold = counts_of(usage, COUNTS.values()) if self._told is None else None
            self.notes.part(self._told is not None)
            self._told = None
        turn.answer_characters += sum(len(text_of(part, "text")) for part in parts)
        self._called = tuple(text_of(tool, "name") for tool in tools)
        for tool in filter(None, tools):
            self.call(text_of(tool, "id"), turn, moment_ns, text_of(tool, "name"))
            turn.answer_characters += 0 if self.lost else len(json.dumps(tool.get("args")))


class QwenLog(ClaudeLog):
    """A file of Qwen Code, row by row."""

    program, held_to, passed, conversation = "Qwen Code", HELD_TO, PASSED, _QwenChain

    def kind_of(self, record: Record) -> str:
        kind, more = text_of(record, "type"), text_of(record, "subtype")
        event = record_of(record, "systemPayload", "uiEvent")
        what = text_of(event, "event.name").rpartition(".")[2]
        if what in ("api_response", "api_error") and not text_of(event, "subagent_id"):
            return what
        if what == "tool_call" and text_of(event, "decision") in DECIDED:
            return what
        if [more, *map(record_of(record, "systemPayload").get, ("phase", "rawCommand"))] == COMPRESS:
            return "compress"
        return more if kind == "system" and more else kind


FORMAT = trace_format(__file__, "qwen-code", reader_of(QwenLog), passed=PASSED, held_to=f"Qwen Code {HELD_TO}")
