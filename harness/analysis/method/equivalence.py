"""Decisions on a mean log cost ratio: equivalence by two one-sided tests, and what a declared stopping rule found.

Where the experiment was looked at while it ran, equivalence is taken from the sequence, never from a fixed-n interval.
Pure functions.
Definitions: docs/planning.md, "Equivalence".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from harness.analysis.method.decide import Decision, Outcome, withheld
from harness.analysis.method.devices import DeviceEffect, of_blocks
from harness.analysis.method.stats import Interval, t_quantile, t_tail
from harness.analysis.method.stopping import ComparisonLooks, Standing
from harness.spec.rules import EquivalenceRule

STOPPING = "stop"


def tost_p(mean: float, standard_error: float, degrees: int, log_margin: float) -> float:
    """The larger p of the two one-sided t tests that a mean lies at or beyond either margin.

    Source: Schuirmann (1987), A comparison of the two one-sided tests procedure.
    """
    distance = log_margin - abs(mean)
    if standard_error == 0:
        return 0.0 if distance > 0 else 1.0
    tail = t_tail(distance / standard_error, degrees) / 2
    return tail if distance > 0 else 1 - tail


def decide_equivalence(
    rule: EquivalenceRule,
    subject: str,
    differences: Sequence[float],
    looked: ComparisonLooks | None = None,
    alpha: float = 0.05,
    devices: DeviceEffect | None = None,
) -> Decision:
    """PASS where the cost ratio is shown to lie within the margin, FAIL where it is not.

    differences: ln ratio of each block. looked: the comparison under the experiment's stopping rule, if it declared
    one, whose interval at ``alpha`` then decides. devices: the same blocks, where several devices made them, whose
    means are then tested.
    """
    limit = math.log1p(rule.margin)
    if looked is not None:
        if looked.last is None or math.isinf(looked.last.half_width):
            return withheld(rule.name, subject, f"no look of its stopping rule has an interval yet ({looked.told})")
        low, high, mean, num_blocks = looked.last.low, looked.last.high, looked.last.mean, looked.last.num_blocks
        told, p, level = "interval of the declared sequence", None, 1 - alpha
    else:
        num_blocks, level = len(differences), 1 - 2 * rule.alpha
        found = of_blocks(differences) if devices is None else devices.estimate
        if found is None:
            return withheld(rule.name, subject, f"{num_blocks} blocks are too few for an interval over their devices")
        mean, half = found.mean, t_quantile(level, found.degrees) * found.error
        low, high, p = mean - half, mean + half, tost_p(mean, found.error, found.degrees, limit)
        over = "" if devices is None else f" over {found.num_units} {found.unit}"
        told = f"two one-sided t tests of the mean log ratio{over}"
    is_equivalent = -limit < low and high < limit
    is_different = low >= limit or high <= -limit
    ratio, least, most = (math.exp(value) for value in (mean, low, high))
    return Decision(
        rule.name,
        subject,
        Outcome.PASS if is_equivalent else Outcome.FAIL,
        f"cost ratio {ratio:.4f} [{least:.4f}, {most:.4f}], margin {1 / (1 + rule.margin):.4f} to "
        f"{1 + rule.margin:.4f}, {num_blocks} blocks, {told}" + ("" if p is None else f", p = {p:.2g}"),
        label="EQUIVALENT" if is_equivalent else "DIFFERENT" if is_different else "NOT SHOWN",
        numbers={"ratio": ratio, "margin": rule.margin, "alpha": rule.alpha, "num_blocks": num_blocks, "p": p},
        intervals={"ratio": Interval(ratio, least, most, level, told, "blocks", num_blocks, 0, 0)},
    )


def decide_stopped(standing: Standing) -> list[Decision]:
    """The verdict of the stopping rule on every comparison: PASS once it has an answer, else WITHHELD."""
    return [
        Decision(
            STOPPING,
            f"{one.condition} vs {one.baseline}",
            Outcome.PASS if one.verdict.is_answer else Outcome.WITHHELD,
            f"{one.told}; declared: {standing.stop}",
            label=one.verdict.value.upper(),
            numbers={"num_blocks": one.num_blocks, "blocks_left": one.blocks_left},
        )
        for one in standing.comparisons
    ]
