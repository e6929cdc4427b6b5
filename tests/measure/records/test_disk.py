"""A table too long for memory becomes the same file as one that is written whole, and is known again as such."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.measure.records.disk import ROW_GROUP, is_as_written_here, write_parquet
from harness.measure.records.schema import RowStream, content_sha256


def numbers(num_rows: int) -> pa.Table:
    values = np.arange(num_rows)
    return pa.table({"value": values, "text": pa.array(values % 7).cast(pa.string())})


@pytest.mark.parametrize("num_rows", [0, ROW_GROUP, 2 * ROW_GROUP + 5])
def test_a_stream_of_uneven_batches_is_written_as_its_table_would_be(tmp_path: Path, num_rows: int) -> None:
    table = numbers(num_rows)

    def batches() -> Iterator[pa.RecordBatch]:
        yield from table.to_batches(max_chunksize=70_001)

    stream = RowStream(table.schema, num_rows, batches)
    whole, streamed = write_parquet(table, tmp_path / "whole"), write_parquet(stream, tmp_path / "streamed")
    assert streamed.read_bytes() == whole.read_bytes()
    assert pq.read_table(streamed).equals(table)
    assert is_as_written_here(whole, pq.ParquetFile(whole).read(use_threads=False))


@pytest.mark.parametrize("num_rows", [0, ROW_GROUP + 5])
def test_a_table_of_a_single_group_is_known_again_whatever_its_length(tmp_path: Path, num_rows: int) -> None:
    path = tmp_path / "earlier"
    pq.write_table(numbers(num_rows), path, compression="zstd")
    assert is_as_written_here(path, pq.ParquetFile(path).read(use_threads=False))
    assert not is_as_written_here(path, numbers(num_rows + 1))


def test_the_hash_of_a_long_table_does_not_depend_on_how_its_memory_is_cut() -> None:
    table = numbers(50_000)
    cut = pa.Table.from_batches(table.to_batches(max_chunksize=777))
    assert content_sha256(cut) == content_sha256(table)
    # Computed from the whole columns at once.
    assert content_sha256(table) == "350916fbcaa227d1970c3d611b41e99f2beba03a6ad08d5cfc15141e26b76d43"
