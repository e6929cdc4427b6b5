"""The short form of `benchmarks gate`: false verdicts stay below alpha, and passes come as power promises."""

from __future__ import annotations

import math

import pytest

from benchmarks.gate import gate_experiment, gated, log_ratios_sd, simulated_blocks
from harness.judge.decisions.gate import GateVerdict, gate_policy
from harness.judge.planning.power import PlannedTest

EXPERIMENTS, NUM_BLOCKS = 150, 9


def test_on_simulated_pairs_the_gate_is_seldom_wrong_and_passes_as_power_promises() -> None:
    blocks, policy = simulated_blocks(gate_experiment(), 40), gate_policy()
    at_limit = gated(blocks, NUM_BLOCKS, policy.limits, EXPERIMENTS)
    equal = gated(blocks, NUM_BLOCKS, dict.fromkeys(policy.limits, 1.0), EXPERIMENTS)
    worse = gated(blocks, NUM_BLOCKS, {**dict.fromkeys(policy.limits, 1.0), "cost": 1.05}, EXPERIMENTS)
    # Alpha and three Monte Carlo errors of so many experiments.
    assert at_limit.of(GateVerdict.WORSE) <= 0.05 + 0.053
    assert at_limit.of_figure("cost", GateVerdict.PASS) <= 0.05 + 0.053
    promised = PlannedTest(log_ratios_sd(blocks, "cost"), 0.05).power(NUM_BLOCKS, -math.log(1.01), "superiority")
    assert equal.of_figure("cost", GateVerdict.PASS) == pytest.approx(promised, abs=0.12)
    assert worse.of(GateVerdict.WORSE) > 0.9
    assert {share.passes_with_open_figures for share in (at_limit, equal, worse)} == {0}
