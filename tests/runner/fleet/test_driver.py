"""Fleets of one host, on simulated and emulated devices: what one device would have made, once, whoever is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.model.spec import FleetSpec
from harness.runner import StopFlag, run_experiment
from harness.runner.fleet.driver import shared_cores
from harness.runner.progress import ProgressEvent, RunSealed, RunStarted
from tests.support.experiments import UNHURRIED, small_experiment
from tests.support.forked import ForkedProcess
from tests.support.forked_children import of_fleets

pytestmark = [pytest.mark.live, pytest.mark.same_everywhere]


def workers() -> list[ForkedProcess]:
    return [worker for worker in of_fleets if worker.poll() is None]


def test_a_fleet_interrupted_killed_and_resumed_makes_each_run_once_on_its_device(tmp_path: Path):
    stop, started, sealed = StopFlag(), list[RunStarted](), list[str]()
    fleet = {"devices": [0, 3], "overcommit": True}
    spec = small_experiment(replicates=4, condition=[{"name": "only"}], fleet=fleet)

    def look(event: ProgressEvent) -> None:
        if isinstance(event, RunStarted):
            started.append(event)
            if len(started) == 2:
                workers()[0].kill()
        elif isinstance(event, RunSealed):
            sealed.append(event.label)
            stop.request() if len(sealed) == 2 else None

    first = run_experiment(spec, runs_root=tmp_path, stop=stop, on_progress=look)
    assert first.was_interrupted
    assert len(started) == first.num_performed + 1
    second = run_experiment(spec, runs_root=tmp_path, resume=True, on_progress=look).require_valid()
    assert sorted(sealed) == [run.label for run in second.runs] == [f"only/{block}" for block in range(4)]
    assert [run.device for run in second.runs] == [0, 3, 0, 3]
    assert all(event.place == f"dev{3 if int(event.label[-1]) % 2 else 0}" for event in started)
    store = RunStore(tmp_path)
    assert store.verify() == 4
    rows = store.query("select distinct device, host is not null as named from runs order by device").to_pylist()
    assert rows == [{"device": 0, "named": True}, {"device": 3, "named": True}]
    for other in (FleetSpec(devices=(0, 1)), None):
        with pytest.raises(SpecError, match="another fleet"):
            run_experiment(spec.model_copy(update={"fleet": other}), runs_root=tmp_path, resume=True)
    assert workers() == []


def prefill_ns(runs: list[SealedRun]) -> dict[int, int]:
    """What the device took for prompts of so many tokens of which it had none: nothing of the host is in it."""
    steps = [json.loads(line) for run in runs for line in run.file(layout.DEVICE_TRACE).read_text().splitlines()]
    found = [step for step in steps if step["kind"] == "PREFILL" and step["cached_tokens"] == 0]
    return {step["computed_tokens"]: step["duration_ns"] for step in found}


def test_a_duet_of_emulated_devices_keeps_step_and_each_has_the_other_beside_it(tmp_path: Path):
    fleet = {"devices": [0, 1], "overcommit": True, "lockstep": True, "emulated": {1: {"speed_offset": 0.5}}}
    order: list[str] = []

    def look(event: ProgressEvent) -> None:
        if isinstance(event, RunStarted | RunSealed):
            order.append(f"{'+' if isinstance(event, RunStarted) else '-'}{event.label}")

    runs = run_experiment(small_experiment(replicates=2, fleet=fleet), runs_root=tmp_path, on_progress=look).runs
    assert sorted(order[:2]) == ["+base/0", "+more/1"]
    assert sorted(order[2:4]) == ["-base/0", "-more/1"]
    assert {run.manifest.fleet and run.manifest.fleet.neighbours for run in runs} == {(0,), (1,)}
    assert [run.manifest.fleet and run.manifest.fleet.emulated_factor for run in runs] == [1.0, 1.5, 1.0, 1.5]
    slow, fast = (prefill_ns([run for run in runs if run.device == device]) for device in (1, 0))
    common = slow.keys() & fast.keys()
    assert len(common) >= 3  # the first prompts of three sessions, of one plan
    assert [slow[tokens] for tokens in common] == pytest.approx([1.5 * fast[tokens] for tokens in common])


def test_a_simulated_fleet_needs_no_processes_and_makes_what_one_device_makes(tmp_path: Path):
    spec = small_experiment(backend="sim", time_scale=1.0, replicates=2)
    alone = run_experiment(spec, runs_root=tmp_path / "alone").runs
    fleet = spec.model_copy(update={"fleet": FleetSpec(devices=(0, 1))})
    both = run_experiment(fleet, runs_root=tmp_path / "fleet").runs
    assert [run.table("requests") for run in alone] == [run.table("requests") for run in both]
    assert [(run.device, other.device) for run, other in zip(alone, both, strict=True)] == [(None, 0), (None, 1)] * 2


def test_a_host_that_cannot_keep_the_limits_is_told_how_many_devices_it_drives(tmp_path: Path):
    spec = small_experiment(
        replicates=2,
        fleet={"devices": [0, 1]},
        limits={**UNHURRIED, "rearrival_lag_p99_ms": 1e-6},
        condition=[{"name": "only"}],
    )
    with pytest.raises(SpecError, match=r"drives 1 of 2 devices in time.*overcommit"):
        run_experiment(spec, runs_root=tmp_path)
    assert RunStore(tmp_path).unsealed() == []


def test_blocks_of_a_fleet_are_not_looked_at_one_by_one(tmp_path: Path):
    spec = small_experiment(replicates=4, fleet={"devices": [0, 1]}, stop={"margin": 0.02, "budget": 4})
    with pytest.raises(SpecError, match="blocks of one device are correlated"):
        run_experiment(spec, runs_root=tmp_path, until_decided=True)


def test_clients_have_cores_of_their_own_only_where_each_server_keeps_one_too():
    assert shared_cores([0, 1, 2, 3], 2, 1) == [(0,), (1,)]
    assert shared_cores([0, 1, 2, 3, 4, 5], 2, 2) == [(0, 1), (2, 3)]
    assert shared_cores([0, 1, 2], 2, 1) == [(), ()]
    assert shared_cores([0, 1], 1, 1) == [()]
