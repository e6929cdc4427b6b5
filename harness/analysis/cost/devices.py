"""The device as a factor: what a comparison gives on each device, their mean, and whether the devices differ in it.

A block never leaves its device, so that a paired difference holds no device's speed; what may remain is another effect
on another device. With one device nothing here is used.
Definitions: docs/reference/method-comparisons.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

from harness.analysis import stats
from harness.analysis.stats import (
    DEFAULT_LEVEL,
    MIN_REPLICATES,
    Estimate,
    FloatArray,
    Interval,
    f_tail,
    grouped,
    of_blocks,
    pooled_variance,
)


class Placed(Protocol):
    """What tells where a run was made: its device, "" outside a fleet, and the replicates that ran at once with it."""

    @property
    def device(self) -> str: ...

    @property
    def unit(self) -> int: ...


class BlockRatio(NamedTuple):
    """ln(cost / baseline cost) of one block. unit: blocks that ran at once by plan share one, and count as one."""

    value: float
    device: str
    unit: int


class DeviceMean(NamedTuple):
    """Blocks of one device: mean and standard deviation of their log ratios (nan of a single one)."""

    device: str
    num_blocks: int
    mean: float
    sd: float


class Interaction(NamedTuple):
    """F test that the effect is the same on every device; sd: between devices beyond that of blocks; within: theirs."""

    f: float
    degrees: tuple[int, int]
    p: float
    sd: float
    within: float

    @property
    def is_found(self) -> bool:
        return self.p < 1 - DEFAULT_LEVEL

    def __str__(self) -> str:
        words = "differs between devices" if self.is_found else "not shown to differ between devices"
        return f"{words}: F({self.degrees[0]}, {self.degrees[1]}) = {self.f:.2f}, p = {self.p:.2g}"


@dataclass(frozen=True, slots=True)
class DeviceEffect:
    """One comparison on one channel, device by device.

    estimate: decides; None where too little is there. these: of these very devices and no others, where that is another
    interval. interaction: None without two blocks on one of two devices.
    """

    devices: tuple[DeviceMean, ...]
    estimate: Estimate | None
    these: Estimate | None = None
    interaction: Interaction | None = None

    def changed(self, of: Callable[[Estimate], Estimate]) -> DeviceEffect:
        """The same with other estimates of the whole."""
        whole, these = (None if found is None else of(found) for found in (self.estimate, self.these))
        return replace(self, estimate=whole, these=these)


def independent_samples(samples: Sequence[FloatArray], runs: Sequence[Placed]) -> tuple[list[FloatArray], str]:
    """The values of runs joined to samples that do not depend on each other, and what each is of.

    A sample is of a run; of runs that were made at once by plan; or of a device, where three or more made them.
    """
    devices = {run.device for run in runs}
    are_devices = len(devices) >= MIN_REPLICATES
    groups: dict[object, list[FloatArray]] = {}
    for sample, run in zip(samples, runs, strict=True):
        groups.setdefault(run.device if are_devices else run.unit, []).append(sample)
    return [np.concatenate(group) for group in groups.values()], "devices" if are_devices else "runs"


def positive_mean_interval(values: Sequence[float], runs: Sequence[Placed], *, unit: str) -> Interval | None:
    """t interval of a mean that cannot be negative, on the log scale (delta method)."""
    if not any(values):
        return mean_interval(values, runs, unit=unit)
    estimate = estimate_of(stats.log_mean_values(values).tolist(), runs)
    return None if estimate is None else estimate._replace(unit=unit).interval()


def effect_of(values: Sequence[float], runs: Sequence[Placed]) -> DeviceEffect | None:
    """A value of each run's block device by device; None where fewer than two devices made them."""
    if len({run.device for run in runs}) < 2:
        return None
    return device_effect([BlockRatio(value, run.device, run.unit) for value, run in zip(values, runs, strict=True)])


def ratio_effect(own: FloatArray, base: FloatArray, runs: Sequence[Placed]) -> DeviceEffect | None:
    """The log of a ratio of sums device by device. own, base: of each run's block, by ``log_mean_values``."""
    whole, of_own, of_base = (effect_of(values.tolist(), runs) for values in (own - base, own, base))
    if whole is None or of_own is None or of_base is None:
        return None
    estimate = stats.of_ratio(whole.estimate, of_own.estimate, of_base.estimate)
    return replace(whole, estimate=estimate, these=stats.of_ratio(whole.these, of_own.these, of_base.these))


