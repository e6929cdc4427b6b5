"""Sides that were priced by different cost files: A of all is by the baseline's, in every view, and each says so."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from harness import compare
from harness.analysis.compare.answer import main_answers
from harness.analysis.compare.stopping import compared_blocks
from harness.analysis.figures import figures_at, run_figures
from harness.analysis.stats import grouped
from harness.analysis.summary import summarise
from harness.judge.decisions.decide import decide_margin
from harness.measure.records.run import SealedRun
from harness.model.spec.rules import SuperiorityRule
from harness.present.report.answers import answers
from harness.present.report.page import write_report
from harness.present.report.terminal import conditions_table
from harness.runner import run_experiment
from harness.shipped import shipped_folder
from tests.support.experiments import small_experiment

DEARER = 1.4
RULE = {"kind": "superiority", "name": "superiority", "margin": 0.0}


def dearer_costs(folder: Path) -> str:
    """The published costs, each f(b) DEARER times as high."""
    shipped = shipped_folder("costs")
    text = (shipped / "paper.toml").read_text().replace('name = "paper"', 'name = "dearer"')
    path = folder / "dearer.toml"
    path.write_text(re.sub(r"^(\d) = ([\d.]+)", lambda m: f"{m[1]} = {DEARER * float(m[2]):.4f}", text, flags=re.M))
    return str(path)


def sealed(folder: Path, conditions: list[dict[str, object]], **changes: object) -> list[SealedRun]:
    runs = run_experiment(
        small_experiment(**{"backend": "emulator", "condition": conditions, **changes}), runs_root=folder
    ).runs
    assert all(run.is_valid for run in runs), [run.invalid_reasons for run in runs]
    return list(runs)


def a_ratio(own: list[SealedRun], base: list[SealedRun]) -> float:
    """The ratio of A, every run at the prices of the baseline."""
    sides = ([figures_at(run, base[0].cost_model).a_ns or 0 for run in runs] for runs in (own, base))
    return sum(next(sides)) / sum(next(sides))


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[SealedRun]]:
    """The runs of two conditions, each with its own costs, made once for all tests that only read them."""
    folder = tmp_path_factory.mktemp("emulated")
    conditions = [{"name": "base"}, {"name": "other", "server": {"cost_model": dearer_costs(folder)}}]
    return grouped(sealed(folder, conditions, baseline="base", replicates=2), lambda run: run.condition)


def test_folders_whose_runs_other_cost_files_priced_are_compared_by_one(emulated: dict[str, list[SealedRun]]) -> None:
    own, base = emulated["other"], emulated["base"]
    table = compare(own[0].path.parent, baseline=base[0].path.parent)
    by_measure = {row["measure"]: row["ratio"] for row in table.records()}
    assert by_measure["A_s_per_token"] == pytest.approx(a_ratio(own, base))
    each_by_its_own = sum(run_figures(run).a_ns or 0 for run in own) / sum(run_figures(run).a_ns or 0 for run in base)
    assert a_ratio(own, base) < 0.9 * each_by_its_own
    assert "A of all is by the baseline's here (paper)" in table.caption
    assert "dearer" in table.caption


def test_conditions_of_one_experiment_are_priced_alike_in_every_view(
    emulated: dict[str, list[SealedRun]], tmp_path: Path
) -> None:
    runs = [*emulated["base"], *emulated["other"]]
    summary = summarise(runs)
    answer = next(one for one in summary.answers if one.channel == "a")
    assert answer.ratio == pytest.approx(a_ratio(emulated["other"], emulated["base"]))
    assert summary.prices == (
        "Priced by different cost models; A of all is by the baseline's here (paper): base (paper), other (dearer)."
    )
    row = next(row for row in compare(runs[0].path.parents[1]).records() if row["measure"] == "A_s_per_token")
    assert row["ratio"] == pytest.approx(answer.ratio)
    a_ns = {row["condition"]: row["a_ns"] for row in summary.to_arrow().to_pylist()}
    assert a_ns["other"] / a_ns["base"] == pytest.approx(answer.ratio)
    assert "A of both by the costs of paper" in answers(summary, str)[0].basis
    assert summary.to_arrow().to_pylist()[1]["note"].endswith("A of both by the costs of paper")
    assert summary.prices in conditions_table(summary).caption
    assert "A of all is by the baseline" in write_report(runs, tmp_path / "report.html").read_text()
    (ratios,) = compared_blocks(runs[0].spec, runs, "a")
    assert np.exp(np.mean(ratios.values)) == pytest.approx(answer.ratio)
    assert "A of both by the costs of paper" in decide_margin(SuperiorityRule.model_validate(RULE), ratios).reason


def test_a_simulation_holds_its_costs_and_says_so(tmp_path: Path) -> None:
    conditions = [{"name": "base"}, {"name": "other", "server": {"cost_model": dearer_costs(tmp_path)}}]
    runs = sealed(tmp_path, conditions, backend="sim", baseline="base", replicates=3)
    summary = summarise(runs)
    assert main_answers(summary.answers)["other"].ratio > 1.15
    assert summary.prices.startswith("Simulated by different cost models, so that ratios hold these too: base (paper)")
    assert "simulated by different cost models" in answers(summary, str)[0].basis
    assert "Simulated by different cost models" in compare(tmp_path / "small").caption
