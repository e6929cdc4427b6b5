"""Every shipped experiment, its analysis and its rules, on simulated runs: what the method says must come out.

Replicates are fewer than shipped where the figure does not need them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness.analysis import run_figures
from harness.analysis.compare.answer import ExperimentRuns
from harness.errors import SpecError
from harness.extras.paper.rules import RecompilationRule
from harness.judge.catalogue import AnalysisResult, analyse, analyses
from harness.judge.decisions.decide import Outcome
from harness.judge.decisions.verdicts import decide_experiment
from harness.judge.prereg import predict_experiment, predict_runs
from harness.measure.records.run import SealedRun
from harness.model.experiment import resolve
from harness.model.spec import ExperimentSpec, load_experiment, load_toml, parse_experiment
from harness.model.spec.rules import load_rule
from harness.runner import run_experiment
from harness.shipped import find_shipped, shipped_names
from tests.support.checkout import ROOT

CATALOGUE = [
    name
    for name in shipped_names("experiments")
    if load_toml(find_shipped("experiments", name, what="")).get("analysis")
]
Runs = Callable[..., list[SealedRun]]


def shipped(name: str, **changes: Any) -> ExperimentSpec:
    path = find_shipped("experiments", name, what="experiment")
    return parse_experiment({**load_toml(path), "backend": "sim", **changes}, where=name)


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Sealed simulated runs of a shipped experiment, made once; only: names of the conditions to keep."""

    @cache
    def runs_of(name: str, replicates: int, only: tuple[str, ...] = ()) -> list[SealedRun]:
        fleet = load_toml(find_shipped("experiments", name, what="")).get("fleet", {"devices": [0]})
        # No test reads how far the draws of a prediction lie apart.
        spec = shipped(name, replicates=replicates * len(fleet["devices"]), prediction={"draws": 2})
        if only:
            kept = tuple(condition for condition in spec.condition if condition.name in only)
            spec = spec.model_copy(update={"condition": kept, "baseline": only[0]})
        return list(run_experiment(spec, runs_root=tmp_path_factory.mktemp(name)).runs)

    return runs_of


def analysed(runs: list[SealedRun]) -> AnalysisResult:
    return analyse(runs, predict_runs(runs))


@pytest.mark.parametrize("name", CATALOGUE)
def test_a_shipped_experiment_names_an_analysis_a_question_and_rules_that_its_replicates_satisfy(name: str) -> None:
    spec = load_experiment(find_shipped("experiments", name, what="experiment"))
    assert spec.name == name
    assert spec.analysis in analyses()
    assert spec.question.endswith("?")
    for rule in spec.rules:
        assert load_rule(rule).has_subject_in(spec.factors)
        assert not load_rule(rule).missing_from(spec.factors)
        assert load_rule(rule).min_replicates <= spec.replicates


def section_of(name: str) -> str:
    """What the pages of experiments say of this one: the section whose heading names it."""
    pages = sorted((ROOT / "docs" / "reference" / "experiments").glob("*.md"))
    sections = [section for page in pages for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE)[1:]]
    (section,) = [each for each in sections if name in each.partition("\n")[0].partition(":")[0].split(", ")]
    return " ".join(section.split())


ALIGNMENT = ("alignment", 2, ("n6-nowaits", "n6-waits", "n8-nowaits", "n8-waits"))
CONFIGURATION = ("configuration", 3, ("n8-base", "n8-slots16", "n8-selected"))
SATURATION = ("saturation", 3, ("n6-base", "n6-slots16", "n6-slots24", "n6-slots32"))
LIMIT = ("limit-without-recompilation", 3, ("active8", "active6"))
# Runs that several tests read; of the other experiments one replicate of all conditions.
READ = {
    name: (name, *rest)
    for name, *rest in (
        *(ALIGNMENT, CONFIGURATION, SATURATION, LIMIT, ("upstream-lru", 1, ("n6-fifo", "n6-lru"))),
        *(("dummy-lifecycle", 2), ("slot-intervention", 3), ("joined", 3), ("dispersion", 2), ("recompilation", 2)),
        ("no-treatment", 10, ("n6",)),
    )
}


