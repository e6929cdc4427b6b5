"""An experiment as people write it: what is derived for a condition, what is refused, and with which words."""

from __future__ import annotations

from typing import Any

import pytest

from harness.errors import SpecError
from harness.model.experiment import build_plan
from harness.model.spec import parse_experiment

TABLE: dict[str, Any] = {
    "name": "mine",
    "base_seed": 1,
    "workload": {"num_sessions": 4},
    "condition": [
        {"name": "base"},
        {"name": "slots", "server": {"kv_slots": 12}},
        {"name": "more", "workload": {"num_sessions": 6}, "baseline": "slots"},
    ],
}


def refused(**changes: Any) -> str:
    with pytest.raises(SpecError) as error:
        parse_experiment({**TABLE, **changes}, where="mine.toml")
    return str(error.value)


def test_a_condition_changes_only_what_it_names() -> None:
    spec = parse_experiment(TABLE, where="mine.toml")
    base, slots, more = spec.condition
    assert spec.server_of(base) == spec.server
    assert spec.server_of(slots) == spec.server.model_copy(update={"kv_slots": 12})
    assert spec.workload_of(more).num_sessions == 6
    assert spec.workload_of(slots) is spec.workload


def test_the_first_condition_is_the_baseline_unless_another_is_named() -> None:
    spec = parse_experiment(TABLE, where="mine.toml")
    assert [spec.baseline_of(condition) for condition in spec.condition] == ["base", "base", "slots"]
    assert parse_experiment({**TABLE, "baseline": "slots"}, where="x").baseline_name == "slots"


def test_repeated_input_is_the_first_replicates() -> None:
    assert parse_experiment({**TABLE, "same_input": True}, where="x").input_of(5) == 0
    assert parse_experiment(TABLE, where="x").input_of(5) == 5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"replicate": 3}, "replicate: unknown key"),
        ({"two\nlines": 3}, "two lines: unknown key"),
        ({"baseline": "nobody"}, "baseline: 'nobody' is not one of the conditions base, slots, more"),
        ({"condition": [{"name": "a"}, {"name": "a"}]}, "condition[a].name: another condition has that name"),
        ({"condition": [{"name": "a", "server": {"kv_slot": 1}}]}, "kv_slot: unknown key"),
        ({"condition": [{"name": "Big"}]}, "name 'Big' must match"),
        (
            {"workload": {"num_sessions": 4, "prompt_tokens": {"distribution": "unifrm"}}},
            "workload.prompt_tokens: distribution 'unifrm' is not one of 'fixed', 'uniform', 'lognormal' "
            "(did you mean uniform?)",
        ),
        ({"backend": "gpu"}, "unknown backend 'gpu'"),
        ({"limits": {"residual_share": 2}}, "limits.residual_share"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    assert words in refused(**changes)


def test_secrets_of_a_condition_are_not_dumped() -> None:
    condition = {"name": "a", "server": {"env": {"HF_TOKEN": "geheim"}}}
    spec = parse_experiment({**TABLE, "condition": [condition]}, where="x")
    assert "geheim" not in spec.model_dump_json()
    assert spec.server_of(spec.condition[0]).env["HF_TOKEN"] == "geheim"


SHORTEST: dict[str, Any] = {
    "name": "mine",
    "condition": [{"name": "base"}, {"name": "slots", "server": {"kv_slots": 12}}],
}


def test_six_lines_are_an_experiment_and_the_rest_has_defaults() -> None:
    spec = parse_experiment(SHORTEST, where="mine.toml")
    assert (spec.base_seed, spec.workload.num_sessions) == (1, 8)
    assert [spec.server_of(condition).decode_buckets for condition in spec.condition] == [(1, 2, 4, 8)] * 2


@pytest.mark.parametrize(("limit", "buckets"), [(1, (1,)), (6, (1, 3, 6)), (8, (1, 2, 4, 8)), (12, (1, 3, 6, 12))])
def test_buckets_that_are_left_out_halve_the_limit(limit: int, buckets: tuple[int, ...]) -> None:
    of_all = parse_experiment({**SHORTEST, "server": {"max_num_seqs": limit}}, where="x")
    assert of_all.server.decode_buckets == buckets
    one = {"name": "other", "server": {"max_num_seqs": limit}}
    of_one = parse_experiment({**SHORTEST, "condition": [*SHORTEST["condition"], one]}, where="x")
    assert of_one.server_of(of_one.condition[-1]).decode_buckets == buckets


def test_written_buckets_are_never_replaced_by_the_default() -> None:
    one = {"name": "other", "server": {"max_num_seqs": 12}}
    words = refused(server={"decode_buckets": [1, 8]}, condition=[{"name": "base"}, one])
    assert "decode_buckets [1, 8] must end with max_num_seqs (12)" in words


def test_a_condition_that_replays_a_trace_takes_the_whole_of_it() -> None:
    one = {"name": "recorded", "workload": {"source": "trace", "trace": "research-agent"}}
    spec = parse_experiment({**SHORTEST, "condition": [*SHORTEST["condition"], one]}, where="x")
    assert spec.workload.num_sessions == 8
    assert build_plan(spec.workload_of(spec.condition[-1]), 1, 0).provenance["left_out"] == ""


def test_a_record_of_an_experiment_holds_what_its_defaults_became() -> None:
    more = [
        {"name": "wide", "server": {"max_num_seqs": 12}},
        {"name": "recorded", "workload": {"source": "trace", "trace": "research-agent"}},
    ]
    spec = parse_experiment({**SHORTEST, "condition": [*SHORTEST["condition"], *more]}, where="x")
    record = spec.model_dump(mode="json")
    assert (record["base_seed"], record["workload"]["num_sessions"]) == (1, 8)
    assert record["condition"][2]["server"]["decode_buckets"] == [1, 3, 6, 12]
    again = parse_experiment(record, where="a manifest")
    assert again == spec
    assert [again.workload_of(one) for one in again.condition] == [spec.workload_of(one) for one in spec.condition]
