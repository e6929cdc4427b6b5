"""``[stop]`` and ``[client]``: what is wrong in it is said in one line."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import SpecError
from harness.model.spec import ClientSpec, ExperimentSpec, parse_experiment

pytestmark = pytest.mark.same_everywhere


def experiment(**stop: Any) -> ExperimentSpec:
    table = {"name": "one", "base_seed": 1, "workload": {"num_sessions": 2}, "condition": [{"name": "base"}]}
    return parse_experiment({**table, **({"stop": stop} if stop else {})}, where="one.toml")


def test_an_experiment_runs_until_decided_with_as_many_blocks_as_the_budget_has() -> None:
    spec = experiment(margin=0.02, budget=24, looks=[6, 12])
    assert spec.replicates == 6
    assert spec.until_decided().replicates == 24
    assert spec.stop.preset_looks == (6, 12, 24)


def test_without_a_rule_nothing_runs_until_decided() -> None:
    with pytest.raises(SpecError, match="declares no stopping rule"):
        experiment().until_decided()


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"looks": "often"}, 'stop.looks: must be "every" or a list of numbers of blocks'),
        ({"looks": []}, "stop.looks: must be"),
        ({"looks": [True, 4]}, "stop.looks: must be"),
        ({"looks": [6, 6]}, r"stop.looks: must ascend from 2 blocks on, not \[6, 6\]"),
        ({"looks": [1, 6]}, "stop.looks: must ascend from 2"),
        ({"looks": list(range(2, 24))}, "has 22 looks, at most 20"),
        ({"looks": [6, 30]}, "the last look, at 30 blocks, is beyond the budget of 24"),
        ({"margin": 0}, "stop.margin"),
        ({"alpha": 1}, "stop.alpha"),
        ({"budget": 1}, "stop.budget"),
        ({"margni": 0.1}, r"stop.margni: unknown key \(did you mean margin\?\)"),
    ],
)
def test_a_bad_rule_is_one_clear_line(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(SpecError, match=told) as raised:
        experiment(**{"margin": 0.02, "budget": 24, **changed})
    assert "\n" not in raised.value.what


def test_a_client_of_earlier_releases_is_read_over_and_any_other_name_is_no_key() -> None:
    former = ClientSpec.from_table({"name": "aiohttp", "processes": 2}, where="[client]")
    assert former == ClientSpec(processes=2)
    assert "name" not in former.model_dump()
    with pytest.raises(SpecError, match="name"):
        ClientSpec.from_table({"name": "httpx"}, where="[client]")
