"""Codex's session logs (``~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl``) as rounds.

A round closes at a ``token_count`` that follows an output. Reads types, call ids, times and usage counts; no content,
path or command leaves a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.traces.base import Progress, Record, TraceFormat, counts_of, instant_ns, json_lines, record_of, text_of
from harness.traces.recording import ReadNotes
from harness.traces.rounds import Conversation, Round, through_rounds

CALLS = ("function_call", "custom_tool_call", "local_shell_call")
RESULTS = ("function_call_output", "custom_tool_call_output")


USAGE = ("input_tokens", "cached_input_tokens", "output_tokens", "reasoning_output_tokens")


def codex_rounds(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Round]:
    """The rounds of each file, one session each."""
    for path in files:
        log = _Log(path.stem, notes)
        for at, record in json_lines(path, notes, progress):
            log.take(record, at)
        yield from log.rounds


class _Log(Conversation):
    """One file, record by record; ``rounds``: those that are closed."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        super().__init__(name)
        self._notes = notes
        self._open: Round | None = None

    def take(self, record: Record, at: str) -> None:
        payload = record_of(record.get("payload"))
        if text_of(record, "type") == "session_meta":
            self.session = text_of(payload, "id") or self.session
            self.parent = text_of(payload, "source", "subagent", "thread_spawn", "parent_thread_id")
            return
        if text_of(record, "type") == "compacted":
            self.is_compacted = True
            return
        moment_ns = instant_ns(record.get("timestamp"))
        if moment_ns is None:
            self._notes.line_broken("a record without its time", at)
            return
        self._event(payload, moment_ns, at)

    def _event(self, payload: Record, moment_ns: int, at: str) -> None:
        kind, call = text_of(payload, "type"), text_of(payload, "call_id")
        if kind == "user_message":
            self.take_input(moment_ns, is_human=True)
        elif kind in RESULTS:
            self.take_input(moment_ns, is_human=False)
            self.result(call, moment_ns)
        elif kind in CALLS:
            self.call(call, self._output(moment_ns), moment_ns)
        elif kind == "reasoning" or (kind == "message" and text_of(payload, "role") == "assistant"):
            self._output(moment_ns)
        elif kind == "token_count" and self._open is not None and payload.get("info") is not None:
            self._close(self._open, counts_of(record_of(payload["info"]).get("last_token_usage"), USAGE), at)

    def _output(self, moment_ns: int) -> Round:
        """The round that this output belongs to."""
        if self._open is None:
            self._open = self.begin(moment_ns)
        self._open.end_ns = max(self._open.end_ns, moment_ns)
        return self._open

    def _close(self, turn: Round, usage: list[int] | None, at: str) -> None:
        if usage is None:
            self._notes.line_broken("a token count without its numbers", at)
            return
        turn.input_tokens, turn.prefix_tokens, turn.output_tokens, hidden = usage
        turn.visible_tokens = max(turn.output_tokens - hidden, 0)
        self.rounds.append(turn)
        self._open = None


FORMAT = TraceFormat(
    "Codex's rollout logs", through_rounds(codex_rounds), (frozenset({"timestamp", "type", "payload"}),)
)
