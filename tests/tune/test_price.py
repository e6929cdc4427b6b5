"""A server whose costs nobody knows is measured first; the search and the measurement then take what was fitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.measure.records.store import RunStore
from harness.model.engine.cost import load_cost_model
from harness.model.spec import ExperimentSpec, parse_experiment
from harness.runner import ExperimentOutcome, run_experiment
from harness.tune import confirm
from harness.tune.explore import QUICK
from harness.tune.path import Tune


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
    monkeypatch.setattr("harness.tune.page._frontier", lambda *_: "")

    def tuned() -> tuple[Tune, list[str], Any]:
        said: list[str] = []
        made = Tune(without_costs(), tmp_path / "runs", simulated, said.append, effort=QUICK.divided(6))
        return made, said, made.run().answer

    made, said, found = tuned()
    assert said[0] == "price: no costs are named; a quick calibration of today's server"
    assert found is not None
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
