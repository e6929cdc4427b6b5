"""What a fleet's devices do, by the folders of its runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.model.experiment import resolve
from harness.runner import StopFlag, run_experiment
from harness.runner.fleet.slot import WorkerSlot, device_states, living_mark
from harness.runner.progress import RunSealed
from tests.support.experiments import small_experiment


def test_each_device_shows_its_blocks_what_it_makes_and_how_far_it_is_behind(tmp_path: Path):
    fleet = small_experiment(backend="sim", time_scale=1.0, replicates=4, fleet={"devices": [0, 1]})
    stop, num_sealed = StopFlag(), 0

    def stop_in_the_second_block(event: object) -> None:
        nonlocal num_sealed
        num_sealed += isinstance(event, RunSealed)
        if num_sealed == 3:
            stop.request()

    with pytest.raises(SpecError, match="no run of a fleet"):
        device_states(tmp_path, "small")
    run_experiment(fleet, runs_root=tmp_path, stop=stop, on_progress=stop_in_the_second_block)
    run = [run for run in resolve(fleet) if run.replicate == 1][1]
    making = tmp_path / "small" / run.condition.name / "1.partial"
    making.mkdir()
    assert run.place is not None
    slot = WorkerSlot(run.place)
    slot.note(making, run)
    first, second = device_states(tmp_path, "small")
    assert (first.place, first.making, first.blocks_done, first.blocks_left, first.blocks_behind) == (
        "dev0",
        "",
        1,
        1,
        0,
    )
    assert (second.place, second.making, second.now) == ("dev1", run.label, "the server is starting")
    assert (second.blocks_done, second.blocks_left, second.blocks_behind, second.warmest_c) == (0, 2, 1, None)
    assert WorkerSlot(run.place._replace(device=0)).neighbours(tmp_path) == {1}
    assert slot.neighbours(tmp_path) == set()


def test_a_run_whose_process_is_gone_is_nobodys_neighbour(tmp_path: Path):
    making = tmp_path / "small" / "base" / "0.partial"
    making.mkdir(parents=True)
    (making / "fleet.json").write_text('{"device": 1, "host": "vm", "pid": 1, "process_started_s": 1.0}')
    assert living_mark(making) is None
    (making / "fleet.json").write_text("half a li")
    assert living_mark(making) is None
