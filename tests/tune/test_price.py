"""A server whose costs nobody knows is measured first; the search and the measurement then take what was fitted."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.errors import SpecError
from harness.measure.records.store import RunStore
from harness.model.engine.cost import load_cost_model
from harness.model.experiment import resolve
from harness.model.spec import ExperimentSpec, ServerSpec, parse_experiment
from harness.runner import ExperimentOutcome, run_experiment
from harness.tune import confirm
from harness.tune.confirm import base_of
from harness.tune.diagnose import Diagnosis
from harness.tune.explore import QUICK
from harness.tune.path import Tune
from harness.tune.price import calibration_of, price_of, with_eager_steps

SEEN = Diagnosis(
    condition="base",
    backend="rbln",
    shown={},
    num_runs=3,
    num_rearrivals=0,
    num_reused=0,
    device_ns=100,
    losses=(),
    waiting_session_ns=0,
    overload=None,
    origin="",
    unknown="",
    has_rules=True,
    has_costs=True,
    eager=None,
    start_ms=0.0,
    lag_ms=0.0,
)
"""A diagnosis of runs that were never made, to be changed where a test needs it."""


def without_costs() -> ExperimentSpec:
    """Of a backend that starts devices' servers."""
    table = {
        "name": "unknown",
        "backend": "rbln",
        "base_seed": 7,
        "server": {"rules": "vendor-0.11.1", "max_num_seqs": 2, "decode_buckets": [1, 2]},
        "workload": {"num_sessions": 4, "wait_cap_s": 20.0},
        "tune": {"may_change": ["kv_slots"]},
        "condition": [{"name": "base"}],
    }
    return parse_experiment(table, where="test")


def simulated(spec: ExperimentSpec, folder: Path, until_ns: int, **options: Any) -> ExperimentOutcome:
    """As if the device were the simulated one, whose costs are those of "paper"."""
    assert until_ns > 0
    return run_experiment(spec.model_copy(update={"backend": "sim"}), runs_root=folder, resume=True, **options)


def test_todays_costs_are_measured_once_and_the_search_takes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(confirm, "MOST_BLOCKS", 6)

    def tuned() -> tuple[Tune, list[str], Any]:
        said: list[str] = []
        made = Tune(without_costs(), tmp_path / "runs", simulated, said.append, effort=QUICK.divided(6))
        return made, said, made.run().answer

    made, said, found = tuned()
    assert said[0] == "price: no costs are named; a quick calibration of today's server"
    assert re.match(r"  the fit errs by at most [0-9.]+ % of decode steps and [0-9.]+ % of parts of prompts", said[1])
    assert found.option is not None
    folder = tmp_path / "runs" / "unknown-tune"
    (costs,) = (folder / "costs").glob("*.toml")
    assert made.spec.server.cost_model == str(costs)
    fitted, true = load_cost_model(costs), load_cost_model("paper")
    for size, number in ((1, 1), (2, 2)):
        assert fitted.decode_step_ns(size, number) == pytest.approx(true.decode_step_ns(size, number), rel=0.03)
    sealed = {run.path for run in RunStore(folder).sealed("unknown-calibrate")}
    assert tuned()[2] == found
    assert {run.path for run in RunStore(folder).sealed("unknown-calibrate")} == sealed


VLLM: dict[str, Any] = {
    "name": "own",
    "backend": "vllm",
    "base_seed": 7,
    "server": {"model": "any", "max_num_seqs": 2, "slot_tokens": 2048, "prefix_caching": False},
    "workload": {
        "num_sessions": 6,
        "prompt_tokens": {"distribution": "uniform", "low": 100, "high": 400},
        "generate_tokens": {"distribution": "uniform", "low": 8, "high": 24},
        "token_id_range": [300, 2000],
    },
    "limits": {"start_spread_ms": 9000.0, "rearrival_lag_p99_ms": 300.0},
    "tune": {"may_change": ["max_num_seqs", "prefix_caching"]},
    "condition": [{"name": "base"}],
}


