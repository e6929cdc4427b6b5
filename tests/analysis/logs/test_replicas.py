"""Which replica answered, found by counters alone: never wrong, and unknown where two counted."""

from __future__ import annotations

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.analysis.logs.replicas import FINISHED_COUNTER, served_by_counters
from harness.clock import NS_PER_S
from harness.measure.records import schema
from tests.support.analysis_tables import request_row


def requests(done_s: list[float]) -> pa.Table:
    """A request of a session of its own for each of these ends."""
    rows = [{**request_row(0, 0), "session": at, "done_ns": round(s * NS_PER_S)} for at, s in enumerate(done_s)]
    return pa.Table.from_pylist(rows, schema=schema.REQUESTS)


def metrics(read_s: list[float], done_s: list[float], served: list[int], num_replicas: int) -> pa.Table:
    """What each replica counts when it is read at these instants."""
    rows = [
        {
            "scrape": scrape,
            "at_ns": round(at_s * NS_PER_S),
            "reason": "interval",
            "name": FINISHED_COUNTER,
            "labels": f'engine="0",finished_reason="length",replica="{replica}"',
            "value": float(sum(by == replica and s <= at_s for s, by in zip(done_s, served, strict=True))),
        }
        for scrape, at_s in enumerate(read_s)
        for replica in range(num_replicas)
    ]
    return pa.Table.from_pylist(rows, schema=schema.METRICS)


@pytest.mark.parametrize(
    ("done_s", "served", "told"),
    [
        pytest.param([0.5, 1.5, 2.5], [1, 0, 1], {(0, 0): 1, (1, 0): 0, (2, 0): 1}, id="one-at-a-time"),
        pytest.param([0.4, 0.6, 1.5], [0, 1, 1], {(2, 0): 1}, id="two-between-two-readings"),
        pytest.param([0.5, 0.95, 2.5], [0, 1, 1], {(2, 0): 1}, id="a-reading-near-an-end"),
    ],
)
def test_the_counters_tell_who_answered_only_where_one_could(
    done_s: list[float], served: list[int], told: dict[tuple[int, int], int]
) -> None:
    read = metrics([0.0, 1.0, 2.0, 3.0], done_s, served, 2)
    assert served_by_counters(requests(done_s), read, 2) == told


@given(
    done_ms=st.lists(st.tuples(st.integers(0, 20_000), st.integers(0, 2), st.integers(-90, 90)), max_size=12),
    read_ms=st.lists(st.integers(0, 20_000), min_size=2, max_size=12, unique=True),
)
def test_counters_never_name_another_replica(done_ms: list[tuple[int, int, int]], read_ms: list[int]) -> None:
    """A server counts a request up to 90 ms before or after its client sees the end."""
    seen_s = [done / 1000 for done, _by, _early in done_ms]
    counted_s = [(done + early) / 1000 for done, _by, early in done_ms]
    served = [by for _done, by, _early in done_ms]
    read = metrics([0.0, *(each / 1000 for each in sorted(read_ms)), 21.0], counted_s, served, 3)
    found = served_by_counters(requests(seen_s), read, 3)
    assert all(served[session] == replica for (session, _request), replica in found.items())
