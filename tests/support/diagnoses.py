"""A diagnosis of runs that were never made, to be changed where a test needs it."""

from __future__ import annotations

from harness.tune.diagnose import Diagnosis

SEEN = Diagnosis(
    condition="base",
    backend="rbln",
    shown={},
    num_runs=3,
    num_rearrivals=0,
    num_reused=0,
    device_ns=100,
    losses=(),
    waiting_session_ns=0,
    overload=None,
    origin="",
    unknown="",
    has_rules=True,
    has_costs=True,
    eager=None,
    start_ms=0.0,
    lag_ms=0.0,
)
