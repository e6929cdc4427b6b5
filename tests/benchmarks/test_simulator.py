"""What `benchmarks simulator` measures can be built: the largest plans, too, are within what a workload may ask."""

from __future__ import annotations

from benchmarks.simulator import SIZES, closed_population


def test_a_closed_population_of_every_size_is_a_workload() -> None:
    for size in SIZES:
        workload = closed_population(size)
        assert workload.num_sessions * workload.requests_per_session == size
