"""Rows that wait on disk for the end of a run make the same tables as rows in memory, in plan order."""

from __future__ import annotations

import pytest

from harness.clock import ScaledClock
from harness.measure.client.answer import NO_KERNEL_STAMP
from harness.measure.client.receive_stamps import OffsetLog
from harness.measure.client.rows import BATCH_CHUNKS, BLOCK_CHUNKS, BLOCK_TEXTS, ChunkRows, RequestRows
from harness.measure.records.schema import CHUNKS, REQUESTS
from harness.model.plan.model import Plan, RequestPlan, SessionPlan


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
        table = chunks.stream(rows, ScaledClock(1.0), None).to_table()
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

    def test_a_chunk_without_a_kernel_stamp_has_none_on_a_clock_of_any_speed(self) -> None:
        _, rows, chunks = self.filled(2)
        offsets = OffsetLog()
        offsets.sample()
        table = chunks.stream(rows, ScaledClock(80.0), offsets).to_table()
        assert table["kernel_ns"].null_count == table.num_rows == 8

    def test_memory_holds_no_more_than_a_block_and_one_request(self) -> None:
        _, _, chunks = self.filled(BLOCK_CHUNKS)
        assert chunks.num_spilled == 4 * BLOCK_CHUNKS

    def test_a_long_table_comes_in_batches_as_often_as_it_is_read(self) -> None:
        _, rows, chunks = self.filled(BATCH_CHUNKS // 2 + 1)
        stream = chunks.stream(rows, ScaledClock(1.0), None)
        sizes = [batch.num_rows for batch in stream.batches()]
        assert max(sizes) <= BATCH_CHUNKS
        assert sum(sizes) == stream.num_rows == stream.to_table().num_rows == 4 * (BATCH_CHUNKS // 2 + 1)


class TestRequestRows:
    @pytest.mark.parametrize("num_answered", [0, 10, BLOCK_TEXTS, 2 * BLOCK_TEXTS + 10])
    def test_every_row_has_the_words_of_its_own_answer(self, num_answered: int) -> None:
        num_requests = 2 * BLOCK_TEXTS + 20
        session = SessionPlan(0, 0, None, None, (RequestPlan(0, 4, 1, 0),) * num_requests)
        plan = Plan("test", 7, 0, "as-drawn", 0, (1000, 60_000), (session,))
        rows = RequestRows(plan)
        for row in range(num_requests):
            rows.trigger_ns[row] = rows.due_ns[row] = row
            rows.status[row] = "ok"
        rows.error[3] = "no such thing"
        answered = range(num_requests)[::-1][:num_answered]
        for row in answered:
            rows.note_texts(row, f"id-{row}", "length", f"digest-{row}")
            rows.spill()
        table = rows.to_table(plan, ScaledClock(1.0))
        assert table.schema == REQUESTS
        assert table["response_id"].to_pylist() == [f"id-{row}" * (row in answered) for row in range(num_requests)]
        assert table["token_digest"].to_pylist() == [f"digest-{row}" * (row in answered) for row in range(num_requests)]
        assert set(table["finish_reason"].to_pylist()) <= {"length", ""}
        assert [text for text in table["error"].to_pylist() if text] == ["no such thing"]
