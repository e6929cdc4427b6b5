"""How token counts are drawn: fixed, uniform or lognormal, each within its own limits.

A law is data; nothing is drawn here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from harness.spec.base import Spec

MOST_TOKENS = 1 << 40


class FixedLaw(Spec):
    """Always ``value`` tokens."""

    law: Literal["fixed"] = "fixed"
    value: int = Field(ge=1, le=MOST_TOKENS)

    @property
    def minimum(self) -> int:
        return self.value

    @property
    def maximum(self) -> int:
        return self.value


class _BoundedLaw(Spec):
    """A law between two limits; each law says itself where ``low`` and ``high`` stand among its keys."""

    if TYPE_CHECKING:
        low: int
        high: int

    @model_validator(mode="after")
    def _ordered(self) -> _BoundedLaw:
        if self.high < self.low:
            raise ValueError(f"high ({self.high}) is below low ({self.low})")
        return self

    @property
    def minimum(self) -> int:
        return self.low

    @property
    def maximum(self) -> int:
        return self.high


class UniformLaw(_BoundedLaw):
    """A whole number of tokens, uniform on [low, high], both ends included."""

    law: Literal["uniform"] = "uniform"
    low: int = Field(ge=1)
    high: int = Field(ge=1, le=MOST_TOKENS)


class LognormalLaw(_BoundedLaw):
    """exp(Normal(ln median, sigma)) tokens, rounded, clipped to [low, high]."""

    law: Literal["lognormal"] = "lognormal"
    median: float = Field(gt=0)
    sigma: float = Field(ge=0)
    low: int = Field(default=1, ge=1)
    high: int = Field(ge=1, le=MOST_TOKENS)


LengthLaw = Annotated[FixedLaw | UniformLaw | LognormalLaw, Field(discriminator="law")]
