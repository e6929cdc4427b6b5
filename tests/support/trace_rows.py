"""Rows of recordings, their files, and the traces that they become.

In rows of agents every text that a person, a tool or a path could have is one secret.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.model.plan.model import Plan, RequestPlan
from harness.model.traces.account import ReadOptions
from harness.model.traces.importing import import_trace
from harness.model.traces.recording import RecordedRequest, TraceFile, read_trace

SECRET = "s3cr3t"


def at(seconds: float) -> str:
    return f"2026-03-01T10:{int(seconds) // 60:02d}:{seconds % 60:06.3f}Z"


def assistant(name: str, seconds: float, usage: tuple[int, int, int, int], *parts: dict[str, Any], **more: Any) -> Any:
    keys = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens", "output_tokens")
    message = {"id": name, "model": "m", "content": list(parts), "usage": dict(zip(keys, usage, strict=True))}
    return {"type": "assistant", "sessionId": SECRET, "timestamp": at(seconds), "message": message, **more}


def text() -> dict[str, Any]:
    return {"type": "text", "text": SECRET}


def tool(call: str) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": "Task", "input": {"command": SECRET}}


def user(seconds: float, content: Any = SECRET, **more: Any) -> dict[str, Any]:
    return {
        "type": "user",
        "sessionId": SECRET,
        "timestamp": at(seconds),
        "cwd": f"/home/{SECRET}",
        "message": {"role": "user", "content": content},
        **more,
    }


def result(call: str, seconds: float, agent: str = "") -> dict[str, Any]:
    more = {"toolUseResult": {"agentId": agent, "stdout": SECRET}} if agent else {}
    return user(seconds, [{"type": "tool_result", "tool_use_id": call, "content": SECRET}], **more)


def written(folder: Path, rows: Iterable[Any], name: str = "in") -> Path:
    """A file of JSON lines; texts are lines as they are. A document is one line."""
    path = folder / f"{name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def imported(*files: Path, kind: str = "auto", **options: Any) -> TraceFile:
    """The trace, which is kept beside the first file, in ``out.jsonl``."""
    import_trace(files, files[0].parent / "out.jsonl", name="t", kind=kind, options=ReadOptions(**options))
    return read_trace(files[0].parent / "out.jsonl")


def trace_of(folder: Path, *files: Iterable[Any], kind: str = "auto", **options: Any) -> TraceFile:
    """The trace of files of these rows each."""
    paths = [written(folder, rows, f"in-{place}") for place, rows in enumerate(files)]
    return imported(*paths, kind=kind, **options)


def imported_as_of_agents(*files: Path) -> TraceFile:
    """The trace of sessions that a server recorded, without the mark of the harness, which played them for agents."""
    for file in files:
        file.write_text(file.read_text().replace(',"harness":1', ""))
    return imported(*files)


def num_whole(plan: Plan, trace: TraceFile) -> int:
    """Planned sessions that were imported with all turns and lengths."""
    planned = Counter(tuple(map(_lengths, session.requests)) for session in plan.sessions)
    return (planned & Counter(tuple(map(_lengths, each.requests)) for each in trace.recordings)).total()


def _lengths(request: RequestPlan | RecordedRequest) -> tuple[int, int, int]:
    return request.prompt_tokens, request.keep_tokens, request.generate_tokens
