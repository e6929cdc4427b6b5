"""The report's plots of serving figures: how long requests took, and curves along what a sweep varies.

Same colours as everywhere on the page; nothing is computed here but what an axis needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.ticker import LogLocator

from harness.analysis.serving import METRICS, Latencies, Rate, ServingFigures, latencies
from harness.clock import NS_PER_MS
from harness.report.plots import ecdf_line, plain_log_ticks
from harness.report.svg import INK, MUTED, PAGE_WIDTH_IN, Sheet, condition_color
from harness.report.view import FloatArray, ReportView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS: dict[str, Callable[[Latencies], FloatArray]] = {
    "ttft": lambda figures: figures.ttft_ns,
    "itl": lambda figures: figures.itl_ns,
    "e2e": lambda figures: figures.e2e_ns,
}
MIN_LEVELS = 3


def serving_plot(sheet: Sheet, view: ReportView) -> str:
    """ECDFs of time to first token, inter-token latency and end to end, a line per condition; empty without any."""
    samples = {metric: _samples(view, of) for metric, of in PANELS.items()}
    shown = [metric for metric, found in samples.items() if found]
    if not shown:
        return ""
    figure = sheet.figure(PAGE_WIDTH_IN, 2.9)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, shown, strict=True):
        _panel(axes, view, samples[metric], METRICS[metric])
    panels[0].set_ylabel("share")
    handles = panels[0].get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(6, len(handles)), handlelength=1.6)
    return sheet.render(figure, name="serving", label="Distributions of the latencies that users felt, by condition.")


def _samples(view: ReportView, of: Callable[[Latencies], FloatArray]) -> dict[str, FloatArray]:
    found: dict[str, FloatArray] = {}
    for condition in view.conditions:
        parts = [of(latencies(view.sealed[run.key])) for run in condition.valid_runs]
        values = np.concatenate(parts) / NS_PER_MS if parts else np.empty(0)
        values = values[~np.isnan(values)]
        if values.size:
            found[condition.name] = values
    return found


def _panel(axes: Axes, view: ReportView, samples: dict[str, FloatArray], name: str) -> None:
    for condition, values in samples.items():
        ecdf_line(axes, values, color=condition_color(view.summary.place_of[condition]), label=condition)
    axes.set_xscale("log")
    # Tokens that came in one receive lie no time apart: four decades hold all others, and their labels.
    low, high = axes.get_xlim()
    low = max(low, high / 1e4)
    axes.set_xlim(low, high)
    # A decade alone has one label, or none.
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,)))
    axes.xaxis.set_major_formatter(plain_log_ticks)
    axes.minorticks_off()
    axes.set_xlabel(f"{name} [{'model ' if view.is_scaled else ''}ms]")
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.5, 0.9, 0.99], ["0", "0.5", "0.9", "0.99"])
    axes.grid(visible=True, axis="both")


def sweep_plot(sheet: Sheet, view: ReportView) -> str:
    """Curves along the one numeric factor that tells the conditions apart; empty where no such factor is."""
    swept = swept_levels(view)
    if swept is None:
        return ""
    factor, levels = swept
    figure = sheet.figure(PAGE_WIDTH_IN, 2.9)
    left, middle, right = figure.subplots(1, 3)
    points = [(level, found) for level, found in levels if found is not None]
    _rates(left, [(level, figures.tokens_per_s) for level, figures in points], "tokens/s", INK)
    _rates(middle, [(level, figures.requests_per_s) for level, figures in points], "requests/s", INK, "answered")
    if all(figures.goodput_per_s is not None for _, figures in points):
        good = [(level, figures.goodput_per_s) for level, figures in points if figures.goodput_per_s is not None]
        _rates(middle, good, "requests/s", MUTED, "good")
        middle.legend()
    for q, style in ((0.5, "-"), (0.99, (0, (4, 2)))):
        times = [(level, ttft.at(q).value / NS_PER_MS) for level, figures in points if (ttft := figures.of("ttft"))]
        right.plot(*zip(*times, strict=True), marker="o", color=INK, linestyle=style, label=f"p{q * 100:.0f}")
    right.set_ylabel("time to first token [ms]")
    right.legend()
    for axes in (left, middle, right):
        axes.set_xlabel(factor)
        axes.set_ylim(bottom=0)
        axes.grid(visible=True, axis="y")
    return sheet.render(figure, name="sweep", label=f"Rates and time to first token by {factor}.")


def swept_levels(view: ReportView) -> tuple[str, list[tuple[float, ServingFigures | None]]] | None:
    """(factor, its levels with their serving figures); None unless one numeric factor alone has enough levels."""
    factors = [condition.factors for condition in view.conditions]
    varied = [name for name in (factors[0] if factors else ()) if len({str(each.get(name)) for each in factors}) > 1]
    if len(varied) != 1 or len(factors) < MIN_LEVELS:
        return None
    levels = [each.get(varied[0]) for each in factors]
    numbers = [float(level) for level in levels if isinstance(level, (int, float)) and not isinstance(level, bool)]
    if len(numbers) != len(levels):
        return None
    found = [view.summary.serving_of(condition.name) for condition in view.conditions]
    if not any(each is not None and each.of("ttft") for each in found):
        return None
    return varied[0], sorted(zip(numbers, found, strict=True), key=lambda pair: pair[0])


def _rates(axes: Axes, points: list[tuple[float, Rate]], label: str, color: str, name: str = "") -> None:
    levels, means = [level for level, _ in points], [rate.mean for _, rate in points]
    spread = [
        (0.0, 0.0) if rate.interval is None else (rate.mean - rate.interval.low, rate.interval.high - rate.mean)
        for _, rate in points
    ]
    axes.errorbar(levels, means, yerr=np.array(spread).T, marker="o", color=color, capsize=3, label=name or None)
    axes.set_ylabel(label)
