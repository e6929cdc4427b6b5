"""How long tools take: a mixture of tools by call count, each with an inverse CDF through its published quantiles.

Distributions come from TOML files, shipped or a user's own; nothing is fitted or capped here.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from harness.clock import NS_PER_MS
from harness.model.spec import Spec, load_toml
from harness.shipped import find_shipped

# A quantile of exactly 0 or 1 would ask the log-normal leg for an infinite deviate. The bounds are the paper's.
LOWEST_QUANTILE = 1e-6
HIGHEST_QUANTILE = 1 - 1e-9
Z_90 = 1.2816  # the paper's rounding of the normal deviate of 0.9
ZERO_MEDIAN_MS = 0.5  # a median of 0 ms in integer milliseconds lies somewhere below 1

LONGEST_NS = 1 << 62  # longer waits are cut to it, so that sums of a few stay whole numbers of a machine

_NORMAL = NormalDist()
FloatArray = npt.NDArray[np.float64]


class ToolRow(Spec):
    """One tool: its calls, and latencies that half, 90 % and 99 % of them do not exceed.

    As each distribution here it has ``quantile_ms``, the inverse CDF at u in (0, 1), and ``cdf``, the share of calls
    that take at most so many ms.
    """

    name: str = Field(min_length=1)
    calls: int = Field(ge=1)
    p50_ms: float = Field(ge=0)
    p90_ms: float = Field(gt=0)
    p99_ms: float = Field(gt=0)

    @model_validator(mode="after")
    def _ordered(self) -> ToolRow:
        if not self.median_ms <= self.p90_ms <= self.p99_ms:
            raise ValueError(f"p50 {self.p50_ms}, p90 {self.p90_ms}, p99 {self.p99_ms} do not ascend")
        return self

    @property
    def median_ms(self) -> float:
        return self.p50_ms or ZERO_MEDIAN_MS

    def quantile_ms(self, u: float) -> float:
        """Exactly p50, p90 and p99 at 0.5, 0.9 and 0.99; log-linear between; flat above.

        Below the median log-normal, with the spread of the 50-90 leg.
        """
        median_ms, log_p90, log_p99, sigma = self._legs
        if u < 0.5:
            return median_ms * math.exp(sigma * _NORMAL.inv_cdf(max(u, LOWEST_QUANTILE)))
        if u <= 0.9:
            return median_ms * math.exp(log_p90 * (u - 0.5) / 0.4)
        if u < 0.99:
            return self.p90_ms * math.exp(log_p99 * (u - 0.9) / 0.09)
        return self.p99_ms

    def cdf(self, latency_ms: float) -> float:
        median_ms = self.median_ms
        if latency_ms >= self.p99_ms:
            return 1.0
        if latency_ms >= self.p90_ms:
            return 0.9 + 0.09 * math.log(latency_ms / self.p90_ms) / math.log(self.p99_ms / self.p90_ms)
        if latency_ms >= median_ms:
            return 0.5 + 0.4 * math.log(latency_ms / median_ms) / math.log(self.p90_ms / median_ms)
        sigma = self._legs[3]
        if latency_ms <= 0 or sigma == 0:
            return 0.0
        return _NORMAL.cdf(math.log(latency_ms / median_ms) / sigma)

    @cached_property
    def _legs(self) -> tuple[float, float, float, float]:
        """The median in ms, the logarithms of the ratios p90 / p50 and p99 / p90, and the spread below the median."""
        log_p90 = math.log(self.p90_ms / self.median_ms)
        return self.median_ms, log_p90, math.log(self.p99_ms / self.p90_ms), log_p90 / Z_90


class ConstantWait(Spec):
    """Always ``wait_s``."""

    distribution: Literal["constant"]
    wait_s: float = Field(ge=0)

    def quantile_ms(self, u: float) -> float:  # noqa: ARG002
        return self.wait_s * 1000

    def cdf(self, latency_ms: float) -> float:
        return float(latency_ms >= self.wait_s * 1000)


class NoWait(Spec):
    """No wait at all."""

    distribution: Literal["none"]

    def quantile_ms(self, u: float) -> float:  # noqa: ARG002
        return 0.0

    def cdf(self, latency_ms: float) -> float:
        return float(latency_ms >= 0)


class LognormalWait(Spec):
    """exp(Normal(ln median, sigma))."""

    distribution: Literal["lognormal"]
    median_s: float = Field(gt=0)
    sigma: float = Field(gt=0)

    def quantile_ms(self, u: float) -> float:
        return self.median_s * 1000 * math.exp(self.sigma * _NORMAL.inv_cdf(u))

    def cdf(self, latency_ms: float) -> float:
        return _NORMAL.cdf(math.log(latency_ms / (self.median_s * 1000)) / self.sigma) if latency_ms > 0 else 0.0


class ExponentialWait(Spec):
    """Exponential with the given mean."""

    distribution: Literal["exponential"]
    mean_s: float = Field(gt=0)

    def quantile_ms(self, u: float) -> float:
        return -math.log1p(-u) * self.mean_s * 1000

    def cdf(self, latency_ms: float) -> float:
        return -math.expm1(-latency_ms / (self.mean_s * 1000)) if latency_ms > 0 else 0.0


class EmpiricalWait(Spec):
    """One of the listed waits, each as likely as the others."""

    distribution: Literal["empirical"]
    waits_s: tuple[Annotated[float, Field(ge=0)], ...] = Field(min_length=1)

    @cached_property
    def _sorted_ms(self) -> list[float]:
        return sorted(wait_s * 1000 for wait_s in self.waits_s)

    def quantile_ms(self, u: float) -> float:
        return self._sorted_ms[min(int(u * len(self.waits_s)), len(self.waits_s) - 1)]

    def cdf(self, latency_ms: float) -> float:
        return sum(wait_ms <= latency_ms for wait_ms in self._sorted_ms) / len(self.waits_s)


class MixtureWait(Spec):
    """Tools by call count. The order of the rows decides which draw meets which tool."""

    distribution: Literal["mixture"]
    tool: tuple[ToolRow, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _named_apart(self) -> MixtureWait:
        names = [row.name for row in self.tool]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"tool names repeat: {repeated}")
        return self


SingleWait = ConstantWait | NoWait | LognormalWait | ExponentialWait | EmpiricalWait
AnyWait = Annotated[MixtureWait | SingleWait, Field(discriminator="distribution")]


class ExcludedTool(Spec):
    """A tool left out of the mixture, because it waits for a person and not for a machine."""

    name: str
    calls: int | None = Field(default=None, ge=0)


class WaitFile(Spec):
    """A distribution file. ``provenance`` is for people: any keys."""

    name: str
    description: str = ""
    waits: AnyWait
    excluded: tuple[ExcludedTool, ...] = ()
    provenance: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class WaitDistribution:
    """A mixture of tools: ``distributions[i]`` with weight ``calls[i]``. Simple distributions are a mixture of one.

    content_hash: SHA-256 of what decides the draws, not of comments or provenance.
    """

    name: str
    tools: tuple[str, ...]
    calls: tuple[int, ...]
    distributions: tuple[ToolRow | SingleWait, ...]
    content_hash: str

    @cached_property
    def _running_totals(self) -> list[int]:
        return list(accumulate(self.calls))

    @property
    def total_calls(self) -> int:
        return self._running_totals[-1]

    def waits_ns(self, picks: FloatArray, u: FloatArray) -> npt.NDArray[np.int64]:
        """A wait in ns, uncapped, from each two deviates: the first picks the tool, the second its quantile."""
        tools = np.searchsorted(self._running_totals, picks * self.total_calls)
        quantiles = np.clip(u, LOWEST_QUANTILE, HIGHEST_QUANTILE)
        waits_ms = [
            self.distributions[tool].quantile_ms(each)
            for tool, each in zip(tools.ravel().tolist(), quantiles.ravel().tolist(), strict=True)
        ]
        return np.rint(np.array(waits_ms) * NS_PER_MS).clip(max=LONGEST_NS).astype(np.int64).reshape(u.shape)

    def cdf(self, latency_ms: float) -> float:
        """Share of all calls that take at most ``latency_ms``."""
        weighted = sum(
            calls * distribution.cdf(latency_ms)
            for calls, distribution in zip(self.calls, self.distributions, strict=True)
        )
        return weighted / self.total_calls

    def mixture_quantile_ms(self, u: float) -> float:
        """Latency in ms that a share ``u`` of all calls does not exceed (the smallest such, to 1e-9 relative)."""
        high = max(distribution.quantile_ms(HIGHEST_QUANTILE) for distribution in self.distributions)
        low = 0.0
        if self.cdf(low) >= u:
            return low
        for _ in range(200):
            middle = (low + high) / 2
            if self.cdf(middle) >= u:
                high = middle
            else:
                low = middle
            if high - low <= high * 1e-9:
                break
        return high

    def capped_share(self, cap_s: float) -> float:
        """Share of calls that last longer than ``cap_s`` and would be cut to it."""
        return 1.0 - self.cdf(cap_s * 1000)

    def moments_s(self, cap_s: float = math.inf, nodes_per_tool: int = 4096) -> tuple[float, float]:
        """Mean and standard deviation in seconds of a wait cut at ``cap_s``, by the midpoint rule over quantiles."""
        midpoints = (np.arange(nodes_per_tool) + 0.5) / nodes_per_tool
        weights = np.array(self.calls, dtype=np.float64) / self.total_calls
        first = second = 0.0
        for weight, distribution in zip(weights.tolist(), self.distributions, strict=True):
            waits_s = np.array([distribution.quantile_ms(u) for u in midpoints.tolist()]).clip(max=cap_s * 1000) / 1000
            first += weight * float(waits_s.mean())
            second += weight * float((waits_s**2).mean())
        return first, math.sqrt(max(second - first**2, 0.0))


def load_waits(name_or_path: str) -> WaitDistribution:
    """The distribution shipped as plans/waits/<name>.toml, or the one in a file of the user's.

    Raises SpecError when there is none of that name, or its file is wrong.
    """
    path = find_shipped("waits", name_or_path, what="wait distribution")
    return _load_file(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=16)
def _load_file(path: Path, mtime_ns: int) -> WaitDistribution:  # noqa: ARG001
    return parse_waits(load_toml(path), where=str(path))


def parse_waits(table: dict[str, Any], *, where: str) -> WaitDistribution:
    """A distribution from a TOML table; raises SpecError naming every key that is wrong."""
    wait_file = WaitFile.from_table(table, where=where, hint="Compare it with plans/waits/tracelab-v0.0.2.toml")
    distribution = wait_file.waits
    # The hash keeps the field's first name, so that plans stay comparable with those of earlier runs.
    content = distribution.model_dump(mode="json")
    content["law"] = content.pop("distribution")
    content_hash = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    if isinstance(distribution, MixtureWait):
        return WaitDistribution(
            name=wait_file.name,
            tools=tuple(row.name for row in distribution.tool),
            calls=tuple(row.calls for row in distribution.tool),
            distributions=distribution.tool,
            content_hash=content_hash,
        )
    return WaitDistribution(wait_file.name, (distribution.distribution,), (1,), (distribution,), content_hash)
