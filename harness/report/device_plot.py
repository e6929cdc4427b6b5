"""The devices of a fleet as a picture: how fast each was, block by block, and what each comparison gave on it.

What is drawn was computed by ``harness.analysis``; nothing is with fewer than two devices.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import TYPE_CHECKING

from harness.analysis import ConditionFigures, ExperimentSummary
from harness.analysis.cost.devices import DeviceEffect
from harness.analysis.cost.speeds import Speeds
from harness.report.plots import percent
from harness.report.svg import GRID, INK, MUTED, SURFACE, Sheet, condition_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_PANELS_PER_ROW = 3
BLOCK_SPREAD = 0.5
# From so many devices on their names are slanted.
TURNED_NAMES = 9
DEVICES_CAPTION = (
    "First panel: B over A of each block (dots, in the order in which the device made them), less the mean of all, and "
    "each device's mean. Others: cost ratio on each device, filled: channel A, open: channel B; bars: one standard "
    "deviation of its blocks; band: the mean of device means on channel B with its 95 % interval."
)


def device_plot(sheet: Sheet, summary: ExperimentSummary) -> str:
    """Speeds of all devices and a panel for each comparison; "" with fewer than two devices."""
    found = summary.speeds
    if found is None:
        return ""
    compared = [
        each for each in summary.conditions if each.comparison is not None and each.comparison.b.devices is not None
    ]
    figure, panels = sheet.panels(1 + len(compared), a_row=MAX_PANELS_PER_ROW, heights=(0.4, 2.6))
    if len(found.devices) >= TURNED_NAMES:
        figure.set_layout_engine("constrained")  # measures what slanted names need
    _speeds_panel(panels[0], found)
    for axes, condition in zip(panels[1:], compared, strict=True):
        _effect_panel(axes, condition, condition_color(summary.place_of[condition.name]))
    speeds = ", ".join(f"{each.device} {percent(fmean(each.values)):+.2f} %" for each in found.devices)
    return sheet.render(figure, name="devices", label=f"How fast each device is, and each comparison on it. {speeds}.")


def _speeds_panel(axes: Axes, speeds: Speeds) -> None:
    _frame(axes, [device.device for device in speeds.devices])
    axes.axhline(0, color=INK, linewidth=0.9)
    for place, device in enumerate(speeds.devices):
        step = BLOCK_SPREAD / max(1, len(device.values) - 1)
        left = place - (BLOCK_SPREAD / 2 if len(device.values) > 1 else 0)
        xs = [left + step * number for number in range(len(device.values))]
        axes.plot(xs, [percent(value) for value in device.values], "o", color=MUTED, alpha=0.6, markersize=3.4)
        mean = percent(fmean(device.values))
        axes.plot([place - 0.34, place + 0.34], [mean, mean], color=INK, linewidth=2.0)
    axes.set_title("time of each device (up: slower)")
    axes.set_ylabel("B over A, from the mean [%]")


def _effect_panel(axes: Axes, condition: ConditionFigures, color: str) -> None:
    compared = condition.comparison
    assert compared is not None, "only comparisons are drawn"
    assert compared.b.devices is not None, "only those of several devices"
    _frame(axes, [device.device for device in compared.b.devices.devices])
    if (estimate := compared.b.devices.estimate) is not None:
        interval = estimate.interval()
        axes.axhspan(interval.low, interval.high, color=GRID, alpha=0.7, linewidth=0)
        axes.axhline(interval.estimate, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    for offset, effect, marker, face in (
        (-0.13, None if compared.a is None else compared.a.devices, "o", color),
        (0.13, compared.b.devices, "D", SURFACE),
    ):
        if effect is not None:
            _device_means(axes, effect, offset, marker=marker, colors=(color, face))
    axes.set_title(f"{condition.name} / {condition.baseline}")
    axes.set_ylabel("cost ratio")


def _device_means(axes: Axes, effect: DeviceEffect, offset: float, *, marker: str, colors: tuple[str, str]) -> None:
    color, face = colors
    for place, device in enumerate(effect.devices):
        if not math.isnan(device.sd):
            ends = [math.exp(device.mean - device.sd), math.exp(device.mean + device.sd)]
            axes.plot([place + offset] * 2, ends, color=color, linewidth=1.2)
        axes.plot([place + offset], [math.exp(device.mean)], marker, color=color, markerfacecolor=face, markersize=6.5)


def _frame(axes: Axes, devices: list[str]) -> None:
    axes.set_xticks(range(len(devices)), devices, rotation=0 if len(devices) < TURNED_NAMES else 60)
    axes.set_xlim(-0.6, len(devices) - 0.4)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=True, axis="y")
