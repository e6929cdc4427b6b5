"""A run whose manifest lists what lies in a folder, as if it had been sealed so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from harness.measure.records import layout
from harness.measure.records.disk import known_entry
from harness.measure.records.run import SealedRun


def as_sealed(run: SealedRun, folder: Path) -> SealedRun:
    """``run`` with the files of ``folder`` for its own; nothing is written."""
    names = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    listed = [name for name in names if name != layout.MANIFEST and not name.startswith(layout.DERIVED)]
    files = {name: known_entry(folder / name) for name in listed}
    return replace(run, path=folder, manifest=run.manifest.model_copy(update={"files": files}))