@pytest.mark.parametrize("name", CATALOGUE)
def test_an_experiment_has_a_section_that_explains_every_table_that_it_prints(simulated: Runs, name: str) -> None:
    section = section_of(name)
    for part in ("**Conditions.**", "**What is computed", "**How to read it.**"):
        assert part in section
    printed = analysed(simulated(*READ.get(name, (name, 1)))).tables
    assert printed
    for table in printed:
        assert f"`{table.name}`" in section, table.name


def test_the_thirteen_experiments_of_the_paper_and_the_effects_are_there() -> None:
    named = {load_experiment(find_shipped("experiments", name, what="")).analysis for name in CATALOGUE}
    assert len(named - {"general", "effects", "neighbours", "duet"}) == 13
    assert named >= {"effects", "neighbours", "duet"}


def test_an_experiment_whose_answer_is_a_ratio_ships_six_replicates() -> None:
    names = ("configuration", "saturation", "bucket-intervention", "slot-intervention", "dispersion")
    for name in (*names, "limit-without-recompilation", *(one for one in shipped_names("experiments") if "gpu" in one)):
        assert load_experiment(find_shipped("experiments", name, what="")).replicates == 6, name
    assert ExperimentSpec.model_fields["replicates"].default == 6


# 1 and 2: alignment and bucket intervention.


def test_alignment_tables_have_a_row_per_n_and_a_block_per_plan(simulated: Runs) -> None:
    result = analysed(simulated(*ALIGNMENT))
    assert result.table("alignment").column("N") == [6, 8]
    assert len(result.table("blocks").rows) == 4
    for row in result.table("alignment").records():
        assert row["delta_p"] == pytest.approx(row["p_C"] - row["p_A"])
        assert row["decode_time_ratio"] > 1


def test_without_waits_both_grids_have_the_same_h_and_the_shares_sum_to_the_drop(simulated: Runs) -> None:
    result = analysed(simulated("bucket-intervention", 3, ("n6-nowaits", "n6-nowaits-bucket6")))
    rows = result.table("contributions").records()
    assert [row["n"] for row in rows] == [5, 6]
    assert sum(row["share_of_slots"] for row in rows) == pytest.approx(1)
    assert sum(row["share_of_drop"] for row in rows) == pytest.approx(1)
    p = dict(zip(result.table("costs").column("condition"), result.table("costs").column("p"), strict=True))
    drop = p["n6-nowaits"] - p["n6-nowaits-bucket6"]
    assert sum(row["drop_of_p"] for row in rows) == pytest.approx(drop)


# 3 and 7: sequential survival and the dummy block.


def test_six_background_requests_are_survived_and_evictions_follow_the_dummy_rule(simulated: Runs) -> None:
    result = analysed(simulated("sequential-survival", 1))
    rows = result.table("survival").records()
    assert [row["m"] for row in rows] == list(range(13))
    assert [row["reused"] for row in rows] == [1] * 7 + [0] * 6
    assert [row["evictions"] for row in rows] == [str(max(0, m - 5)) for m in range(13)]
    assert {row["cached_tokens"] for row in rows} == {"1920", "0"}
    assert any("critical request count: 6" in note for note in result.notes)


def test_table_s4_comes_out_row_by_row(simulated: Runs) -> None:
    rows = analysed(simulated("dummy-lifecycle", 2)).table("dummy lifecycle").records()
    sequential = [row for row in rows if str(row["run"]).startswith("sequential")]
    assert [row["decode_steps"] for row in sequential] == [49, 49, 56, 56, 63, 63, 70, 70]
    assert [row["partial_steps"] for row in sequential] == [row["decode_steps"] for row in sequential]
    assert [row["evictions"] for row in sequential] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert [row["never_reallocated"] for row in sequential] == [0, 0, 1, 1, 1, 1, 1, 1]
    concurrent = [row for row in rows if str(row["run"]).startswith("concurrent")]
    for row in concurrent:
        assert row["steps_at_limit"] > 0
        assert (row["evictions"], row["callers"], row["never_reallocated"]) == (1, "dummy 1", 1)


# 4, 6 and 13: slots, joined, dispersion.


