"""Equivalence: p-values as statsmodels 0.14 computes them, and no fixed-n test of data that were looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest

from harness.analysis.compare.answer import ChannelWords
from harness.analysis.compare.stopping import ComparedBlocks, ComparisonLooks, SequentialStatus, looks_at
from harness.analysis.stats import of_blocks
from harness.judge.decisions.decide import Outcome, decide_margin, decide_stopped, tost_p
from harness.model.spec import StopSpec
from harness.model.spec.rules import EquivalenceRule
from tests.support.experiments import blocks_of

BLOCKS = (0.004, -0.003, 0.006, 0.001, -0.002, 0.005)
RULE = EquivalenceRule(name="equal", kind="equivalence", margin=0.02)
STOP = StopSpec(margin=0.02, budget=24)


def ratios_of(values: Sequence[float]) -> ComparedBlocks:
    return ComparedBlocks("more", "base", "a", blocks_of(values), tuple(range(len(values))), tuple(values))


def looked_at(values: Sequence[float], stop: StopSpec = STOP) -> SequentialStatus:
    return SequentialStatus(stop, len(values), (looks_of(values, stop),))


def looks_of(values: Sequence[float], stop: StopSpec = STOP) -> ComparisonLooks:
    blocks = blocks_of(values)
    return ComparisonLooks("more", "base", blocks, tuple(looks_at(blocks, stop)), None)


@pytest.mark.parametrize(("scale", "p"), [(1, 4.017655762634448e-05), (6, 0.19176855218651995)])
def test_p_is_that_of_statsmodels_ttost_mean(scale: float, p: float) -> None:
    values = np.array(BLOCKS) * scale
    error = float(values.std(ddof=1)) / math.sqrt(len(values))
    estimate = of_blocks(values.tolist())
    assert estimate.error == pytest.approx(error)
    assert tost_p(estimate, math.log(1.02)) == pytest.approx(p)


def test_blocks_within_the_margin_pass_and_scattered_ones_show_nothing() -> None:
    within = decide_margin(RULE, ratios_of(BLOCKS))
    scattered = decide_margin(RULE, ratios_of([6 * value for value in BLOCKS]))
    apart = decide_margin(RULE, ratios_of([value + 0.1 for value in BLOCKS]))
    assert (within.outcome, within.label) == (Outcome.PASS, "EQUIVALENT")
    assert (scattered.outcome, scattered.label) == (Outcome.FAIL, "NOT SHOWN")
    assert (apart.outcome, apart.label) == (Outcome.FAIL, "DIFFERENT")


def test_of_data_that_were_looked_at_the_sequence_decides() -> None:
    values = tuple(2 * value for value in BLOCKS)
    assert decide_margin(RULE, ratios_of(values)).outcome is Outcome.PASS
    # The sequence is wider by its looks, and does not show it yet.
    decision = decide_margin(RULE, ratios_of(values), looked_at(values))
    assert (decision.outcome, decision.label) == (Outcome.FAIL, "NOT SHOWN")
    assert "declared sequence" in decision.reason
    none = decide_margin(RULE, ratios_of(BLOCKS[:1]), looked_at(BLOCKS[:1]))
    assert none.outcome is Outcome.WITHHELD
    sloppy = StopSpec(margin=0.02, budget=24, alpha=0.2)
    assert "another rule" in decide_margin(RULE, ratios_of(values), looked_at(values, sloppy)).reason


def test_a_stopping_rule_decides_once_it_has_an_answer() -> None:
    values = tuple(-0.05 + one for one in BLOCKS)
    (found,) = decide_stopped(looked_at(values), {"more": ChannelWords(reason="B says so too")})
    assert (found.outcome, found.label, found.subject) == (Outcome.PASS, "CHEAPER", "more vs base")
    assert "declared: margin 0.02" in found.reason
    assert found.reason.endswith("; B says so too")
    (open_,) = decide_stopped(
        SequentialStatus(STOP, 3, (ComparisonLooks("more", "base", blocks_of(values[:3]), (), 3),)),
        {"more": ChannelWords()},
    )
    assert (open_.outcome, open_.label) == (Outcome.WITHHELD, "GO ON")
