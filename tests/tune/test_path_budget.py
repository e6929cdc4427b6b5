"""A budget is kept, and the forecast follows what the runs so far took, whatever was assumed before the first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S
from harness.measure.records import layout
from harness.measure.records.manifest import load_manifest
from harness.model.spec import ExperimentSpec, parse_experiment
from harness.runner import ExperimentOutcome, run_experiment
from harness.runner.progress import StopFlag
from harness.tune.explore import QUICK
from harness.tune.path import Tune
from tests.support.processes import VirtualClock

REPLAY_S, BUDGET_S = 60, 40 * 60


def experiment(backend: str, **changes: Any) -> ExperimentSpec:
    table = {
        "name": "timed",
        "backend": backend,
        "base_seed": 771,
        "server": {"cost_model": "paper", "rules": "vendor-0.11.1"},
        "workload": {"num_sessions": 8, "wait_cap_s": 20.0},
        "tune": {"may_change": ["kv_slots"], "budget": "40min"},
        "condition": [{"name": "base"}],
    }
    return parse_experiment(table | changes, where="test")


class Timed:
    """Simulated runs that take as long on a virtual clock as ones whose server needs ``life_s`` besides the replay."""

    def __init__(self, life_s: int) -> None:
        self.life_s, self.clock = life_s, VirtualClock()

    def __call__(self, spec: ExperimentSpec, folder: Path, until_ns: int, **options: Any) -> ExperimentOutcome:
        stop = StopFlag()

        def told(event: Any) -> None:
            if type(event).__name__ == "RunSealed":
                condition, _, replicate = event.label.rpartition("/")
                self._take(layout.run_folder(folder, spec.name, condition, int(replicate)))
                stop.after_run = self.clock.now_ns() >= until_ns

        spec = spec.model_copy(update={"backend": "sim"})
        return run_experiment(spec, runs_root=folder, resume=True, stop=stop, on_progress=told, **options)

    def _take(self, run: Path) -> None:
        """Let the time of a run pass, and write it where a server's life is written."""
        file, now_ns = run / layout.MANIFEST, self.clock.now_ns()
        healthy_ns = now_ns + self.life_s * NS_PER_S
        end_ns = healthy_ns + REPLAY_S * NS_PER_S
        timings = {
            "server_start_ns": now_ns,
            "healthy_ns": healthy_ns,
            "replay_start_ns": healthy_ns,
            "replay_end_ns": end_ns,
            "server_stopped_ns": end_ns,
        }
        manifest = load_manifest(file).model_copy(update={"timings": timings})
        file.write_text(manifest.to_json(), encoding="utf-8")
        # A second for the seal.
        self.clock.sleep_until_ns(end_ns + NS_PER_S)


@pytest.mark.parametrize(("backend", "assumed_s", "life_s"), [("emulator", 2, 30), ("rbln", 20, 5)])
def test_the_budget_is_kept_whether_servers_start_slower_or_faster_than_assumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, assumed_s: int, life_s: int
) -> None:
    # A rule that looks at the end alone takes all plans.
    monkeypatch.setattr("harness.tune.confirm.LOOKS", ())
    timed, said = Timed(life_s), list[str]()

    def tune() -> Tune:
        spec = experiment(backend)
        return Tune(spec, tmp_path / "runs", timed, said.append, effort=QUICK.divided(6), clock=timed.clock)

    tune().forecast()
    assert f"  each run: its replay and {assumed_s} s for its server, assumed" in said
    assert tune().run().answer.state == "confirmed"
    whole_s = timed.clock.now_ns() / NS_PER_S
    assert 0.9 * BUDGET_S < whole_s < 1.1 * BUDGET_S
    run_s = REPLAY_S + life_s + 1
    assert f"  a run took {run_s:.0f} s: its replay and {life_s + 1} s for its server, as 3 runs here took" in said
    (minutes,) = (int(found[1]) for line in said if (found := re.match(r"confirm: .* about (\d+) min", line)))
    assert 60 * minutes == pytest.approx(whole_s - 3 * run_s, rel=0.1)


def test_the_most_agents_are_narrowed_within_the_budget(tmp_path: Path) -> None:
    goal = {"goal": "sessions", "percentile": 80, "may_change": ["kv_slots"], "budget": "40min"}
    spec = experiment("emulator", slo={"ttft_ms": 700.0, "session_s": 8.0}, tune=goal, workload={"num_sessions": 4})
    timed, said = Timed(5), list[str]()
    found = Tune(spec, tmp_path / "runs", timed, said.append, effort=QUICK.divided(6), clock=timed.clock).run()
    assert len(found.answer.capacities[0].points) > 2
    assert sum(line.startswith("confirm: today with ") for line in said) > 1
    # A round that has no room is not begun.
    assert 0.5 * BUDGET_S < timed.clock.now_ns() / NS_PER_S < 1.1 * BUDGET_S


def test_a_budget_that_ends_after_the_search_leaves_the_prediction_and_names_one_that_confirms_it(
    tmp_path: Path,
) -> None:
    timed, said = Timed(30), list[str]()
    spec = experiment("emulator", tune={"may_change": ["kv_slots"], "budget": "5min"})
    answer = Tune(spec, tmp_path / "runs", timed, said.append, effort=QUICK.divided(6), clock=timed.clock).run().answer
    assert answer.state == "predicted"
    assert "less device time, predicted, not measured" in answer.sentence
    assert re.search(r"it leaves room for \d plans?.*Allow \d+ min", answer.why)
    minutes = re.findall(r"Allow (\d+) min", answer.why)[0]
    spec = experiment("emulator", tune={"may_change": ["kv_slots"], "budget": f"{minutes}min"})
    more = Tune(spec, tmp_path / "runs", timed, said.append, effort=QUICK.divided(6), clock=timed.clock).run().answer
    assert more.measured


def test_repeats_of_invalid_runs_are_not_taken_from_the_budget(tmp_path: Path) -> None:
    tune = Tune(experiment("emulator"), tmp_path, Timed(5), lambda _line: None, clock=VirtualClock())
    before_ns = tune.until_ns
    tune.repeated_s = 60.0
    assert tune.until_ns == before_ns + 60 * NS_PER_S
