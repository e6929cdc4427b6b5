"""The short form of `benchmarks channels`: noise seldom withholds an answer, and a turned sign is noticed."""

from __future__ import annotations

import pytest

from benchmarks.channels import NOISES, REVERSED, WITHHELD, Noise, sequences, shares
from harness.analysis.cost.agreement import Agreement
from harness.model.spec.sections import StopSpec
from harness.tune.confirm import looks_within

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


@pytest.mark.parametrize("budget", [6, 12, 24])
def test_a_rule_ends_with_a_wrong_sign_only_where_time_in_flight_could_not_be_asked(budget: int) -> None:
    stop = StopSpec(margin=0.01, budget=budget, looks=tuple(looks_within(budget)))
    found = sequences(NOISES[0], REVERSED, 40, stop)
    assert found.without == 1.0
    assert found.cheaper <= 0.05 + 0.05


def test_a_rule_ends_with_a_true_sign_once_time_in_flight_confirms_it() -> None:
    stop = StopSpec(margin=0.01, budget=24, looks=(12,))
    assert sequences(NOISES[1], (-0.033, -0.033), 40, stop).cheaper > 0.8
