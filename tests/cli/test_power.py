"""``harness power``: from nothing to lines that can be pasted, and from sealed runs where there are some."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.judge.planning.needed import (
    Goal,
    devices_for_equivalence,
    measured_components,
    needed_together,
    simulated_components,
)
from harness.judge.planning.rare_plans import plans_asked
from harness.measure.records.store import RunStore
from harness.model.spec import load_experiment, load_toml, parse_experiment
from harness.runner import run_experiment
from tests.support.command_line import harness
from tests.support.experiments import small_experiment

pytestmark = pytest.mark.same_everywhere

GOAL = Goal(margin=0.05)


def test_lines_to_paste_read_back_as_an_experiment(tmp_path: Path) -> None:
    said = harness(
        "power", "demo", "--comparison", "bucket6-nowaits", "--blocks", "20", "-o", "power.html", cwd=tmp_path
    )
    assert said.returncode == 0, said.stderr
    assert "simulated: 20 plan draws" in said.stdout
    lines = said.stdout.partition("in place of its own replicates:\n")[2].partition("page:")[0]
    pasted = tmp_path / "pasted.toml"
    pasted.write_text("\n".join(line for line in lines.splitlines() if not line.startswith("or, ")))
    found = load_toml(pasted)
    more = {"name": "mine", "base_seed": 1, "workload": {"num_sessions": 2}, "condition": [{"name": "base"}]}
    spec = parse_experiment({**found, **more}, where="pasted.toml")
    assert spec.stop.margin == 0.02
    assert 2 <= spec.replicates <= spec.stop.budget
    page = (tmp_path / "power.html").read_text()
    assert 'aria-label="Power against blocks. Blocks proposed: bucket6-nowaits' in page


def test_spreads_come_from_sealed_blocks_where_there_are_enough(tmp_path: Path) -> None:
    spec = small_experiment(backend="sim", replicates=3)
    runs = run_experiment(spec, runs_root=tmp_path).runs
    (found,) = measured_components(spec, runs)
    assert (found.condition, found.num_blocks, found.plan) == ("more", 3, None)
    with pytest.raises(SpecError, match="no comparison has 3 valid blocks"):
        measured_components(spec, runs[:4])


def test_simulated_spreads_tell_plan_draws_from_restarts() -> None:
    spec = small_experiment(backend="sim")
    ((drawn,), block_s) = simulated_components(spec, 20)
    ((same,), _) = simulated_components(spec.model_copy(update={"same_input": True}), 20)
    assert drawn.plan > 0
    assert same.plan == 0
    assert block_s > 0
    assert needed_together([drawn], GOAL)[0].proposed is not None


def test_a_superiority_rule_gets_its_number_of_replicates_in_a_sentence(tmp_path: Path) -> None:
    options = ("--comparison", "bucket6-nowaits", "--blocks", "20")
    shown = harness("power", "demo", "--rule", "superiority", *options, cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    answer = shown.stdout.splitlines()[0]
    sentence = (
        r"bucket6-nowaits: (\d+) replicates show it cheaper with probability 0.9, if it costs (\d\.\d) % less; "
        r"f\(6\) was not measured, but interpolated"
    )
    counted = re.fullmatch(sentence, answer)
    assert counted is not None, answer
    assert "# power 0.9 at margin 0, alpha 0.025" in shown.stdout
    assert f"\nreplicates = {counted[1]}\n" in shown.stdout
    refused = harness("power", "demo", "--rule", "equivalence", *options, cwd=tmp_path)
    assert (refused.returncode, "no superiority rule" in refused.stderr) == (2, True)


def test_the_spread_between_devices_is_told_apart_and_more_blocks_on_each_need_fewer_devices(tmp_path: Path) -> None:
    spec = small_experiment(backend="sim", replicates=8, fleet={"devices": [0, 1]})
    [found] = measured_components(spec, run_experiment(spec, runs_root=tmp_path).runs)
    assert (found.num_devices, found.num_blocks) == (2, 8)
    assert found.device is not None
    scattered = replace(found, device=0.005, within=0.02)
    needs = [devices_for_equivalence(scattered, Goal(margin=0.02), blocks) or 0 for blocks in (1, 4, 400)]
    assert needs[0] > needs[1] > needs[2] > 2


def test_comparisons_that_are_judged_together_need_more_blocks_than_each_alone(tmp_path: Path) -> None:
    components, _costs = simulated_components(load_experiment("demo"), 20)
    assert [parts.condition for parts in components] == ["bucket6-waits", "bucket6-nowaits"]
    together, alone = needed_together(components, Goal()), [needed_together([parts], Goal())[0] for parts in components]
    for both, one in zip(together, alone, strict=True):
        assert (both.proposed or 0) > (one.proposed or 0)
        assert both.proposed_power >= 0.9
    said = harness("power", "demo", "--comparison", "bucket6-waits", "--blocks", "20", cwd=tmp_path).stdout
    assert "at alpha 0.05 over 2 comparisons" in said
    assert "\n# power 0.9" in said
    # Rare plans carry a little of the mean.
    asked = plans_asked(load_experiment("demo"), "bucket6-waits")["bucket6-waits"]
    assert f"\nreplicates = {max(asked, together[0].proposed or 0)}\n" in said


def test_after_runs_the_plan_is_for_the_margin_and_not_for_the_ratio_that_they_show(tmp_path: Path) -> None:
    harness("run", "demo", "--backend", "sim", "--replicates", "4", "--runs", "runs", cwd=tmp_path)
    options = ("--rule", "superiority", "--comparison", "bucket6-nowaits")
    said = harness("power", "demo", *options, "--runs", "runs", cwd=tmp_path).stdout
    assert "of 4 sealed blocks under runs\nPredicted: simulated in virtual time" in said
    assert "measured in" not in said
    answer = said.splitlines()[0]
    assert re.search(
        r"if it costs 2\.0 % less \(the margin that is wanted; the 4 blocks so far: \d\.\d % less\)", answer
    )
    assert re.search(
        r"bucket6-nowaits: its sd is of 4 blocks, and may be as high as 0\.\d+ \(90 % limit\); power 0\.9", said
    )
    spec = load_experiment("demo")
    components = measured_components(spec, RunStore(tmp_path / "runs").sealed("demo"))
    (found,) = (parts for parts in components if parts.condition == "bucket6-nowaits")
    large = replace(found, mean=5 * found.mean)
    assert needed_together([found], Goal())[0].proposed == needed_together([large], Goal())[0].proposed
    assert (
        needed_together([found], Goal())[0].proposed
        != needed_together([replace(large, is_observed=False)], Goal())[0].proposed
    )


def test_power_and_simulate_give_the_same_effect_and_say_why_other_plans_give_another(tmp_path: Path) -> None:
    said = harness("power", "demo", "--blocks", "20", cwd=tmp_path).stdout
    simulated = harness("simulate", "demo", cwd=tmp_path).stdout
    own = re.search(r"bucket6-nowaits: (-\d\.\d) \+- \d\.\d % on this experiment's 3 own plans", said)
    ratio = re.search(r"bucket6-nowaits / base-nowaits: (0\.\d+)", simulated)
    assert float(own[1]) == pytest.approx(100 * (float(ratio[1]) - 1), abs=0.06)
    assert re.search(r"; -\d\.\d\d? \+- \d\.\d\d? % is over 20 plans", said)
