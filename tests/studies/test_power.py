"""The short form of `benchmarks power`: adjusted plans keep their promise, and plans for one comparison do not."""

from __future__ import annotations

import re

from benchmarks.power import bench_power


def test_the_short_study_keeps_what_the_long_one_shows() -> None:
    figures = {figure.name: figure for figure in bench_power(400, 400)}
    # Five Monte Carlo errors of 400 experiments beside the .03 of the long form.
    for case in ("differ by the margin", "equal", "as found"):
        assert float(figures[f"{case}: farthest below the promise"].value) <= 0.03 + 0.075
        lowest = float(re.match(r"[\d.]+", figures[f"{case}: not adjusted"].value)[0])
        assert lowest < 0.8
    assert float(figures["any of 6 ever wrong: alpha shared"].value) <= 0.05 + 0.03
    assert float(figures["any of 6 ever wrong: alpha for each"].value) > 0.08
