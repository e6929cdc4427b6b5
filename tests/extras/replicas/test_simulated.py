"""Simulated runs of several replicas: the records of a measured run, and the figures of the prediction."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.analysis import run_figures
from harness.analysis.logs.derive import rebuild
from harness.analysis.logs.replicas import engines_of, servers_in
from harness.analysis.summary import summarise
from harness.errors import RecordsError, SpecError
from harness.extras.replicas.figures import figures_by_condition, figures_of_sealed
from harness.extras.replicas.policies import policy_named
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.model.engine.config import EngineConfig
from harness.model.experiment import resolve
from harness.model.spec import ExperimentSpec, ServerSpec, load_experiment
from harness.present.report.page import write_report
from harness.present.report.view import routing_of
from harness.runner import run_experiment
from harness.shipped import find_shipped
from tests.support.experiments import small_experiment
from tests.support.naive_replicas import play_replicas

pytestmark = pytest.mark.same_everywhere

PAGED = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "num_gpu_blocks": 600}
NEW = ("does-affinity-pay", "one-big-or-two-small", "does-keeping-kv-pay", "does-offload-pay")


def experiment(**server: object) -> ExperimentSpec:
    """Four sessions of two turns on two replicas behind session affinity."""
    of_two = {"replicas": 2, "router": {"policy": "session-affinity"}, **server}
    return small_experiment(
        backend="sim", time_scale=1.0, server=of_two, workload={"num_sessions": 6}, condition=[{"name": "base"}]
    )


def simulated(tmp_path: Path, spec: ExperimentSpec) -> SealedRun:
    run = run_experiment(spec, runs_root=tmp_path).runs[0]
    assert run.is_valid, run.invalid_reasons
    return run


@pytest.mark.parametrize("server", [{}, PAGED, {"prefix_caching": False}], ids=["slots", "paged", "no caching"])
def test_a_simulated_run_has_the_figures_of_the_prediction(tmp_path: Path, server: dict[str, object]) -> None:
    spec = experiment(**server)
    run = simulated(tmp_path, spec)
    planned = resolve(spec).by_condition["base"][0]
    router = policy_named("session-affinity", 2)
    played = play_replicas(planned.plan, planned.server.replica, planned.cost_model, router)
    assert engines_of(run) == played.served_by
    of_run, predicted = figures_of_sealed(run), played.figures
    assert of_run.num_requests == predicted.num_requests
    assert (of_run.kept_tokens, of_run.lost_by_routing_tokens) == (predicted.kept_tokens, 0)
    assert of_run.in_flight_s == pytest.approx(predicted.in_flight_s)
    assert of_run.device_s == pytest.approx(predicted.device_s, rel=1e-6)
    assert run_figures(run).b_ns == round(sum(of_run.in_flight_s) * 1e9)
    (found,) = (finding.evidence for finding in run.manifest.findings if finding.code == "replicas")
    assert found.startswith(f"answered by replica 0 {of_run.num_requests[0]}, replica 1 {of_run.num_requests[1]}")


def test_the_report_shows_what_routing_lost_and_each_replicas_share(tmp_path: Path) -> None:
    spec = small_experiment(
        backend="sim",
        time_scale=1.0,
        workload={"num_sessions": 6},
        condition=[
            {"name": "rotates", "server": {"replicas": 2, "router": {"policy": "round-robin"}}},
            {"name": "keeps", "server": {"replicas": 2, "router": {"policy": "session-affinity"}}},
            {"name": "alone"},
        ],
    )
    runs = run_experiment(spec, runs_root=tmp_path).runs
    shown = {one.name: one for one in routing_of(runs)}
    assert list(shown) == ["rotates", "keeps"], "one server is behind no router"
    (alone,) = figures_by_condition(runs)["alone"]
    assert (alone.num_home, alone.lost_by_routing_tokens) == (alone.num_returns, 0)
    (of_one,) = (run for run in runs if run.condition == "alone")
    assert alone.device_s == pytest.approx(((run_figures(of_one).a_ns or 0) / 1e9,))
    with pytest.raises(RecordsError, match="runs of one server only"):
        figures_by_condition([of_one])
    for name, one in shown.items():
        figures = [figures_of_sealed(run) for run in runs if run.condition == name]
        reusable = sum(each.reusable_tokens for each in figures)
        assert one.kept == sum(each.kept_tokens for each in figures) / reusable
        assert (one.kept or 0) + (one.lost_by_routing or 0) + (one.lost_by_eviction or 0) == pytest.approx(1)
        assert sum(one.shares) == pytest.approx(1)
    assert (shown["rotates"].lost_by_routing or 0) > 0 == shown["keeps"].lost_by_routing
    page = write_report(runs, tmp_path / "page.html").read_text()
    assert f'aria-label="keeps: kept {100 * (shown["keeps"].kept or 0):.0f} %, lost by routing 0 %' in page
    assert 'class="t-replica r1"' in page, "lines of replicas have no colour of a condition"
    assert routing_of([run for run in runs if run.condition == "alone"]) == []


def test_the_tables_of_replicas_come_apart_as_they_were(tmp_path: Path) -> None:
    run = simulated(tmp_path, experiment())
    first, second = servers_in(run)
    assert first.steps.num_rows + second.steps.num_rows == run.table("steps").num_rows
    for server in (first, second):
        assert server.steps["step"].to_pylist() == list(range(server.steps.num_rows))
        slots = {slot for row in server.kv_events["slots"].to_pylist() for slot in row}
        assert max(slots) < run.server.num_kv_slots
        assert max(server.kv_events["step"].to_pylist()) <= server.steps.num_rows
    rebuild(run)
    RunStore(tmp_path).verify()


def test_replicas_are_never_taken_for_one_engine() -> None:
    with pytest.raises(SpecError, match="2 replicas behind a router are not one engine"):
        EngineConfig.from_server(ServerSpec(replicas=2))


@pytest.mark.parametrize("name", NEW)
def test_a_shipped_experiment_of_replicas_or_retention_is_valid(tmp_path: Path, name: str) -> None:
    spec = load_experiment(find_shipped("experiments", name, what="experiment"))
    workload = spec.workload.model_copy(update={"num_sessions": min(spec.workload.num_sessions, 6)})
    few = spec.model_copy(update={"backend": "sim", "replicates": 1, "workload": workload})
    runs = run_experiment(few, runs_root=tmp_path).runs
    assert len(runs) == len(spec.condition)
    assert all(run.is_valid for run in runs), [run.invalid_reasons for run in runs]


def test_what_a_second_memory_gave_is_a_column_where_a_run_has_one(tmp_path: Path) -> None:
    memory = {"server": {"offload_blocks": 20_000, "offload_block_us": 20.0}}
    spec = small_experiment(
        backend="sim",
        time_scale=1.0,
        workload={"num_sessions": 8, "requests_per_session": 3},
        server={**PAGED, "num_gpu_blocks": 160, "slot_tokens": 2048},
        condition=[{"name": "without"}, {"name": "with", **memory}],
    )
    summary = summarise(run_experiment(spec, runs_root=tmp_path).require_valid().runs)
    without, with_memory = summary.to_arrow().to_pylist()
    assert without["second_memory_loaded_tokens"] is None
    assert 0 < with_memory["second_memory_loaded_tokens"] < with_memory["second_memory_asked_tokens"]
    # A model has no bytes.
    assert with_memory["second_memory_loaded_bytes"] is None
    alone = summarise([each for each in RunStore(tmp_path).sealed("small") if each.condition == "without"])
    assert not [name for name in alone.to_arrow().schema.names if name.startswith("second_memory")]


def test_a_condition_changes_the_policy_and_keeps_the_router() -> None:
    spec = small_experiment(
        server={"replicas": 2, "router": {"kind": "haproxy", "session_header": "X-Mine"}},
        condition=[
            {"name": "base"},
            {"name": "affinity", "server": {"router": {"policy": "session-affinity"}}},
            {"name": "harness", "server": {"router": {"kind": "harness", "policy": "prefix-aware"}}},
        ],
    )
    routers = [spec.server_of(condition).routing for condition in spec.condition]
    assert [(router.kind, router.policy, router.session_header) for router in routers] == [
        ("haproxy", "round-robin", "X-Mine"),
        ("haproxy", "session-affinity", "X-Mine"),
        ("harness", "prefix-aware", "X-Session-Id"),
    ]


def test_records_of_one_server_say_nothing_of_replicas_and_retention() -> None:
    table = ServerSpec().model_dump(mode="json")
    assert not {"replicas", "router", "replica_urls", "replica_header", "keep_kv_s", "offload_blocks"} & table.keys()
    two = ServerSpec(replicas=2).model_dump(mode="json")
    assert ServerSpec.model_validate(two).num_replicas == 2
