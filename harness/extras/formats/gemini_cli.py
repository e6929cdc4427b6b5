"""Gemini CLI's sessions: ``~/.gemini/tmp/PROJECT/chats/*.jsonl``; a message comes again under its id as it grows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from harness.model.traces.account import ReadNotes
from harness.model.traces.base import by_type, read_tables, trace_format
from harness.model.traces.calls import UNCOUNTED, UNTIMED, AgentLog, Call, Conversation, Log
from harness.model.traces.links import reader_of
from harness.model.traces.values import Record, counts_of, first_of, instant_ns, list_of, record_of, records_of, text_of

TABLES = read_tables(Path(__file__).with_suffix(".toml"))
PASSED, NAMES = by_type(TABLES["passed"]), TABLES["names"]


class GeminiLog(AgentLog):
    """A file of Gemini CLI, or the document that older releases wrote. Its first row says which session it holds."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        super().__init__(name, notes)
        self._session = _Session(name, notes)
        self._sessions = {"": self._session}

    def logs(self) -> Iterable[Log]:
        return [session.log() for session in self._sessions.values()]

    def take(self, record: Record, at: str) -> None:
        if "projectHash" in record:  # it comes again when a session is resumed
            name = text_of(record, "sessionId")
            self._session = self._sessions.setdefault(name, _Session(name or self.name, self.notes))
            # A sub-agent lies in a folder of its parent's id.
            self._session.parent = self.folder if text_of(record, "kind") == "subagent" else ""
        if "messages" in record and not isinstance(record["messages"], list):
            self.notes.row_broken("a session whose messages are no list", at)
        elif messages := list_of(record, "messages"):
            self.notes.num_rows += len(messages) - 1
            for place, message in enumerate(map(record_of, messages)):
                self._session.take(message, f"{at}, message {place}")
        elif record.keys() & {"projectHash", "$set", "$rewindTo"}:
            self._session.take_state(record_of(record, "$set"), text_of(record, "$rewindTo"), at)
        else:
            self._session.take(record, at)


