"""Small experiments for tests: the emulator at many times real speed, a few short sessions."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from harness.analysis.compare.ratio import BlockCosts
from harness.model.spec import ExperimentSpec

FAST = 20.0
A_MINUTE_MS = 60_000.0
UNHURRIED: dict[str, float] = {
    "rearrival_lag_p99_ms": A_MINUTE_MS,
    "start_spread_ms": A_MINUTE_MS,
    "stall_ms": A_MINUTE_MS,
    "stamp_lag_ms": A_MINUTE_MS,
    "server_stall_ms": A_MINUTE_MS,
    "schedule_moved_share": 1_000.0,
    # A stand-in for a server sends an answer in one piece.
    "first_token_held_ms": A_MINUTE_MS,
    "read_together_ms": A_MINUTE_MS,
}
"""Limits of every run of a test on a real clock: how busy its machine is decides nothing. A test of a limit sets it."""
UNHURRIED_TOML = "\n".join(["[limits]", *(f"{name} = {limit}" for name, limit in UNHURRIED.items()), ""])
"""The same as a part of an experiment file."""
UNHURRIED_WORDS = tuple(word for name, limit in UNHURRIED.items() for word in ("--set", f"limits.{name}={limit}"))
"""The same as words of ``harness run``."""
SHORT_PROMPTS: dict[str, Any] = {"distribution": "fixed", "value": 200}


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
        "limits": UNHURRIED,
        "condition": [{"name": "base"}, {"name": "more", "server": {"decode_buckets": [1, 2, 3, 4, 8]}}],
    }
    return ExperimentSpec.model_validate({**table, **changes})


def one_condition(name: str, backend: str = "emulator", **keys: Any) -> ExperimentSpec:
    """Two sessions of four tokens an answer, without waits, one condition, one replicate.

    A table among ``keys`` adds to the one here; a workload of another source, and anything else, replaces it.
    """
    table: dict[str, Any] = {
        "name": name,
        "backend": backend,
        "replicates": 1,
        "base_seed": 1,
        "workload": {"num_sessions": 2, "waits": "none", "generate_tokens": {"distribution": "fixed", "value": 4}},
        "limits": UNHURRIED,
        "condition": [{"name": "only"}],
    }
    for key, value in keys.items():
        adds = isinstance(value, dict) and "source" not in value
        table[key] = {**table.get(key, {}), **value} if adds else value
    return ExperimentSpec.model_validate(table)


def blocks_of(logs: Iterable[float], base: float = 1.0) -> tuple[BlockCosts, ...]:
    """Blocks whose cost over that of the baseline has these logarithms."""
    return tuple(BlockCosts(base * math.exp(log), base) for log in logs)
