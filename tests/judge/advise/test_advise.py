"""Advice comes from sealed runs, proposes the smallest change that pays, and writes what could prove it wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.errors import SpecError
from harness.judge.advise import advise, diagnose
from harness.judge.advise.advise import Step, smallest_enough
from harness.measure.records.run import SealedRun
from harness.model.experiment import build_plan, resolve
from harness.model.sim import simulate
from harness.model.sim.predict.intervals import Prediction
from harness.model.sim.search.space import parse_space
from harness.model.spec import ServerShape, load_experiment, parse_experiment
from harness.model.spec.rules import load_rule
from harness.runner import run_experiment


def measured(folder: Path, **changes: Any) -> tuple[SealedRun, ...]:
    """Sealed baseline runs, made in virtual time."""
    table: dict[str, Any] = {
        "name": "base",
        "backend": "sim",
        "replicates": 2,
        "base_seed": 771,
        "workload": {"num_sessions": 8, "wait_cap_s": 20.0},
        "condition": [{"name": "base"}],
        **changes,
    }
    return run_experiment(parse_experiment(table, where="test"), runs_root=folder / "runs").runs


def test_a_diagnosis_counts_what_the_baseline_lost(tmp_path: Path) -> None:
    runs = measured(tmp_path)
    found = diagnose(runs)
    spec = parse_experiment(runs[0].manifest.requested["experiment"], where="test")
    results = [simulate(build_plan(spec.workload, 771, k), spec.server) for k in range(2)]
    again = [row for result in results for row in result.requests.to_pylist() if row["request"] > 0]
    assert (found.num_runs, found.num_rearrivals) == (2, 16)
    assert found.num_reused == sum(row["cached_tokens"] > 0 for row in again)
    assert found.simulated_ns == sum(result.device_ns for result in results)
    assert found.device_ns == pytest.approx(found.simulated_ns, rel=0.01)
    assert found.lost_tokens > 0
    assert found.is_reuse_first
    assert len(found.queue_ns) == 8


def test_lost_reuse_is_met_with_slots_until_they_no_longer_help(tmp_path: Path) -> None:
    advice = advise(measured(tmp_path), tmp_path / "advice")
    assert advice.proposal is not None
    assert advice.proposal.prediction.candidate.kv_slots > 8
    helped = [found.shows_saving for _, found in advice.ladder]
    assert helped[:-1] == [True] * (len(helped) - 1)
    text = "\n".join(advice.lines())
    assert text.startswith("Predicted: simulated in virtual time")
    assert "slots first" in text
    assert "harness prereg freeze" in text
    assert f"predicted to save {100 * advice.proposal.saving:.1f} +-" in text


def test_the_written_experiment_and_criteria_are_ready_to_freeze_and_run(tmp_path: Path) -> None:
    lengths = {"generate_tokens": {"distribution": "uniform", "low": 40, "high": 250}}
    workload = {"num_sessions": 8, "wait_cap_s": 20.0, **lengths}
    advice = advise(measured(tmp_path, workload=workload), tmp_path / "advice")
    assert advice.files is not None
    experiment, criteria = advice.files
    assert advice.proposal is not None
    spec = load_experiment(experiment)
    rule = load_rule(str(criteria))
    assert spec.workload.generate_tokens.model_dump() == lengths["generate_tokens"]
    proposed = {condition.name: spec.server_of(condition).shape for condition in spec.condition}
    assert advice.proposal.prediction.candidate in proposed.values()
    assert proposed["baseline"] == spec.server.shape
    assert set(rule.conditions) == set(proposed) - {"baseline"}
    assert spec.base_seed != 771
    assert spec.base_seed not in advice.space.inputs.search_seeds
    assert len(resolve(spec)) == len(proposed) * spec.replicates


def test_a_baseline_that_keeps_its_reuse_gets_buckets_first(tmp_path: Path) -> None:
    runs = measured(
        tmp_path,
        workload={"num_sessions": 5, "wait_cap_s": 20.0},
        server={"max_num_seqs": 8, "decode_buckets": [8], "kv_slots": 20},
    )
    advice = advise(runs, tmp_path / "advice")
    assert not advice.diagnosis.is_reuse_first
    assert advice.proposal is not None
    assert advice.proposal.name == "buckets"


def test_where_nothing_helps_the_baseline_is_kept(tmp_path: Path) -> None:
    runs = measured(
        tmp_path, workload={"num_sessions": 1}, server={"max_num_seqs": 1, "decode_buckets": [1], "kv_slots": 9}
    )
    advice = advise(runs, tmp_path / "advice")
    assert advice.proposal is None
    assert "keep the baseline" in "\n".join(advice.lines())
    assert not (tmp_path / "advice").exists()


def test_a_space_with_another_baseline_is_refused(tmp_path: Path) -> None:
    space = parse_space(
        {
            "name": "other",
            "max_num_seqs": [4],
            "baseline": {"max_num_seqs": 4, "decode_buckets": [4]},
            "inputs": {"users": [4], "search_seeds": [1]},
        },
        where="test",
    )
    with pytest.raises(SpecError, match="baseline"):
        advise(measured(tmp_path), tmp_path / "advice", space=space)


def test_an_unknown_condition_is_refused_with_the_names(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="base"):
        diagnose(measured(tmp_path), "grid")


def step(name: str, saving: float, *, told: bool = True) -> Step:
    ratio = 1 - saving
    low, high = (ratio - 0.001, ratio + 0.001) if told else (ratio - 0.1, 1.1)
    base = ServerShape(8, (8,), 8, 8192)
    return Step(
        name, Prediction(base, base, "paper", ratio, ratio, ratio, low, high, 0.9, error=0.001 if told else 0.2)
    )


@pytest.mark.parametrize(
    ("savings", "is_reuse_first", "chosen"),
    [
        ({"slots": 0.09, "buckets": 0.02, "slots and buckets": 0.10}, True, "slots"),
        ({"slots": 0.05, "buckets": 0.02, "slots and buckets": 0.10}, True, "slots and buckets"),
        ({"slots": 0.09, "buckets": 0.09, "slots and buckets": 0.10}, False, "buckets"),
        ({}, True, None),
    ],
)
def test_the_smallest_change_that_keeps_most_of_the_saving_wins(
    savings: dict[str, float], is_reuse_first: bool, chosen: str | None
) -> None:
    found = smallest_enough([step(name, saving) for name, saving in savings.items()], is_reuse_first=is_reuse_first)
    assert (found.name if found else None) == chosen
    untold = [step(name, saving, told=False) for name, saving in savings.items()]
    assert smallest_enough(untold, is_reuse_first=is_reuse_first) is None