def ratio_estimate(own: FloatArray, base: FloatArray, runs: Sequence[Placed]) -> Estimate | None:
    """The log of a ratio of sums over these blocks. own, base: of each run's block, by ``log_mean_values``."""
    return stats.of_ratio(*(estimate_of(values.tolist(), runs) for values in (own - base, own, base)))


def mean_interval(values: Sequence[float], runs: Sequence[Placed], *, unit: str) -> Interval | None:
    """t interval of a mean over the blocks of these runs: over device means, where several devices made them."""
    effect = effect_of(values, runs)
    if effect is None:
        return stats.mean_interval(values, unit=unit)
    return None if effect.estimate is None else effect.estimate.interval(float)


def estimate_of(values: Sequence[float], runs: Sequence[Placed]) -> Estimate | None:
    """The mean of one value a run: over device means, where several devices made them; None below three values."""
    effect = effect_of(values, runs)
    if effect is not None:
        return effect.estimate
    return of_blocks(values) if len(values) >= MIN_REPLICATES else None


def device_effect(blocks: Sequence[BlockRatio]) -> DeviceEffect:
    """Mean of device means: over three devices and more they are what scatters, with two the blocks on each.

    From three devices on the interval is that of the one-way random effects model with as many degrees of freedom as
    devices less one: it also holds where the effect differs between devices, and speaks of devices like these. Blocks
    that ran at once by plan are averaged first, as they shared their host's noise.
    """
    names = sorted({one.device for one in blocks}, key=device_order)
    by_device = {name: [one.value for one in blocks if one.device == name] for name in names}
    # By the device, or the devices at once, that data are from; each datum the mean over its unit's blocks.
    groups: dict[tuple[str, ...], list[float]] = {}
    for members in grouped(blocks, lambda one: one.unit).values():
        where = tuple(sorted(one.device for one in members))
        groups.setdefault(where, []).append(float(np.mean([one.value for one in members])))
    are_rounds = any(len(where) > 1 for where in groups)
    estimate = within = _within(list(groups.values()), "rounds" if are_rounds else "blocks")
    if len(groups) >= MIN_REPLICATES:
        means = [float(np.mean(values)) for values in groups.values()]
        estimate = of_blocks(means)._replace(method="t interval of the mean of device means", unit="devices")
    devices = tuple(_mean_of(name, values) for name, values in by_device.items())
    these = within if len(groups) >= MIN_REPLICATES else None
    return DeviceEffect(devices, estimate, these, _interaction(list(by_device.values())))


def device_order(device: str) -> tuple[str, int, str]:
    """Sorts "host/dev2" before "host/dev10"."""
    host, _, number = device.rpartition("dev")
    return host, int(number) if number.isdigit() else 0, device


def _mean_of(device: str, values: Sequence[float]) -> DeviceMean:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return DeviceMean(device, len(values), float(np.mean(values)), spread)


def _within(groups: Sequence[Sequence[float]], unit: str) -> Estimate | None:
    """The mean of these groups' means by the spread inside them, pooled; None below two degrees of freedom."""
    variance, degrees = pooled_variance(groups)
    if degrees < MIN_REPLICATES - 1:
        return None
    counts = np.array([len(values) for values in groups])
    error = math.sqrt(variance * float((1 / counts).sum())) / len(groups)
    mean = float(np.mean([np.mean(values) for values in groups]))
    return Estimate(mean, error, degrees, "t interval within these devices", unit, int(counts.sum()))


def _interaction(groups: Sequence[Sequence[float]]) -> Interaction | None:
    """One-way analysis of variance of the blocks' log ratios by device."""
    counts: FloatArray = np.array([len(values) for values in groups], dtype=np.float64)
    error_square, inside = pooled_variance(groups)
    between = len(groups) - 1
    if between < 1 or inside < 1:
        return None
    means = np.array([np.mean(values) for values in groups])
    mean_square = float((counts * (means - np.average(means, weights=counts)) ** 2).sum()) / between
    if error_square == 0:
        return Interaction(math.inf if mean_square else 0.0, (between, inside), float(mean_square == 0), 0.0, 0.0)
    f = mean_square / error_square
    typical = (counts.sum() - (counts**2).sum() / counts.sum()) / between
    sd = math.sqrt(max(0.0, mean_square - error_square) / typical)
    p = f_tail(f, between, inside)
    return Interaction(f, (between, inside), p, sd, math.sqrt(error_square))
