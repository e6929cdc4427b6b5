"""What the scrapes of a run say of its validity."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.analysis.logs.derive import Derived
from harness.analysis.logs.parse import ParseCounts, metrics_table
from harness.analysis.validity.scrapes import check_moved_schedule
from harness.clock import NS_PER_S
from harness.emulator.metrics import ServerMetrics
from harness.engine import EngineConfig
from harness.spec import ServerSpec
from tests.support.analysis_tables import manifest


def scraped(*bodies: str | None) -> Derived:
    """Derived tables of a run with these scrapes: the first before the replay, the last after it; None: no answer."""
    reasons = ["before", *["interval"] * (len(bodies) - 2), "after"]
    scrapes: list[dict[str, Any]] = [
        {"at_ns": at, "reason": reason, "status": 200 if body else 0, "body": body or ""}
        for at, (reason, body) in enumerate(zip(reasons, bodies, strict=True))
    ]
    lines = [json.dumps(scrape).encode() + b"\n" for scrape in scrapes]
    table, num_scrapes, num_failed = metrics_table(lines)
    return Derived({"metrics": table}, ParseCounts(), num_scrapes=num_scrapes, num_failed_scrapes=num_failed)


@pytest.mark.parametrize(
    ("moved_s", "severity"), [(0.0, None), (0.9, None), (1.0, "warning"), (4.9, "warning"), (5.0, "invalid")]
)
def test_an_emulators_moved_schedule_is_summed_and_judged(moved_s: float, severity: str | None) -> None:
    server = ServerMetrics("m", EngineConfig.from_server(ServerSpec()), 100)
    server.schedule_moved(7 * NS_PER_S)  # before the replay
    first = server.render().decode()
    for _ in range(2):
        server.schedule_moved(round(moved_s * NS_PER_S / 2))
    derived = scraped(first, server.render().decode())

    def found(**limits: float) -> list[str]:
        times = {"replay_start_ns": 30 * NS_PER_S, "replay_end_ns": 130 * NS_PER_S}
        run = manifest(timings=times, requested={"limits": limits})
        return [finding.severity for finding in check_moved_schedule(run, derived)]

    assert found() == ([] if severity is None else [severity])
    if severity == "invalid":
        assert found(schedule_moved_share=0.06) == ["warning"]
