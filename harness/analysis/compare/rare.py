"""What the shape of a comparison's blocks leaves open: too few, plans too rare to be seen, one that decides, and skew.

Nothing is decided. Definitions: docs/reference/method-comparisons.md, "Rare plans".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from harness.analysis.compare.ratio import BlockCosts, estimate_of_blocks, have_ratio, values_of_blocks
from harness.analysis.stats import MIN_REPLICATES, NO_SCATTER, FloatArray

T = TypeVar("T")
# Shares of 95 % intervals of so few blocks that hold the ratio of the worst simulated workload.
# Source: docs/evidence/error-rates.md, "Long tails".
HELD_OF_FEW = {3: ".78", 4: ".85", 5: ".89"}
# Blocks from which on a skew is looked at, and the spread below which there is none.
MIN_SKEWED = 8
# Kinds of plans that so many blocks do not hold with this probability may still differ.
UNSEEN_CHANCE = 0.05
SIDES = {-1: "cheaper", 0: "no difference shown", 1: "more expensive"}


def shape_in_words(blocks: Sequence[BlockCosts], replicates: Sequence[int], *, is_repeated: bool = False) -> str:
    """What stands beside a verdict on blocks: that they are few, the one that decides, a skew, and what is not seen.

    is_repeated: they sent the same sessions.
    """
    held = HELD_OF_FEW.get(len(blocks))
    few = "" if held is None else f"an interval of {len(blocks)} replicates may hold too seldom: in {held}, not .95"
    of_one = deciding(replicates, lambda places: _side([blocks[place] for place in places]))
    parts = (
        few,
        "" if of_one is None else f"replicate {of_one[0]} decides: without it, {SIDES[of_one[1]]}",
        skew_in_words(values_of_blocks(blocks)),
        unseen_in_words(len(blocks), is_repeated=is_repeated),
    )
    return "; ".join(filter(None, parts))


def unseen_in_words(num_plans: int, *, is_repeated: bool = False) -> str:
    """How rare a plan may be that none of so many was: "a plan in 4.5 or rarer may differ"."""
    if not num_plans:
        return ""
    if is_repeated:
        return f"{num_plans} repeats of the same sessions say nothing of others"
    rarity = 1 / (1 - UNSEEN_CHANCE ** (1 / num_plans))
    return f"a plan in {rarity:.{int(rarity < 10)}f} or rarer may differ"


def skew_in_words(values: FloatArray) -> str:
    """That blocks are skewed by more than chance makes normal ones; empty where they are not, or too few to say.

    values: of each block, its deviation from the ratio of sums.
    """
    number = len(values)
    spread = float(values.std()) if number else 0.0
    if number < MIN_SKEWED or spread < NO_SCATTER:
        return ""
    skew = float(((values - values.mean()) ** 3).mean()) / spread**3
    # Source: the standard error of the sample skewness of normal values.
    error = math.sqrt(6.0 * (number - 2) / ((number + 1) * (number + 3)))
    if abs(skew) < 2 * error:
        return ""
    return f"skew {skew:+.1f}: alpha is promised for ratios that are nearly symmetric"


def deciding(replicates: Sequence[int], verdict_of: Callable[[list[int]], T | None]) -> tuple[int, T] | None:
    """The one replicate without which the verdict is another, and that verdict; None without one, or with several.

    verdict_of: the verdict of the blocks at these places; None where so few have none.
    """
    places = range(len(replicates))
    of_all, found = verdict_of([*places]), None
    for place in places if of_all is not None else ():
        verdict = verdict_of([other for other in places if other != place])
        if verdict is None or verdict == of_all:
            continue
        if found is not None:
            return None
        found = replicates[place], verdict
    return found


def _side(blocks: Sequence[BlockCosts]) -> int | None:
    """The side of 1 that a fixed interval shows of a ratio of sums; None of so few that they have none."""
    if len(blocks) < MIN_REPLICATES or not have_ratio(blocks):
        return None
    estimate = estimate_of_blocks(blocks)
    return -1 if estimate.high < 0 else int(estimate.low > 0)
