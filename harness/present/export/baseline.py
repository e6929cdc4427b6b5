"""A baseline as a folder: the figures of runs and their manifests, with a SHA-256 of every file.

It is small and all text, for a repository or an artifact store. A changed, missing or added file is refused; who may
write the folder can also write its hashes.
"""

from __future__ import annotations

import csv
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from harness.analysis.compare.measures import Bounds, Value
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


class _Place(NamedTuple):
    """What the table says of a run beside its figures."""

    condition: str
    replicate: str
    device: str
    unit: int
    num_requests: int
    num_sessions: int


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
    figures: dict[_Place, dict[str, Value | None]] = {}
    bounds: dict[_Place, dict[str, Bounds]] = {}
    try:
        with open(folder / TABLE, encoding="utf-8", newline="") as stream:
            for row in csv.DictReader(stream, strict=True):
                # Earlier versions saved no number of sessions.
                numbers = [int(row.get(name) or 0) for name in ("unit", "num_requests", "num_sessions")]
                place = _Place(row["condition"], row["replicate"], row["device"], *numbers)
                values = figures.setdefault(place, {})
                values[row["figure"]] = Value(float(row["amount"]), float(row["units"])) if row["amount"] else None
                # Earlier versions saved no bounds.
                if row.get("at_least"):
                    ends = (float(row[name]) for name in BOUNDS)
                    bounds.setdefault(place, {})[row["figure"]] = Bounds(*ends)
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        why = f"is no table of figures that this version reads ({in_one_line(error)})"
        raise RecordsError(why, where=str(folder / TABLE), hint=_RESTORE) from error
    runs: list[GateRun] = []
    for place, values in figures.items():
        name = _manifest_name(place.condition, place.replicate)
        if not (folder / name).is_file():
            raise RecordsError(f"has no {name}", where=str(folder), hint=_RESTORE)
        numbers = (place.device, place.unit, place.num_requests)
        known = (values, place.num_sessions, bounds.get(place, {}), str(folder.resolve()))
        runs.append(GateRun(load_manifest(folder / name), *numbers, *known))
    return runs


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
