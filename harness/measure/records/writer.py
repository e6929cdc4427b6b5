"""A run while it is written: its folder ends in ``.partial`` until everything in it is on disk and counted.

Records are append-only: a sealed run is never overwritten, a stale ``.partial`` is renamed, and a run whose rows do not
match its plan is refused.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import pyarrow as pa
from pydantic import ValidationError

from harness.errors import RecordsError, SpecError
from harness.measure.records import layout, schema
from harness.measure.records.disk import disk_errors, file_entry, sync_tree, write_parquet
from harness.measure.records.manifest import DerivedEntry, EarlierTry, Manifest, load_manifest
from harness.measure.records.run import SealedRun
from harness.outputs import hold_lock, sync


class RawFile:
    """An append-only file of raw bytes in a run; a full disk is a RecordsError at once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(path):
            # Unbuffered: nothing that was captured before a crash is lost.
            self._file: BinaryIO = open(path, "ab", buffering=0)  # noqa: SIM115 - closed by the RunWriter

    def write(self, data: bytes) -> int:
        """Append all of ``data``; returns its length."""
        view = memoryview(data)
        with disk_errors(self.path):
            while view:
                # On a nearly full disk a raw write may be short; the next one raises ENOSPC.
                view = view[self._file.write(view) :]
        return len(data)

    def tell(self) -> int:
        """Bytes appended so far."""
        return self._file.tell()

    def close(self) -> None:
        """Close it; closing twice is harmless. ``seal`` makes it durable."""
        with disk_errors(self.path):
            self._file.close()


class RunWriter:
    """Write one run; ``seal`` makes it visible by a rename.

    root: the records folder. The run lies at <root>/<experiment>/<condition>/<replicate>.
    Raises RecordsError when that run is sealed already, is being written by a living process, or the disk refuses.
    At the end of a ``with`` block, a run that was not sealed is renamed to ``<replicate>.aborted-<k>``.
    """

    def __init__(self, root: Path, experiment: str, condition: str, replicate: int, planned_requests: int) -> None:
        from harness.model.spec import check_name

        try:
            check_name(experiment)
            check_name(condition)
        except ValueError as error:
            raise SpecError(str(error)) from error
        if replicate < 0:
            raise SpecError(f"replicate must not be negative, got {replicate}")
        self.key = (experiment, condition, replicate)
        self.planned_requests = planned_requests
        self.final_folder = layout.run_folder(Path(root), experiment, condition, replicate)
        self.folder = self.final_folder.with_name(f"{replicate}{layout.PARTIAL}")
        self._raw_files: dict[str, RawFile] = {}
        self._num_requests: int | None = None
        self._derived: dict[str, DerivedEntry] = {}
        self._is_open = False
        with disk_errors(self.folder):
            self._open_folder(self.folder.parent)
        self._is_open = True

    def _open_folder(self, parent: Path) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        if self.final_folder.exists():
            raise RecordsError(
                "this run is sealed already and is never overwritten",
                where=str(self.final_folder),
                hint="Resume skips it; to repeat it, use another records folder or move this run away",
            )
        if self.folder.exists():
            set_aside(self.folder)
        self.folder.mkdir()
        self._lock = _lock_folder(self.folder)

    def raw(self, name: str) -> RawFile:
        """The append-only raw file ``name`` of this run, opened on first use."""
        self._require_open()
        if not layout.is_raw_name(name):
            raise RecordsError(f"{name!r} cannot name a raw file of a run")
        if name not in self._raw_files:
            self._raw_files[name] = RawFile(self.folder / name)
        return self._raw_files[name]

    def close_raw(self) -> None:
        """Close every raw file: derived tables need complete bytes."""
        for raw_file in self._raw_files.values():
            raw_file.close()

    def write(self, name: str, rows: pa.Table | schema.RowStream) -> Path:
        """Write table ``name`` (a key of schema.TABLES) under a temporary name, then rename it into place.

        Both a table and a stream are written a batch at a time.
        """
        self._require_open()
        if name not in schema.TABLES:
            raise RecordsError(f"{name!r} is not a table of a run: {', '.join(schema.TABLES)}")
        stream = rows if isinstance(rows, schema.RowStream) else schema.RowStream.of(rows)
        rows = schema.conform_stream(name, stream)
        # ``seal`` makes every file and folder durable before the run has its name.
        path = write_parquet(rows, self.folder / layout.table_path(name), is_durable=False)
        if name == "requests":
            self._num_requests = rows.num_rows
        if name in schema.DERIVED_TABLES:
            content = schema.content_sha256(rows)
            self._derived[name] = DerivedEntry(
                rows=rows.num_rows, content_sha256=content, file_sha256=file_entry(path).sha256
            )
        return path

    def seal(self, manifest: Manifest | dict[str, Any], invalid_reasons: Iterable[str] = ()) -> SealedRun:
        """Make the run visible: all files on disk, manifest last, one rename.

        manifest: the run's facts; files, derived, planned_requests and status are filled in here.
        invalid_reasons: empty for a valid run. Raises RecordsError when requests are missing from the table: an
        unanswered request is a row with a status, never a missing row.
        """
        self._require_open()
        self._check_conservation()
        self.close_raw()
        text = self._complete(manifest, tuple(invalid_reasons)).to_json()
        with disk_errors(self.folder):
            (self.folder / layout.MANIFEST).write_text(text, encoding="utf-8")
            (self.folder / layout.LOCK).unlink()
            # Other processes' files too, such as the server's log.
            sync_tree(self.folder)
            # rename() onto an existing sealed folder fails: it is not empty.
            self.folder.rename(self.final_folder)
            sync(self.final_folder.parent)
        self._close()
        return SealedRun(self.final_folder, Manifest.model_validate_json(text))

    def abort(self) -> Path | None:
        """Rename the unfinished run and return its new path; None when it was sealed or discarded."""
        if not self._is_open:
            return None
        self._close()
        with disk_errors(self.folder):
            (self.folder / layout.LOCK).unlink(missing_ok=True)
            return set_aside(self.folder)

    def discard(self) -> None:
        """Remove the unfinished run without a trace; harmless after sealing."""
        if not self._is_open:
            return
        self._close()
        shutil.rmtree(self.folder, ignore_errors=True)
        # Empty folders of the condition and the experiment are removed too.
        with contextlib.suppress(OSError):
            self.folder.parent.rmdir()
            self.folder.parent.parent.rmdir()

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _require_open(self) -> None:
        if not self._is_open:
            raise RecordsError("the run was sealed or given up and takes no more records", where=str(self.folder))

    def _check_conservation(self) -> None:
        if self._num_requests is None:
            raise RecordsError("cannot seal: the requests table was never written", where=str(self.folder))
        if self._num_requests != self.planned_requests:
            raise RecordsError(
                f"cannot seal: {self.planned_requests} requests planned, {self._num_requests} recorded",
                where=str(self.folder),
                hint="Every planned request needs one row, also when it failed or was never sent",
            )

    def _complete(self, manifest: Manifest | dict[str, Any], invalid_reasons: tuple[str, ...]) -> Manifest:
        experiment, condition, replicate = self.key
        facts = manifest.model_dump() if isinstance(manifest, Manifest) else dict(manifest)
        facts.update(
            experiment=experiment,
            condition=condition,
            replicate=replicate,
            planned_requests=self.planned_requests,
            status="invalid" if invalid_reasons else "valid",
            invalid_reasons=invalid_reasons,
            derived=self._derived,
            earlier_tries=earlier_tries(self.final_folder),
            schema_version=schema.SCHEMA_VERSION,
        )
        with disk_errors(self.folder):
            files = [path for path in sorted(self.folder.rglob("*")) if path.is_file() and path.name != layout.LOCK]
            facts["files"] = {
                str(path.relative_to(self.folder)): file_entry(path)
                for path in files
                if path.parent.name != layout.DERIVED
            }
        try:
            return Manifest.model_validate(facts)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise RecordsError(f"cannot seal: manifest key {key}: {first['msg']}", where=str(self.folder)) from error

    def _close(self) -> None:
        self._is_open = False
        # Errors of closing are dropped: the error that ended the run is being raised.
        for raw_file in self._raw_files.values():
            try:
                raw_file.close()
            except RecordsError:
                continue
        os.close(self._lock)