def test_a_first_look_at_a_vllm_whose_costs_nobody_knows_says_whose_costs_it_takes(tmp_path: Path) -> None:
    said: list[str] = []
    quick = Tune(parse_experiment(VLLM, where="test"), tmp_path, simulated, said.append).forecast()
    assert quick is not None
    assert any(line.startswith("  a first look, as if it cost what 'emulated-gpu' says: ") for line in said)


def test_sizes_that_a_vllm_chose_itself_are_searched_from_those_of_its_release_where_they_are_named(
    tmp_path: Path,
) -> None:
    server = {**VLLM["server"], "max_num_seqs": 20}
    table = {**VLLM, "server": server, "tune": {"may_change": ["decode_buckets"]}}
    made = Tune(parse_experiment(table, where="test"), tmp_path, simulated, lambda _line: None)
    assert made.question.server.decode_buckets == (1, 2, 4, 8, 16, 20)
    quick = made.forecast()
    assert quick.baseline.decode_buckets == (1, 2, 4, 8, 16, 20)
    sets = {setup.decode_buckets for setup, _ in quick.screened}
    assert len(sets) > 10
    assert {len(sizes) for sizes in sets} <= set(range(1, 9))
    assert "at most 8 captured sizes" in quick.bounds
    assert not base_of(made.spec, quick).keys(quick.baseline)
    eager = {**table, "server": {**server, "extra_args": ["--enforce-eager"]}}
    with pytest.raises(SpecError, match="this server captures nothing"):
        Tune(parse_experiment(eager, where="test"), tmp_path, simulated, lambda _line: None).forecast()
    usual = Tune(parse_experiment(VLLM, where="test"), tmp_path, simulated, lambda _line: None)
    assert usual.question.server.decode_buckets == ()


def test_a_calibration_asks_for_what_the_model_has_and_for_as_many_requests_as_there_are_agents(tmp_path: Path) -> None:
    made = Tune(parse_experiment(VLLM, where="test"), tmp_path, simulated, lambda _line: None)
    sweeps = made.sweeps
    assert sweeps.workload.token_id_range == (300, 2000)
    assert sweeps.server.max_num_seqs == 8
    assert (sweeps.limits.start_spread_ms, sweeps.limits.rearrival_lag_p99_ms) == (9000.0, 2000.0)
    (run,) = resolve(sweeps).runs
    longest = max(
        request.prompt_tokens + request.generate_tokens for each in run.plan.sessions for request in each.requests
    )
    assert longest <= 2048


def costs_that_err_by(share: float, folder: Path) -> Path:
    costs = folder / "loose.toml"
    text = Path("plans/costs/paper.toml").read_text(encoding="utf-8")
    costs.write_text(f"{text}\n[calibration.decode]\nheld_out_max_share = {share}\n", encoding="utf-8")
    return costs


@pytest.mark.parametrize("share", [0.45, 0.015])
def test_an_answer_by_costs_whose_fit_is_not_good_says_how_far_they_err(tmp_path: Path, share: float) -> None:
    server = {"cost_model": str(costs_that_err_by(share, tmp_path))}
    spec = without_costs().model_copy(update={"backend": "sim", "server": ServerSpec.model_validate(server)})
    made = Tune(spec, tmp_path / "runs", simulated, lambda _line: None, effort=QUICK.divided(6))
    found = made.run(only_explore=True).answer
    said = f"Costs: the fit errs by at most {100 * share:.1f} % of decode steps, measured and not fitted."
    page = (tmp_path / "runs" / "unknown-tune" / "tune.html").read_text(encoding="utf-8")
    overturns = page.partition("What would overturn it")[2]
    assert (said in found.rests, said in overturns) == (share > 0.02, share > 0.02)


@pytest.mark.parametrize(("error", "channel"), [(0.977, "b"), (0.2, "a")])
def test_costs_whose_fit_errs_too_much_decide_nothing_and_are_named(tmp_path: Path, error: float, channel: str) -> None:
    price = price_of(ServerSpec(cost_model=str(costs_that_err_by(error, tmp_path))), SEEN)
    assert (price.channel, price.is_assumed) == (channel, error > 0.5)
    assert ("97.7 % of decode steps" in price.words) == price.is_assumed