class _Session(Conversation):
    """The messages of one session."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        super().__init__(name, notes)
        self._answers: dict[str, Call] = {}
        self._uncounted: dict[str, str] = {}  # answers without counts so far, and their places
        self._said: list[str] = []
        self._ended: set[str] = set()
        self._is_refused = False  # no tool of the last answer ran: the model is not asked with their results
        self._moments: dict[str, int] = {}  # of messages, as they were first written

    def take_state(self, state: Record, rewound_to: str, at: str) -> None:
        """What the conversation holds from now on. A list without an answer that came before is a compaction."""
        if rewound_to and rewound_to not in self._said:
            self.row_broken("a way back to a message that is not there", at)
            return
        self.notes.pass_over(f"state: {PASSED['state']}")
        kept = {text_of(message, "id") for message in list_of(state, "messages")}
        gone = [name for name in self._said if name not in kept] if len(kept) > 1 else []
        # All after some message: a turn that was cancelled, or failed, is taken back.
        if rewound_to or (0 < len(gone) < len(self._said) and gone == self._said[-len(gone) :]):
            if gone:
                self.end_without_row(at)
            del self._said[self._said.index(rewound_to or gone[0]) :]
            self.go_back([call for name in self._said if (call := self._answers.get(name))])
        elif any(map(self._answers.get, gone)):
            self.compact(at)
            self._said = [name for name in self._said if name in kept]

    def take(self, message: Record, at: str) -> None:
        """Read one message."""
        kind, name, told_ns = text_of(message, "type"), text_of(message, "id"), instant_ns(message.get("timestamp"))
        if told_ns is not None and (name or at) not in self._moments:
            self._moments[name or at] = self.moved_ns(told_ns)
        moment_ns = self._moments.get(name or at, 0)
        parts = list_of(message, "content") or [{"text": text_of(message, "content")}]
        has_content = all(part if isinstance(part, str) else any(record_of(part).values()) for part in parts)
        self.num_rows += 1
        if kind == "gemini" and isinstance(message.get("content"), list) and not first_of(message, "model", "tokens"):
            kind = "added"  # an answer of a model names it
        if kind == "gemini" and name and moment_ns:
            self._answer(message, name, moment_ns, at)
        elif kind in ("gemini", "user"):
            if name in self._said:
                self.notes.leave("rows that their own file holds already", at, 1)
            elif kind == "gemini" or not moment_ns or not has_content:
                self.row_broken("a message without its id, time or content", at)
            else:
                self._said += [name] * bool(name)
                self._is_refused = False
                take_parts(self, parts, moment_ns, is_human=True)
                self.notes.part()
        elif not self.notes.passes(kind, PASSED):
            self.row_unknown(f"message {kind}", at)
        elif kind == "error" or (text_of(message, "content") == NAMES["cancelled"] and not self._is_refused):
            self.end_without_row(at)
        self.look(message)

    def _answer(self, message: Record, name: str, moment_ns: int, at: str) -> None:
        tokens, tools = record_of(message, "tokens"), records_of(message, "toolCalls")
        turn = self._answers.get(name)
        # An editor's session has one message without counts for the tools of all its answers.
        is_holder = bool(self.calls and tools) and not (turn or text_of(message, "content"))
        is_holder = is_holder and (name in self._said or not (name in self._uncounted or self.is_asked(moment_ns)))
        counts = counts_of(tokens, NAMES["counts"]) if turn is None and tokens else []
        if counts is None:
            self.row_broken("an answer with a count that is no number of tokens", at)
            return
        if counts:
            self._uncounted.pop(name, None)
            self._leave_uncounted()
            turn = self._answers[name] = self.add(moment_ns, ("gemini-cli", name), at)
            self._said.append(name)
            set_counts(turn, tokens, NAMES["counts"])
            turn.has_reasoning_apart, turn.provider = True, text_of(message, "model")
            turn.answer_characters = len(text_of(message, "content"))
        else:
            self.notes.part()
        if is_holder and name not in self._said:
            self._said.append(name)
        elif not (turn or is_holder):
            self._uncounted.setdefault(name, at)
        for tool in tools if self.calls else ():
            self._take_tool(turn or self.calls[-1], tool, is_counted=bool(turn or is_holder))
        self._is_refused = bool(tools) and all(text_of(tool, "status") == "cancelled" for tool in tools)

    def _leave_uncounted(self) -> None:
        """Answers whose counts did not come are left out, with what they were asked."""
        for name, at in self._uncounted.items():
            self.notes.leave("answers without token counts", at)
            self.skip(UNCOUNTED, self._moments[name])
        self._uncounted.clear()

    def _take_tool(self, turn: Call, tool: Record, *, is_counted: bool) -> None:
        if (name := text_of(tool, "id")) not in self._tools:
            self.call(name, turn, turn.end_ns, text_of(tool, "name"))
            turn.answer_characters += len(json.dumps(tool.get("args"))) * is_counted
        ended_ns = instant_ns(tool.get("timestamp"))
        if ended_ns is not None and name not in self._ended and text_of(tool, "status") in NAMES["ended"]:
            self._ended.add(name)  # older releases write no row of its result
            ended_ns = self.moved_ns(ended_ns, turn.end_ns)
            said = (text_of(part, "functionResponse", "response", "error") for part in records_of(tool, "result"))
            self.result(name, ended_ns, "".join(said))
            self.is_allowed |= text_of(tool, "status") == "cancelled"  # a person did so, before it ran or as it ran
        if child := text_of(tool, "agentId"):
            turn.children[child] = UNTIMED if ended_ns is None else ended_ns

    def log(self) -> Log:
        """The calls so far."""
        self._leave_uncounted()
        return self.known()


def take_parts(conversation: Conversation, parts: Sequence[object], moment_ns: int, *, is_human: bool | None) -> None:
    """What a message's parts say to the model: results of tools, else what is_human tells."""
    found = (record_of(part).get("functionResponse") for part in parts)
    results = [record_of(each) for each in found if each is not None]
    for each in results:
        conversation.result(text_of(each, "id"), moment_ns, text_of(each, "response", "error"))
    if not results:
        conversation.take_input(moment_ns, is_human=is_human, said=list(parts))


def set_counts(turn: Call, usage: Record, names: Mapping[str, str]) -> None:
    """The counts of a call, from a usage object by the names of these."""
    counts = dict(zip(names, counts_of(usage, names.values()) or [0] * len(names), strict=True))
    turn.input_tokens, turn.output_tokens = counts["input"] + counts["tool"], counts["output"]
    turn.reasoning_tokens, turn.total_tokens = counts["thoughts"], counts["total"] or None
    turn.prefix_tokens = None if usage.get(names["cached"]) is None else counts["cached"]


FORMAT = trace_format(__file__, "gemini-cli", reader_of(GeminiLog), passed=PASSED)
