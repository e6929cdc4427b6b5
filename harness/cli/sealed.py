"""Sealed runs as commands ask for them: by folder, by experiment; where there are none, where others lie is said.

Nothing here reads a record or writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import SpecError

if TYPE_CHECKING:
    from harness.records import RunStore, SealedRun


def store_at(runs: Path) -> RunStore:
    """The sealed runs of a folder; a SpecError that says where others lie when it holds none."""
    from harness.records import RunStore, layout

    store = RunStore(runs)
    if next(runs.glob(f"*/*/*/{layout.MANIFEST}"), None) is None:
        below = sorted({str(path.parents[3]) for path in runs.glob(f"*/*/*/*/{layout.MANIFEST}")})
        more = f" and {len(below) - 3} more" if len(below) > 3 else ""
        hint = (
            f"They lie in {', '.join(below[-3:])}{more}: say --runs {below[-1]}"
            if below
            else ("Name their folder with --runs, or make some: harness run FILE.toml")
        )
        looked = "no sealed runs in it (looked for EXPERIMENT/CONDITION/REPLICATE)"
        raise SpecError(looked if runs.is_dir() else "there is no such folder", where=str(runs), hint=hint)
    return store


def sealed_runs(runs: Path, experiment: str) -> list[SealedRun]:
    """The sealed runs of one experiment; a SpecError that names what is there when there are none."""
    store = store_at(runs)
    sealed = list(store.sealed(experiment))
    if not sealed:
        known = sorted({run.experiment for run in store.sealed()})
        raise SpecError(
            f"no sealed runs of experiment {experiment!r}",
            where=str(runs),
            hint=f"Experiments there: {', '.join(known) or 'none'}",
        )
    return sealed
