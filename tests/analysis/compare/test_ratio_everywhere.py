"""The same runs have one ratio and one interval: in sentence, table, CSV, JSON, page, comparison and decision."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest

from harness import compare, decide
from harness.analysis.compare.answer import change, ends_in_words, main_answers
from harness.analysis.compare.rare import unseen_in_words
from harness.analysis.summary import summarise
from harness.measure.records.run import SealedRun
from harness.present.report import write_report
from harness.present.report.answers import answers
from harness.runner import run_experiment
from harness.table import interval_ends
from tests.support.command_line import harness
from tests.support.experiments import small_experiment


def heavy(folder: Path, sigma: float, stop: dict[str, Any] | None) -> list[SealedRun]:
    """Answers of log-normal length: a few plans carry most of the cost, and gain less than the others."""
    lengths = {"distribution": "lognormal", "median": 24, "sigma": sigma, "low": 4, "high": 4000}
    sizes = {"server": {"decode_buckets": [3, 6, 8]}}
    spec = small_experiment(
        backend="sim",
        replicates=9,
        base_seed=606,
        # Whole answers have one chunk each.
        client={"stream": False},
        workload={"num_sessions": 6, "wait_cap_s": 10.0, "generate_tokens": lengths},
        server={"cost_model": "paper", "slot_tokens": 16384, "decode_buckets": [1, 2, 4, 8]},
        condition=[{"name": "base"}, {"name": "new", **sizes}, {"name": "more", "server": {"kv_slots": 16}}],
        baseline="base",
        rules=("superiority",),
        **({"stop": stop} if stop else {}),
    )
    return list(run_experiment(spec, runs_root=folder, until_decided=stop is not None).runs)


EVERY = {"margin": 0.001, "budget": 12}
PRESET = {"margin": 0.001, "budget": 9, "looks": [6]}


@pytest.mark.parametrize(("sigma", "stop"), [(2.2, None), (1.0, EVERY), (2.2, PRESET)])
def test_every_view_of_the_same_runs_has_one_ratio_and_one_interval(
    tmp_path: Path, sigma: float, stop: dict[str, Any] | None
) -> None:
    runs = heavy(tmp_path, sigma, stop)
    summary = summarise(runs)
    said = " ".join(one.text for one in answers(summary, str))
    assert all(len(one.text.split()) <= 25 for one in answers(summary, str))
    page = write_report(runs, tmp_path / "report.html", timelines=()).read_text(encoding="utf-8")
    page = re.sub("<[^>]*>", "", page).replace("&nbsp;", " ")
    csv_text, json_text = (
        harness("table", "small", "--runs", str(tmp_path), "--format", form).stdout for form in ("csv", "json")
    )
    rows = [*csv.DictReader(csv_text.splitlines()), *json.loads(json_text)]
    compared = [row for row in compare(tmp_path).records() if row["measure"] == "cost_s_per_token"]
    decided = {one.subject.split()[0]: one for one in decide(runs).decisions if one.rule != "stop"}
    for name, answer in main_answers(summary.answers).items():
        own, base = (summary.condition(each).a_ns or 0 for each in (name, "base"))
        found, by_rule = answer.interval, decided[name].intervals["ratio"]
        wanted = pytest.approx((own / base, found.low, found.high))
        assert (answer.ratio, found.low, found.high) == wanted, "the ratio is that of the sums in the table"
        assert (by_rule.estimate, by_rule.low, by_rule.high) == wanted
        for row in (row for row in rows if row["condition"] == name):
            assert tuple(float(row[key]) for key in ("ratio_a", "ratio_a_low", "ratio_a_high")) == wanted
        for row in (row for row in compared if row["condition"].endswith(f"/{name}")):
            assert (row["ratio"], row["low"], row["high"]) == wanted
        assert f"costs {change(answer.ratio)}" in said
        for words in (
            ends_in_words(found),
            f"{answer.ratio:.4f}",
            "\u2013".join(interval_ends(found.low, found.high, 3)),
        ):
            assert words in page
        assert ends_in_words(found) in said
        rare = unseen_in_words(len(answer.comparison.replicates))
        notes = [row["note"] for row in compared if row["condition"].endswith(f"/{name}")]
        for view in (page, decided[name].reason, *notes):
            assert rare in view


def test_of_a_sequence_between_two_looks_every_view_has_the_blocks_of_the_last_look(tmp_path: Path) -> None:
    runs = [run for run in heavy(tmp_path, 1.0, {**PRESET, "alpha": 0.4}) if run.replicate < 8]
    summary = summarise(runs)
    for name, answer in main_answers(summary.answers).items():
        assert answer.interval.num_units == len(summary.replicates) == 6
        assert answer.ratio == pytest.approx(summary.condition(name).a_ns / summary.condition("base").a_ns)
