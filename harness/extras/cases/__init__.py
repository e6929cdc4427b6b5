"""Simulations that other programs describe, one JSON line each."""

from harness.plugins import Plugin

PLUGIN = Plugin(
    name="cases",
    summary="`harness simulate --jsonl`: one simulation a line",
    services={"simulation cases": "harness.extras.cases.cases:simulate_file"},
)
