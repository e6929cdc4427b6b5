"""Writing and hashing of files: a name appears only when all its bytes are on disk."""

from __future__ import annotations

import errno
import hashlib
import io
import os
import stat
from collections.abc import Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from harness.clock import utc_now
from harness.errors import RecordsError
from harness.measure.records.manifest import FileEntry
from harness.measure.records.schema import RowStream
from harness.outputs import UNFINISHED, sync, whole_file

COPY_BYTES = 1 << 20
_CODEC = "zstd"
# Rows that are compressed together, and in memory at once.
ROW_GROUP = 1 << 17
_TICK_NS = 50_000_000
"""File systems stamp a change by the kernel's tick (1 to 10 ms): two changes this close may share a stamp."""


RUN_IS_UNSEALED = "Free space or choose a writable records folder; the run stays unsealed"


@contextmanager
def disk_errors(path: Path, hint: str = RUN_IS_UNSEALED) -> Generator[None]:
    """Turn errors of the disk into a RecordsError with a next step."""
    try:
        yield
    except OSError as error:
        # The system's text of the error number: Arrow's is for programmers.
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise RecordsError(f"cannot write records: {reason}", where=str(error.filename or path), hint=hint) from error


def write_parquet(
    rows: pa.Table | RowStream, path: Path, *, is_durable: bool = True, hint: str = RUN_IS_UNSEALED
) -> Path:
    """Write a table so that ``path`` either holds all of it or does not exist.

    is_durable: the file is on disk before this returns; otherwise the caller has to flush it. hint: what to do where
    the disk refuses.
    """
    with disk_errors(path, hint):
        path.parent.mkdir(exist_ok=True)
        with whole_file(path, is_durable=is_durable) as file:
            _write_groups(rows, file, ROW_GROUP)
    return path


def _write_groups(rows: pa.Table | RowStream, sink: BinaryIO | pa.BufferOutputStream, group_rows: int) -> None:
    stream = rows if isinstance(rows, RowStream) else RowStream.of(rows)
    with pq.ParquetWriter(sink, rows.schema, compression=_CODEC) as writer:
        for group in _groups(stream, group_rows):
            writer.write_table(group, row_group_size=group_rows)


def _groups(rows: RowStream, group_rows: int) -> Iterator[pa.Table]:
    waiting: list[pa.RecordBatch] = []
    num_waiting = 0
    for batch in rows.batches():
        waiting.append(batch)
        num_waiting += batch.num_rows
        while num_waiting >= group_rows:
            table = pa.Table.from_batches(waiting, rows.schema)
            yield table.slice(0, group_rows).combine_chunks()
            waiting = table.slice(group_rows).to_batches()
            num_waiting -= group_rows
    # A group even of a table without rows.
    if num_waiting or not rows.num_rows:
        yield pa.Table.from_batches(waiting, rows.schema).combine_chunks()


def csv_bytes(table: pa.Table) -> bytes:
    """The table as CSV."""
    from pyarrow.csv import write_csv

    buffer = io.BytesIO()
    write_csv(table, buffer)
    return buffer.getvalue()


def parquet_bytes(table: pa.Table) -> bytes:
    """The table as Parquet; columns carry their meaning and unit."""
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


def is_as_written_here(path: Path, table: pa.Table) -> bool:
    """Whether a file that holds ``table`` is, byte for byte, what ``write_parquet`` makes of it.

    Equal values are not enough: a flipped bit in a page header or the footer changes none.
    """
    with pq.ParquetFile(path) as file:
        group_rows = file.metadata.row_group(0).num_rows if file.metadata.num_row_groups else 0
    written = pa.BufferOutputStream()
    _write_groups(table, written, max(group_rows, 1))
    return path.read_bytes() == written.getvalue().to_pybytes()


def is_unfinished(path: Path) -> bool:
    """Whether a table is being written there, or was when its writer was killed."""
    return path.name.startswith(".") and path.name.endswith(UNFINISHED) and not path.is_symlink()


def file_entry(path: Path) -> FileEntry:
    """Size and SHA-256 of a file, read in constant memory."""
    digest = hashlib.sha256()
    size_bytes = 0
    with open(path, "rb") as file:
        while block := file.read(COPY_BYTES):
            digest.update(block)
            size_bytes += len(block)
    return FileEntry(sha256=digest.hexdigest(), size_bytes=size_bytes)


_ENTRIES: dict[tuple[str, int, int, int, int], FileEntry] = {}


def known_entry(path: Path) -> FileEntry:
    """``file_entry`` of a regular file, read once in this process as long as the file is not touched.

    Raises OSError, also for a link, a pipe or a device, which are never opened.
    """
    facts = path.lstat()
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    # The change time too: it changes when the modification time is set back.
    key = (str(path), facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)
    if key not in _ENTRIES:
        entry = file_entry(path)
        if utc_now().timestamp() * 1e9 - facts.st_ctime_ns < _TICK_NS:
            return entry
        _ENTRIES[key] = entry
    return _ENTRIES[key]


def sync_tree(folder: Path) -> None:
    """Flush a folder and everything in it to the disk.

    All flushes run at once: the file system's journal then commits them together.
    """
    list(_syncing_threads(os.getpid()).map(sync, [folder, *folder.rglob("*")]))


@lru_cache(maxsize=1)
def _syncing_threads(_process: int) -> ThreadPoolExecutor:
    """About as many threads as a run has files, kept for the next run. A forked process starts new threads."""
    return ThreadPoolExecutor(16, thread_name_prefix="sync")
