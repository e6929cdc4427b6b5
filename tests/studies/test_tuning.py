"""The short form of `benchmarks tuning`: what is proposed is near the best, and nothing is proposed for nothing."""

from __future__ import annotations

from benchmarks.tuning import bench_tuning


def test_the_short_study_keeps_what_the_long_one_shows() -> None:
    figures = {figure.name: figure for figure in bench_tuning(9, 24)}
    near, of = map(int, figures["proposed within 1 % of the best of its space, all"].value.split(" of "))
    assert of == 9
    assert near >= 8
    kept, of = map(int, figures["kept where nothing saves 1 %"].value.split(" of "))
    assert kept >= of - 1
    # Two Monte Carlo errors of 24 tunes below .95.
    assert float(figures["confirmed gains whose interval holds the true ratio"].value) >= 0.86
