"""Chunk rows that waited on disk make the same table."""

from __future__ import annotations

import pytest

from harness.client.answer import NO_KERNEL_STAMP
from harness.client.rows import BLOCK_CHUNKS, ChunkRows, RequestRows
from harness.clock import clock_for
from harness.plan import Plan, RequestPlan, SessionPlan
from harness.records.schema import CHUNKS


class TestChunkRows:
    def filled(self, num_chunks: int) -> tuple[Plan, RequestRows, ChunkRows]:
        sessions = tuple(
            SessionPlan(index, 0, None, None, (RequestPlan(0, 4, num_chunks, 0),) * 2) for index in range(2)
        )
        plan = Plan("test", 7, 0, "as-drawn", 0, (1000, 60_000), sessions)
        rows, chunks = RequestRows(plan), ChunkRows()
        for row in (2, 0, 3, 1):  # as they happen to end, not as they were planned
            stamps = [(row * 10**6 + place, NO_KERNEL_STAMP, place % 3, place % 2 == 0) for place in range(num_chunks)]
            chunks.extend(row, stamps)
            chunks.spill()
        return plan, rows, chunks

    @pytest.mark.parametrize("num_chunks", [1, 5_000, 20_000])
    def test_rows_that_waited_on_disk_make_the_same_table(self, num_chunks: int) -> None:
        _, rows, chunks = self.filled(num_chunks)
        assert (chunks.num_spilled > 0) == (4 * num_chunks > BLOCK_CHUNKS)
        table = chunks.to_table(rows, clock_for(1.0), None)
        assert table.schema == CHUNKS
        expected = [(row // 2, row % 2, place) for row in range(4) for place in range(num_chunks)]
        assert (
            list(zip(*(table[name].to_pylist() for name in ("session", "request", "chunk")), strict=True)) == expected
        )
        assert table["received_ns"].to_pylist() == [
            row * 10**6 + place for row in range(4) for place in range(num_chunks)
        ]
        assert table["num_tokens"].to_pylist() == [place % 3 for _ in range(4) for place in range(num_chunks)]
        assert table["kernel_ns"].null_count == 4 * num_chunks

    def test_memory_holds_no_more_than_a_block_and_one_request(self) -> None:
        _, _, chunks = self.filled(BLOCK_CHUNKS)
        assert chunks.num_spilled == 4 * BLOCK_CHUNKS
        chunks.close()
