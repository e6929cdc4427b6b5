"""Codex's session logs (``~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl``) as rounds.

A round closes at a ``token_count`` that follows an output. Reads types, call ids, times and usage counts; no content,
path or command leaves a line.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.traces.form import ReadNotes
from harness.traces.lines import Progress, Record, instant_ns, json_lines, record_of, text_of, tokens_of
from harness.traces.rounds import Round

CALLS = ("function_call", "custom_tool_call", "local_shell_call")
RESULTS = ("function_call_output", "custom_tool_call_output")


def codex_rounds(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Round]:
    """The rounds of each file, one session each."""
    for path in files:
        log = _Log(path.stem, notes)
        for at, record in json_lines(path, notes, progress):
            log.take(record, at)
        yield from log.closed


class _Log:
    """One file, record by record; ``closed``: the rounds so far."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        self._session, self._parent, self._notes = name, "", notes
        self.closed: list[Round] = []
        self._inputs: list[tuple[int, bool]] = []
        self._open: Round | None = None
        self._calls: dict[str, tuple[Round, int]] = {}
        self._is_compacted = False

    def take(self, record: Record, at: str) -> None:
        payload = record_of(record.get("payload"))
        if text_of(record, "type") == "session_meta":
            self._session = text_of(payload, "id") or self._session
            self._parent = text_of(payload, "source", "subagent", "thread_spawn", "parent_thread_id")
            return
        if text_of(record, "type") == "compacted":
            self._is_compacted = True
            return
        moment_ns = instant_ns(record.get("timestamp"))
        if moment_ns is None:
            self._notes.line_broken("a record without its time", at)
            return
        kind = text_of(payload, "type")
        if kind == "user_message":
            self._inputs.append((moment_ns, True))
        elif kind in RESULTS:
            self._result(text_of(payload, "call_id"), moment_ns)
        elif kind in CALLS:
            self._calls[text_of(payload, "call_id")] = (self._output(moment_ns), moment_ns)
        elif kind == "reasoning" or (kind == "message" and text_of(payload, "role") == "assistant"):
            self._output(moment_ns)
        elif kind == "token_count" and self._open is not None and payload.get("info") is not None:
            self._close(record_of(record_of(payload["info"]).get("last_token_usage")), at)

    def _result(self, call: str, moment_ns: int) -> None:
        self._inputs.append((moment_ns, False))
        if call in self._calls:
            one, started_ns = self._calls[call]
            one.tool_spans.append((started_ns, max(moment_ns, started_ns)))

    def _output(self, moment_ns: int) -> Round:
        """The round that this output belongs to: the first output takes the inputs so far."""
        if self._open is None:
            ended_ns = self.closed[-1].end_ns if self.closed else moment_ns
            submitted_ns = max((at for at, _ in self._inputs), default=ended_ns)
            is_human = self._inputs[0][1] if self._inputs else False
            self._open = Round(self._session, submitted_ns, moment_ns, 0, 0, 0, 0, is_human, index=len(self.closed))
            self._open.is_reset, self._is_compacted = self._is_compacted, False
            self._open.parent = self._parent
            self._inputs.clear()
        self._open.end_ns = max(self._open.end_ns, moment_ns)
        return self._open

    def _close(self, usage: Record, at: str) -> None:
        counted = [tokens_of(usage.get(key, 0)) for key in _USAGE]
        one = self._open
        if not usage or None in counted or one is None:
            self._notes.line_broken("a token count without its numbers", at)
            return
        one.input_tokens, one.prefix_tokens, one.output_tokens, hidden = (count or 0 for count in counted)
        one.visible_tokens = max(one.output_tokens - hidden, 0)
        self.closed.append(one)
        self._open = None


_USAGE = ("input_tokens", "cached_input_tokens", "output_tokens", "reasoning_output_tokens")
