"""Missing and INVALID runs: every sum, count and percentile equals that of a folder without their partners."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analysis.compare.across import Side, compare_all, pairs_of
from harness.analysis.compare.answer import ExperimentRuns
from harness.analysis.summary import ExperimentSummary, summarise
from harness.extras.paper.catalogue.costs import cost_table
from harness.extras.paper.catalogue.reuse import prefill_kinds_table
from harness.measure.records.run import SealedRun
from harness.present.report.page import render_page
from harness.present.report.terminal import answer_lines, summary_tables
from harness.present.report.view import gather
from harness.runner import run_experiment
from tests.support.experiments import small_experiment

CONDITIONS = ("base", "more", "full")
REPLICATES = 4
# Columns that count the runs that there are, and not what they show.
COUNTS = {"num_runs", "num_valid_runs"}
Cells = set[tuple[str, int]]

missing_cells = st.sets(st.tuples(st.sampled_from(CONDITIONS), st.integers(0, REPLICATES - 1)), min_size=1, max_size=8)


class Runs(tuple[SealedRun, ...]):
    """Runs that a failing example names in a word."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "runs"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    servers: tuple[dict[str, Any], ...] = ({}, {"decode_buckets": [1, 2, 3, 4, 8]}, {"decode_buckets": [8]})
    spec = small_experiment(
        backend="sim",
        replicates=REPLICATES,
        baseline="base",
        condition=[{"name": name, "server": server} for name, server in zip(CONDITIONS, servers, strict=True)],
    )
    return Runs(run_experiment(spec, runs_root=tmp_path_factory.mktemp("runs")).runs)


def without(runs: Sequence[SealedRun], missing: Cells, *, is_kept_invalid: bool) -> list[SealedRun]:
    """The runs without those cells, or with these INVALID."""
    kept: list[SealedRun] = []
    for run in runs:
        if (run.condition, run.replicate) not in missing:
            kept.append(run)
        elif is_kept_invalid:
            kept.append(replace(run, manifest=run.manifest.model_copy(update={"status": "invalid"})))
    return kept


def never_had(runs: Sequence[SealedRun], missing: Cells, conditions: Sequence[str]) -> list[SealedRun]:
    """The runs of these conditions in replicates that none of them misses; a condition that misses all is no matter."""
    gone = {name for name in conditions if all((name, k) in missing for k in range(REPLICATES))}
    lost = {k for name, k in missing if name in conditions and name not in gone}
    return [
        run for run in runs if run.condition in conditions and run.condition not in gone and run.replicate not in lost
    ]


def sums(summary: ExperimentSummary) -> dict[str, dict[str, Any]]:
    """The rows for programs by condition, without what is of a pair of conditions."""
    of_a_pair = re.compile(r"ratio_|tau|channels|is_agreed|is_given|source|p_|family|verdict")
    return {
        row["condition"]: {
            name: value for name, value in row.items() if name not in COUNTS and not of_a_pair.match(name)
        }
        for row in summary.to_arrow().to_pylist()
        if row["num_counted_runs"]
    }


def sentences(summary: ExperimentSummary, condition: str) -> list[str]:
    return [line for line in answer_lines(summary) if f"[bold]{condition}[/] costs" in line]


@settings(max_examples=8, deadline=None)
@given(missing=missing_cells, is_kept_invalid=st.booleans())
def test_sums_and_percentiles_are_those_of_a_folder_that_never_had_the_unpaired_runs(
    runs: Runs, missing: Cells, is_kept_invalid: bool
) -> None:
    there = without(runs, missing, is_kept_invalid=is_kept_invalid)
    reference = never_had(runs, missing, CONDITIONS)
    if not there or not any(run.is_valid for run in there):
        return
    shown = summarise(there)
    if not reference:
        assert shown.replicates == ()
        assert shown.serving == ()
        assert all(row["a_ns"] is None and row["num_reused"] is None for row in shown.to_arrow().to_pylist())
        return
    expected = summarise(reference)
    assert sums(shown) == sums(expected)
    assert {each.condition: each for each in shown.serving} == {each.condition: each for each in expected.serving}
    experiments = [ExperimentRuns([run for run in each if run.is_valid]) for each in (there, reference)]
    for table in (cost_table, prefill_kinds_table):
        rows = [{row["condition"]: row for row in table(each).records()} for each in experiments]
        assert {name: row for name, row in rows[0].items() if name in rows[1]} == rows[1]


@settings(max_examples=8, deadline=None)
@given(missing=missing_cells, is_kept_invalid=st.booleans())
def test_a_ratio_and_its_sentence_are_those_of_the_replicates_that_both_conditions_have(
    runs: Runs, missing: Cells, is_kept_invalid: bool
) -> None:
    there = without(runs, missing, is_kept_invalid=is_kept_invalid)
    for name in CONDITIONS[1:]:
        pair = never_had(runs, missing, ("base", name))
        if len({run.condition for run in pair}) < 2:
            continue
        shown, expected = summarise(there), summarise(pair)
        assert shown.condition(name).comparison.main == expected.condition(name).comparison.main
        assert sentences(shown, name) == sentences(expected, name) != []
        sides = [
            [
                Side(f"x/small/{condition}", tuple(run for run in each if run.condition == condition and run.is_valid))
                for condition in ("base", name)
            ]
            for each in (there, pair)
        ]
        rows = [compare_all(pairs_of(each)).records() for each in sides]
        assert rows[0] == rows[1]


def test_a_missing_run_is_named_and_its_partners_are_not_summed(runs: Runs) -> None:
    there = without(runs, {("base", 1)}, is_kept_invalid=True)
    shown, expected = summarise(there), summarise(never_had(runs, {("base", 1)}, CONDITIONS))
    told, reference = ([table.rows for table in summary_tables(each)] for each in (shown, expected))
    assert told == reference
    assert "over replicates 0, 2, 3, which every condition has. Missing or INVALID: base/1." in (
        summary_tables(shown)[0].caption
    )
    never = never_had(runs, {("base", 1)}, CONDITIONS)
    page, other = (cells_of(render_page(gather(each, timelines=[]))) for each in (there, never))
    assert page["conditions"] == other["conditions"]
    assert page["reuse"] == other["reuse"]


def cells_of(page: str) -> dict[str, list[str]]:
    """The first table of each section, its cells as text."""
    _, *sections = re.split(r'<(?:h2|details class="section") id="(\w+)"', page)
    pairs = zip(sections[::2], sections[1::2], strict=True)
    bodies = ((name, re.search(r"<tbody>(.*?)</tbody>", text, re.DOTALL)) for name, text in pairs)
    return {name: re.findall(r">([^<>\n]+)<", found[1]) for name, found in bodies if found}
