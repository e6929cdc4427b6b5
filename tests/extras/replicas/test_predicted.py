"""Predictions of replicas: with one of them those of a server, with several what a simulated run of them does."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from harness.analysis import run_figures
from harness.analysis.compare.drawn import DrawnCosts
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SpecError
from harness.extras.replicas.policies import POLICIES
from harness.extras.replicas.predicted import DrawsOnReplicas
from harness.judge.prereg import predict_experiment
from harness.judge.prereg.predict import predict_run
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.experiment import resolve
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.sim.draws import nominal
from harness.model.sim.plans import plan_arrays
from harness.model.spec import ExperimentSpec, ServerSpec
from harness.model.spec.server import RouterSpec
from harness.runner import run_experiment
from tests.extras.replicas.test_simulated_replicas import PAGED, played
from tests.support.experiments import small_experiment
from tests.support.naive_replicas import differences, drawn_case

pytestmark = pytest.mark.same_everywhere

OF_PAGED = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "num_gpu_blocks": 600}


# In 98 and 134 pins decide what is found; 20 and 160 have a prefix-aware router too, 29 has a second memory alone.
@pytest.mark.parametrize("seed", [20, 29, 98, 134, 160])
def test_kept_kv_and_routed_prompts_are_the_second_opinions(seed: int) -> None:
    case = drawn_case(seed)
    assert {"pins", "second", "prefix-aware"} & set(case.counted())
    assert list(differences(case)) == []


def test_drawn_plans_on_drawn_replicas_take_the_same_steps_as_in_python() -> None:
    seen = Counter[str]()
    # The last three: a request comes when the next steps of its instant have begun, since a prefill took no time.
    for seed in (*range(14), 1041, 1_000_968, 2_005_506):
        case = drawn_case(seed)
        assert list(differences(case)) == [], f"seed {seed}"
        seen += case.counted()
    assert min(seen[policy] for policy in POLICIES) > 1
    assert min(seen["preemptions"], seen["left"]) > 10


@pytest.mark.parametrize("server", [ServerSpec(), PAGED], ids=["slots", "paged"])
def test_a_part_that_starts_after_its_agents_wait_stays_at_home(server: ServerSpec) -> None:
    turn = (RequestPlan(0, 1000, 20),)
    first, other = (SessionPlan(index, index, None, None, turn) for index in range(2))
    beside = SessionPlan(2, 2 * NS_PER_S, None, None, (RequestPlan(0, 1000, 500),))
    # It continues no text: an agent that began a new prompt.
    goes_on = SessionPlan(3, 2 * NS_PER_S, 0, None, turn, start_kind="tool")
    plan = Plan("drawn", 1, 0, "as-drawn", 0, (1000, 2000), (first, other, beside, goes_on), {})
    of_replicas = server.model_copy(update={"replicas": 2, "router": RouterSpec(policy="session-affinity")})
    costs = load_cost_model(server.cost_model)
    run = played(plan, server, "session-affinity", 2)
    assert run.served_by[3, 0] == run.served_by[0, 0] == run.served_by[2, 0]
    outcome = DrawsOnReplicas(of_replicas)(
        nominal(plan_arrays([plan]), costs), EngineConfig.from_server(of_replicas.replica)
    )
    assert outcome.requests["completed_ns"].tolist() == run.requests_table().column("done_ns").to_pylist()


def two_policies(**keys: object) -> ExperimentSpec:
    return small_experiment(
        backend="sim",
        time_scale=1.0,
        replicates=2,
        workload={"num_sessions": 6},
        condition=[{"name": "in-turn"}, {"name": "home", "server": {"router": {"policy": "session-affinity"}}}],
        **{"server": {"replicas": 2, "router": {"policy": "round-robin"}}, **keys},
    )


@pytest.mark.parametrize("server", [{}, OF_PAGED], ids=["slots", "paged"])
def test_a_nominal_prediction_of_replicas_has_the_figures_of_their_simulated_run(
    tmp_path: Path, server: dict[str, object]
) -> None:
    spec = two_policies(server={"replicas": 2, "router": {"policy": "session-affinity"}, **server})
    run = run_experiment(spec, runs_root=tmp_path).require_valid().runs[0]
    predicted, figures = predict_run(run, num_draws=1), run_figures(run)
    assert predicted.device_ns == pytest.approx(figures.a.total_ns, abs=NS_PER_MS)
    assert predicted.num_decode_steps == sum(figures.steps_by_n_b.values())
    assert predicted.padding == figures.padding
    assert predicted.cached_tokens == figures.cached_tokens
    assert predicted.end_ns == run.manifest.timings["replay_end_ns"]


def test_draws_of_replicas_share_the_true_costs_of_their_baseline() -> None:
    predictions = predict_experiment(resolve(two_policies()), num_draws=6)
    own, base = (list(predictions[name].values()) for name in ("home", "in-turn"))
    assert all(each.draws is not None and len(set(each.draws.device_ns)) > 1 for each in (*own, *base))
    ratio = DrawnCosts.of(own).ratio_to(DrawnCosts.of(base))
    assert ratio is not None
    assert predict_experiment(resolve(two_policies()), num_draws=6) == predictions


def test_a_router_with_decisions_of_its_own_is_not_predicted() -> None:
    spec = two_policies(server={"replicas": 2, "router": {"kind": "haproxy", "policy": "round-robin"}})
    with pytest.raises(SpecError, match="haproxy is not modelled"):
        predict_experiment(resolve(spec.model_copy(update={"condition": spec.condition[:1]})))


def test_each_replica_accepts_drafts_by_draws_of_its_own() -> None:
    drafts = {
        "num_speculative_tokens": 3,
        "speculative_method": "eagle3",
        "synthetic_acceptance_rates": (0.8, 0.5, 0.2),
    }
    server = ServerSpec.model_validate({**OF_PAGED, **drafts, "replicas": 3, "router": {"policy": "round-robin"}})
    sessions = tuple(SessionPlan(place, 0, None, None, (RequestPlan(0, 100, 200),)) for place in range(3))
    plan = Plan("drawn", 1, 0, "as-drawn", 0, (1000, 2000), sessions, {})
    ends_ns = played(plan, server.replica, "round-robin", 3).requests_table().column("done_ns").to_pylist()
    assert len(set(ends_ns)) == 3
    costs = load_cost_model(server.cost_model)
    outcome = DrawsOnReplicas(server)(nominal(plan_arrays([plan]), costs), EngineConfig.from_server(server.replica))
    assert outcome.requests["completed_ns"].tolist() == ends_ns