def test_what_more_slots_reuse_is_what_is_not_computed(simulated: Runs) -> None:
    rows = {
        row["condition"]: row for row in analysed(simulated("slot-intervention", 3)).table("prefill by kind").records()
    }
    base = rows["slots8"]
    for name in ("batch16", "slots16-limit8"):
        gained = rows[name]["reused_tokens"] - base["reused_tokens"]
        saved = base["computed_rearrivals"] - rows[name]["computed_rearrivals"]
        assert gained == saved > 0
        assert rows[name]["reused"] == "24/24"
        assert rows[name]["computed_first"] == base["computed_first"]
    assert rows["batch16"]["max_bucket"] == 8


def test_formula_c_matches_every_reuse_and_the_wider_one_does_not(simulated: Runs) -> None:
    result = analysed(simulated("slot-intervention", 3))
    for row in result.table("formula").records():
        assert row["formula_C_matches"] == row["reused"]
        assert row["wider_formula_matches"] < row["reused"]
        assert row["C_matches_where_they_differ"] == row["formulas_differ"]
        assert row["partial"] == 0
    # Exceptions are listed one by one; where the formula holds there is no such table.
    assert "formula exceptions" not in {table.name for table in result.tables}


def test_restored_reuse_prefill_and_waiting_are_joined_in_one_run(simulated: Runs) -> None:
    result = analysed(simulated("joined", 3))
    for row in result.table("joined").records():
        assert row["reuse_gained_tokens"] == row["computed_saved_tokens"]
        assert row["waiting_saved_measured_session_s"] == pytest.approx(row["waiting_saved_session_s"], abs=1e-3)
    for row in result.table("waiting").records():
        assert row["source"] == "stamps and streams"
        assert row["W_measured_session_s"] == pytest.approx(row["W_modelled_session_s"], abs=1e-3)
    interval = result.intervals["slots16-limit8: mean prefill_saved_s"]
    assert 0 < interval.low <= interval.estimate <= interval.high
    assert interval.unit == "replicates"


def test_dispersion_keeps_the_total_wait(simulated: Runs) -> None:
    runs = simulated("dispersion", 2)
    waits: dict[tuple[str, int], int] = {}
    for run in runs:
        requests = run.table("requests").to_pylist()
        waits[run.condition, run.replicate] = sum(row["planned_wait_ns"] for row in requests if row["request"] == 0)
    assert all(waits["equal", k] == waits["drawn", k] for k in range(2))
    assert {row["condition"] for row in analysed(runs).table("prefill by kind").records()} == {"equal", "drawn"}


# 5: injection.


def test_an_injected_prefill_stops_all_streams_at_once_and_longer_the_longer_it_is(simulated: Runs) -> None:
    result = analysed(simulated("prefill-injection", 1))
    rows = result.table("injection").records()
    assert [row["injected_tokens"] for row in rows] == [500, 2000, 6000]
    assert [round(row["elapsed_ms"], 1) for row in rows] == [86.1, 359.8, 1177.1]
    # One decode step more than the prefill: the interval from the last token before it to the first after it.
    for row in rows:
        assert row["spike_ms"] == pytest.approx(row["elapsed_ms"] + row["baseline_ms"], abs=0.01)
    assert round(rows[1]["waiting_session_s"], 2) == 1.44
    assert all(row["cached_tokens"] == 0 for row in result.table("injection by run").records())


def test_existence_stays_a_partial_confirmation_because_the_start_is_an_injection_too(simulated: Runs) -> None:
    runs = simulated("prefill-injection", 1)
    rule = load_rule("interference").model_copy(update={"min_replicates": 1})
    decisions = {one.subject: one for one in decide_experiment([rule], ExperimentRuns(runs), is_confirmatory=True)}
    assert decisions["existence"].outcome is Outcome.WITHHELD
    assert decisions["existence"].label == "PARTIALLY CONFIRMED"
    assert 0.25 < decisions["existence"].numbers["last_control_crossing_s"] < 0.35
    assert decisions["simultaneity"].outcome is Outcome.PASS
    assert decisions["growth"].outcome is Outcome.PASS


