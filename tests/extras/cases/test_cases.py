"""Simulation cases as JSON lines: the stated format, and errors that spoil only their own line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from harness.extras.cases.cases import simulate_batches, simulate_jsonl

COST: dict[str, Any] = {
    "f_s": {"1": 0.00987, "2": 0.01042, "4": 0.010825, "8": 0.01297},
    "alpha_s": 0.000501,
    "beta_s": 0.0000413,
    "context_s_per_token": 0.0,
    "prefill": {"per_chunk_s": 0.021206, "per_chunk_per_token_s": 6.399e-07, "chunk": 128},
}
CASE: dict[str, Any] = {
    "id": "two",
    "rules": "vendor-0.11.1",
    "sessions": [
        {
            "start_s": 0.0,
            "requests": [
                {"new_tokens": 1129, "generate": 36, "wait_s": 0.715},
                {"new_tokens": 8, "generate": 40, "wait_s": 0.0},
            ],
        },
        {"after": 0, "start_s": 0.1, "requests": [{"new_tokens": 200, "generate": 5, "wait_s": 1.0}]},
    ],
    "config": {"buckets": [1, 2, 4, 8], "limit": 8, "slots": 8, "slot_tokens": 8192},
    "cost": COST,
    "emit": ["steps"],
}


def run(*cases: Any) -> list[dict[str, Any]]:
    lines = [case if isinstance(case, str) else json.dumps(case) for case in cases]
    return [json.loads(line) for line in simulate_jsonl(lines)]


def test_a_case_gives_requests_steps_and_sums() -> None:
    (result,) = run(CASE)
    assert [request["cached_tokens"] for request in result["requests"]] == [0, 1024, 0]
    assert [request["prompt_tokens"] for request in result["requests"]] == [1129, 1173, 200]
    first, second, after = result["requests"]
    assert second["arrival_s"] == pytest.approx(first["completed_s"] + 0.715, abs=1e-9)
    assert after["arrival_s"] == pytest.approx(second["completed_s"] + 0.1, abs=1e-9)
    assert result["decode_steps"] == {"1->1": 35 + 39 + 4}
    assert result["decode_s"] == pytest.approx(78 * 0.0104123, abs=1e-9)
    assert result["device_s"] == pytest.approx(result["decode_s"] + result["prefill_s"], abs=1e-9)
    assert (result["wait_session_s"], result["evictions"]) == (0.0, 0)
    assert [step[1:] for step in result["steps"]] == [
        ["prefill", 1, 1, 1, 0, 0, 1129],
        ["decode", 1, 1, 35, None, None, None],
        ["prefill", 1, 1, 1, 0, 1, 149],
        ["decode", 1, 1, 39, None, None, None],
        ["prefill", 1, 1, 1, 1, 0, 200],
        ["decode", 1, 1, 4, None, None, None],
    ]


def test_steps_of_growing_context_are_still_merged() -> None:
    (result,) = run({**CASE, "cost": {**CASE["cost"], "context_s_per_token": 1.45e-7}})
    assert [step[4] for step in result["steps"] if step[1] == "decode"] == [35, 39, 4]


def test_a_server_may_be_larger_than_one_of_an_experiment() -> None:
    config = {"buckets": [2000], "limit": 2000, "slots": 2000, "slot_tokens": 65536}
    (result,) = run({**CASE, "config": config, "cost": {**COST, "f_s": {"2000": 0.5}}})
    assert result["decode_steps"] == {"1->2000": 35 + 39 + 4}


def test_what_is_no_case_at_all_is_an_error_without_an_id() -> None:
    results = run("{", "[1, 2]", "", json.dumps({"id": "only"}))
    assert [result["id"] for result in results] == [None, None, "only"]
    assert all("error" in result for result in results)


def test_one_wrong_key_is_one_complaint() -> None:
    (result,) = run({**CASE, "sessions": [{"requests": [{"new_tokens": 5.5, "generate": 1}]}]})
    assert result["error"].startswith("sessions.0.requests.0.new_tokens")
    assert ";" not in result["error"]


def test_whole_numbers_may_be_written_with_a_point() -> None:
    (result,) = run({**CASE, "sessions": [{"requests": [{"new_tokens": 500.0, "generate": 2.0}]}]})
    assert result["decode_steps"] == {"1->1": 1}


def test_a_session_may_follow_one_that_stands_after_it() -> None:
    request = {"new_tokens": 5, "generate": 2}
    (result,) = run({**CASE, "sessions": [{"after": 1, "requests": [request]}, {"requests": [request]}]})
    second, first = result["requests"]
    assert first["arrival_s"] == 0.0
    assert second["arrival_s"] == first["completed_s"]


def test_a_case_of_twenty_thousand_requests_is_a_case_like_any_other() -> None:
    sessions = [
        {
            "start_s": index * 0.5,
            "requests": [{"new_tokens": 900, "generate": 40, "wait_s": 1.5}, {"new_tokens": 8, "generate": 40}],
        }
        for index in range(10_000)
    ]
    (result,) = run({**CASE, "sessions": sessions, "emit": []})
    assert len(result["requests"]) == 20_000
    assert sum(int(key.split("->")[0]) * count for key, count in result["decode_steps"].items()) == 20_000 * 39


def test_draws_of_a_case_have_the_fields_of_a_single_result_and_its_own_numbers() -> None:
    perturb = {"start_s": 0.01, "lag_s": 0.002, "step_sd": 0.01, "cost_sd": 0.002}
    (with_steps,) = run({**CASE, "draws": 3, "perturb": perturb})
    (together,) = run({key: value for key, value in {**CASE, "draws": 3, "perturb": perturb}.items() if key != "emit"})
    nominal = {key: value for key, value in together.items() if key not in ("id", "rules", "draws")}
    for one, other in zip(with_steps["draws"], together["draws"], strict=True):
        assert one.keys() - other.keys() == {"steps"}
        assert other == {key: one[key] for key in nominal}
        assert 0 < abs(other["device_s"] / nominal["device_s"] - 1) < 0.05
    assert len({one["device_s"] for one in together["draws"]}) == 3
    assert run({**CASE, "draws": 3, "perturb": perturb})[0] == with_steps
    assert run({**CASE, "draws": 3, "perturb": perturb, "seed": 1})[0]["draws"] != with_steps["draws"]


def test_a_perturbation_of_nothing_leaves_only_the_order_of_arrivals_open() -> None:
    (result,) = run({**CASE, "draws": 2, "perturb": {"start_s": 0, "lag_s": 0, "step_sd": 0, "cost_sd": 0}})
    assert [one["device_s"] for one in result["draws"]] == [result["device_s"]] * 2


def test_fields_choose_what_a_result_and_its_draws_hold() -> None:
    whole, chosen = run(
        {**CASE, "draws": 2, "emit": []},
        {**CASE, "draws": 2, "emit": [], "fields": ["requests.completed_s", "device_s", "requests.session"]},
    )
    for full, part in zip([whole, *whole["draws"]], [chosen, *chosen["draws"]], strict=True):
        assert part["device_s"] == full["device_s"]
        assert part["requests"] == [
            {"session": row["session"], "completed_s": row["completed_s"]} for row in full["requests"]
        ]
    assert chosen.keys() == {"id", "rules", "requests", "device_s", "draws"}
    assert chosen["draws"][0].keys() == {"requests", "device_s"}


def test_fields_without_requests_leave_them_out_and_unknown_fields_are_an_error() -> None:
    (few, all_columns, unknown) = run(
        {**CASE, "emit": [], "fields": ["evictions"]},
        {**CASE, "emit": [], "fields": ["requests", "requests.session"]},
        {**CASE, "fields": ["requests.speed"]},
    )
    assert few.keys() == {"id", "rules", "evictions"}
    assert len(all_columns["requests"][0]) == 8
    assert unknown["error"].startswith("fields.0")


def test_batches_on_all_cores_give_the_lines_of_one_process_in_their_order() -> None:
    cases = [{**CASE, "id": place, "seed": place, "draws": place % 3} for place in range(140)]
    lines = [json.dumps({**case, "id": f"case {case['id']}"}) for case in cases]
    lines[7:7] = ["{", "", "  "]
    assert list(simulate_batches(lines)) == list(simulate_jsonl(lines))


PAGED: dict[str, Any] = {
    "id": "gpu",
    "rules": "vllm-paged",
    "sessions": [
        {"requests": [{"new_tokens": 100, "generate": 60, "wait_s": 0.5}, {"new_tokens": 20, "generate": 5}]},
        {"start_s": 0.0503, "requests": [{"new_tokens": 300, "generate": 5}]},
        {"after": 1, "requests": [{"new_tokens": 30, "generate": 5}]},
    ],
    "config": {"buckets": [1], "limit": 2, "slot_tokens": 1024, "max_num_batched_tokens": 200, "num_gpu_blocks": 80},
    "cost": {
        "f_s": {"1": 0.001, "8": 0.002},
        "chunked_prefill": {"per_step_s": 0.001, "per_token_s": 1e-5},
        "eager_s": 0.01,
    },
    "emit": ["steps"],
}


def test_a_case_of_paged_rules_computes_prompts_in_parts_reuses_blocks_and_prices_steps_without_a_graph() -> None:
    (result,) = run(PAGED)
    # 159 tokens were computed: nine blocks of 16.
    assert [request["cached_tokens"] for request in result["requests"]] == [0, 144, 0, 0]
    assert result["requests"][3]["arrival_s"] == result["requests"][2]["completed_s"]
    assert result["decode_steps"].keys() == {"1->1", "2->2"}
    parts = [step[1:] for step in result["steps"] if step[1] != "decode"]
    assert parts[0] == ["prefill", 1, None, 1, None, None, 100]
    assert ["mixed", 2, None, 1, None, None, 199] in parts
    (cheaper,) = run({**PAGED, "cost": {**PAGED["cost"], "eager_s": 0.0}})
    assert result["device_s"] == pytest.approx(cheaper["device_s"] + 0.01 * result["decode_steps"]["2->2"])


def test_draws_of_a_case_of_paged_rules_differ_and_without_perturbation_miss_its_result_by_steps_at_most() -> None:
    (drawn,) = run({**PAGED, "draws": 3, "seed": 4})
    assert len({draw["device_s"] for draw in drawn["draws"]} | {drawn["device_s"]}) == 4
    still = {"start_s": 0, "lag_s": 0, "step_sd": 0, "cost_sd": 0}
    costs = {**PAGED["cost"], "eager_s": 0.0}
    (exact,) = run({**PAGED, "cost": costs, "emit": [], "draws": 2, "perturb": still})
    # Starts differ by less than 1 us, so a session may begin a step later.
    assert [draw["device_s"] for draw in exact["draws"]] == pytest.approx([exact["device_s"]] * 2, abs=0.0025)
    assert "steps" not in exact["draws"][0]


AT_ONCE = [{"requests": [{"new_tokens": 30_000, "generate": 4}]}] * 400
SLOW_PROMPTS = {"per_chunk_s": 0.0, "per_chunk_per_token_s": 1e-3, "chunk": 1}
LONG_WAITS = [{"requests": [{"new_tokens": 8, "generate": 2, "wait_s": 1e8}] * 40}]
MANY = {"buckets": [400], "limit": 400, "slots": 400, "slot_tokens": 32768}
LONG = [{"requests": [{"new_tokens": 8000, "generate": 4}]}]
IN_A_CIRCLE = [{"after": other, "requests": [{"new_tokens": 10, "generate": 1}]} for other in (1, 0)]
# A set of names has another order in each process.
FOREIGN_KEYS = {**CASE["config"], "num_gpu_blocks": 9, "max_num_batched_tokens": 64, "async_scheduling": True}
NOT_OF_SLOTS = "the rules 'vendor-0.11.1' do not have it"


@pytest.mark.parametrize(
    ("case", "change", "complaint"),
    [
        (CASE, {"sessions": []}, "sessions"),
        (CASE, {"sessions": IN_A_CIRCLE}, "never starts"),
        (CASE, {"config": FOREIGN_KEYS}, f"config.async_scheduling: {NOT_OF_SLOTS}"),
        (CASE, {"config": {**CASE["config"], "num_gpu_blocks": 9}}, f"config.num_gpu_blocks: {NOT_OF_SLOTS}"),
        (CASE, {"rules": "vendors"}, "rules"),
        (CASE, {"config": {"buckets": [1, 2], "limit": 8, "slots": 8}}, "limit"),
        (CASE, {"config": {"buckets": [8], "limit": 8, "slots": 1}}, "slot"),
        (CASE, {"sessions": [{"requests": [{"new_tokens": 9000, "generate": 1}]}]}, "do not fit"),
        (CASE, {"sessions": [{"requests": [{"new_tokens": 10, "generate": 0}]}]}, "generate"),
        (CASE, {"sessions": [{"after": 5, "requests": [{"new_tokens": 10, "generate": 1}]}]}, "no other session"),
        (CASE, {"sessions": [{"start_s": -1.0, "requests": [{"new_tokens": 10, "generate": 1}]}]}, "start_s"),
        (CASE, {"cost": {"f_s": {"1": 9.87}, "prefill": {"per_chunk_s": 0.02}}}, "more than one second"),
        (CASE, {"speed": 1}, "speed"),
        (CASE, {"sessions": [{"requests": [{"new_tokens": "500", "generate": 1}]}]}, "must be a number"),
        (CASE, {"sessions": [{"requests": [{"new_tokens": 5, "generate": True}]}]}, "generate: must be a number"),
        (CASE, {"sessions": [{"requests": [{"new_tokens": 10**30, "generate": 1}]}]}, "less than or equal"),
        (CASE, {"sessions": [{"requests": [{"new_tokens": 5, "generate": 1, "think_s": 1}]}]}, "think_s"),
        (CASE, {"sessions": [{"after": 0, "requests": [{"new_tokens": 5, "generate": 1}]}]}, "no other session"),
        (CASE, {"cost": {**COST, "context_s_per_token": -1e-3}}, "no time"),
        (CASE, {"cost": {**COST, "prefill": {"per_chunk_s": 0.001, "per_chunk_per_token_s": -1e-4}}}, "cost.prefill"),
        (CASE, {"cost": {**COST, "f_s": {"one": 0.01}}}, "cost.f_s"),
        (CASE, {"config": {"buckets": [8, 8], "limit": 8, "slots": 8}}, "ascending"),
        (CASE, {"emit": ["everything"]}, "emit"),
        (PAGED, {"config": {**PAGED["config"], "slots": 8}}, "config.slots: the rules 'vllm-paged' do not have it"),
        (PAGED, {"cost": {"f_s": {"1": 0.001}}}, "cost.chunked_prefill: Field required"),
        (PAGED, {"rules": "vendor-0.12.0"}, "config.slots: Field required"),
        (PAGED, {"config": {**PAGED["config"], "num_gpu_blocks": 8}}, "do not hold one request of 1024 tokens"),
        # Times that no integer holds.
        (
            CASE,
            {"sessions": AT_ONCE, "config": MANY, "cost": {**COST, "context_s_per_token": 1e-3}},
            "a step could take 12,0",
        ),
        (CASE, {"sessions": LONG, "cost": {**COST, "prefill": SLOW_PROMPTS}}, "a step could take 64,0"),
        (CASE, {"sessions": LONG_WAITS}, "its waits and steps could take 124 years"),
        (PAGED, {"sessions": LONG_WAITS}, "its waits and steps could take 124 years"),
    ],
)
def test_a_bad_case_is_an_error_and_the_rest_goes_on(
    case: dict[str, Any], change: dict[str, Any], complaint: str
) -> None:
    bad, good = run({**case, **change}, CASE)
    assert bad["id"] == case["id"]
    assert complaint in bad["error"]
    assert "error" not in good
