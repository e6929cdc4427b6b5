"""Comparisons that are judged together, and the one interval that each ratio of theirs has.

They share alpha in equal parts (Bonferroni): each interval has level 1 - alpha / size. Where a stopping rule looked at
the runs while they came in, intervals stay valid at every look.
Definitions: docs/reference/method.md, "Answers".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.analysis.compare.boundaries import spending_boundaries, t_mixture_boundary
from harness.analysis.compare.pairs import num_comparisons
from harness.analysis.compare.ratio import Ratio
from harness.analysis.cost.cost_errors import half_width
from harness.analysis.stats import DEFAULT_LEVEL, Interval
from harness.errors import RecordsError
from harness.measure.records.run import SealedRun
from harness.model.spec import ExperimentSpec
from harness.model.spec.sections import StopSpec

ALPHA = 1 - DEFAULT_LEVEL


@dataclass(frozen=True, slots=True)
class Family:
    """Comparisons that are judged together.

    is_checked: a stopping rule looked at the runs while they came in. looks: the numbers of blocks at which it looked;
    empty: at every one.
    """

    size: int = 1
    is_checked: bool = False
    looks: tuple[int, ...] = ()

    @classmethod
    def of(cls, runs: Sequence[SealedRun]) -> Family:
        """The comparisons that the experiment of these runs declares; of records without it, those of the runs."""
        try:
            spec = runs[0].spec
        except RecordsError:
            size = len({run.condition for run in runs if run.manifest.baseline not in ("", run.condition)})
            return cls(max(1, size), is_checked=any(map(ran_until_decided, runs)))
        if spec.stop is not None and any(map(ran_until_decided, runs)):
            return cls.under(spec, spec.stop)
        return cls(num_comparisons(spec))

    @classmethod
    def under(cls, spec: ExperimentSpec, stop: StopSpec) -> Family:
        """The comparisons of an experiment whose runs are checked by a stopping rule."""
        return cls(num_comparisons(spec), is_checked=True, looks=stop.preset_looks)

    def interval(self, ratio: Ratio, of: Callable[[float], float] = math.exp) -> Interval | None:
        """Of a ratio; None where so few blocks have none. of: makes the figure of its log."""
        estimate, blocks = ratio.estimate, ratio.blocks
        if estimate is None or blocks is None:
            return None
        if not self.is_checked:
            return estimate.interval(of, family=self.size)
        alpha = ALPHA / self.size
        t = self._boundary(int(blocks.degrees) + 1, alpha / 2 if ratio.costs.parts else alpha)
        half = t * blocks.error + half_width(ratio.costs, alpha / 2)
        return None if math.isinf(half) else estimate.interval(of, family=self.size, half=half)

    def _boundary(self, num_blocks: int, alpha: float) -> float:
        """|t| at so many blocks: that of a preset look, else one that holds at any number."""
        if num_blocks in self.looks:
            return spending_boundaries(self.looks, self.looks[-1], alpha)[self.looks.index(num_blocks)]
        return t_mixture_boundary(num_blocks, alpha)


ALONE = Family()


def ran_until_decided(run: SealedRun) -> bool:
    """Whether the stopping rule was to end the experiment: then it has as many replicates as the rule's budget."""
    experiment = run.manifest.requested_experiment
    rule = experiment.get("stop") or {}
    return bool(rule) and rule.get("budget") == experiment.get("replicates")
