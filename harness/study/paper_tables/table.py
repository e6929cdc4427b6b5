"""One table of the paper: how it is made, and what it says where its runs are not there.

Cells are laid out and rounded by its builder; whether an NPU was measured stands in its notes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.kinds import kind_of_run
from harness.study.paper_tables.source import NotRunError, Source


@dataclass(frozen=True, slots=True)
class PaperTable:
    """One table. number: as the paper counts it, "XII" or "S4". missing: what to run where there is nothing to show.

    notes: what a reader must know, first of all whether an NPU was measured.
    """

    number: str
    caption: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()
    missing: str = ""


Rows = Sequence[Sequence[str]]
Builder = Callable[[Source], Rows]


@dataclass(frozen=True, slots=True)
class TableSpec:
    """How one table is made. experiments: whose runs it shows, for the note about the backend. remark: a note that
    depends on the runs.
    """

    number: str
    caption: str
    columns: tuple[str, ...]
    build: Builder
    experiments: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remark: Callable[[Source], str] | None = None


def make_table(spec: TableSpec, source: Source) -> PaperTable:
    """One table; where its runs are missing, an empty one that says what to run."""
    try:
        rows = tuple(tuple(row) for row in spec.build(source))
    except NotRunError as missing:
        return PaperTable(spec.number, spec.caption, spec.columns, (), (), missing.command)
    remarks = () if spec.remark is None else (spec.remark(source),)
    notes = (*_backend_notes(spec, source), *remarks, *spec.notes)
    if not rows:
        return PaperTable(spec.number, spec.caption, spec.columns, (), (*notes, "the runs hold nothing that it shows"))
    return PaperTable(spec.number, spec.caption, spec.columns, rows, notes)


def _backend_notes(spec: TableSpec, source: Source) -> list[str]:
    runs = [run for experiment in spec.experiments if source.has(experiment) for run in source.runs(experiment)]
    backends = sorted({run.manifest.backend for run in runs})
    if not backends:
        return []
    told = f"{len(runs)} sealed runs of {', '.join(spec.experiments)}, backend {', '.join(backends)}"
    is_npu = all(kind_of_run(backend).has_device for backend in backends)
    if is_npu:
        return [told]
    is_predicted = any(kind_of_run(backend).is_virtual for backend in backends)
    return [f"No NPU was measured{': predicted in virtual time' if is_predicted else ''}. {told}"]
