"""``[stop]``: the rule by which an experiment ends when its answer is known, declared before its first run.

Data only: which difference matters, how sure, how many blocks at most, when it is looked at. Nothing here looks.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from harness.spec.base import Spec

Channel = Literal["a", "b"]
EVERY = "every"
MIN_LOOK_BLOCKS = 2
MAX_PRESET_LOOKS = 20


class StopSpec(Spec):
    """When `harness run --until decided` ends: at the first look at which every comparison has its verdict."""

    margin: float = Field(gt=0, lt=1, description="cost ratios from 1 / (1 + margin) to 1 + margin count as equal")
    alpha: float = Field(
        default=0.05, gt=0, le=0.5, description="chance, for each comparison, that any of its looks is wrong"
    )
    budget: int = Field(ge=2, le=1000, description="blocks at most; a block is every condition once on one plan draw")
    looks: Literal["every"] | tuple[int, ...] = Field(
        default=EVERY, description='"every": after each block; or the numbers of blocks at which it is looked, [6, 12]'
    )
    channel: Channel = Field(default="a", description="whose costs decide: a, reconstructed, or b, observed")

    @field_validator("looks", mode="before")
    @classmethod
    def _looks(cls, looks: Any) -> Any:
        """One line for what is neither; a union would tell of each of its choices."""
        if looks == EVERY:
            return looks
        is_list = isinstance(looks, list | tuple)
        if not is_list or not looks or any(isinstance(look, bool) or not isinstance(look, int) for look in looks):
            raise ValueError('must be "every" or a list of numbers of blocks, e.g. [6, 12, 24]')
        if looks[0] < MIN_LOOK_BLOCKS or any(later <= earlier for earlier, later in pairwise(looks)):
            raise ValueError(f"must ascend from {MIN_LOOK_BLOCKS} blocks on, not {list(looks)}")
        if len(looks) > MAX_PRESET_LOOKS:
            raise ValueError(f'has {len(looks)} looks, at most {MAX_PRESET_LOOKS}; for more say "every"')
        return looks

    @model_validator(mode="after")
    def _within_budget(self) -> StopSpec:
        if self.looks != EVERY and self.preset_looks[-1] > self.budget:
            raise ValueError(
                f"looks: the last one, at {self.looks[-1]} blocks, lies beyond the budget of {self.budget}"
            )
        return self

    @property
    def preset_looks(self) -> tuple[int, ...]:
        """Blocks at which it is looked, the end of the budget included; empty where every block is a look."""
        if self.looks == EVERY:
            return ()
        looks = tuple(int(look) for look in self.looks)
        return looks if looks[-1] >= self.budget else (*looks, self.budget)

    @property
    def log_margin(self) -> float:
        """ln(1 + margin): mean log ratios within it count as equal."""
        return math.log1p(self.margin)

    def __str__(self) -> str:
        when = (
            "a look after every block" if self.looks == EVERY else f"looks at {', '.join(map(str, self.looks))} blocks"
        )
        limits = f"margin {self.margin:.3g}, alpha {self.alpha:g}, at most {self.budget} blocks"
        return f"{limits}, {when}, channel {self.channel.upper()}"
