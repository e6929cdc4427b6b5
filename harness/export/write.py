"""Writes exported runs to a folder. A file that is there is kept, unless it may be replaced."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.errors import SpecError
from harness.export.formats import Format
from harness.plan.files import write_atomic
from harness.records import SealedRun


def write_runs(runs: Sequence[SealedRun], form: Format, folder: Path, *, may_replace: bool) -> list[Path]:
    """The files of the format, written below ``folder``; SpecError before the first where one is there already."""
    paths = [folder / name for name in form.names(runs)]
    there = [path for path in paths if path.exists()]
    if there and not may_replace:
        more = f" and {len(there) - 1} more" if len(there) > 1 else ""
        raise SpecError(
            f"is there already{more}", where=str(there[0]), hint="Replace with --force, or name another folder with -o"
        )
    for path, content in zip(paths, form.files(runs), strict=True):
        write_atomic(path, iter([content]), what="the export")
    return paths