# 8 to 12.


def test_step_costs_of_constant_n_runs_are_the_cost_models(simulated: Runs) -> None:
    result = analysed(simulated("step-cost", 1))
    rows = result.table("decode steps").records()
    assert [(row["n"], row["b"]) for row in rows] == [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (6, 8), (7, 8), (8, 8)]
    for row in rows:
        # Log stamps have microseconds.
        assert row["median_ms"] == pytest.approx(row["model_ms"], abs=0.001)
    for row in result.table("prefills").records():
        assert row["elapsed_ms"] == pytest.approx(row["model_ms"], abs=1e-9)


def test_recompilations_of_a_deterministic_device_are_within(simulated: Runs) -> None:
    runs = simulated("recompilation", 2)
    rule = load_rule("recompilation")
    assert {one.outcome for one in decide_experiment([rule], ExperimentRuns(runs), is_confirmatory=True)} == {
        Outcome.WITHHELD
    }
    relaxed = rule.model_copy(update={"min_replicates": 2})
    decisions = decide_experiment([relaxed], ExperimentRuns(runs), is_confirmatory=True)
    assert [one.label for one in decisions] == ["WITHIN"] * 12
    assert all("nothing varied between these runs" in one.reason for one in decisions)
    assert {one.num_blocks for one in decisions} == {2}
    assert {row["null_pairs"] for row in analysed(runs).table("sessions").records()} == {3}


def with_report(run: SealedRun, p50_ms: float) -> SealedRun:
    """The run as a server with VLLM_RBLN_METRICS would have left it."""
    launch = {"device_metrics": {"MODEL": {"decode": {"p50_ms": p50_ms}}}}
    return replace(run, manifest=run.manifest.model_copy(update={"effective": {"launch": launch}}))


def test_the_servers_own_model_time_is_used_where_every_session_reported_it(simulated: Runs) -> None:
    runs = simulated("recompilation", 2, ("a1-b8", "a3-b8"))
    reported = [with_report(run, 12.35 + 0.01 * run.replicate) for run in runs]
    (table,) = (one for one in analysed(reported).tables if one.name == "sessions")
    assert [row["ms_per_session"] for row in table.records()] == ["12.35 / 12.36"] * 2
    assert {row["source"] for row in table.records()} == {"reported"}
    # One session without a report: whole steps everywhere, so that two figures are never compared.
    (mixed,) = (one for one in analysed([runs[0], *reported[1:]]).tables if one.name == "sessions")
    assert {row["source"] for row in mixed.records()} == {"steps"}
    assert all(str(row["ms_per_session"]).startswith("13.801") for row in mixed.records())


def test_a_recompilation_rule_can_ask_for_one_figure_alone(simulated: Runs) -> None:
    runs = [with_report(run, 12.0) for run in simulated("recompilation", 2, ("a1-b8", "a3-b8"))]
    asked = {"comparisons": (("a1", "a3"),), "min_replicates": 2}
    reasons = {
        times: decide_experiment(
            [RecompilationRule(name="r", kind="recompilation", times=times, **asked)],
            ExperimentRuns(runs),
            is_confirmatory=True,
        )[0].reason
        for times in ("any", "reported", "steps")
    }
    assert reasons["any"] == reasons["reported"] == "model p50 of the server's report: " + reasons["any"].split(": ")[1]
    assert reasons["steps"].startswith("whole step periods: medians 13.80")


def test_repeats_of_one_input_give_45_and_2100_pairs(simulated: Runs) -> None:
    runs = simulated("no-treatment", 10, ("n6",))
    rows = analysed(runs).table("repeats").records()
    assert [row["pairs"] for row in rows] == [45, 2100]
    assert {row["max"] for row in rows} == {0.0}
    sensitivity = analysed(runs).table("tau sensitivity").records()
    assert [row["tau0"] for row in sensitivity] == [k / 1000 for k in range(5, 55, 5)]
    assert all(row["covers_q95_of_sums"] for row in sensitivity)
    decisions = decide_experiment([load_rule("no-treatment")], ExperimentRuns(runs), is_confirmatory=True)
    assert [one.label for one in decisions] == ["COVERED"]


