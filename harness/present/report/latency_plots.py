"""The report's plots of times: what users waited for, curves along what a sweep varies, the harness's own lateness.

Same colours as everywhere on the page; nothing is computed here but what an axis needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.analysis import RunFigures
from harness.analysis.serving import METRICS, Latencies, Rate, ServingFigures, latencies
from harness.clock import NS_PER_MS
from harness.present.report.svg import INK, MUTED, PAGE_WIDTH_IN, WARN, Sheet, condition_color
from harness.present.report.timeline import FloatArray
from harness.present.report.view import ReportView

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PANELS: dict[str, Callable[[Latencies], FloatArray]] = {
    "ttft": lambda figures: figures.ttft_ns,
    "itl": lambda figures: figures.itl_ns,
    "e2e": lambda figures: figures.e2e_ns,
}
MIN_LEVELS = 3
MAX_ECDF_POINTS = 400


def serving_plot(sheet: Sheet, view: ReportView) -> str:
    """ECDFs of time to first token, inter-token latency and end to end, a line per condition; empty without any."""
    samples = {metric: _samples(view, of) for metric, of in PANELS.items()}
    shown = [metric for metric, found in samples.items() if found]
    if not shown:
        return ""
    figure = sheet.figure(PAGE_WIDTH_IN, 2.9)
    panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, shown, strict=True):
        _serving_panel(axes, view, samples[metric], METRICS[metric])
    panels[0].set_ylabel("share")
    handles = panels[0].get_legend_handles_labels()[0]
    figure.legend(handles=handles, loc="outside upper left", ncols=min(6, len(handles)), handlelength=1.6)
    return sheet.render(figure, name="serving", label="Distributions of the latencies that users felt, by condition.")


def _samples(view: ReportView, of: Callable[[Latencies], FloatArray]) -> dict[str, FloatArray]:
    found: dict[str, FloatArray] = {}
    for condition in view.summary.conditions:
        parts = [of(latencies(view.sealed[run.key])) for run in condition.counted]
        values = np.concatenate(parts) / NS_PER_MS if parts else np.empty(0)
        values = values[~np.isnan(values)]
        if values.size:
            found[condition.name] = values
    return found


def _serving_panel(axes: Axes, view: ReportView, samples: dict[str, FloatArray], name: str) -> None:
    from matplotlib.ticker import LogLocator

    for condition, values in samples.items():
        _ecdf_line(axes, values, color=condition_color(view.summary.place_of[condition]), label=condition)
    axes.set_xscale("log")
    # Tokens that came in one receive lie no time apart: four decades hold all others, and their labels.
    low, high = axes.get_xlim()
    low = max(low, high / 1e4)
    axes.set_xlim(low, high)
    # A decade alone has one label, or none.
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,)))
    axes.xaxis.set_major_formatter(_plain_log_ticks)
    axes.minorticks_off()
    axes.set(xlabel=f"{name} [{'model ' if view.is_scaled else ''}ms]", ylim=(0, 1.02))
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
        axes.set(xlabel=factor, ylim=(0, None))
        axes.grid(visible=True, axis="y")
    return sheet.render(figure, name="sweep", label=f"Rates and time to first token by {factor}.")


def swept_levels(view: ReportView) -> tuple[str, list[tuple[float, ServingFigures | None]]] | None:
    """(factor, its levels with their serving figures); None unless one numeric factor alone has enough levels."""
    factors = [condition.factors for condition in view.summary.conditions]
    varied = [name for name in (factors[0] if factors else ()) if len({str(each.get(name)) for each in factors}) > 1]
    if len(varied) != 1 or len(factors) < MIN_LEVELS:
        return None
    levels = [each.get(varied[0]) for each in factors]
    numbers = [float(level) for level in levels if isinstance(level, (int, float)) and not isinstance(level, bool)]
    if len(numbers) != len(levels):
        return None
    found = [view.summary.serving_of(condition.name) for condition in view.summary.conditions]
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


def lateness_plot(sheet: Sheet, view: ReportView, limits_ms: tuple[float | None, float | None]) -> str:
    """What the harness did late in every run, invalid ones too: ECDF of the dispatch delay, start spreads [wall ms].

    limits_ms: (dispatch delay p99, start spread), None where there is no limit.
    """
    color_of = {name: condition_color(place) for name, place in view.summary.place_of.items()}
    samples = {each.name: _joined([run.lateness.rearrival_ms for run in each.runs]) for each in view.summary.conditions}
    samples = {name: lags for name, lags in samples.items() if lags.size}
    spreads = [run for run in view.runs if run.lateness.start_spread_ms is not None]
    if not samples and not spreads:
        return ""
    floor_ms = _joined([np.asarray(run.audit.floor_lag_ms) for run in view.sealed.values()])
    if not samples:  # nothing re-arrived: an empty plot would only look like a fault
        figure = sheet.figure(PAGE_WIDTH_IN * 0.5, 2.6)
        _spread_points(figure.subplots(), spreads, color_of, limits_ms[1])
        return sheet.render(figure, name="lateness", label="Start spread of every run; nothing re-arrived.")
    figure = sheet.figure(PAGE_WIDTH_IN, 3.1 + 0.2 * (len(samples) // 6))
    left, right = figure.subplots(1, 2, width_ratios=[1.55, 1.0])
    _lag_ecdf(left, samples, color_of, floor_ms, limits_ms[0])
    _spread_points(right, spreads, color_of, limits_ms[1])
    handles = left.get_legend_handles_labels()[0]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=min(6, len(handles)), handlelength=1.6, columnspacing=1.4
    )
    return sheet.render(
        figure, name="lateness", label="Dispatch delays after tool waits, and start spread of every run."
    )


def _joined(parts: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate(parts) if parts else np.empty(0)


def _lag_ecdf(
    axes: Axes, samples: dict[str, FloatArray], color_of: dict[str, str], floor_ms: FloatArray, limit_ms: float | None
) -> None:
    everything = _joined([*samples.values(), floor_ms])
    for name, lags in samples.items():
        _ecdf_line(axes, lags, color=color_of[name], label=name)
    if floor_ms.size:
        _ecdf_line(axes, floor_ms, color=MUTED, label="self-audit floor", linestyle=(0, (4, 2)))
    if everything.size:
        # A log axis shows the tail; early sends (negative) would vanish on it, so they are counted in the table.
        lowest = max(1e-3, float(np.min(everything[everything > 0], initial=1.0)))
        axes.set_xscale("log")
        axes.set_xlim(lowest * 0.8, max(float(everything.max()), limit_ms or 0.0, lowest * 10) * 1.4)
        axes.xaxis.set_major_formatter(_plain_log_ticks)
        axes.minorticks_off()
    if limit_ms is not None:
        _limit_line(axes, limit_ms, "limit on p99")
    axes.axhline(0.99, color=MUTED, linewidth=0.7, linestyle=(0, (1, 2)))
    axes.set_ylim(0, 1.02)
    axes.set_yticks([0, 0.25, 0.5, 0.75, 0.99], ["0", "0.25", "0.5", "0.75", "0.99"])
    axes.grid(visible=True, axis="x")
    title = "Re-arrival lag: sent \u2212 (completion + planned wait)"
    axes.set(title=title, xlabel="lag [wall ms]", ylabel="share of re-arrivals")


def _plain_log_ticks(value: float, _position: float) -> str:
    """A tick of a log axis without powers."""
    return f"{value:g}"


def _ecdf_line(axes: Axes, values: FloatArray, *, color: str, label: str, linestyle: Any = "-") -> None:
    """One ECDF, thinned to what a page can show."""
    ordered = np.sort(values)
    share = np.arange(1, ordered.size + 1) / ordered.size
    if ordered.size > MAX_ECDF_POINTS:
        keep = np.unique(np.linspace(0, ordered.size - 1, MAX_ECDF_POINTS).astype(np.int64))
        ordered, share = ordered[keep], share[keep]
    ordered = np.concatenate([ordered[:1], ordered])
    share = np.concatenate([[0.0], share])
    axes.plot(np.maximum(ordered, 1e-4), share, drawstyle="steps-post", color=color, label=label, linestyle=linestyle)


def _limit_line(axes: Axes, limit_ms: float, text: str) -> None:
    axes.axvline(limit_ms, color=WARN, linewidth=1.0)
    place: Any = {"xycoords": ("data", "axes fraction"), "xytext": (-4, 0), "textcoords": "offset points"}
    look: Any = {"rotation": 90, "ha": "right", "va": "bottom", "fontsize": 8, "color": WARN}
    axes.annotate(f"{text}: {limit_ms:g} ms", (limit_ms, 0.03), **place, **look)


def _spread_points(axes: Axes, runs: Sequence[RunFigures], color_of: dict[str, str], limit_ms: float | None) -> None:
    largest_ms = max(run.lateness.start_spread_ms or 0.0 for run in runs) if runs else 0.0
    # A limit far beyond every run would squeeze the runs into one spot; then it is named, not drawn.
    is_limit_near = limit_ms is not None and largest_ms > 0.1 * limit_ms
    limit_note = "" if limit_ms is None or is_limit_near else f" (limit {limit_ms:g} ms)"
    names = list(dict.fromkeys(run.condition for run in runs))
    for row, name in enumerate(names):
        mine = [run for run in runs if run.condition == name]
        for run in mine:
            marker = "o" if run.is_valid else "X"
            axes.plot([run.lateness.start_spread_ms or 0.0], [row], marker, color=color_of[name], alpha=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    end_ms = max(largest_ms * 1.15, 0.01, (limit_ms or 0.0) * 1.08 if is_limit_near else 0.0)
    axes.set(title=f"Start spread of each run{limit_note}", xlim=(0, end_ms), ylim=(len(names) - 0.5, -0.5))
    if is_limit_near and limit_ms is not None:
        _limit_line(axes, limit_ms, "limit")
    axes.grid(visible=True, axis="x")
    axes.set_xlabel("latest \u2212 earliest first send [wall ms]")
