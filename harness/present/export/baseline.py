"""A baseline as a folder: the figures of runs and their manifests, with a SHA-256 of every file.

It is small and all text, for a repository or an artifact store. A changed, missing or added file is refused; who may
write the folder can also write its hashes.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness.analysis.compare.measures import Bounds, Value
from harness.analysis.stats import grouped
from harness.errors import RecordsError, SpecError, in_one_line
from harness.judge.decisions.gate import FIGURES, GateRun, gate_run
from harness.measure.records import layout
from harness.measure.records.archive import SUMS, check_sums, files_of
from harness.measure.records.manifest import load_manifest
from harness.measure.records.run import SealedRun
from harness.outputs import write_text

TABLE = "figures.csv"
MANIFESTS = "manifests"
COLUMNS = ("condition", "replicate", "device", "unit", "num_requests", "num_sessions", "figure", "amount", "units")
BOUNDS = ("at_least", "at_most")
_RESTORE = "Restore the folder from its commit or artifact, or save the baseline again"


def is_baseline(folder: Path) -> bool:
    return (folder / SUMS).is_file()


def save_baseline(folder: Path, runs: Sequence[SealedRun], *, may_replace: bool = False) -> list[Path]:
    """The files of a baseline of these runs; SpecError where the folder holds anything that it may not replace."""
    if folder.exists() and any(folder.iterdir()) and not (may_replace and is_baseline(folder)):
        hint = "Name a new folder" + (", or replace it with --force" if is_baseline(folder) else "")
        raise SpecError("is there already", where=str(folder), hint=hint)
    files = {TABLE: _table([gate_run(run) for run in runs])}
    for run in runs:
        files[_manifest_name(run.condition, str(run.replicate))] = run.file(layout.MANIFEST).read_text(encoding="utf-8")
    for name in files_of(folder):
        (folder / name).unlink()
    sums = "".join(f"{hashlib.sha256(text.encode()).hexdigest()}  {name}\n" for name, text in sorted(files.items()))
    for name, text in {**files, SUMS: sums}.items():
        write_text(folder / name, text)
    return [folder / name for name in (*files, SUMS)]


def load_baseline(folder: Path) -> list[GateRun]:
    """The runs of a baseline; RecordsError naming the file where a byte is not as it was saved."""
    check_sums(folder, folder, _RESTORE)
    try:
        with open(folder / TABLE, encoding="utf-8", newline="") as stream:
            by_run = grouped(csv.DictReader(stream, strict=True), lambda row: (row["condition"], row["replicate"]))
        return [_run_of(folder, _manifest_name(*names), rows) for names, rows in by_run.items()]
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        why = f"is no table of figures that this version reads ({in_one_line(error)})"
        raise RecordsError(why, where=str(folder / TABLE), hint=_RESTORE) from error


def _run_of(folder: Path, manifest: str, rows: Sequence[Mapping[str, str]]) -> GateRun:
    """The run of a manifest and its rows of the table. Earlier versions saved neither bounds nor sessions."""
    if not (folder / manifest).is_file():
        raise RecordsError(f"has no {manifest}", where=str(folder), hint=_RESTORE)
    return GateRun(
        load_manifest(folder / manifest),
        device=rows[0]["device"],
        unit=int(rows[0]["unit"] or 0),
        num_requests=int(rows[0]["num_requests"] or 0),
        num_sessions=int(rows[0].get("num_sessions") or 0),
        values={
            row["figure"]: Value(float(row["amount"]), float(row["units"])) if row["amount"] else None for row in rows
        },
        bounds={row["figure"]: Bounds(*(float(row[end]) for end in BOUNDS)) for row in rows if row.get("at_least")},
        folder=str(folder.resolve()),
    )


def _table(runs: Sequence[GateRun]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*COLUMNS, *BOUNDS))
    for run in runs:
        numbers = (run.num_requests, run.num_sessions)
        place = (run.condition, run.manifest.replicate, run.device, run.unit, *numbers)
        writer.writerows(
            (*place, name, *(run.values.get(name) or ("", "")), *(run.bounds.get(name) or ("", ""))) for name in FIGURES
        )
    return text.getvalue()


def _manifest_name(condition: str, replicate: str) -> str:
    return f"{MANIFESTS}/{condition}/{replicate}.json"
