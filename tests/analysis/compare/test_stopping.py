"""Intervals that may be looked at after every block: against the formula's own source, by simulation, and by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.stopping import ended
from harness.analysis.compare.ratio import BlockCosts, Verdict
from harness.analysis.compare.stopping import (
    Look,
    blocks_left,
    bonferroni,
    boundary_of,
    check_can_decide,
    looks_at,
    t_mixture_boundary,
    verdict,
)
from harness.analysis.stats import t_quantile
from harness.errors import SpecError
from harness.model.engine.cost import find_cost_file
from harness.model.spec import StopSpec
from tests.support.experiments import blocks_of, small_experiment

RULE = StopSpec(margin=0.02, budget=40)
PATHS, LOOKS = 4_000, 60


def ever_missed(boundary) -> float:
    """Share of Gaussian paths of mean 0 whose |t| crosses a boundary at any look up to LOOKS."""
    values = np.random.default_rng(16).standard_normal((PATHS, LOOKS))
    n = np.arange(1, LOOKS + 1)
    mean = values.cumsum(axis=1) / n
    squares = (values**2).cumsum(axis=1) - n * mean**2
    with np.errstate(divide="ignore", invalid="ignore"):
        t = np.abs(mean) * np.sqrt(n) / np.sqrt(squares / (n - 1))
    limits = np.array([math.inf, *(boundary(k) for k in range(2, LOOKS + 1))])
    return float(np.mean((t > limits).any(axis=1)))


def test_the_mixture_of_likelihood_ratios_is_one_over_alpha_at_the_boundary() -> None:
    """The integral over the prior, by quadrature on a grid of effects and scales, not by the formula that solved it."""
    num_blocks, alpha = 12, 0.05
    t = t_mixture_boundary(num_blocks, alpha)
    effect = np.linspace(-8, 8, 1001)
    scale = np.exp(np.linspace(-4, 4, 1001))
    # A sample with mean m and sum of squares about it 1 that has this t; sigma by Jeffreys' right Haar measure.
    mean = t / math.sqrt(num_blocks * (num_blocks - 1))
    total = 1 + num_blocks * mean**2

    def marginal(delta: float) -> float:
        z = (total - 2 * scale * delta * num_blocks * mean + (scale * delta) ** 2 * num_blocks) / scale**2
        return float(np.trapezoid(scale ** (-num_blocks) * np.exp(-z / 2), np.log(scale)))

    prior = np.exp(-(effect**2) / 2) / math.sqrt(2 * math.pi)
    mixed = np.trapezoid([marginal(delta) * weight for delta, weight in zip(effect, prior, strict=True)], effect)
    assert mixed / marginal(0.0) == pytest.approx(1 / alpha, rel=1e-3)


def test_the_sequence_misses_at_most_alpha_ever_and_a_fixed_interval_looked_at_misses_far_more() -> None:
    assert ever_missed(lambda n: t_mixture_boundary(n, 0.05)) < 0.05
    assert ever_missed(lambda n: t_quantile(0.95, n - 1)) > 0.25


@pytest.mark.parametrize(("num_blocks", "width"), [(5, 3.78), (10, 1.22), (20, 0.77), (40, 0.53)])
def test_half_widths_in_units_of_the_spread_are_those_of_the_formula(num_blocks: int, width: float) -> None:
    assert t_mixture_boundary(num_blocks, 0.05) / math.sqrt(num_blocks) == pytest.approx(width, abs=0.005)
    assert math.isinf(t_mixture_boundary(4, 0.05))


@pytest.mark.parametrize(
    ("low", "high", "found"),
    [
        (0.94, 0.96, Verdict.LOWER),
        (1.04, 1.06, Verdict.HIGHER),
        (0.99, 1.01, Verdict.EQUIVALENT),
        (0.985, 0.997, Verdict.EQUIVALENT),  # below nothing, and no difference that matters
        (0.975, 0.995, Verdict.LOWER),
        (0.955, 1.015, Verdict.GO_ON),
    ],
)
def test_a_verdict_is_where_the_whole_interval_lies(low: float, high: float, found: Verdict) -> None:
    assert verdict(low, high, RULE.margin) is found


def test_a_look_says_how_many_blocks_the_next_that_decides_would_take() -> None:
    scatter = [0.004, -0.004, 0.003, -0.003] * 10
    looks = list(looks_at(blocks_of(-0.03 + one for one in scatter), RULE))
    first = next(look for look in looks if look.verdict is Verdict.LOWER)
    assert all(look.verdict is Verdict.GO_ON for look in looks if look.num_blocks < first.num_blocks)
    assert first.high < 1
    left = blocks_left(looks[0], RULE)
    assert looks[0].num_blocks + left == pytest.approx(first.num_blocks, abs=1)
    with_errors = blocks_left(replace(looks[0], of_costs=0.0), RULE)
    assert with_errors > left, "errors of the costs take half of alpha"


def test_a_budget_that_runs_out_is_inconclusive_and_not_a_looser_verdict() -> None:
    looks = list(looks_at(blocks_of([0.2, -0.2] * 20), RULE))
    assert len(looks) == 39
    assert [look.verdict for look in looks[-2:]] == [Verdict.GO_ON, Verdict.INCONCLUSIVE]
    assert blocks_left(looks[-2], RULE) is None


def test_preset_looks_are_taken_at_their_blocks_and_nowhere_else() -> None:
    rule = StopSpec(margin=0.02, budget=24, looks=(6, 12))
    noise = blocks_of([0.05, -0.05] * 12)
    assert [look.num_blocks for look in looks_at(noise, rule)] == [6, 12, 24]
    assert [look.num_blocks for look in looks_at(noise[:11], rule)] == [6]


def test_blocks_lost_to_invalid_runs_leave_a_last_look_at_what_is_there() -> None:
    rule = StopSpec(margin=0.02, budget=24, looks=(6, 12))
    looks = list(looks_at(blocks_of([0.05, -0.05] * 10), rule, is_over=True))
    assert [look.num_blocks for look in looks] == [6, 12, 20]
    assert looks[-1].verdict is Verdict.INCONCLUSIVE


def test_a_budget_in_which_no_look_can_decide_is_refused_with_the_first_that_could() -> None:
    with pytest.raises(SpecError, match=r"mine\.toml: stop\.budget: 4 blocks never decide.*infinite before block 5"):
        check_can_decide(small_experiment(), StopSpec(margin=0.02, budget=4), "mine.toml")
    assert check_can_decide(small_experiment(), StopSpec(margin=0.02, budget=4, looks=(4,)), "mine.toml").budget == 4


def test_a_budget_is_refused_by_the_half_of_alpha_that_the_errors_of_the_costs_leave(tmp_path: Path) -> None:
    paper = find_cost_file("paper").read_text(encoding="utf-8")
    errors = '[[errors]]\ncoefficients = ["alpha_ms"]\nstandard_errors = [0.1]\ncorrelations = [[1.0]]\ndegrees = 5.0\n'
    (tmp_path / "mine.toml").write_text(paper + errors, encoding="utf-8")
    priced = small_experiment(server={"cost_model": str(tmp_path / "mine.toml")})
    rule = StopSpec(margin=0.02, budget=5)
    assert check_can_decide(small_experiment(), rule, "mine.toml") == rule
    assert check_can_decide(priced, rule.model_copy(update={"channel": "b"}), "mine.toml").channel == "b"
    with pytest.raises(SpecError, match=r"5 blocks never decide.*alpha 0\.025 of each.*before block 6"):
        check_can_decide(priced, rule, "mine.toml")


def test_one_plan_repeated_never_decides() -> None:
    with pytest.raises(SpecError, match="one plan, repeated, decides nothing of other plans"):
        check_can_decide(small_experiment(same_input=True), StopSpec(margin=0.02, budget=9), "mine.toml")


def test_comparisons_share_the_alpha_of_their_rule() -> None:
    stop = StopSpec(margin=0.02, budget=40)
    assert bonferroni(stop, 6).alpha == pytest.approx(stop.alpha / 6)
    assert boundary_of(bonferroni(stop, 6))(20) > boundary_of(stop)(20)


def test_blocks_that_do_not_vary_have_no_interval_and_no_verdict() -> None:
    looks = list(looks_at(blocks_of([-0.1] * 8), StopSpec(margin=0.02, budget=8)))
    assert not any(look.has_interval for look in looks)
    assert looks[-1].verdict is Verdict.INCONCLUSIVE


def test_of_plans_with_heavy_tails_the_interval_at_the_end_holds_the_ratio_of_sums() -> None:
    """Costs of plans are log-normal, and larger plans gain less: the mean of the logs says .9 % more than the sums."""
    rng, rule = np.random.default_rng(69), RULE.model_copy(update={"budget": 30})

    def sides(shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        size = rng.standard_normal(shape)
        return np.exp(size - 0.025 + 0.02 * np.tanh(size) + 0.01 * rng.standard_normal(shape)), np.exp(size)

    own, base = sides((1_000_000,))
    truth, ends = own.sum() / base.sum(), list[Look]()
    assert truth - math.exp(float(np.log(own / base).mean())) > 0.008
    for costs in zip(*sides((200, rule.budget)), strict=True):
        ends.append(ended(looks_at([*map(BlockCosts, *costs)], rule)))
    assert np.mean([look.low <= truth <= look.high for look in ends]) >= 0.93
    assert np.mean([look.verdict is Verdict.LOWER for look in ends]) > 0.5
