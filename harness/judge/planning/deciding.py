"""The costs on which a predicted ratio turns: those of changed sizes, whether they were measured, and their break-even.

Words for the sentence of a prediction, and the break-even behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from harness.model.engine.cost import CostModel
from harness.model.experiment import PlannedRun

FIRST_CHANGE = 0.05
LEAST_CHANGE, MOST_CHANGE = -0.5, 1.0
MOST_STEPS = 6
CLOSE = 0.05
"""A break-even is found where what is left of the effect is this share of it."""


def deciding_sizes(buckets: Sequence[int], baseline_buckets: Sequence[int]) -> tuple[int, ...]:
    """Sizes that a configuration adds to its baseline's; where it adds none, those that it leaves out. Ascending."""
    added = set(buckets) - set(baseline_buckets)
    return tuple(sorted(added or set(baseline_buckets) - set(buckets)))


def sizes_in_words(sizes: Iterable[int]) -> str:
    """f(6); f(12) and f(16); f(10), f(12) and f(16)."""
    *others, last = (f"f({size})" for size in sizes)
    return f"{', '.join(others)} and {last}" if others else last


def unmeasured_in_words(model: CostModel, sizes: Iterable[int]) -> str:
    """Which of these sizes have no measured cost: "f(12) and f(16) were not measured, but extrapolated"; else ""."""
    missing = model.interpolated_buckets(sorted(set(sizes)))
    if not missing:
        return ""
    inside = [size for size in missing if min(model.f_fs) < size < max(model.f_fs)]
    outside = [size for size in missing if size not in inside]
    parts = [
        f"{sizes_in_words(some)} {'were' if len(some) > 1 else 'was'} not measured, but {how}"
        for some, how in ((inside, "interpolated"), (outside, "extrapolated"))
        if some
    ]
    return "; ".join(parts)


def unmeasured_of_runs(*runs: PlannedRun) -> list[str]:
    """What of the sizes of these runs was never measured, a part of a sentence for each cost model."""
    sizes: dict[Path, tuple[CostModel, set[int]]] = {}
    for run in runs:
        sizes.setdefault(run.cost_file, (run.cost_model, set()))[1].update(run.server.decode_buckets)
    return list(filter(None, (unmeasured_in_words(model, of_model) for model, of_model in sizes.values())))


def break_even(ratio_at: Callable[[float], float]) -> float | None:
    """The relative change of some costs at which a cost ratio is 1; None where no change from -50 % to +100 % does it.

    ratio_at: the ratio when these costs are (1 + change) times as high. By secants, each of which simulates: a schedule
    follows its step times, so that no straight line from the present costs is exact.
    """
    effect = math.log(ratio_at(0.0))
    if effect == 0:
        return 0.0
    points = [(0.0, effect)]
    change = FIRST_CHANGE
    for _ in range(MOST_STEPS):
        here = math.log(ratio_at(change))
        if abs(here) <= CLOSE * abs(effect):
            return change
        points.append((change, here))
        (x0, y0), (x1, y1) = sorted(points, key=lambda point: abs(point[1]))[:2]
        if y0 == y1:
            return None
        change = x0 - y0 * (x1 - x0) / (y1 - y0)
        if not LEAST_CHANGE <= change <= MOST_CHANGE:
            return None
    return None


class BreakEven(NamedTuple):
    """The relative change of some costs at which a predicted ratio is 1; None: no such change between a half and twice.

    sizes: whose f changes; empty: the prefill costs, where both sides have the same sizes. few_draws: of how many draws
    it is, where these are fewer than those of the prediction; 0: of all of them.
    """

    sizes: tuple[int, ...]
    change: float | None
    few_draws: int = 0

    @property
    def short(self) -> str:
        """The change alone, "+8.3 %"; a dash where there is none."""
        return "-" if self.change is None else f"{100 * self.change:+.1f} %"

    def __str__(self) -> str:
        by = f" (by {self.few_draws} draws alone)" if self.few_draws else ""
        return f"{self._words}{by}"

    @property
    def _words(self) -> str:
        costs = sizes_in_words(self.sizes) if self.sizes else "the prefill costs"
        is_or_are = "is" if len(self.sizes) == 1 else "are"
        if self.change is None:
            return f"the answer holds while {costs} {is_or_are} between half and twice what is given"
        if abs(self.change) < 0.0005:
            return f"the ratio is 1 at the given {costs}"
        size = f"{100 * abs(self.change):.1f} % {'higher' if self.change > 0 else 'lower'}"
        return f"the answer turns where {costs} {is_or_are} {size} than given"


class CostChange(NamedTuple):
    """A relative change of f of some sizes; without sizes, of the prefill costs."""

    sizes: tuple[int, ...]
    change: float

    def of(self, model: CostModel) -> CostModel:
        """The changed costs."""
        if not self.sizes:
            return model.scaled(1.0, 1 + self.change)
        return model.rescaled(self.sizes, 1 + self.change)

    def seen_by(self, buckets: Sequence[int]) -> CostChange:
        """The same change, or none where a server has none of the sizes."""
        return NO_CHANGE if self.sizes and set(self.sizes).isdisjoint(buckets) else self


NO_CHANGE = CostChange((), 0.0)
