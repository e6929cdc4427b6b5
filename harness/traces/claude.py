"""Claude Code's session logs (``~/.claude/projects/<project>/*.jsonl`` and ``subagents/agent-*.jsonl``) as rounds.

Reads types, ids, times, tool results' ids and usage counts; no content, path or command leaves a line. Rows of one
assistant message share its id and repeat its usage.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.traces.form import ReadNotes
from harness.traces.lines import (
    Progress,
    Record,
    instant_ns,
    json_lines,
    list_of,
    record_of,
    text_of,
    tokens_of,
)
from harness.traces.rounds import Round

SYNTHETIC = "<synthetic>"
OUTPUTS = ("text", "thinking", "redacted_thinking", "tool_use")


def claude_rounds(files: Iterable[Path], notes: ReadNotes, progress: Progress | None = None) -> Iterator[Round]:
    """The rounds of each file, side chains as sessions of their own."""
    for path in files:
        log = _Log(path.stem, notes)
        for at, record in json_lines(path, notes, progress):
            log.take(record, at)
        yield from log.rounds()


class _Log:
    """One file, row by row."""

    def __init__(self, name: str, notes: ReadNotes) -> None:
        self._name, self._notes = name, notes
        self._chains: dict[str, _Chain] = {}
        self._side_roots: dict[str, str] = {}

    def rounds(self) -> Iterator[Round]:
        for chain in self._chains.values():
            yield from chain.rounds()

    def take(self, record: Record, at: str) -> None:
        kind = text_of(record, "type")
        is_boundary = kind == "system" and text_of(record, "subtype") == "compact_boundary"
        if kind not in ("user", "assistant") and not is_boundary:
            return
        moment_ns = instant_ns(record.get("timestamp"))
        if moment_ns is None:
            self._notes.line_broken("a row without its time", at)
            return
        session = self._session(record)
        chain = self._chains.setdefault(session, _Chain(session))
        if is_boundary:
            chain.compact()
        elif kind == "user":
            chain.user(record, moment_ns, text_of(record, "sessionId") or self._name)
        elif text_of(record, "message", "model") != SYNTHETIC and not chain.assistant(record, moment_ns):
            self._notes.line_broken("an assistant row without its id or usage", at)

    def _session(self, record: Record) -> str:
        """The conversation that a row belongs to: the session, a sub-agent of it, or a side chain by its first row."""
        session = text_of(record, "sessionId") or self._name
        if record.get("isSidechain") is not True:
            return session
        if agent := text_of(record, "agentId"):
            return agent_session(session, agent)
        own = text_of(record, "uuid")
        root = self._side_roots.get(text_of(record, "parentUuid"), own)
        self._side_roots[own] = root
        self._notes.labels.add("side chains without a link run as sessions of their own")
        return agent_session(session, root)


def agent_session(session: str, agent: str) -> str:
    """The name of a sub-agent's conversation."""
    return f"{session}/{agent}"


class _Chain:
    """One conversation: its rounds by message id, and the inputs since the last one began."""

    def __init__(self, session: str) -> None:
        self._session = session
        self._rounds: dict[str, Round] = {}
        self._usage: dict[str, int] = {}
        self._tools: dict[str, tuple[Round, int]] = {}
        self._inputs: list[tuple[int, bool]] = []
        self._is_compacted = False

    def rounds(self) -> Iterator[Round]:
        yield from self._rounds.values()

    def compact(self) -> None:
        self._is_compacted = True

    def user(self, record: Record, moment_ns: int, session: str) -> None:
        if record.get("isMeta") is True:
            return
        content = record_of(record.get("message")).get("content")
        results = [part for part in map(record_of, list_of(content)) if text_of(part, "type") == "tool_result"]
        self._inputs.append((moment_ns, not results))
        for part in results:
            round_and_start = self._tools.get(text_of(part, "tool_use_id"))
            if round_and_start is None:
                continue
            one, started_ns = round_and_start
            one.tool_spans.append((started_ns, max(moment_ns, started_ns)))
            if agent := text_of(record, "toolUseResult", "agentId"):
                one.children.append(agent_session(session, agent))

    def assistant(self, record: Record, moment_ns: int) -> bool:
        message = record_of(record.get("message"))
        usage = record_of(message.get("usage"))
        counted = [tokens_of(usage.get(key, 0)) for key in _USAGE]
        name = text_of(message, "id")
        if not name or not usage or None in counted:
            return False
        fresh, created, cached, output = (count or 0 for count in counted)
        one = self._rounds.get(name)
        if one is None:
            one = self._rounds[name] = self._begin(moment_ns)
        # Usage repeats with every block of the message; the last one counts the whole answer.
        if output >= self._usage.get(name, -1):
            self._usage[name] = output
            one.input_tokens, one.prefix_tokens = fresh + created + cached, cached
            one.output_tokens = one.visible_tokens = output
        parts = [record_of(part) for part in list_of(message.get("content"))]
        if any(text_of(part, "type") in OUTPUTS for part in parts):
            one.end_ns = max(one.end_ns, moment_ns)
        for part in parts:
            if text_of(part, "type") == "tool_use":
                self._tools[text_of(part, "id")] = (one, moment_ns)
        return True

    def _begin(self, moment_ns: int) -> Round:
        ended_ns = next(reversed(self._rounds.values())).end_ns if self._rounds else moment_ns
        submitted_ns = max((at for at, _ in self._inputs), default=ended_ns)
        is_human = self._inputs[0][1] if self._inputs else False
        one = Round(self._session, submitted_ns, moment_ns, 0, 0, 0, 0, is_human, index=len(self._rounds))
        one.is_reset, self._is_compacted = self._is_compacted, False
        self._inputs.clear()
        return one


_USAGE = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
