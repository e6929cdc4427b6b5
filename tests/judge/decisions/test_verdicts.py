"""Rules on the runs of an experiment: who is compared with whom goes by factors, and nothing is left out in silence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.compare.answer import ExperimentRuns
from harness.analysis.figures import RunFigures
from harness.errors import SpecError
from harness.extras.paper.rules import DirectionRule, NoTreatmentRule, SaturationRule
from harness.extras.paper.rules.cases import Contrast, adjacent_ratios, waits_pairs
from harness.judge.decisions.decide import Outcome
from harness.judge.decisions.verdicts import decide_experiment
from harness.measure.records.run import SealedRun
from harness.model.spec import parse_experiment
from harness.model.spec.rules import CostRule, SuperiorityRule
from harness.runner import run_experiment

SLOTS = SaturationRule(
    name="slots", kind="saturation", factor="slots", levels=(8, 10), strata=("N",), seed=1, min_replicates=2
)


def sealed(folder: Path, *conditions: dict[str, Any], replicates: int = 2) -> list[SealedRun]:
    """Simulated runs of a small experiment."""
    table = {
        "name": "small",
        "backend": "sim",
        "base_seed": 7,
        "replicates": replicates,
        "workload": {"num_sessions": 2, "generate_tokens": {"distribution": "fixed", "value": 8}, "wait_cap_s": 1.0},
        "condition": list(conditions),
    }
    return list(run_experiment(parse_experiment(table, where="test"), runs_root=folder).runs)


def slots(name: str, n: int, count: int) -> dict[str, Any]:
    return {
        "name": name,
        "factors": {"N": n, "slots": count},
        "workload": {"num_sessions": n},
        "server": {"kv_slots": count},
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[SealedRun]:
    """Two numbers of slots for two numbers of sessions."""
    conditions = (slots("alpha", 2, 8), slots("beta", 2, 10), slots("gamma", 3, 8), slots("delta", 3, 10))
    return sealed(tmp_path_factory.mktemp("runs"), *conditions)


def test_strata_and_levels_go_by_factors_whatever_the_names_are(runs: list[SealedRun]) -> None:
    ratios = adjacent_ratios(ExperimentRuns(runs), Contrast("slots", ("N",)), 8, 10)
    assert {stratum: len(values) for stratum, values in ratios.items()} == {"N2": 2, "N3": 2}
    (decision,) = decide_experiment([SLOTS], ExperimentRuns(runs), is_confirmatory=True)
    assert (decision.subject, decision.numbers["num_comparisons"]) == ("slots8 -> slots10", 4)


def test_a_stratum_without_valid_runs_withholds_instead_of_vanishing(runs: list[SealedRun]) -> None:
    kept = [run for run in runs if run.condition != "delta"]
    (decision,) = decide_experiment([SLOTS], ExperimentRuns(kept), is_confirmatory=True)
    assert decision.outcome is Outcome.WITHHELD
    assert "0 valid replicates" in decision.reason


def test_two_conditions_that_factors_cannot_tell_apart_are_refused(tmp_path: Path) -> None:
    runs = sealed(tmp_path, slots("alpha", 2, 8), slots("twin", 2, 8), slots("beta", 2, 10))
    with pytest.raises(SpecError, match="'alpha' and 'twin'"):
        decide_experiment([SLOTS], ExperimentRuns(runs), is_confirmatory=True)


def test_a_value_that_no_condition_has_is_withheld_by_name(runs: list[SealedRun]) -> None:
    runs = [run for run in runs if run.condition in ("alpha", "beta")]
    rule = NoTreatmentRule(name="again", kind="no-treatment", conditions={"N": (2, 5)}, min_replicates=9)
    decisions = decide_experiment([rule], ExperimentRuns(runs), is_confirmatory=True)
    assert [one.subject for one in decisions] == ["alpha", "beta", "N = 5"]
    assert decisions[-1].reason == "no condition of this experiment is that"


def test_a_rule_that_finds_nothing_says_so_once(tmp_path: Path) -> None:
    runs = sealed(tmp_path, {"name": "alpha"}, {"name": "beta"})
    rule = CostRule(name="cost", kind="cost-validation", conditions={"N": (6,)})
    (decision,) = decide_experiment([rule], ExperimentRuns(runs), is_confirmatory=True)
    assert (decision.outcome, decision.subject) == (Outcome.WITHHELD, "-")
    assert "no condition of this experiment is subject to it" in decision.reason


def test_a_condition_that_is_exploratory_by_its_factors_has_no_verdict(tmp_path: Path) -> None:
    runs = sealed(tmp_path, {"name": "with", "factors": {"N": 2}}, {"name": "without", "treatment": "no-waits"})
    assert list(waits_pairs(ExperimentRuns(runs[:0] + runs))) == [("with", "without")]
    rule = DirectionRule(name="d", kind="direction", num_blocks=2, conditions=(), exploratory={"N": (2,)})
    (decision,) = decide_experiment([rule], ExperimentRuns(runs), is_confirmatory=True)
    assert decision.outcome is Outcome.NOT_SUBJECT


def test_runs_sealed_without_factors_are_grouped_by_what_their_names_tell(tmp_path: Path) -> None:
    bare = [
        {key: value for key, value in slots(name, 2, count).items() if key != "factors"}
        for name, count in (("n2-slots8", 8), ("n2-slots10", 10))
    ]
    (decision,) = decide_experiment([SLOTS], ExperimentRuns(sealed(tmp_path, *bare)), is_confirmatory=True)
    assert decision.subject == "slots8 -> slots10"
    assert decision.outcome in (Outcome.PASS, Outcome.FAIL)


def test_superiority_is_withheld_where_the_two_channels_lie_apart(tmp_path: Path) -> None:
    class LongInFlight(ExperimentRuns):
        """Requests of the eight slots were in flight for twice as long as their device time."""

        def figures(self, condition: str) -> list[RunFigures]:
            return [
                replace(run, b_ns=run.b_ns * (2 if condition == "eight" else 1)) for run in super().figures(condition)
            ]

    rule = SuperiorityRule(name="cheaper", kind="superiority", min_replicates=3)
    runs = sealed(tmp_path, slots("base", 2, 2), slots("eight", 2, 8), replicates=3)
    (decided,) = decide_experiment([rule], ExperimentRuns(runs), is_confirmatory=True)
    (withheld,) = decide_experiment([rule], LongInFlight(runs), is_confirmatory=True)
    assert decided.outcome in (Outcome.PASS, Outcome.FAIL)
    assert withheld.outcome is Outcome.WITHHELD
    assert "time in flight (B)" in withheld.reason


def test_simulated_runs_never_say_that_both_channels_agree(tmp_path: Path) -> None:
    rule = SuperiorityRule(name="cheaper", kind="superiority", min_replicates=3)
    runs = sealed(tmp_path, slots("base", 6, 6), slots("more", 6, 16), replicates=4)
    (decision,) = decide_experiment([rule], ExperimentRuns(runs), is_confirmatory=True)
    assert decision.outcome is Outcome.PASS
    assert "simulated: both channels are one cost" in decision.reason
    assert "agree" not in decision.reason