def keep_for_retry(run: SealedRun) -> Path:
    """Rename an INVALID run to make room for its repetition; returns its new path."""
    if run.is_valid:
        raise RecordsError("a valid run is never repeated", where=str(run.path))
    kept = run.path.with_name(f"{run.path.name}{layout.RETRIED}{len(earlier_tries(run.path)) + 1}")
    with disk_errors(run.path):
        run.path.rename(kept)
        sync(kept.parent)
    return kept


def earlier_tries(folder: Path) -> tuple[EarlierTry, ...]:
    """The INVALID runs that the run at ``folder`` repeats, first to last."""
    kept = sorted(folder.parent.glob(f"{folder.name}{layout.RETRIED}*"), key=lambda path: (len(path.name), path.name))
    manifests = [(path.name, load_manifest(path / layout.MANIFEST)) for path in kept]
    return tuple(
        EarlierTry(folder=name, seal=manifest.seal, invalid_reasons=manifest.invalid_reasons)
        for name, manifest in manifests
    )


def set_aside(partial: Path) -> Path:
    """Rename a ``.partial`` folder without a writer to ``.aborted-<k>`` and return its new path.

    Raises RecordsError when a living process still holds it.
    """
    lock = _lock_folder(partial)
    try:
        stem = partial.name.removesuffix(layout.PARTIAL)
        for k in range(1, 1_000_000):
            aborted = partial.with_name(f"{stem}{layout.ABORTED}{k}")
            if not aborted.exists():
                partial.rename(aborted)
                (aborted / layout.LOCK).unlink()
                return aborted
    finally:
        os.close(lock)
    raise RecordsError("too many aborted runs lie beside it", where=str(partial), hint="Remove old .aborted folders")


def _lock_folder(folder: Path) -> int:
    hint = "Wait for it and then --resume, end it with Ctrl-C, or write elsewhere: --runs FOLDER"
    return hold_lock(folder / layout.LOCK, "writing this run", hint)
