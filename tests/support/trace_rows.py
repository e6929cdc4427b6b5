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
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def imported(*files: Path, **options: Any) -> TraceFile:
    """The trace, which is kept beside the first file, in ``out.jsonl``."""
    import_trace(files, files[0].parent / "out.jsonl", name="t", options=ReadOptions(**options))
    return read_trace(files[0].parent / "out.jsonl")