def test_the_papers_predictions_come_out_of_its_own_inputs() -> None:
    printed = {
        "n6-slots16": 0.9610,
        "n6-selected": 0.9466,
        "n8-slots16": 0.9101,
        "n8-selected": 0.8971,
        "n10-slots16": 0.9213,
        "n10-selected": 0.8899,
    }
    workload = {"source": "paper", "num_sessions": 6}
    spec = shipped("configuration", workload=workload, base_seed=20261000, replicates=3, prediction={"draws": 1})
    predictions = predict_experiment(resolve(spec), "paper")
    cost = {name: sum(one.device_ns for one in runs.values()) for name, runs in predictions.items()}
    found = {name: round(cost[name] / cost[f"{name.split('-')[0]}-base"], 4) for name in printed}
    assert found == printed


def test_a_cost_is_validated_against_predictions_made_by_other_rules(simulated: Runs) -> None:
    runs = simulated(*CONFIGURATION)
    experiment = ExperimentRuns(runs, predict_runs(runs, "paper"))
    decisions = decide_experiment([load_rule("cost-validation")], experiment, is_confirmatory=True)
    # The rule asks for N = 6 too; that nothing of it was run is said.
    assert [one.subject for one in decisions] == ["n8-slots16", "n8-selected", "N = 6"]
    assert decisions[-1].outcome is Outcome.WITHHELD
    for one in decisions[:-1]:
        assert one.outcome in (Outcome.PASS, Outcome.FAIL)
        assert one.numbers["predicted_ratio"] != one.numbers["ratio_a"]


def test_saturation_compares_adjacent_slot_counts_of_every_n(simulated: Runs) -> None:
    runs = simulated(*SATURATION)
    result = analysed(runs)
    assert result.table("adjacent levels").column("pair") == ["slots16 -> slots24", "slots24 -> slots32"]
    assert {row["share_of_top_bucket"] for row in result.table("saturation by replicate").records()} == {0.0}
    decisions = decide_experiment([load_rule("saturation")], ExperimentRuns(runs), is_confirmatory=True)
    assert [one.label for one in decisions] == ["SATURATED", "SATURATED"]
    assert {interval.seed for interval in decisions[0].intervals.values()} == {20260912}


def test_results_render_as_json_and_markdown(simulated: Runs) -> None:
    result = analysed(simulated("sequential-survival", 1))
    assert "| m | runs |" in result.to_markdown()
    assert '"critical request count: 6' in result.to_json()


def test_an_unknown_analysis_is_refused_before_anything_runs_with_the_choices(tmp_path: Path) -> None:
    spec = load_experiment("dispersion").model_copy(update={"analysis": "alignement"})
    with pytest.raises(SpecError, match="unknown analysis 'alignement'") as refused:
        run_experiment(spec, runs_root=tmp_path / "runs")
    assert "alignment, bucket-intervention" in str(refused.value.hint)
    assert refused.value.exit_code == 2
    assert not (tmp_path / "runs").exists()


def test_effects_are_the_mean_differences_of_pairs_with_their_intervals(simulated: Runs) -> None:
    runs = simulated(*LIMIT)
    result = analysed(runs)
    (row,) = result.table("effects").records()
    figures = {name: [run_figures(run) for run in runs if run.condition == name] for name in ("active8", "active6")}
    gained = [
        own.reuse.num_reused - base.reuse.num_reused
        for own, base in zip(figures["active6"], figures["active8"], strict=True)
    ]
    assert row["reused"] == pytest.approx(sum(gained) / 3)
    assert row["reused_low"] <= row["reused"] <= row["reused_high"]
    assert row["cost_ratio"] == pytest.approx(result.intervals["active6 / active8, channel A"].estimate)
    assert (row["active"], row["fit"], row["slots"], row["replicates"]) == (6, 0, 8, 3)


def test_no_effect_has_an_interval_below_three_replicates(simulated: Runs) -> None:
    two = [run for run in simulated(*LIMIT) if run.replicate < 2]
    (row,) = analysed(two).table("effects").records()
    assert row["reused"] is None
    assert row["cost_ratio_low"] is None
