"""Rows of a recording as a file, the trace that they become, and the sessions of a plan that are in it whole."""

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
