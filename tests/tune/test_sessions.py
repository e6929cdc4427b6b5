"""The most agents at a time within the targets: found by bisection, shown by measuring on both sides of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from harness.analysis.compare.drawn import DrawnRatio
from harness.errors import SpecError
from harness.measure.records.store import RunStore
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import load_cost_model
from harness.model.experiment import build_plan, resolve
from harness.model.plan.model import Plan
from harness.model.sim.plans import plan_arrays
from harness.model.sim.simulate import run_batch
from harness.model.spec import ServerSpec, SloSpec, TuneSpec, parse_experiment
from harness.runner import run_experiment
from harness.tune.answer import sessions_answer
from harness.tune.explore import QUICK, Explored
from harness.tune.path import Tune
from harness.tune.predict import Option
from harness.tune.sessions import explore_agents, most_held, next_points
from harness.tune.setups import Setup
from harness.tune.targets import Capacity, Counts, Point, Targets, counts_of, counts_of_run, point_of, share_of

SETUP = Setup(8, (1, 2, 4, 8), 8, None)
SLO = {"ttft_ms": 700.0, "session_s": 8.0}


def experiment(**changes: Any) -> Any:
    table = {
        "name": "agents",
        "backend": "sim",
        "base_seed": 7,
        "workload": {"num_sessions": 4, "wait_cap_s": 20.0},
        "slo": SLO,
        "tune": {"goal": "sessions", "may_change": ["kv_slots"], "percentile": 80},
        "condition": [{"name": "base"}],
    }
    return parse_experiment(table | changes, where="test")


@pytest.mark.parametrize("true", [0, 1, 2, 7, 8, 9, 63, 64, 500])
@pytest.mark.parametrize("start", [1, 8, 512])
def test_bisection_finds_the_largest_number_that_holds_from_any_start(true: int, start: int) -> None:
    asked: list[int] = []

    def holds(agents: int) -> bool:
        asked.append(agents)
        return agents <= true

    assert most_held(holds, start, 512) == true
    assert len(asked) <= 20


def test_the_boundary_and_one_step_beyond_are_measured_first_and_then_what_is_further_out() -> None:
    fresh = Capacity("today", SETUP, 20)
    assert next_points(fresh, 512) == [20, 22]
    unclear = Capacity("today", SETUP, 20, (point(20, "open"), point(22, "open")))
    assert next_points(unclear, 512) == [16, 26]
    assert unclear.words == "an unknown number of agents at a time"
    known = Capacity("today", SETUP, 20, (*unclear.points, point(16, "holds"), point(26, "fails")))
    assert known.words == "16 to 25 agents at a time"


def test_later_rounds_narrow_the_interval_from_both_sides_towards_what_is_not_told() -> None:
    told = Capacity("today", SETUP, 20, (point(20, "holds"), point(26, "fails")))
    assert next_points(told, 512) == [22, 24]
    unclear = replace(told, points=(*told.points, point(22, "holds"), point(24, "open")))
    assert (next_points(unclear, 512), unclear.words) == ([23, 25], "22 to 25 agents at a time")
    narrow = replace(told, points=(*unclear.points, point(23, "open"), point(25, "fails")))
    assert (next_points(narrow, 512), narrow.words) == ([], "22 to 24 agents at a time")
    assert next_points(replace(told, points=(point(20, "holds"), point(21, "fails"))), 512) == []
    assert next_points(replace(told, points=(point(20, "holds"), point(22, "fails"))), 512) == [21]
    assert next_points(replace(told, points=(point(22, "holds"), point(20, "fails"))), 512) == [], "no single boundary"


def test_what_has_no_boundary_between_two_numbers_is_said() -> None:
    crossed = Capacity("today", SETUP, 20, (point(16, "fails"), point(20, "holds"), point(22, "fails")))
    assert crossed.words == "no single boundary: 20 agents at a time hold and 16 do not"
    assert Capacity("today", SETUP, 0, (point(1, "fails"),)).words == "not even one agent at a time"


def point(agents: int, verdict: Any) -> Point:
    return Point(agents, verdict, None, None, 12)


def test_a_number_holds_only_where_so_many_runs_can_show_the_wanted_share() -> None:
    alike = [Counts((10, 10), None)] * 73
    assert point_of(10, alike, 0.95).verdict == "holds"
    assert point_of(10, alike[:72], 0.951).verdict == "open"
    assert point_of(10, alike[:72], 0.95).most_shown == pytest.approx(0.95, abs=0.0002)
    assert point_of(10, alike[:1], 0.5).verdict == "open"
    assert point_of(10, [Counts((7, 10), None)] * 24, 0.95).verdict == "fails"
    both = [Counts((10, 10), (6, 10))] * 24
    assert point_of(10, both, 0.95).verdict == "fails"


def test_requests_of_one_run_that_fails_whole_are_one_draw() -> None:
    assert share_of([(0, 48), *[(48, 48)] * 107], 0.025).low < 0.961
    assert share_of([(0, 48), (0, 48), *[(48, 48)] * 106], 0.025).low < 0.95, "of 5,184 requests 98 % meet the target"


def test_what_has_no_boundary_or_holds_no_more_than_today_is_not_told_apart() -> None:
    spec = experiment()
    option = Option(SETUP, "12 KV slots", DrawnRatio(0.9, 0.01, 100), 0.8, 1.0, 0.1, 1.0, None, None)
    explored = Explored(SETUP, None, (option,), None, None, (), 2, 2)
    today = Capacity("today", SETUP, 10, (point(10, "holds"), point(12, "fails")))
    more = Capacity("proposed", SETUP, 14, (point(14, "holds"),))
    assert sessions_answer(spec, explored, [today, more]).state == "confirmed"
    crossed = replace(more, points=(point(14, "holds"), point(9, "fails")))
    assert sessions_answer(spec, explored, [today, crossed]).state == "not told apart"
    odd = replace(today, points=(point(9, "fails"), point(14, "holds")))
    assert sessions_answer(spec, explored, [odd, more]).state == "not told apart"
    assert sessions_answer(spec, explored, [odd]).state == "not told apart"
    few = replace(today, points=(point(10, "open"),))
    told = sessions_answer(spec, explored, [few])
    assert (told.state, told.exit_code) == ("not told apart", 5)
    assert "12 runs cannot show more than 73.5 % within the targets" in told.rests


def test_intervals_of_a_share_hold_the_true_share_though_runs_differ() -> None:
    rng, held = np.random.default_rng(11), 0
    for _ in range(400):
        chance = rng.beta(18, 2, 24)
        pairs = [(int(rng.binomial(16, each)), 16) for each in chance]
        found = share_of(pairs, 0.025)
        held += found.low <= 0.9 <= found.high
    assert held >= 370


@pytest.mark.parametrize("slo", [SloSpec(ttft_ms=400.0, tpot_ms=24.0, session_s=8.0), SloSpec(itl_ms=200.0)])
def test_a_simulated_run_and_its_sealed_record_meet_the_same_targets(tmp_path: Path, slo: SloSpec) -> None:
    spec = experiment(replicates=3)
    sealed = run_experiment(spec, runs_root=tmp_path).runs
    seen = simulated([run.plan for run in resolve(spec).runs], spec.server, slo)
    assert seen == [counts_of_run(run, slo) for run in sealed]
    assert any(each.requests is not None and 0 < each.requests[0] < each.requests[1] for each in seen)


def simulated(plans: Sequence[Plan], server: ServerSpec, slo: SloSpec) -> list[Counts]:
    arrays, config = plan_arrays(plans), EngineConfig.from_server(server)
    model = load_cost_model(server.cost_model)
    return counts_of(arrays, run_batch(arrays, config, model), slo, server, model)


def test_it_ends_in_an_interval_of_agents_and_goes_on_to_the_same(tmp_path: Path) -> None:
    said = list[str]()

    def tuned() -> Any:
        made = Tune(experiment(), tmp_path / "runs", perform, said.append, effort=QUICK.divided(6))
        return made.run().answer

    found = tuned()
    today = found.capacities[0]
    check_by_hand(said, today.predicted)
    assert today.low > 0
    assert today.low < today.high
    assert "agents at a time" in found.sentence
    assert "(simulated)" in found.sentence
    folder = tmp_path / "runs" / "agents-tune"
    assert "agents-1.toml" in (folder / "frozen.json").read_text(encoding="utf-8")
    diagnosed = {run.manifest.plan_hash for run in RunStore(folder).sealed("agents-diagnose")}
    assert not diagnosed & {run.manifest.plan_hash for run in RunStore(folder).sealed("agents-agents-1")}
    page = (folder / "tune.html").read_text(encoding="utf-8")
    assert "within the targets" in page
    assert not re.search(r"<td>(best|smallest)", page), "its numbers name what holds more agents, not what costs less"
    assert tuned() == found


def test_fewer_requests_at_once_are_found_where_they_hold_more_agents() -> None:
    spec = experiment(
        workload={
            "num_sessions": 10,
            "requests_per_session": 3,
            "prompt_tokens": {"distribution": "uniform", "low": 100, "high": 250},
            "generate_tokens": {"distribution": "uniform", "low": 40, "high": 120},
        },
        server={"max_num_seqs": 8, "kv_slots": 24},
        slo={"tpot_ms": 14.5, "ttft_ms": 4000.0},
        tune={"goal": "sessions", "percentile": 90},
    )
    question = Tune(spec, Path(), perform, lambda _line: None).question
    found, (today, proposed) = explore_agents(question, Targets(spec.slo, 0.9), QUICK)
    assert proposed.setup.max_num_seqs < today.setup.max_num_seqs
    assert proposed.predicted > today.predicted + 4
    assert found.bounds[0].startswith("max_num_seqs: 1 to ")
    assert [option.setup for option in found.options] == [proposed.setup]


def check_by_hand(said: list[str], predicted: int) -> None:
    """What is said of a prediction is enough to simulate it again: plans, numbers of agents, and what met targets."""
    text = "\n".join(said)
    seed, last = (int(number) for number in re.findall(r"base_seed = (\d+), replicates 0 to (\d+)", text)[0])
    spec = experiment()
    wanted = (spec.tune or TuneSpec()).percentile / 100
    for agents, holds in ((predicted, True), (predicted + 1, False)):
        workload = spec.workload.model_copy(update={"num_sessions": agents})
        plans = [build_plan(workload, seed, replicate) for replicate in range(last + 1)]
        counts = simulated(plans, spec.server, spec.slo)
        parts = [
            [sum(part) for part in zip(*pairs, strict=True)]
            for pairs in ([each.requests or () for each in counts], [each.sessions or () for each in counts])
        ]
        words = "; ".join(
            f"{name}: {good:,} of {of:,} within the targets"
            for name, (good, of) in zip(("requests", "sessions"), parts, strict=True)
        )
        assert f"workload.num_sessions = {agents}: {words}" in text
        assert all(good >= wanted * of for good, of in parts) == holds


def perform(spec: Any, folder: Path, until_ns: int, **options: Any) -> Any:
    assert until_ns > 0
    return run_experiment(spec, runs_root=folder, resume=True, **options)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"slo": {}}, "tune.goal: no target is set that could hold"),
        ({"workload": {"num_sessions": 4, "start_offset_s": 1.0}}, "tune.goal: this workload has no number of agents"),
        ({"server": {"replicas": 2, "router": {"policy": "round-robin"}}}, "tune.goal: is searched for one server"),
    ],
)
def test_a_goal_that_the_experiment_cannot_have_is_named(tmp_path: Path, changes: Any, named: str) -> None:
    with pytest.raises(SpecError, match=named):
        Tune(experiment(**changes), tmp_path, perform, lambda _line: None).run()
