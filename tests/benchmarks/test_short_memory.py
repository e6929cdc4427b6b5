"""What requests take beside their steps is added to a prediction, once for each request that a figure holds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.short_memory import FIGURES
from tests.support.report_runs import seal_run


def test_ttft_holds_one_request_and_a_session_all_of_its_own(tmp_path: Path) -> None:
    run = seal_run(tmp_path / "runs")
    requests = run.table("requests")
    num_sessions = len(set(requests["session"].to_pylist()))
    added = {name: figure.added(run, 2.0) for name, figure in FIGURES.items()}
    assert added["TTFT p50, ms"] == added["TTFT p90, ms"] == 2.0
    assert added["session time less waits, mean s"] == pytest.approx(0.002 * len(requests) / num_sessions)
    assert added["duration, s"] == added["reuse (share of prompt tokens)"] == 0
