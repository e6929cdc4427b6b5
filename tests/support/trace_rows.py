"""Rows of a recording as a file, and the trace that they become."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from harness.model.traces.account import ReadOptions
from harness.model.traces.importing import import_trace
from harness.model.traces.recording import TraceFile, read_trace


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
