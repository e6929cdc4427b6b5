"""Step times from stamps: only steps that nothing interrupted count."""

from __future__ import annotations

import pyarrow as pa
import pytest

from harness.analysis.calibration.scatter import steady_step_ns
from harness.extras.paper.rules.interference import chunk_instants, prefill_elapsed_ms
from harness.measure.records import schema


def steps(*rows: tuple[int | None, int, int]) -> pa.Table:
    """(log_ns, n, b) per decode step."""
    table = [{"step": k, "log_ns": at_ns, "n": n, "b": b} for k, (at_ns, n, b) in enumerate(rows)]
    return pa.Table.from_pylist(table, schema=schema.STEPS)


def allocations(*before_steps: int) -> pa.Table:
    """An allocation logged after so many decode steps."""
    rows = [{"index": k, "step": step, "kind": "alloc"} for k, step in enumerate(before_steps)]
    return pa.Table.from_pylist(rows, schema=schema.KV_EVENTS)


def test_a_step_lasts_until_the_next_one_of_its_kind() -> None:
    found = steady_step_ns(steps((0, 2, 2), (10, 2, 2), (25, 2, 2)), allocations(0))
    assert {pair: durations.tolist() for pair, durations in found.items()} == {(2, 2): [10, 15]}


def test_a_step_before_a_prefill_or_a_change_of_n_is_left_out() -> None:
    log = steps((0, 2, 2), (10, 2, 2), (400, 2, 2), (410, 3, 4), (422, 3, 4))
    found = steady_step_ns(log, allocations(0, 0, 2))
    assert {pair: durations.tolist() for pair, durations in found.items()} == {(2, 2): [10], (3, 4): [12]}


def test_steps_without_stamps_have_no_duration() -> None:
    assert steady_step_ns(steps((0, 1, 1), (None, 1, 1)), allocations(0)) == {}
    assert steady_step_ns(steps((0, 1, 1)), allocations(0)) == {}


def test_the_kernels_stamp_is_preferred_chunk_by_chunk() -> None:
    row = {"session": 0, "request": 0, "num_tokens": 1}
    stamps = enumerate([(10, 7), (20, None), (30, 28)])
    rows = [{**row, "chunk": k, "received_ns": received, "kernel_ns": kernel} for k, (received, kernel) in stamps]
    chunks = pa.Table.from_pylist(rows, schema=schema.CHUNKS)
    assert chunk_instants(chunks)[0, 0].tolist() == [7, 20, 28]


def metrics(*scrapes: tuple[int, float, int]) -> pa.Table:
    """(at_ns, sum of prefill seconds, requests counted) per scrape."""
    rows = [
        {"scrape": k, "at_ns": at_ns, "name": f"vllm:request_prefill_time_seconds_{name}", "value": value}
        for k, (at_ns, total, count) in enumerate(scrapes)
        for name, value in (("sum", total), ("count", float(count)))
    ]
    return pa.Table.from_pylist(rows, schema=schema.METRICS)


def test_the_elapsed_time_is_the_increment_around_one_request() -> None:
    found = prefill_elapsed_ms(metrics((0, 1.0, 4), (100, 1.0, 4), (200, 1.36, 5), (300, 1.36, 5)), 110, 190)
    assert found == pytest.approx(360)


@pytest.mark.parametrize("counts", [(4, 4), (4, 6)])
def test_an_increment_of_other_than_one_request_tells_nothing(counts: tuple[int, int]) -> None:
    assert prefill_elapsed_ms(metrics((0, 1.0, counts[0]), (200, 2.0, counts[1])), 110, 190) is None


def test_without_a_scrape_on_both_sides_there_is_no_elapsed_time() -> None:
    assert prefill_elapsed_ms(metrics((120, 1.0, 4), (200, 1.3, 5)), 110, 190) is None
    assert prefill_elapsed_ms(metrics((0, 1.0, 4)), 110, 190) is None
