"""How many plans a comparison needs where rare plans carry its mean, and that who asks is told."""

from __future__ import annotations

import numpy as np
import pytest

from harness.judge.planning import rare_plans
from harness.judge.planning.rare_plans import few_plans_in_words, fewest_plans, plans_asked
from harness.model.spec import ExperimentSpec
from tests.support.experiments import small_experiment

RNG = np.random.default_rng(5)
SIZES_AND_SLOTS = {"decode_buckets": [3, 6, 8], "kv_slots": 16}


def heavy(sigma: float, **changes: object) -> ExperimentSpec:
    lengths = {"distribution": "lognormal", "median": 24, "sigma": sigma, "low": 4, "high": 4000}
    return small_experiment(
        backend="sim",
        base_seed=606,
        workload={"num_sessions": 8, "wait_cap_s": 10.0, "generate_tokens": lengths},
        server={"cost_model": "paper", "slot_tokens": 16384},
        baseline="base",
        **{"condition": [{"name": "base"}, {"name": "new", "server": SIZES_AND_SLOTS}], **changes},
    )


@pytest.mark.parametrize(("one_in", "more"), [(10, 0.1), (20, 0.2)])
def test_where_one_plan_in_so_many_carries_the_mean_no_few_plans_are_enough(one_in: int, more: float) -> None:
    """Six plans show "cheaper" in more than half of such experiments; as many as are asked for in one of twenty."""
    own = 100 + RNG.normal(0, 0.05, 1_000)
    own[::one_in] *= 1 + more
    base = np.full(1_000, own.mean())
    asked = fewest_plans(own, base)
    places = RNG.integers(0, 1_000, (4_000, asked))
    left = (own - base)[places]
    t = left.mean(axis=1) / (left.std(axis=1, ddof=1) / asked**0.5)
    assert np.mean(t < -1.97) <= 0.055
    # So many hold such a plan, but with .05.
    assert (1 - 1 / one_in) ** asked < 0.05


def test_normal_differences_need_no_more_than_any_interval() -> None:
    assert fewest_plans(100 + RNG.normal(0, 2, 1_000), np.full(1_000, 100.0)) == 3
    assert fewest_plans(np.full(1_000, 90.0), np.full(1_000, 100.0)) == 3


def test_simulated_pairs_of_the_workload_say_what_each_comparison_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    # As many as a user has, and not the few of other tests.
    monkeypatch.setattr(rare_plans, "PAIRS", 1_000)
    (asked,) = plans_asked(heavy(2.2)).values()
    assert asked > 24
    assert plans_asked(heavy(2.2, same_input=True)) == plans_asked(heavy(2.2), only="base") == {}
    idle = [{"name": "base"}, {"name": "idle", "treatment": "no-waits"}]
    assert plans_asked(heavy(2.2, condition=idle))["idle"] > 100, "each side replays plans of its own treatment"
    assert few_plans_in_words(asked, asked) == ""
    assert few_plans_in_words(75, 12) == (
        "rare plans carry the mean: 75 plans are needed, by simulated ones; fewer show false differences"
    )
