"""What else moves a run's cost: its device, its busy neighbours, and how late in its block it came.

A device's speed is what the client saw over what the executed steps cost by the model, so that plans drop out. All of
it is findings and tables. Nothing is corrected by it, since pairs on the same device hold none of it.
Definitions: docs/reference/method-comparisons.md; docs/reference/method-planning.md, "Orders and drift".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.analysis.cost.devices import device_order
from harness.analysis.figures import RunFigures, cells, figure_at, run_figures
from harness.analysis.stats import DEFAULT_LEVEL, Estimate, FloatArray, contrast, grouped, holm, percent
from harness.measure.records.findings import finding
from harness.measure.records.manifest import Finding, FleetRecord
from harness.measure.records.run import SealedRun
from harness.table import Cell, Table, interval_text, table_of

if TYPE_CHECKING:
    from harness.analysis.compare.channels import Comparison


class Speed(NamedTuple):
    """One device. slower: ln of its time over the median of the others'; p: Holm's, over devices.

    drift: per block that it made, None where it is not known. values: ln(B / A) of each of its blocks, conditions'
    means taken out, in order. neighbours: mean number that were busy. is_emulated: no real device.
    """

    device: str
    values: tuple[float, ...]
    slower: Estimate | None
    p: float | None
    drift: Estimate | None
    neighbours: float
    is_emulated: bool

    @property
    def is_apart(self) -> bool:
        return self.p is not None and self.p < 1 - DEFAULT_LEVEL


@dataclass(frozen=True, slots=True)
class Speeds:
    """All devices of an experiment; neighbour: ln of the time that one more busy neighbour costs, None where all runs
    had as many."""

    devices: tuple[Speed, ...]
    neighbour: Estimate | None


def speeds(figures: Sequence[RunFigures]) -> Speeds | None:
    """Levels of the devices of valid runs with both channels; None where fewer than two made any."""
    runs = [run for run in figures if run.is_valid and run.device and run.a_ns and run.b_ns > 0]
    names = sorted({run.device for run in runs}, key=device_order)
    if len(names) < 2:
        return None
    left = _without_conditions(runs)
    values = {name: _by_block([(run, left[run.key]) for run in runs if run.device == name]) for name in names}
    contrasts = {name: _contrast(name, values) for name in names}
    adjusted = holm([None if slower is None else slower.p for slower in contrasts.values()])
    devices: list[Speed] = []
    for (name, slower), p in zip(contrasts.items(), adjusted, strict=True):
        own = [run for run in runs if run.device == name]
        neighbours = float(np.mean([run.neighbours for run in own]))
        drift, is_emulated = _slope(own, [run.replicate for run in own]), any(run.is_emulated for run in own)
        devices.append(Speed(name, tuple(values[name]), slower, p, drift, neighbours, is_emulated))
    return Speeds(tuple(devices), _slope(runs, [run.neighbours for run in runs]))


def _log_b_over_a(run: RunFigures) -> float:
    assert run.a_ns, "runs without channel A were left out"
    return math.log(run.b_ns / run.a_ns)


def _without_conditions(runs: Sequence[RunFigures]) -> dict[tuple[str, str, int], float]:
    """ln(B / A) of every run, less the mean of its condition."""
    by_condition = grouped(runs, lambda run: run.condition)
    means = {name: float(np.mean([_log_b_over_a(run) for run in group])) for name, group in by_condition.items()}
    return {run.key: _log_b_over_a(run) - means[run.condition] for run in runs}


def _by_block(runs: Sequence[tuple[RunFigures, float]]) -> list[float]:
    blocks = grouped(runs, lambda pair: pair[0].replicate)
    return [float(np.mean([value for _, value in blocks[block]])) for block in sorted(blocks)]


def _contrast(name: str, values: Mapping[str, Sequence[float]]) -> Estimate | None:
    """One device's mean less the median of the others'; None of a single block.

    The median, so that one slow device does not make all others fast.
    """
    if min(map(len, values.values())) < 2:
        return None
    others = sorted((other for other in values if other != name), key=lambda other: float(np.mean(values[other])))
    middle = others[(len(others) - 1) // 2 : len(others) // 2 + 1]
    return contrast([(1.0, values[name]), *((-1 / len(middle), values[other]) for other in middle)])


def _slope(runs: Sequence[RunFigures], places: Sequence[int]) -> Estimate | None:
    """ln(B / A) on ``places`` beside levels of conditions and devices."""
    conditions = np.unique([run.condition for run in runs], return_inverse=True)[1]
    devices = np.unique([run.device for run in runs], return_inverse=True)[1]
    return slope_of(np.array([_log_b_over_a(run) for run in runs]), conditions, devices, np.array(places, dtype=float))


def slower_text(speed: Speed) -> str:
    """How one device differs: "dev2 is 3.0 % slower than the median of the others [2.8 %, 3.2 %]"."""
    assert speed.slower is not None, "only devices with an interval have a text"
    value, low, high = _ends_percent(speed.slower)
    word = "slower" if value >= 0 else "faster"
    ends = (low, high) if value >= 0 else (-high, -low)
    name = f"emulated {speed.device}" if speed.is_emulated else speed.device
    return f"{name} is {abs(value):.1f} % {word} than the median of the others [{ends[0]:.1f} %, {ends[1]:.1f} %]"


def _percent_with_ends(estimate: Estimate) -> str:
    return f"{percent(estimate.mean)} [{percent(estimate.low)}, {percent(estimate.high)}]"


def _ends_percent(estimate: Estimate) -> tuple[float, ...]:
    return tuple(100 * math.expm1(value) for value in (estimate.mean, estimate.low, estimate.high))


def device_findings(
    runs: Sequence[SealedRun],
    figures: Sequence[RunFigures],
    measured: Speeds | None,
    compared: Mapping[str, Comparison | None],
) -> list[Finding]:
    """All that a reader must know of the devices of an experiment; compared: its comparisons by condition."""
    findings, places = list[Finding](), dict[int, set[str]]()
    for run in figures:
        places.setdefault(run.replicate, set()).add(run.device)
    # No pair of theirs counts.
    if split := sorted(block for block, devices in places.items() if len(devices) > 1):
        evidence = f"replicates {', '.join(map(str, split))} have runs on several devices"
        findings.append(finding("block-split", evidence))
    findings += missing_neighbours(runs)
    findings += [] if measured is None else speed_findings(measured)
    for condition, comparison in compared.items():
        for channel, effect in ({} if comparison is None else comparison.device_effects).items():
            if effect.interaction is not None and effect.interaction.is_found:
                means = ", ".join(f"{mean.device} {percent(mean.mean)}" for mean in effect.devices)
                evidence = f"{condition}: its effect on channel {channel} {effect.interaction} ({means})"
                findings.append(finding("device-interaction", evidence))
    return findings


def speed_findings(found: Speeds) -> Iterator[Finding]:
    """What a reader must know of the devices: who is apart, who drifts, what neighbours cost."""
    for speed in found.devices:
        if speed.is_apart:
            yield finding(
                "device-apart", f"{slower_text(speed)}, p = {speed.p:.2g} (B over A, {len(speed.values)} blocks)"
            )
        if speed.drift is not None and speed.drift.p < (1 - DEFAULT_LEVEL) / len(found.devices):
            yield finding(
                "device-drifts", f"{speed.device} changes by {_percent_with_ends(speed.drift)} per replicate, B over A"
            )
    if found.neighbour is not None and found.neighbour.p < 1 - DEFAULT_LEVEL:
        yield finding(
            "neighbours-cost", f"one more busy neighbour costs {_percent_with_ends(found.neighbour)}, B over A"
        )


def missing_neighbours(runs: Sequence[SealedRun]) -> Iterator[Finding]:
    """Runs of a fleet that keeps step beside which fewer devices, or more, were busy than planned."""
    others: list[str] = []
    for run in runs:
        if run.manifest.fleet is not None and run.spec.keeps_step:
            planned, busy = run.spec.num_at_once(run.condition_spec) - 1, len(run.manifest.fleet.neighbours)
            others += [f"{run.label} ({busy} of {planned})"] if busy != planned else []
    if others:
        yield finding("neighbours-other", f"other neighbours were busy than planned: {', '.join(others)}")


SPEEDS_CAPTION = (
    "B over A, conditions' means taken out: how much longer each device took than the median of the others, with its "
    "95 % interval and Holm's p; what each of its replicates adds; devices that were busy beside it, on the mean"
)
EFFECTS_CAPTION = (
    "Cost ratio to the baseline on each device (ratio of sums over its blocks), then over all of them with its 95 % "
    "interval; p: that the effect is the same on every device"
)


def device_tables(measured: Speeds | None, compared: Mapping[str, Comparison | None]) -> list[Table]:
    """Both tables of an experiment; compared: by condition. Empty where fewer than two devices made it."""
    known = {name: comparison for name, comparison in compared.items() if comparison is not None}
    rows = [row for name, comparison in known.items() for row in _effect_rows(name, comparison)]
    effects = table_of("effect by device", EFFECTS_CAPTION, rows)
    tables = [*([] if measured is None else [table_of("devices", SPEEDS_CAPTION, _speed_rows(measured))]), effects]
    return [table for table in tables if table.rows]


def places_table(runs: Iterable[SealedRun]) -> Table:
    """What the runs of each device say of it: serial and card, temperatures, neighbours, cores of its client."""
    fleets = (run.manifest.fleet for run in runs)
    by_place = grouped((fleet for fleet in fleets if fleet is not None), lambda fleet: (fleet.host, fleet.device))
    rows = [_place_row(host, device, records) for (host, device), records in sorted(by_place.items())]
    caption = "What the runs of each device record; neighbours: least and most busy beside a run; a dash: not recorded"
    return table_of("what the devices record", caption, rows)


def _place_row(host: str, device: int, records: Sequence[FleetRecord]) -> dict[str, Cell]:
    heat = [degrees for fleet in records if fleet.temperature_c is not None for degrees in fleet.temperature_c]
    busy = [len(fleet.neighbours) for fleet in records]
    factors = [fleet.emulated_factor for fleet in records if fleet.emulated_factor is not None]
    return {
        "device": f"dev{device}",
        "host": host,
        "runs": len(records),
        "neighbours": f"{min(busy)} to {max(busy)}",
        "uuid": ", ".join(sorted({fleet.uuid for fleet in records} - {""})) or None,
        "card": ", ".join(sorted({fleet.card for fleet in records} - {""})) or None,
        "temperature_C": f"{min(heat):g} to {max(heat):g}" if heat else None,
        "client_cores": ",".join(str(core) for core in records[0].client_cores) or None,
        "emulated_factor": f"{min(factors):.4f} to {max(factors):.4f}" if factors else None,
    }


def _speed_rows(found: Speeds) -> Iterator[Mapping[str, Cell]]:
    for speed in found.devices:
        slower = (None, None, None) if speed.slower is None else _ends_percent(speed.slower)
        yield {
            "device": speed.device,
            "blocks": len(speed.values),
            "slower_%": slower[0],
            "low_%": slower[1],
            "high_%": slower[2],
            "p_holm": speed.p,
            "drift_%_per_replicate": None if speed.drift is None else 100 * math.expm1(speed.drift.mean),
            "neighbours": speed.neighbours,
            "emulated": "yes" if speed.is_emulated else "no",
        }


def _effect_rows(condition: str, compared: Comparison) -> Iterator[Mapping[str, Cell]]:
    for channel, effect in compared.device_effects.items():
        named: dict[str, Cell] = {"comparison": f"{condition} / {compared.baseline}", "channel": channel}
        for mean in effect.devices:
            yield {**named, "device": mean.device, "blocks": mean.num_blocks, "ratio": math.exp(mean.mean)}
        for device, estimate in (("all", effect.estimate), ("these alone", effect.these)):
            if estimate is not None:
                yield {
                    **named,
                    "device": device,
                    "blocks": sum(mean.num_blocks for mean in effect.devices),
                    **cells(estimate.interval(), {"ratio": "estimate", "low": "low", "high": "high"}),
                    "p_interaction": figure_at(effect.interaction, "p") if device == "all" else None,
                }


@dataclass(frozen=True, slots=True)
class Drift:
    """Change of log cost (channel B) per place in the order of a block; left: see ``drift``."""

    per_run: Estimate
    left: float
    order: str

    @property
    def is_found(self) -> bool:
        return self.per_run.p < 1 - DEFAULT_LEVEL

    def __str__(self) -> str:
        words, found = "drift" if self.is_found else "no drift shown", self.per_run
        change, low, high = (100 * math.expm1(value) for value in (found.mean, found.low, found.high))
        ends = interval_text(low, high, 2, ", ", "+f")
        return (
            f"{words}: cost (B) changes by {change:+.2f} % [{ends}] per place in the order ({self.order}), "
            f"p = {found.p:.2g}, {found.num_units} runs; the order leaves at most "
            f"{100 * math.expm1(abs(self.left)):.2f} % in a comparison"
        )


def drift(runs: Sequence[SealedRun]) -> Drift | None:
    """Least squares of ln B on condition, replicate and place in the order; None where these cannot be separated.

    left: the largest part of the slope that any two conditions keep, by their mean places: 0 over whole squares.
    """
    valid = [run for run in runs if run.is_valid and run_figures(run).b_ns > 0]
    if not valid:
        return None
    names, condition = np.unique([run.condition for run in valid], return_inverse=True)
    place = np.array([run.manifest.order_index for run in valid], dtype=np.float64)
    log_cost = np.log([run_figures(run).b_ns for run in valid])
    slope = slope_of(log_cost, condition, np.array([run.replicate for run in valid]), place)
    if slope is None:
        return None
    means = [float(place[condition == one].mean()) for one in range(len(names))]
    order = str(valid[0].manifest.requested_experiment.get("order", "rotation"))
    return Drift(slope, slope.mean * (max(means) - min(means)), order)


def slope_of(
    log_cost: FloatArray, condition: NDArray[np.int64], block: NDArray[np.int64], place: FloatArray
) -> Estimate | None:
    """The slope on ``place`` beside a level for each condition and each block; None where it cannot be separated.

    All of shape (runs,). Source: Frisch and Waugh (1933), Lovell (1963): the slope is that of the two residuals.
    """
    design = np.column_stack(
        [condition[:, None] == np.unique(condition), (block[:, None] == np.unique(block))[:, 1:]]
    ).astype(np.float64)
    fitted = design @ np.linalg.lstsq(design, np.column_stack([place, log_cost]), rcond=None)[0]
    place_left, cost_left = place - fitted[:, 0], log_cost - fitted[:, 1]
    degrees = len(place) - int(np.linalg.matrix_rank(design)) - 1
    moved = float(place_left @ place_left)
    if degrees < 1 or moved < 1e-9:
        return None
    slope = float(place_left @ cost_left) / moved
    rest = cost_left - slope * place_left
    error = math.sqrt(float(rest @ rest) / degrees / moved)
    return Estimate(slope, error, degrees, "t interval of a slope", "runs", len(place))
