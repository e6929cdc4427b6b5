"""The table of conditions on a terminal, and how steps become lanes."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from harness.analysis.summary import ExperimentSummary, summarise
from harness.measure.records.run import SealedRun
from harness.model.engine import CostModel
from harness.model.engine.cost import FS_PER_MS, to_fs
from harness.present.report import conditions_table, on_terminal
from harness.present.report.answers import answers
from harness.present.report.timeline import Steps, nice_stride, requests_in_stalls, step_segments, timeline
from harness.runner import run_experiment
from tests.support.experiments import small_experiment
from tests.support.report_runs import MS, Shape, seal_demo, seal_run


def printed(runs: list[SealedRun], width: int) -> str:
    return drawn(summarise(runs), width)


def drawn(summary: ExperimentSummary, width: int) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(on_terminal(conditions_table(summary), width))
    return console.file.getvalue()


def test_the_table_shows_costs_ratios_and_the_verdict(tmp_path: Path) -> None:
    runs = seal_demo(tmp_path, num_replicates=1)
    text = printed(runs, 100)
    compared = summarise(runs).condition("bucket6-nowaits").comparison
    assert f"{compared.ratio_a:.4f}" in text
    assert "silent" in text
    assert "could not notice a contradiction" in " ".join(text.split())
    words = " ".join(text.split())
    assert "against base-waits (for bucket6-waits, base-nowaits) and base-nowaits (for bucket6-nowaits)" in words
    assert "No interval below three replicates" in words
    assert "per generated token" not in words
    assert "baseline" in text
    assert "model s, \u00d74" in text


def test_invalid_runs_are_counted_in_the_title(tmp_path: Path) -> None:
    runs = [seal_run(tmp_path), seal_run(tmp_path, Shape(replicate=1, invalid_reasons=("late",)))]
    assert "2 runs, 1 INVALID and not counted" in " ".join(printed(runs, 100).split())


def test_an_answer_that_b_contradicts_is_withheld_with_both_figures_and_the_costs_behind_it(tmp_path: Path) -> None:
    # Steps of size 16 take 18.2 ms; this cost file, which never measured them, has them on a line that goes down.
    costs = CostModel(
        "old", "a fit of another server", {1: to_fs(10.5, FS_PER_MS), 4: to_fs(13, FS_PER_MS), 8: to_fs(12, FS_PER_MS)}
    )
    sides = (Shape(), Shape(condition="sixteen", buckets=(1, 2, 16)))
    runs = [seal_run(tmp_path, replace(side, replicate=k)) for k in range(3) for side in sides]
    [said] = [f"{one.text} {one.basis}" for one in answers(summarise(runs, costs), str)]
    assert re.match(
        r"Withheld: sixteen against base-waits: modelled device time \(A\) [\d.]+ % less, "
        r"time in flight \(B\) [\d.]+ % more\. A: 95 % interval, cost model assumed exact: .* less; B: 95 % interval: ",
        said,
    )
    assert "They contradict each other. Likely cause: the costs of decode steps of size 4, 8, 16 (not measured)" in said
    assert "(old: a fit of another server)" in said
    assert "sixteen costs" not in said


def test_a_condition_that_is_compared_with_none_says_how_far_its_channels_lie_apart(tmp_path: Path) -> None:
    runs = [seal_run(tmp_path)]
    [said] = [f"{one.text} {one.basis}" for one in answers(summarise(runs), str)]
    assert "it has no baseline" in said
    assert "do not agree" not in said
    cheap = CostModel("cheap", "a fit of another server", {1: to_fs(1, FS_PER_MS), 8: to_fs(1, FS_PER_MS)})
    summary = summarise(runs, cheap)
    [condition] = summary.conditions
    [said] = [f"{one.text} {one.basis}" for one in answers(summary, str)]
    assert f"The channels do not agree: A lies {1 - condition.a_ns / condition.b_ns:.2f} of B below it" in said


def test_the_terminal_says_where_its_figures_come_from(tmp_path: Path) -> None:
    predicted = printed(seal_demo(tmp_path / "sim", num_replicates=3, backend="sim", time_scale=1.0), 120)
    assert "Predicted: simulated in virtual time" in predicted
    assert "agree" not in predicted
    runs = seal_demo(tmp_path / "emulator", num_replicates=3, time_scale=1.0)
    emulated = printed(runs, 120)
    assert "Emulated with modelled step times; no accelerator was measured." in emulated
    compared = summarise(runs).condition("bucket6-nowaits").comparison
    assert f"{compared.main.interval.low:.3f}\u2013{compared.main.interval.high:.3f}" in emulated


def test_the_sentence_names_a_size_whose_cost_was_never_measured(tmp_path: Path) -> None:
    said = [f"{one.text} {one.basis}" for one in answers(summarise(seal_demo(tmp_path, num_replicates=1)), str)]
    assert any("f(6) was never measured" in text for text in said), said


def test_a_narrow_terminal_loses_no_column(tmp_path: Path) -> None:
    text = printed(seal_demo(tmp_path, num_replicates=1), 60)
    assert "bucke" in "".join(text.split())
    assert all(len(line) <= 60 for line in text.splitlines())


def test_at_eighty_columns_a_set_of_buckets_stays_whole(tmp_path: Path) -> None:
    summary = summarise(seal_demo(tmp_path, num_replicates=3))
    factors = {"waits": True, "buckets": "1,2,4,6,8"}
    conditions = tuple(replace(condition, factors=factors) for condition in summary.conditions)
    assert "buckets=1,2,4,6,8 " in drawn(replace(summary, conditions=conditions), 80)


def steps_of(step_s: list[float], n: list[int], b: list[int]) -> Steps:
    return Steps(np.array(step_s), np.array(n), np.array(b))


def test_equal_steps_join_and_a_prefill_between_them_separates() -> None:
    steps = steps_of([0.00, 0.01, 0.02, 0.30, 0.31, 0.32], [3, 3, 2, 2, 2, 2], [4, 4, 2, 2, 2, 2])
    segments = step_segments(steps)
    assert [(s.n, s.b) for s in segments] == [(3, 4), (2, 2), (2, 2)]
    assert segments[0].end_s == pytest.approx(0.02)
    assert segments[1].end_s == pytest.approx(0.03)  # one usual step, not the prefill behind it
    assert segments[2].start_s == 0.30


def test_stamps_that_are_too_coarse_place_no_steps() -> None:
    assert step_segments(steps_of([1.0, 1.0, 1.0, 2.0], [1, 1, 1, 1], [1, 1, 1, 1])) == []
    assert step_segments(steps_of([], [], [])) == []


@pytest.mark.parametrize(("span", "stride"), [(10.0, 1.0), (10.9, 2.0), (27.2, 5.0), (0.4, 0.05), (600.0, 100.0)])
def test_ticks_are_round_and_at_most_ten(span: float, stride: float) -> None:
    assert nice_stride(span, 10) == pytest.approx(stride)


def test_only_requests_that_met_a_stall_are_counted(tmp_path: Path) -> None:
    requests = seal_run(tmp_path).table("requests")
    rows = requests.to_pylist()
    first_done_ns = min(row["done_ns"] for row in rows)
    assert requests_in_stalls(requests, []) == 0
    assert requests_in_stalls(requests, [[first_done_ns - MS // 10, MS // 5]]) == 1
    assert requests_in_stalls(requests, [[rows[0]["due_ns"] - 2 * MS, MS]]) == 0


def test_a_session_that_continues_another_shows_what_its_first_request_reused(tmp_path: Path) -> None:
    for num_background, expected in ((0, "cached"), (9, "recomputed")):
        workload = {"source": "sequential", "num_background": num_background}
        spec = small_experiment(backend="sim", replicates=1, workload=workload, condition=[{"name": "m"}])
        view = timeline(run_experiment(spec, runs_root=tmp_path / str(num_background)).runs[0], 0)
        assert view.bars[-1].reuse == expected
        assert {bar.reuse for bar in view.bars[:-1]} == {"first"}
