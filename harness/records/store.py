"""Sealed runs below a folder: a run is visible when its manifest is, and not before.

A damaged run is named, never skipped. Nothing here writes to a run.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness.errors import SpecError
from harness.records import layout
from harness.records.manifest import load_manifest
from harness.records.run import RunKey, SealedRun, damaged

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa

QUERY_TIMEOUT_S = 60.0


class RunStore:
    """All sealed runs below one records folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def __repr__(self) -> str:
        return f"RunStore({str(self.root)!r}): {len(self.sealed())} sealed runs"

    def sealed(self, experiment: str | None = None) -> list[SealedRun]:
        """Sealed runs, sorted by key; raises RecordsError naming the file when one is damaged (no bytes are read)."""
        folders = [folder for folder in self._folders() if layout.is_replicate_name(folder.name)]
        wanted = [folder for folder in folders if experiment in (None, folder.parent.parent.name)]
        return sorted((self._load(folder) for folder in wanted), key=lambda run: run.key)

    def foreign(self) -> list[Path]:
        """Folders where runs lie whose names no run has, such as 00 beside 0: never read, never counted."""
        marks = (layout.PARTIAL, layout.ABORTED, layout.RETRIED)
        named = [folder for folder in self._folders() if not any(mark in folder.name for mark in marks)]
        return sorted(folder for folder in named if not layout.is_replicate_name(folder.name))

    def _folders(self) -> list[Path]:
        return [folder for folder in self.root.glob("*/*/*") if folder.is_dir() or folder.is_symlink()]

    def run(self, experiment: str, condition: str, replicate: int) -> SealedRun:
        """One sealed run; SpecError when there is none."""
        folder = layout.run_folder(self.root, experiment, condition, replicate)
        if not folder.is_dir():
            raise SpecError("there is no sealed run of that name", where=str(folder), hint="See `harness query`")
        return self._load(folder)

    def unsealed(self) -> list[Path]:
        """Folders of runs that are being written, or were cut short."""
        found = [*self.root.glob(f"*/*/*{layout.PARTIAL}/"), *self.root.glob(f"*/*/*{layout.ABORTED}*/")]
        return sorted(folder for folder in found if folder.is_dir())

    def verify(self) -> int:
        """Verify every sealed run by hash and return how many there are; RecordsError names the first damage.

        A foreign folder that holds a manifest is damage: a run that somebody copied or renamed.
        """
        for folder in self.foreign():
            if (folder / layout.MANIFEST).exists():
                raise damaged(folder, "is not the name of a run", hint="A replicate is named 0, 1, 2; move it away")
        runs = [kept for run in self.sealed() for kept in (run, *self.earlier_tries(run))]
        for run in runs:
            run.verify()
        return len(runs)

    def earlier_tries(self, run: SealedRun) -> list[SealedRun]:
        """The INVALID runs that ``run`` repeats, as sealed; RecordsError when one is missing or was changed."""
        kept: list[SealedRun] = []
        for earlier in run.manifest.earlier_tries:
            folder = run.path.with_name(earlier.folder)
            found = SealedRun(folder, load_manifest(folder / layout.MANIFEST))
            if (found.key, found.manifest.seal) != (run.key, earlier.seal):
                raise damaged(folder, f"is not the earlier try that {run.label} names")
            kept.append(found)
        return kept

    def connect(self) -> duckdb.DuckDBPyConnection:
        """An in-memory DuckDB connection with a view for each table of docs/data-dictionary.md.

        Every view starts with experiment, condition, replicate, is_valid. The plain views hold rows of all sealed runs,
        invalid ones included; ``valid_runs``, ``valid_requests``, ... hold the rows of valid runs. The connection is an
        ordinary one: it reads the files of the runs as it needs them, and has no limits.
        """
        from harness.records.sql import connected

        return connected(self.sealed())

    def query(self, sql: str, timeout_s: float = QUERY_TIMEOUT_S) -> pa.Table:
        """Rows of one SQL statement that reads the tables of all sealed runs; it can write nothing.

        SpecError says what is wrong with the statement, or which limit of time or memory it exceeds.
        """
        from harness.records.sql import answered

        with answered(self.sealed(), sql, timeout_s) as answer:
            return answer.rows

    def drawn(self, sql: str, width: int, timeout_s: float = QUERY_TIMEOUT_S) -> str:
        """The rows of ``query`` as DuckDB draws them: types under names, the middle of many rows left out."""
        from harness.records.sql import answered

        with answered(self.sealed(), sql, timeout_s) as answer:
            return answer.drawn(width)

    def _load(self, folder: Path) -> SealedRun:
        if folder.is_symlink():
            raise damaged(folder, "is a symbolic link", hint="Copy the run to where it is read")
        run = SealedRun(folder, load_manifest(folder / layout.MANIFEST))
        named = RunKey(folder.parent.parent.name, folder.parent.name, int(folder.name))
        if run.key != named:
            raise damaged(folder / layout.MANIFEST, f"belongs to run {'/'.join(map(str, run.key))}")
        run.check_listing()
        return run
