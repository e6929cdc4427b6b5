from __future__ import annotations

from collections import Counter

from harness.runner.experiment import build_plans, planned_order
from tests.support.experiments import small_experiment


def four_conditions(replicates: int):
    return small_experiment(replicates=replicates, condition=[{"name": name} for name in "abcd"])


def test_condition_order_rotates_from_replicate_to_replicate():
    labels = [key.label for key in planned_order(four_conditions(3))]
    assert labels == ["a/0", "b/0", "c/0", "d/0", "b/1", "c/1", "d/1", "a/1", "c/2", "d/2", "a/2", "b/2"]


def test_every_condition_stands_equally_often_at_every_position():
    places = Counter((index % 4, key.name) for index, key in enumerate(planned_order(four_conditions(4))))
    assert set(places.values()) == {1}
    assert len(places) == 16


def test_all_conditions_of_a_replicate_get_the_identical_drawn_plan():
    spec = small_experiment(
        replicates=2,
        condition=[{"name": "a"}, {"name": "b", "treatment": "no-waits"}, {"name": "c", "server": {"kv_slots": 12}}],
    )
    plans = build_plans(spec)
    hashes = {(key.replicate, plan.hash) for key, plan in plans.items()}
    assert len(hashes) == 2
    for key, plan in plans.items():
        assert plan.with_treatment(key.condition.treatment).drawn_hash == plan.hash


def test_a_condition_with_its_own_workload_has_its_own_plan():
    spec = small_experiment(condition=[{"name": "three"}, {"name": "five", "workload": {"num_sessions": 5}}])
    sizes = {key.name: plan.num_sessions for key, plan in build_plans(spec).items()}
    assert sizes == {"three": 3, "five": 5}
