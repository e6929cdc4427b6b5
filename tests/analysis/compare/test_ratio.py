"""The interval of modelled device time (A) is the same in every view, with the error of its costs or given these."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness import compare, decide
from harness.analysis.compare.answer import main_answers, result_of
from harness.analysis.compare.ratio import Family, Ratio
from harness.analysis.compare.stopping import looks_at
from harness.analysis.stats import Interval, of_blocks
from harness.analysis.summary import summarise
from harness.measure.records.run import SealedRun
from harness.model.engine.cost import CostError
from harness.model.spec.sections import StopSpec
from harness.runner import run_experiment
from harness.shipped import shipped_folder
from tests.support.experiments import blocks_of, small_experiment

CONDITIONS = [{"name": "base"}, {"name": "full", "server": {"decode_buckets": [8]}}]
# f(1) is known to 0.3 ms, the others exactly.
ERRORS = """
[[errors]]
coefficients = ["f(1)", "f(2)", "f(4)", "f(8)", "alpha_ms", "beta_ms_per_request", "per_call_ms", \
"per_call_us_per_token"]
standard_errors = [0.3, 0.3, 0.3, 0.3, 0, 0, 0, 0]
correlations = [%s]
degrees = 20
"""


def cost_file(folder: Path, *, with_errors: bool) -> str:
    shipped = shipped_folder("costs")
    rows = ", ".join(str([int(row == column) for column in range(8)]) for row in range(8))
    path = folder / f"costs-{with_errors}.toml"
    path.write_text((shipped / "paper.toml").read_text() + (ERRORS % rows if with_errors else ""))
    return str(path)


def sealed(folder: Path, *, with_errors: bool, until_decided: bool = False) -> list[SealedRun]:
    spec = small_experiment(
        backend="sim",
        replicates=6,
        baseline="base",
        condition=CONDITIONS,
        rules=("superiority",),
        server={"cost_model": cost_file(folder, with_errors=with_errors)},
        **({"stop": {"margin": 0.001, "budget": 6}} if until_decided else {}),
    )
    spec = spec.until_decided() if until_decided else spec
    return list(run_experiment(spec, runs_root=folder / f"{with_errors}-{until_decided}").runs)


def in_every_view(runs: list[SealedRun]) -> Interval:
    """The interval of the one comparison; fails where a view has another one, or other words of its costs."""
    (answer,) = main_answers(summarise(runs).answers).values()
    interval = answer.interval
    (row,) = [row for row in compare(runs[0].path.parents[2]).records() if row["measure"] == "cost_s_per_token"]
    decided = next(one for one in decide(runs).decisions if one.rule != "stop").intervals["ratio"]
    assert decided.level == pytest.approx(interval.level)
    assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
    assert (decided.low, decided.high) == pytest.approx((interval.low, interval.high))
    assert interval.is_given_costs == decided.is_given_costs == ("cost model assumed exact" in row["note"])
    for one in decide(runs).decisions:
        assert one.rule != "stop" or interval.is_given_costs == ("cost model assumed exact" in one.reason)
    return interval


@pytest.mark.parametrize("until_decided", [False, True])
def test_every_view_has_the_error_of_the_costs_or_says_that_it_has_none(tmp_path: Path, until_decided: bool) -> None:
    known = in_every_view(sealed(tmp_path, with_errors=True, until_decided=until_decided))
    given = in_every_view(sealed(tmp_path, with_errors=False, until_decided=until_decided))
    assert "with the error of the costs" in known.method
    assert (known.is_given_costs, given.is_given_costs) == (False, True)
    # Only some of the error cancels: the sides decode with other sizes.
    assert known.high - known.low > 1.3 * (given.high - given.low)


COSTS = CostError(((0.01**2, 20.0),), ())


def test_what_a_stopping_rule_checks_holds_with_the_costs_at_every_look() -> None:
    """The interval of the blocks at half of alpha, and that of the costs at the other half, side by side."""
    values = np.random.default_rng(3).normal(0.1, 0.02, 12).tolist()
    stop, blocks = StopSpec(margin=0.0001, budget=12), blocks_of(values)
    of_blocks_alone = looks_at(blocks, stop.model_copy(update={"alpha": stop.alpha / 2}))
    for look, alone in zip(looks_at(blocks, stop, costs=[COSTS] * 12), of_blocks_alone, strict=True):
        assert look.of_costs == pytest.approx(0.01 * 2.423, rel=1e-3)
        if look.has_interval:
            widening = math.exp(0.01 * 2.423)
            assert (look.low, look.high) == pytest.approx((alone.low / widening, alone.high * widening), rel=1e-4)
    of = Ratio(ratio=1.1, values=tuple(values), blocks=of_blocks(values), costs=COSTS)
    checked = result_of(of, 12, Family(is_checked=True)).interval
    alone = result_of(replace(of, costs=CostError((), ())), 12, Family(is_checked=True)).interval
    assert math.log(checked.high / checked.low) > math.log(alone.high / alone.low) + 2 * 0.01 * 2.4
