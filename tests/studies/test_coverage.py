"""The short form of `benchmarks coverage`: intervals and bounds hold as often as they say, on a small population."""

from __future__ import annotations

import math
from functools import partial

import pytest

from benchmarks.coverage import Load, coverage, shown, simulated

CLOSED = Load("closed", 10, 20, None, 400, 0)
PLANS = Load("closed", 1, 6, None, 400, 0, "plan")
OPEN = Load("open", 150, 2, 0.5, 400, 0)


@pytest.mark.parametrize(("load", "metric"), [(CLOSED, "ttft"), (OPEN, "ttft"), (OPEN, "e2e")])
def test_intervals_and_bounds_of_simulated_runs_hold(load: Load, metric: str) -> None:
    found = coverage(simulated(load).of_runs[metric], 100, 200, percentiles=partial(shown, load, metric))
    for q in (0.5, 0.9):
        # The level, less three Monte Carlo errors.
        assert found[q].held / found[q].shown > 0.95 - 3 * math.sqrt(0.95 * 0.05 / found[q].shown)
        assert found[q].within / found[q].bounded > 0.98
    # A hundred runs may hold none of a kind that makes one in a hundred.
    assert found[0.99].shown == 0


@pytest.mark.parametrize("sessions", [1, 10])
def test_where_one_plan_in_ten_is_long_no_p90_is_shown_that_misses(sessions: int) -> None:
    load = PLANS._replace(sessions=sessions)
    of_runs = simulated(load).of_runs["e2e"]
    assert coverage(of_runs, 12, 100, percentiles=partial(shown, load, "e2e"))[0.9].shown == 0
    of_hundred = coverage(of_runs, 100, 200, percentiles=partial(shown, load, "e2e"))[0.9]
    assert of_hundred.shown - of_hundred.held <= 0.07 * 200
