"""The short form of `benchmarks coverage`: intervals and bounds hold as often as they say, on a small population."""

from __future__ import annotations

import pytest

from benchmarks.coverage import Load, coverage, simulated

CLOSED = Load("closed", 10, 20, None, 400, 0)
OPEN = Load("open", 150, 2, 0.5, 400, 0)


@pytest.mark.parametrize(("load", "metric"), [(CLOSED, "ttft"), (OPEN, "ttft"), (OPEN, "e2e")])
def test_intervals_and_bounds_of_simulated_runs_hold(load: Load, metric: str) -> None:
    found = coverage(simulated(load).of_runs[metric], 12, 300, hangs_on_queues=load.per_s is not None)
    for q in (0.5, 0.9):
        # The level, less three Monte Carlo errors of 300 experiments.
        assert found[q].held / found[q].shown > 0.95 - 0.038
        assert found[q].within / found[q].bounded > 0.98
    assert (found[0.99].shown > 0) is (load is CLOSED)