def test_a_search_by_costs_that_are_not_this_servers_keeps_nothing_and_is_made_anew(tmp_path: Path) -> None:
    server = {**VLLM["server"], "max_num_seqs": 6, "prefix_caching": True}
    spec = parse_experiment({**VLLM, "server": server}, where="test")
    made = Tune(spec, tmp_path, simulated, lambda _line: None, effort=QUICK.divided(6))
    found = made.run(only_explore=True).answer
    assert found.state == "cannot tell"
    assert "No costs are named; the search takes those of 'emulated-gpu'" in found.rests
    assert not (tmp_path / "own-tune" / "explored.json").exists()


def test_arithmetic_of_a_modelled_gpu_is_assumed_for_a_device_whoever_names_it() -> None:
    seen = replace(SEEN, backend="vllm")
    server = ServerSpec(model="any", rules="vllm-paged", cost_model="emulated-gpu")
    assert price_of(server, seen).is_assumed
    assert not price_of(server, replace(seen, backend="emulator")).is_assumed


def test_a_calibration_covers_the_longest_part_of_a_prompt_that_the_search_can_ask_for(tmp_path: Path) -> None:
    table = VLLM | {"tune": {"may_change": ["max_num_batched_tokens"]}}
    made = Tune(parse_experiment(table, where="test"), tmp_path, simulated, lambda _line: None)
    assert made.sweeps.server.max_num_batched_tokens == 4000
    assert made.first.server.max_num_batched_tokens is None


@pytest.mark.parametrize(("server", "limit_ms"), [({}, 5.0), ({"model": "m", "rules": "vllm-paged"}, 60_000.0)])
def test_when_the_client_read_plays_no_part_where_the_engine_stamps_its_steps(
    server: dict[str, Any], limit_ms: float
) -> None:
    spec = without_costs().model_copy(update={"server": ServerSpec.model_validate(server)})
    assert calibration_of(spec, spec.server).limits.read_together_ms == limit_ms


def test_steps_without_a_graph_have_an_assumed_price_where_nobody_measured_one() -> None:
    captured = ServerSpec(model="any", rules="vllm-paged", cost_model="emulated-gpu", decode_buckets=(1, 2))
    price = price_of(captured, replace(SEEN, backend="vllm"))
    assert price.words.endswith("a step without a graph is assumed to take 3 ms more")
    model = load_cost_model("emulated-gpu")
    assert with_eager_steps(model, captured).eager_ns == 3_000_000
    measured = replace(model, eager_ns=7)
    assert with_eager_steps(measured, captured) is measured
    own = captured.model_copy(update={"decode_buckets": ()})
    assert with_eager_steps(model, own) is model, "what it captures is not known"


def test_a_calibration_covers_as_many_requests_at_once_as_sessions_that_arrive_one_after_another(
    tmp_path: Path,
) -> None:
    table = VLLM | {
        "server": {**VLLM["server"], "max_num_seqs": 1},
        "workload": {**VLLM["workload"], "start_offset_s": 1.0},
    }
    made = Tune(parse_experiment(table, where="test"), tmp_path, simulated, lambda _line: None)
    assert made.sweeps.server.max_num_seqs == 6
    quick = made.forecast()
    assert "max_num_seqs: 1 to 6" in quick.bounds


def test_costs_of_one_size_decide_nothing_where_sizes_are_searched(tmp_path: Path) -> None:
    costs = tmp_path / "one.toml"
    text = Path("plans/costs/paper.toml").read_text(encoding="utf-8")
    costs.write_text(re.sub(r"(?m)^([2-9]|1\d) = .*\n", "", text), encoding="utf-8")
    assert load_cost_model(costs).measured_sizes == (1,)
    price = price_of(ServerSpec(cost_model=str(costs)), SEEN, ["max_num_seqs"])
    assert (price.channel, price.is_assumed) == ("b", True)
    assert "of all sizes only 1 was measured" in price.words
    assert price_of(ServerSpec(cost_model=str(costs)), SEEN, ["kv_slots"]).channel == "a"
