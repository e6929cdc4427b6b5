"""Fleets of one host, on simulated and emulated devices: what one device would have made, once, whoever is killed."""

from __future__ import annotations

import json
from pathlib import Path

import psutil
import pytest

from harness.errors import SpecError
from harness.records import RunStore
from harness.runner import StopFlag, run_experiment
from harness.runner.fleet.capacity import shared_cores
from harness.runner.progress import ProgressEvent, RunSealed, RunStarted
from harness.spec import ExperimentSpec
from tests.support.experiments import small_experiment

pytestmark = [pytest.mark.live, pytest.mark.same_everywhere]


def simulated(**changes: object) -> ExperimentSpec:
    return small_experiment(**{"backend": "sim", "time_scale": 1.0, "replicates": 4, **changes})


def workers() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [one for one in children if one.is_running() and "harness.runner.fleet.worker" in one.cmdline()]


def test_a_fleet_makes_what_one_device_makes_and_says_where(tmp_path: Path):
    alone = run_experiment(simulated(), runs_root=tmp_path / "alone").require_valid()
    events: list[ProgressEvent] = []
    fleet = run_experiment(
        simulated(fleet={"devices": [0, 3]}), runs_root=tmp_path / "fleet", on_progress=events.append
    ).require_valid()
    assert {run.key: run.table("requests") for run in fleet.runs} == {
        run.key: run.table("requests") for run in alone.runs
    }
    assert {(run.replicate, run.device) for run in fleet.runs} == {(0, 0), (1, 3), (2, 0), (3, 3)}
    assert {(one.label, one.place) for one in events if isinstance(one, RunStarted)} == {
        (run.label, f"dev{run.device}") for run in fleet.runs
    }
    store = RunStore(tmp_path / "fleet")
    rows = store.query("select distinct device, host is not null as named from runs order by device").to_pylist()
    assert rows == [{"device": 0, "named": True}, {"device": 3, "named": True}]
    assert json.loads(fleet.runs[0].file("fleet.json").read_text())["device"] == fleet.runs[0].device
    assert [run.device for run in alone.runs] == [None] * 8
    with pytest.raises(SpecError, match="another fleet"):
        run_experiment(simulated(fleet={"devices": [0, 1]}), runs_root=store.root, resume=True)
    with pytest.raises(SpecError, match="another fleet"):
        run_experiment(simulated(), runs_root=store.root, resume=True)
    assert workers() == []


def test_killed_workers_cost_the_runs_in_flight_and_nothing_is_lost_or_made_twice(tmp_path: Path):
    num_started, killed = 0, list[int]()

    def kill_one_now_and_then(event: ProgressEvent) -> None:
        nonlocal num_started
        num_started += isinstance(event, RunStarted)
        if isinstance(event, RunStarted) and num_started in (2, 5):
            victim = workers()[0]
            killed.append(victim.pid)
            victim.kill()

    outcome = run_experiment(
        simulated(fleet={"devices": [0, 1]}), runs_root=tmp_path, on_progress=kill_one_now_and_then
    ).require_valid()
    assert len(set(killed)) == 2
    assert (outcome.num_performed, RunStore(tmp_path).verify()) == (8, 8)
    assert workers() == []


def test_a_person_ends_a_fleet_after_the_runs_in_flight_and_resumes_the_rest(tmp_path: Path):
    stop, spec = StopFlag(), simulated(fleet={"devices": [0, 1]})

    def end_after_the_first(event: ProgressEvent) -> None:
        if isinstance(event, RunSealed):
            stop.request()

    first = run_experiment(spec, runs_root=tmp_path, stop=stop, on_progress=end_after_the_first)
    assert first.was_interrupted
    assert not first.is_complete
    second = run_experiment(spec, runs_root=tmp_path, resume=True)
    assert first.num_performed + second.num_performed == 8
    assert second.is_complete


def test_a_host_that_cannot_keep_the_limits_is_told_how_many_devices_it_drives(tmp_path: Path):
    spec = small_experiment(
        replicates=2,
        fleet={"devices": [0, 1]},
        limits={"rearrival_lag_p99_ms": 1e-6, "start_spread_ms": 500.0},
        condition=[{"name": "only"}],
    )
    with pytest.raises(SpecError, match=r"drives 1 of 2 devices in time.*overcommit"):
        run_experiment(spec, runs_root=tmp_path)
    assert RunStore(tmp_path).unsealed() == []


def test_blocks_of_a_fleet_are_not_looked_at_one_by_one(tmp_path: Path):
    spec = simulated(fleet={"devices": [0, 1]}, stop={"margin": 0.02, "budget": 4})
    with pytest.raises(SpecError, match="blocks of one device are alike"):
        run_experiment(spec, runs_root=tmp_path, until_decided=True)


def test_clients_have_cores_of_their_own_only_where_each_server_keeps_one_too():
    assert shared_cores([0, 1, 2, 3], 2, 1) == [(0,), (1,)]
    assert shared_cores([0, 1, 2, 3, 4, 5], 2, 2) == [(0, 1), (2, 3)]
    assert shared_cores([0, 1, 2], 2, 1) == [(), ()]
    assert shared_cores([0, 1], 1, 1) == [()]
