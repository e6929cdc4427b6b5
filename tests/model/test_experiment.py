from __future__ import annotations

from typing import Any

import pytest

from harness.errors import SpecError
from harness.model.engine import load_cost_model
from harness.model.experiment import resolve
from harness.model.spec import ExperimentSpec


def experiment(**changes: Any) -> ExperimentSpec:
    table: dict[str, Any] = {
        "name": "small",
        "replicates": 1,
        "base_seed": 7,
        "workload": {"num_sessions": 3, "prompt_tokens": {"distribution": "fixed", "value": 300}},
        "condition": [{"name": "base"}],
    }
    return ExperimentSpec.model_validate({**table, **changes})


def test_condition_order_rotates_from_replicate_to_replicate():
    spec = experiment(replicates=3, condition=[{"name": name} for name in "abcd"])
    labels = [run.label for run in resolve(spec)]
    assert labels == ["a/0", "b/0", "c/0", "d/0", "b/1", "c/1", "d/1", "a/1", "c/2", "d/2", "a/2", "b/2"]


def test_all_conditions_of_a_replicate_send_one_draw_each_under_its_own_treatment():
    spec = experiment(
        replicates=2,
        condition=[{"name": "a"}, {"name": "b", "treatment": "no-waits"}, {"name": "c", "server": {"kv_slots": 12}}],
    )
    planned = resolve(spec)
    assert len({(run.replicate, run.plan.drawn_hash) for run in planned}) == 2
    runs = planned.by_condition
    assert runs["a"][1].plan is runs["c"][1].plan
    assert runs["b"][1].plan == runs["a"][1].plan.with_treatment("no-waits")
    assert [run.plan.treatment for run in runs["b"]] == ["no-waits", "no-waits"]


def test_a_condition_with_its_own_workload_has_its_own_plan():
    spec = experiment(condition=[{"name": "three"}, {"name": "five", "workload": {"num_sessions": 5}}])
    assert {run.condition.name: run.plan.num_sessions for run in resolve(spec)} == {"three": 3, "five": 5}


def test_replicates_of_the_same_input_send_the_identical_plan():
    planned = resolve(experiment(replicates=3, same_input=True))
    assert len({run.plan.hash for run in planned}) == 1


def test_a_planned_run_carries_the_server_and_the_prices_of_its_condition():
    spec = experiment(condition=[{"name": "base"}, {"name": "more", "server": {"kv_slots": 12}}])
    base, more = resolve(spec)
    assert (base.server.num_kv_slots, more.server.num_kv_slots) == (8, 12)
    assert base.cost_file.stem == "paper"
    assert base.cost_model == load_cost_model("paper")
    assert base.key == ("small", "base", 0)


def test_a_request_that_no_slot_holds_is_refused_before_anything_is_made():
    spec = experiment(condition=[{"name": "tiny", "server": {"slot_tokens": 256}}])
    with pytest.raises(SpecError, match="do not fit a slot of 256"):
        resolve(spec)
