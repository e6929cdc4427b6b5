"""The short form of `benchmarks channels`: noise seldom withholds an answer, and a turned sign is noticed."""

from __future__ import annotations

import pytest

from benchmarks.channels import NOISES, REVERSED, WITHHELD, Noise, shares
from harness.analysis.cost.agreement import Agreement

EXPERIMENTS = 120


@pytest.mark.parametrize("noise", NOISES, ids=lambda noise: noise.name)
@pytest.mark.parametrize("change", [0.0, -0.1])
def test_equal_changes_of_both_channels_are_seldom_withheld(noise: Noise, change: float) -> None:
    # Alpha and three Monte Carlo errors of so many experiments.
    assert shares(noise, (change, change), 6, EXPERIMENTS).of(*WITHHELD) <= 0.05 + 0.06


def test_a_sign_that_a_cost_file_turns_is_withheld_and_never_called_agreement() -> None:
    found = [shares(noise, REVERSED, 6, EXPERIMENTS) for noise in NOISES]
    assert [share.of(Agreement.AGREE) for share in found] == [0.0, 0.0]
    assert found[0].of(*WITHHELD) > 0.7
    assert found[1].of(*WITHHELD) == 1.0
