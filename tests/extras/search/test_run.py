"""A search judges every candidate once, keeps what it has done, and never looks at the evaluation to select."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import RecordsError, SpecError
from harness.extras.search.evaluate import Evaluator
from harness.extras.search.result import pareto_front, score_interval, search_tables, sensitivity
from harness.extras.search.run import search
from harness.extras.search.space import SpaceSpec, load_space, parse_space
from harness.judge.prereg.freeze import SEARCH_FILE
from harness.model.engine import load_cost_model
from harness.model.engine.config import EngineConfig
from harness.model.experiment import build_plan
from harness.model.sim import simulate
from harness.model.spec import ServerShape
from harness.shipped import shipped_names
from harness.stacks.rbln.rules.kv_rules import RULE_SETS

SMALL: dict[str, Any] = {
    "name": "small",
    "max_num_seqs": [4, 6],
    "kv_slots": ["max_num_seqs", 9],
    "buckets": {"most": 4},
    "baseline": {"max_num_seqs": 4, "decode_buckets": [1, 2, 4]},
    "inputs": {"users": [3, 5], "search_seeds": [1, 2], "evaluation_seeds": [3], "replicates": 2},
}


def space(**changes: Any) -> SpaceSpec:
    return parse_space({**SMALL, **changes}, where="test")


def with_inputs(**changes: Any) -> SpaceSpec:
    return space(inputs={**SMALL["inputs"], **changes})


def test_candidates_come_in_a_stated_order_and_are_counted_without_listing() -> None:
    listed = list(space().candidates())
    assert listed[:2] == [ServerShape(4, (1, 4), 4, 8192), ServerShape(4, (1, 2, 4), 4, 8192)]
    assert listed[2] == ServerShape(4, (1, 3, 4), 4, 8192)
    assert len(listed) == space().count() == 2 * ((1 + 2 + 1) + (1 + 4 + 6))
    assert len(set(listed)) == len(listed)


def test_admission_below_the_limit_is_a_factor_where_the_rules_know_it() -> None:
    spec = space(rules="vendor-0.12.1", max_active_seqs=["max_num_seqs", 3, 4])
    listed = list(spec.candidates())
    assert len(listed) == spec.count() == len(set(listed))
    # Of the limit 4, admitting 4 is the limit itself; of 6, it is not.
    assert {(one.max_num_seqs, one.max_active_seqs) for one in listed} == {(4, None), (4, 3), (6, None), (6, 3), (6, 4)}
    assert ServerShape(6, (1, 6), 9, 8192, 4).label == "{1,6}/6 9 slots 4 active"
    with pytest.raises(SpecError, match=r"rules 'vendor-0\.12\.0' do not support max_active_seqs"):
        space(rules="vendor-0.12.0", max_active_seqs=[3])
    with pytest.raises(SpecError, match=r"must lie in 1\.\.max_num_seqs"):
        space(rules="vendor-0.12.1", max_active_seqs=[7])


def test_a_baseline_that_admits_fewer_is_what_candidates_are_compared_with(tmp_path: Path) -> None:
    server = {"max_num_seqs": 4, "decode_buckets": [1, 2, 4], "max_active_seqs": 2, "rules": "vendor-0.12.1"}
    spec = space(
        rules="vendor-0.12.1",
        max_active_seqs=["max_num_seqs", 2],
        baseline=server,
        max_num_seqs=[4],
        kv_slots=["max_num_seqs"],
    )
    result = search(spec, tmp_path)
    ratios = result.scores.sum_seconds
    rows = result.ledger.to_pylist()
    same = next(row for row in rows if row["decode_buckets"] == [1, 2, 4] and row["max_active_seqs"] == 2)
    assert result.candidate(same["index"]).max_active_seqs == 2
    assert ratios[same["index"]] == 1.0


def test_every_space_that_ships_can_be_searched() -> None:
    assert {load_space(name).name for name in shipped_names("spaces")} == {"emulated-gpu", "paper", "slots", "steady"}
    assert load_space("paper").count() == 2077


PAGED = {
    "rules": "vllm-paged",
    "cost_model": "emulated-gpu",
    "max_num_seqs": [4],
    "kv_slots": ["max_num_seqs"],
    "slot_tokens": [4096],
    "num_gpu_blocks": [260, 2100],
    "buckets": {"sets": [[1, 2], [1, 2, 4], [1, 2, 3, 4]]},
    "baseline": {"max_num_seqs": 4, "decode_buckets": [1, 2, 4], "slot_tokens": 4096, "num_gpu_blocks": 2100},
}


def test_captured_sizes_and_paged_memory_are_searched_on_the_simulator(tmp_path: Path) -> None:
    spec = space(**PAGED)
    result = search(spec, tmp_path)

    rows = result.ledger.to_pylist()
    assert [(tuple(row["decode_buckets"]), row["num_gpu_blocks"]) for row in rows] == [
        (sizes, blocks) for blocks in (260, 2100) for sizes in ((1, 2), (1, 2, 4), (1, 2, 3, 4))
    ]
    for row in rows:
        candidate = result.candidate(row["index"])
        config = EngineConfig.of_shape(candidate, spec.rules)
        inputs = spec.inputs
        plans = [build_plan(inputs.workload_of(5), seed, replicate) for seed in (1, 2) for replicate in range(2)]
        runs = [simulate(plan, config, load_cost_model("emulated-gpu")) for plan in plans]
        assert row["search_device_ns"][1] == sum(run.device_ns for run in runs)
    # Less memory costs nothing but what it makes the server compute again.
    small, large = rows[1], rows[4]
    assert small["cached_tokens"] < large["cached_tokens"]
    assert small["search_device_ns"][1] > large["search_device_ns"][1]
    assert large["memory_gib"] > small["memory_gib"]
    assert result.scores.of("sum-seconds")[4] == 1.0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({**PAGED, "kv_slots": [9]}, "have no KV slots: give num_gpu_blocks"),
        ({"num_gpu_blocks": [600]}, "have KV slots: give kv_slots"),
    ],
)
def test_memory_is_given_as_the_rules_have_it(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        space(**change)


def test_bucket_sets_can_be_given_one_by_one() -> None:
    chosen = space(buckets={"sets": [[1, 4], [2, 4], [6]]})
    assert [one.decode_buckets for one in chosen.candidates()] == [(1, 4), (2, 4), (1, 4), (2, 4), (6,), (6,)]


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"inputs": {**SMALL["inputs"], "evaluation_seeds": [2, 9]}}, "share"),
        ({"inputs": {**SMALL["inputs"], "users": []}}, "users"),
        ({"inputs": {**SMALL["inputs"], "workload": {"slots": 3}}}, "slots"),
        ({"max_num_seqs": [0]}, "max_num_seqs"),
        ({"sensitivity": [[3, 7]]}, "sensitivity"),
        ({"max_num_seqs": [64], "buckets": {"most": 12}}, "narrow"),
        ({"buckets": {"sets": [[4, 1]]}}, "ascending"),
        ({"speed": 1}, "speed"),
    ],
)
def test_a_space_that_makes_no_sense_is_refused_by_name(change: dict[str, Any], complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        space(**change)


def test_figures_are_those_of_simulating_each_plan_alone(tmp_path: Path) -> None:
    spec = space(rules="vendor-0.12.1", max_active_seqs=["max_num_seqs", 3])
    result = search(spec, tmp_path)
    for row in random.Random(1).sample(result.ledger.to_pylist(), 8):
        candidate = result.candidate(row["index"])
        for place, users in enumerate(spec.inputs.users):
            for role, seeds in (("search", (1, 2)), ("evaluation", (3,))):
                runs = [
                    simulate(
                        build_plan(spec.inputs.workload_of(users), seed, replicate),
                        EngineConfig.of_shape(candidate, spec.rules),
                    )
                    for seed in seeds
                    for replicate in range(2)
                ]
                assert row[f"{role}_device_ns"][place] == sum(run.device_ns for run in runs)
                assert row[f"{role}_completed"][place] == sum(run.requests.num_rows for run in runs)


@settings(max_examples=12)
@given(
    rules=st.sampled_from([name for name, rules in RULE_SETS.items() if not rules.is_paged]),
    limit=st.integers(1, 9),
    slots=st.integers(2, 12),
    users=st.sets(st.integers(1, 7), min_size=1, max_size=3),
    per_user=st.integers(1, 3),
    active=st.integers(1, 6),
    seed=st.integers(0, 9),
)
def test_sharing_simulations_changes_no_figure(
    rules: str, limit: int, slots: int, users: set[int], per_user: int, active: int, seed: int
) -> None:
    lowered = ["max_num_seqs", min(active, limit)] if RULE_SETS[rules].has_active_limit else ["max_num_seqs"]
    spec = parse_space(
        {
            **SMALL,
            "rules": rules,
            "max_num_seqs": [limit, limit + 1, limit + 4],
            "kv_slots": ["max_num_seqs", slots, slots + 1],
            "max_active_seqs": lowered,
            "buckets": {"most": 3},
            "inputs": {
                "users": sorted(users),
                "search_seeds": [seed],
                "replicates": 1,
                "sessions_per_user": per_user,
                "workload": {"wait_cap_s": 0.3},
            },
        },
        where="test",
    )
    shared, alone = Evaluator(spec), Evaluator(spec, is_sharing=False)
    for candidate in spec.candidates():
        assert shared.evaluate(candidate, shared.groups) == alone.evaluate(candidate, alone.groups)
    assert shared.num_simulated <= alone.num_simulated


def test_a_finished_ledger_is_read_and_one_made_by_other_processes_has_the_same_bytes(tmp_path: Path) -> None:
    spec = space(max_num_seqs=[4, 6, 8], buckets={"most": 6})
    done: list[float] = []
    whole = search(spec, tmp_path / "one", workers=1, on_progress=done.append)
    assert done[-1] == 1
    assert search(spec, tmp_path / "many").ranked == whole.ranked
    ledgers = [(tmp_path / name / "ledger.parquet").read_bytes() for name in ("one", "many")]
    assert ledgers[0] == ledgers[1]
    done.clear()
    again = search(spec, tmp_path / "one", on_progress=done.append)
    assert done == []
    assert again.ledger.equals(whole.ledger)


def test_an_interrupted_search_leaves_no_ledger(tmp_path: Path) -> None:
    def stop(_share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search(space(), tmp_path, on_progress=stop)
    assert [path.name for path in tmp_path.iterdir()] == [SEARCH_FILE], "its seeds were used"


def test_a_folder_holds_one_search_only(tmp_path: Path) -> None:
    search(space(), tmp_path)
    with pytest.raises(SpecError, match="another search"):
        search(space(rules="paper"), tmp_path)


@pytest.mark.parametrize("is_cut", [True, False], ids=["cut", "changed bytes"])
def test_a_damaged_ledger_is_named_and_is_not_another_result(is_cut: bool, tmp_path: Path) -> None:
    search(space(), tmp_path)
    ledger = tmp_path / "ledger.parquet"
    content = bytearray(ledger.read_bytes())
    for place in range(40, len(content) // 2, 37):
        content[place] ^= 0xFF
    ledger.write_bytes(ledger.read_bytes()[:100] if is_cut else content)
    with pytest.raises(RecordsError, match=r"ledger\.parquet"):
        search(space(), tmp_path)


def test_constraints_leave_candidates_in_the_ledger_with_the_reason(tmp_path: Path) -> None:
    result = search(space(constraints={"memory_gib": 4.5, "compile_s": 250}), tmp_path)
    rows = result.ledger.to_pylist()
    assert len(rows) == space().count()
    excluded = [row for row in rows if row["excluded"]]
    assert all(row["search_device_ns"] is None for row in excluded)
    assert {row["kv_slots"] for row in excluded if "memory" in row["excluded"]} == {9}
    assert all("compile" in row["excluded"] for row in rows if len(row["decode_buckets"]) > 2)
    assert set(result.ranked) == {row["index"] for row in rows if not row["excluded"]}


def test_when_nothing_meets_the_constraints_the_search_says_so(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="no candidate"):
        search(space(constraints={"compile_s": 1}), tmp_path)


@pytest.mark.parametrize("score", ["sum-seconds", "per-n"])
def test_the_best_has_an_interval_over_plans_that_holds_its_score_on_others(score: str) -> None:
    candidate = ServerShape(6, (1, 3, 6), 9, 8192)

    def of(seeds: range) -> tuple[float, float]:
        found = score_interval(
            space(score=score, inputs={**SMALL["inputs"], "search_seeds": list(seeds), "evaluation_seeds": []}),
            candidate,
        )
        assert found[2] == 2 * len(seeds)
        return found[:2]

    low, high = of(range(1_000, 1_060))
    truth = (low + high) / 2
    held = [low <= truth <= high for low, high in (of(range(6 * k, 6 * k + 6)) for k in range(20))]
    assert 17 <= sum(held) <= 20
    assert score_interval(with_inputs(search_seeds=[1], evaluation_seeds=[]), candidate) is None


def test_the_best_stands_with_its_interval_over_the_plans_of_the_search(tmp_path: Path) -> None:
    found = search(space(), tmp_path)
    [sentence] = [one for one in search_tables(found, 1) if str(one).startswith("best: ")]
    low, high = (float(end) for end in re.search(r"its 4 plans (\S+) to (\S+) \(95 %\)", str(sentence)).groups())
    assert low < found.scores.of("sum-seconds").min() < high


def test_equal_scores_stay_in_enumeration_order(tmp_path: Path) -> None:
    result = search(space(), tmp_path)
    scores = dict(zip(result.scores.indices.tolist(), result.scores.sum_seconds.tolist(), strict=True))
    ranked = result.ranked
    assert [(scores[index], index) for index in ranked] == sorted((scores[index], index) for index in ranked)


def test_the_selection_never_depends_on_the_evaluation(tmp_path: Path) -> None:
    one = search(with_inputs(evaluation_seeds=[3]), tmp_path / "one")
    other = search(with_inputs(evaluation_seeds=[77, 78]), tmp_path / "other")
    none = search(with_inputs(evaluation_seeds=[]), tmp_path / "none")
    assert one.ranked == other.ranked == none.ranked
    assert none.evaluation is None


def test_sensitivity_names_what_each_set_of_users_would_choose(tmp_path: Path) -> None:
    result = search(space(), tmp_path)
    rows = sensitivity(result)
    assert {(row.score, row.users) for row in rows} == {(s, (3, 5)) for s in ("sum-seconds", "per-n")}
    reference = next(row for row in rows if row.score == "sum-seconds")
    assert (reference.reference_rank, reference.common_top) == (1, 20)
    assert reference.selected == result.ranked[0]


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=40))
def test_nobody_on_the_pareto_front_is_beaten_and_everybody_else_is(points: list[tuple[int, int, int]]) -> None:
    values = np.array(points, dtype=np.float64)
    front = set(pareto_front(values).tolist())
    for place, value in enumerate(values):
        beaten = any(np.all(other <= value) and np.any(other < value) for other in values)
        repeated = any(np.array_equal(other, value) for other in values[:place])
        assert (place in front) == (not beaten and not repeated)


def test_a_search_leaves_its_space_with_its_seeds_for_a_freeze_to_read(tmp_path: Path) -> None:
    search(space(), tmp_path)
    written = json.loads((tmp_path / SEARCH_FILE).read_text())["space"]
    assert SpaceSpec.model_validate(written) == space()


def test_the_p99_of_a_ledger_is_the_percentile_of_every_other_figure(tmp_path: Path) -> None:
    one = with_inputs(users=[5], replicates=1, search_seeds=[1])
    (row, *_) = search(one, tmp_path).ledger.to_pylist()
    (plan, *_) = Evaluator(one).plans
    shape = ServerShape(row["max_num_seqs"], tuple(row["decode_buckets"]), row["kv_slots"], row["slot_tokens"])
    requests = simulate(plan, EngineConfig.of_shape(shape, one.rules)).requests
    latencies = requests.column("completed_ns").to_numpy() - requests.column("arrival_ns").to_numpy()
    assert row["p99_completion_ns"] == round(float(np.quantile(latencies, 0.99)))


def test_a_plan_too_long_for_a_slot_excludes_only_the_candidates_it_does_not_fit(tmp_path: Path) -> None:
    result = search(space(slot_tokens=[1024, 8192]), tmp_path)
    excluded = {row["slot_tokens"] for row in result.ledger.to_pylist() if "do not fit" in row["excluded"]}
    assert excluded == {1024}
    assert all(result.candidate(index).slot_tokens == 8192 for index in result.ranked)
