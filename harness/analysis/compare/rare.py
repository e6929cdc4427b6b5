"""What the shape of a comparison's blocks leaves open: plans too rare to be among them, one that decides, and skew.

Nothing is decided. Definitions: docs/reference/method-comparisons.md, "Rare plans".
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from harness.analysis.stats import NO_SCATTER, FloatArray, of_blocks

# Blocks from which on a skew is looked at, and the spread below which there is none.
MIN_SKEWED = 8
# Kinds of plans that so many blocks do not hold with this probability may still differ.
UNSEEN_CHANCE = 0.05


def unseen_in_words(num_plans: int) -> str:
    """How rare a plan may be that none of so many was: "a plan in 4.5 or rarer may differ"."""
    if not num_plans:
        return ""
    rarity = 1 / (1 - UNSEEN_CHANCE ** (1 / num_plans))
    return f"a plan in {rarity:.{int(rarity < 10)}f} or rarer may differ"


def skew_in_words(logs: FloatArray) -> str:
    """That log ratios are skewed by more than chance makes normal ones; empty where they are not, or too few to say."""
    number = len(logs)
    spread = float(logs.std()) if number else 0.0
    if number < MIN_SKEWED or spread < NO_SCATTER:
        return ""
    skew = float(((logs - logs.mean()) ** 3).mean()) / spread**3
    # Source: the standard error of the sample skewness of normal values.
    error = math.sqrt(6.0 * (number - 2) / ((number + 1) * (number + 3)))
    if abs(skew) < 2 * error:
        return ""
    return f"skew {skew:+.1f}: alpha is promised for log ratios that are nearly symmetric"


def shape_in_words(values: Sequence[float], replicates: Sequence[int]) -> str:
    """What stands beside a verdict on blocks with these values: the one that decides, a skew, and what is not seen."""
    parts = (_deciding(values, replicates), skew_in_words(np.array(values)), unseen_in_words(len(values)))
    return "; ".join(filter(None, parts))


def _deciding(values: Sequence[float], replicates: Sequence[int]) -> str:
    """The one block without which a fixed interval would show another side; empty where there is none, or several."""
    sides = [_side(np.delete(values, place)) for place in range(len(values))] if len(values) > 3 else []
    changed = [place for place, side in enumerate(sides) if side != _side(np.array(values))]
    if len(changed) != 1:
        return ""
    without = {-1: "cheaper", 0: "no difference shown", 1: "more expensive"}[sides[changed[0]]]
    return f"replicate {replicates[changed[0]]} decides: without it, {without}"


def _side(values: FloatArray) -> int:
    estimate = of_blocks(values.tolist())
    return -1 if estimate.high < 0 else int(estimate.low > 0)
