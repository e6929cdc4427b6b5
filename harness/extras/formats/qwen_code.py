"""Qwen Code's sessions: ``~/.qwen/projects/PROJECT/chats/*.jsonl``, and ``subagents/SESSION/agent-*.jsonl``.

Its rows have the ids and links of Claude Code's, and usage in the words of Gemini's API. As release 0.24 writes them.
Only types, ids, times, lengths and counts are read.
"""

from __future__ import annotations

import json

from harness.extras.formats.gemini_cli import results_of, set_counts
from harness.model.traces.base import Record, by_type, counts_of, list_of, record_of, text_of, trace_format
from harness.model.traces.claude import Chain, ClaudeLog
from harness.model.traces.links import reader_of

HELD_TO = "0.24.4"
STATE = """attribution_snapshot file_history_snapshot session_artifact_event session_artifact_snapshot session_model
session_source session_sources_snapshot parent_session branch_checkpoint goal_state goal_turn_end custom_title
turn_result user_text_elements rewind"""
PASSED = by_type(
    {
        "state of the program, or of files": STATE.split(),
        "calls and tools as its telemetry counts them: they have rows of their own": ["ui_telemetry"],
        "what a row beside it says too": ["slash_command", "at_command", "omni_recall", "background_task_completed"],
        "how a sub-agent began": ["agent_bootstrap", "agent_launch_prompt", "agent_retry", "agent_session_ready"],
    }
)
COUNTS = {
    "input": "promptTokenCount",
    "output": "candidatesTokenCount",
    "thoughts": "thoughtsTokenCount",
    "cached": "cachedContentTokenCount",
    "tool": "toolUsePromptTokenCount",
    "total": "totalTokenCount",
}
NEWS = ("notification", "cron", "goal_runtime")


class QwenLog(ClaudeLog):
    """A file of Qwen Code, row by row."""

    program, held_to, passed = "Qwen Code", HELD_TO, PASSED

    def new_chain(self, session: str) -> Chain:
        return _QwenChain(session, self.notes)

    def kind_of(self, record: Record) -> str:
        kind, more = text_of(record, "type"), text_of(record, "subtype")
        return more if kind == "system" and more else kind


class _QwenChain(Chain):
    kinds = ("user", "assistant", "tool_result", "chat_compression")
    _why_unknown = ""

    def take(self, kind: str, record: Record, moment_ns: int, at: str) -> None:
        parts = list(map(record_of, list_of(record_of(record.get("message")).get("parts"))))
        if kind == "assistant":
            self._answer(record, parts, moment_ns, at)
            return
        self.notes.part()
        if kind == "chat_compression":
            self.compact(at)
        elif text_of(record, "subtype") in NEWS:
            self.take_news(moment_ns)
        else:
            self.take_input(moment_ns, is_human=kind == "user")
            for name in results_of(parts):
                self.result(name, moment_ns)

    def _answer(self, record: Record, parts: list[Record], moment_ns: int, at: str) -> None:
        usage, tools = record_of(record.get("usageMetadata")), [record_of(part.get("functionCall")) for part in parts]
        if not usage and any(tools) and self.calls and "agentId" in record:
            turn = self.calls[-1]  # a sub-agent's calls of tools have rows of their own
            self.notes.part()
        elif not counts_of(usage, COUNTS.values()):
            self._why_unknown = self.notes.not_counted(usage, at)
            return
        else:
            turn = self.add(moment_ns, ("qwen-code", text_of(record, "uuid") or (moment_ns, at)), at)
            set_counts(turn, usage, COUNTS)
            turn.provider = text_of(record, "model")
            # A fork begins with copies of its parent's rows.
            turn.fork_of = text_of(record, "forkedFrom", "sessionId")
            turn.is_replay = bool(turn.fork_of)
            turn.unknown_wait, self._why_unknown = self._why_unknown or turn.unknown_wait, ""
        turn.answer_characters += sum(len(text_of(part, "text")) for part in parts)
        for tool in filter(None, tools):
            self.call(text_of(tool, "id"), turn, moment_ns, text_of(tool, "name"))
            turn.answer_characters += len(json.dumps(tool.get("args")))


FORMAT = trace_format(
    __file__,
    "qwen-code",
    reader_of(QwenLog),
    keys=tuple(
        frozenset({"uuid", "sessionId", name})
        for name in ("usageMetadata", "provenance", "systemPayload", "toolCallResult", "contextWindowSize")
    ),
    is_special=True,
    passed=PASSED,
    held_to=f"Qwen Code {HELD_TO}",
)
