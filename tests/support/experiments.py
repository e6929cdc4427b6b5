"""Small experiments for tests: the emulator at many times real speed, a few short sessions."""

from __future__ import annotations

from typing import Any

from harness.model.spec import ExperimentSpec

FAST = 20.0
UNHURRIED: dict[str, float] = {
    "rearrival_lag_p99_ms": 5000.0,
    "start_spread_ms": 5000.0,
    "schedule_moved_share": 1.0,
    # A stand-in for a server sends an answer in one piece.
    "first_token_held_ms": 5000.0,
    "read_together_ms": 5000.0,
}
"""Limits of runs on a server at its own speed, where a test is not about how busy its machine is."""


def small_experiment(**changes: Any) -> ExperimentSpec:
    """Three sessions of two short requests, two conditions, one replicate; ``changes`` replace top-level keys."""
    table: dict[str, Any] = {
        "name": "small",
        "time_scale": FAST,
        "replicates": 1,
        "base_seed": 7,
        "workload": {
            "num_sessions": 3,
            "prompt_tokens": {"distribution": "uniform", "low": 200, "high": 400},
            "generate_tokens": {"distribution": "uniform", "low": 8, "high": 24},
            "wait_cap_s": 2.0,
        },
        # How busy the test machine is decides nothing; a test of a limit sets it.
        "limits": UNHURRIED,
        "condition": [{"name": "base"}, {"name": "more", "server": {"decode_buckets": [1, 2, 3, 4, 8]}}],
    }
    return ExperimentSpec.model_validate({**table, **changes})
