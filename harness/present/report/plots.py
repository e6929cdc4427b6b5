"""The report's plots of cost and what explains it: ratios, step histograms, reuse, looks of a stopping rule, devices.

Same colour = same condition in every plot; shades of one hue are buckets; hatching is padding. Nothing is computed
here but what an axis needs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.analysis.compare.channels import Comparison
from harness.analysis.compare.stopping import ComparisonLooks, SequentialStatus
from harness.analysis.cost.devices import DeviceEffect
from harness.analysis.reuse_by_wait import EDGES_S, ReuseByWait, ReuseShare, WaitBin
from harness.analysis.speeds import Speeds
from harness.analysis.summary import ConditionFigures, ExperimentSummary
from harness.clock import NS_PER_S
from harness.model.spec.sections import Basis
from harness.present.report.answers import Channel
from harness.present.report.svg import GRID, INK, MUTED, PAGE_WIDTH_IN, SURFACE, Sheet, bucket_color, condition_color
from harness.present.report.view import ReportView

if TYPE_CHECKING:
    from matplotlib.axes import Axes


# A phone of 390 px, less its margins.
NARROW_WIDTH_IN = 3.7
MAX_PANELS_PER_ROW = 4
REUSE_SPREAD = 0.5  # how far the conditions' points of one bin lie apart, in bins
MAX_REUSE_BARS = 72  # above this many re-arrivals, bars are thinner than a hatch and points say more


def cost_plot(sheet: Sheet, view: ReportView, *, is_narrow: bool = False) -> str:
    """Cost ratio of each compared condition on the channels there are, with the ratio of every replicate.

    Without any comparison: the cost itself. is_narrow: for a phone, the names above their rows.
    """
    compared = [
        (condition, condition.comparison) for condition in view.summary.conditions if condition.comparison is not None
    ]
    rows = max(1, len(compared or view.summary.conditions))
    figure = sheet.figure(NARROW_WIDTH_IN if is_narrow else PAGE_WIDTH_IN, 0.9 + (0.75 if is_narrow else 0.62) * rows)
    axes = figure.subplots()
    if compared:
        names, label = _ratio_rows(axes, view, compared, is_narrow=is_narrow)
    else:
        names, label = _cost_rows(axes, view)
    if is_narrow:
        axes.set_yticks([])
        for row, name in enumerate(names):
            place: Any = {"xytext": (0, -1), "textcoords": "offset points", "va": "top", "fontsize": 8.5, "color": INK}
            axes.annotate(name.replace("\n", " "), (0, row - 0.5), xycoords=("axes fraction", "data"), **place)
    else:
        axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.grid(visible=True, axis="x")
    if len(view.channels) > 1:
        plain: dict[str, Any] = {"color": INK, "linestyle": "none"}
        looks: dict[Basis, dict[str, Any]] = {
            "a": {"marker": "o", "markersize": 7, "label": "A, modelled"},
            "s": {"marker": "s", "markerfacecolor": "none", "markersize": 6.5, "label": "S, in steps"},
            "b": {"marker": "D", "markerfacecolor": "none", "markersize": 6.5, "label": "B, in flight"},
        }
        handles = [
            *(axes.plot([], [], **looks[channel.basis], **plain)[0] for channel in view.channels),
            axes.plot([], [], marker="o", alpha=0.45, markersize=3, label="one replicate", **plain)[0],
        ]
        figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), handletextpad=0.3)
    return sheet.render(figure, name="cost-narrow" if is_narrow else "cost", label=label)


def _ratio_rows(
    axes: Axes, view: ReportView, compared: Sequence[tuple[ConditionFigures, Comparison]], *, is_narrow: bool
) -> tuple[list[str], str]:
    """Rows of ratios: their names, and what they show in one sentence."""
    axes.axvline(1.0, color=INK, linewidth=0.9, zorder=1)
    ratios: list[str] = []
    for row, (condition, _) in enumerate(compared):
        for place, channel in enumerate(view.channels):
            _ratio_marks(axes, row + _offset(place, len(view.channels), 0.28), channel, condition, view)
        shown = [(channel.heading, channel.ratio(view.summary, condition.name)) for channel in view.channels]
        ratios.append("\n".join(f"{name if len(shown) > 1 else ''} {ratio:.4f}" for name, ratio in shown if ratio))
    if not is_narrow:
        values = axes.secondary_yaxis("right")
        values.set_yticks(range(len(compared)), ratios)
        values.tick_params(axis="y", length=0)
        values.spines["right"].set_visible(False)
    kind = "predicted cost ratio" if compared[0][1].is_predicted else "cost ratio"
    axes.set_xlabel(f"{kind} to the baseline (below 1: costs less)")
    axes.locator_params(axis="x", nbins=5 if is_narrow else 9)
    _pad_limits(axes, include=1.0)
    names = [f"{condition.name}\nvs {condition.baseline}" for condition, _ in compared]
    summary = [
        f"{condition.name}: {text}".replace("\n", ", ") for (condition, _), text in zip(compared, ratios, strict=True)
    ]
    return names, f"Cost ratios to the baseline. {'; '.join(summary)}."


MARKERS: dict[Basis, str] = {"a": "o", "s": "s", "b": "D"}


def _offset(place: int, num_channels: int, apart: float) -> float:
    """Where in its row a channel is drawn. apart: the distance of two channels; three stand closer."""
    return (apart if num_channels < 3 else 2 / 3 * apart) * (place - (num_channels - 1) / 2)


def _ratio_marks(axes: Axes, row: float, channel: Channel, condition: ConditionFigures, view: ReportView) -> None:
    """One channel of a comparison: its replicates, its interval, its ratio."""
    comparison, color = condition.comparison, _color(view, condition.name)
    assert comparison is not None, "only comparisons are drawn"
    each = [channel.ratio_of(condition, replicate) for replicate in comparison.replicates]
    known = [ratio for ratio in each if ratio is not None]
    axes.plot(known, [row] * len(known), "o", color=color, alpha=0.45, markersize=3.4, zorder=2)
    if (interval := channel.interval(view.summary, condition.name)) is not None:
        axes.plot([interval.low, interval.high], [row] * 2, "|-", color=color, linewidth=1.3, markersize=7, zorder=2)
    marker, (face, size) = MARKERS[channel.basis], (color, 8.0) if channel.is_a else (SURFACE, 7.0)
    if (ratio := channel.ratio(view.summary, condition.name)) is None:
        return
    axes.plot([ratio], [row], marker, color=color, markerfacecolor=face, markersize=size, zorder=3)


def _cost_rows(axes: Axes, view: ReportView) -> tuple[list[str], str]:
    """Rows of costs, where nothing is compared: their names, and what they show in one sentence."""
    for row, condition in enumerate(view.summary.conditions):
        color = _color(view, condition.name)
        for place, channel in enumerate(view.channels):
            cost_ns = channel.cost_ns(condition)
            if cost_ns is None:
                continue
            at, value = row + _offset(place, len(view.channels), 0.24), cost_ns / NS_PER_S
            axes.plot([0, value], [at] * 2, color=color, linewidth=1.0)
            marker, face = MARKERS[channel.basis], color if channel.is_a else SURFACE
            axes.plot([value], [at], marker, color=color, markerfacecolor=face, markersize=7)
    axes.set(xlabel=f"cost [{view.seconds_unit}]", xlim=(0, None))
    return [condition.name for condition in view.summary.conditions], "Cost of each condition; nothing is compared."


def _color(view: ReportView, condition: str) -> str:
    return condition_color(view.summary.place_of[condition])


def step_histograms(sheet: Sheet, view: ReportView) -> str:
    """h(n) of each condition as small multiples on one scale; shade = bucket, hatched = its padded positions."""
    shown = [condition for condition in view.summary.conditions if condition.steps_by_n_b]
    if not shown:
        return ""
    columns = min(MAX_PANELS_PER_ROW, len(shown))
    figure, panels = sheet.panels(
        len(shown),
        "h(n), decode steps",
        a_row=MAX_PANELS_PER_ROW,
        heights=(0.35, 2.15),
        is_shared=True,
        pair_width=0.85,
    )
    widest = max(n for condition in shown for n, _ in condition.steps_by_n_b)
    for axes, condition in zip(panels, shown, strict=True):
        _step_histogram(axes, condition, _color(view, condition.name), view.buckets, widest)
    panels[0].set_ylim(0, 1.06 * max(max(condition.histogram.values()) for condition in shown))
    for axes in panels[:-columns]:
        axes.tick_params(axis="x", labelbottom=False)
    panels[0].locator_params(axis="y", integer=True)
    for axes in panels[-columns:]:
        axes.set_xlabel("n, requests in the step")
    look = {"handlelength": 1.2, "handleheight": 1.0, "columnspacing": 1.2}
    figure.legend(handles=_bucket_handles(view.buckets), loc="outside upper left", ncols=len(view.buckets) + 1, **look)
    text = "; ".join(f"{c.name}: {sum(c.histogram.values())} steps, padding {_padding(c)}" for c in shown)
    return sheet.render(figure, name="steps", label=f"Histograms of decode steps by number of requests. {text}.")


def _step_histogram(
    axes: Axes, condition: ConditionFigures, title_color: str, buckets: Sequence[int], widest: int
) -> None:
    top: dict[int, float] = {}
    bars: list[tuple[int, float, float, float, str]] = []
    for (n, b), count in sorted(condition.steps_by_n_b.items()):
        below, real = top.get(n, 0.0), count * n / b
        bars.append((n, below, real, count - real, bucket_color(list(buckets).index(b), len(buckets))))
        top[n] = below + count
    places, bottoms, reals, padded, colors = zip(*bars, strict=True)
    axes.bar(places, reals, bottom=bottoms, width=0.78, color=colors, edgecolor=colors, linewidth=0.8)
    bottoms = np.add(bottoms, reals)
    axes.bar(places, padded, bottom=bottoms, width=0.78, color="none", edgecolor=colors, linewidth=0.8, hatch="//////")
    steps = f"{sum(condition.histogram.values()):,} steps"
    _panel_title(axes, condition.name, title_color, f"{steps} \u00b7 p = {_padding(condition)}")
    stride = 1 if widest <= 10 else 2 if widest <= 20 else -(-widest // 10)
    axes.set_xticks(range(stride if stride > 1 else 1, widest + 1, stride))
    axes.set_xlim(0.4, widest + 0.6)


def _panel_title(axes: Axes, name: str, color: str, line: str) -> None:
    """A condition's name, and a line below it with its figures."""
    axes.set_title(name, color=color, fontweight="bold", pad=16)
    axes.annotate(line, (0, 1), xytext=(0, 5), xycoords="axes fraction", textcoords="offset points", fontsize=8.5)
    axes.grid(visible=True, axis="y")


def _padding(condition: ConditionFigures) -> str:
    ratio = condition.padding.ratio
    return "not known" if ratio is None else f"{ratio:.3f}"


def _bucket_handles(buckets: Sequence[int]) -> list[Any]:
    from matplotlib.patches import Patch

    solid = [Patch(facecolor=bucket_color(i, len(buckets)), label=f"bucket {b}") for i, b in enumerate(buckets)]
    return [*solid, Patch(facecolor="none", edgecolor=MUTED, hatch="//////", label="share padded")]


def reuse_plot(sheet: Sheet, view: ReportView) -> str:
    """Reused tokens of every re-arrival of the counted runs against what formula C allows, one panel per condition."""
    shown = [condition for condition in view.summary.conditions if condition.reuse.num_rearrivals]
    if not shown:
        return ""
    figure, panels = sheet.panels(
        len(shown), "reused tokens", a_row=MAX_PANELS_PER_ROW, heights=(0.3, 1.85), is_shared=True
    )
    most = max(condition.reuse.num_rearrivals for condition in shown)
    draw = _reuse_bars if most <= MAX_REUSE_BARS else _reuse_points
    for axes, condition in zip(panels, shown, strict=True):
        color, reused = _color(view, condition.name), condition.reuse.num_reused
        draw(axes, condition, color)
        line = f"{reused} of {condition.reuse.num_rearrivals} reused"
        _panel_title(axes, condition.name, color, "reuse unknown: not reported" if reused is None else line)
    label = "Reused tokens of each re-arrival, measured and as formula C allows."
    return sheet.render(figure, name="reuse", label=label)


def reuse_by_wait_plot(sheet: Sheet, view: ReportView, *, is_narrow: bool = False) -> str:
    """Share of returns still cached and of tokens kept by the wait, a curve per condition; empty without returns.

    is_narrow: for a phone, one panel above the other.
    """
    shown = view.summary.reuse_by_wait
    if not shown:
        return ""
    figure = sheet.figure(NARROW_WIDTH_IN if is_narrow else PAGE_WIDTH_IN, 5.2 if is_narrow else 2.9)
    panels = figure.subplots(*((2, 1) if is_narrow else (1, 2)), squeeze=False).ravel()
    for axes, name, title in zip(
        panels, ("reused", "kept"), ("returns still cached [%]", "tokens kept [%]"), strict=True
    ):
        for place, each in enumerate(shown):
            offset = REUSE_SPREAD * ((place + 0.5) / len(shown) - 0.5)
            _reuse_curve(axes, each, name, offset, _color(view, each.condition))
        _wait_axis(axes, [one for each in shown for one in each.bins])
        axes.set(title=title, ylim=(-3, 103), xlabel=f"wait before the return [{view.seconds_unit}]")
        axes.grid(visible=True, axis="y")
    first = [(each.condition, one.reused) for each in shown for one in (each.bins[0], each.bins[-1])]
    words = "; ".join(
        f"{name} not known" if share is None else f"{name} {100 * share.value:.1f} %" for name, share in first
    )
    label = f"Reuse by the wait before the return; of the shortest and the longest waits: {words}."
    return sheet.render(figure, name="reuse-by-wait-narrow" if is_narrow else "reuse-by-wait", label=label)


def _reuse_curve(axes: Axes, each: ReuseByWait, name: str, offset: float, color: str) -> None:
    """One condition's points: filled and with a bar where there is an interval, else open."""
    shares: list[tuple[float, ReuseShare | None]] = [
        (EDGES_S.index(one.low_s) + offset, getattr(one, name)) for one in each.bins
    ]
    values = [math.nan if share is None else 100 * share.value for _, share in shares]
    axes.plot([at for at, _ in shares], values, color=color, linewidth=1.2)
    # One line for all points of a kind: a line for each point takes three times as long.
    sure, unsure, bars = list[tuple[float, float]](), list[tuple[float, float]](), list[tuple[float, float]]()
    for at, share in shares:
        if share is None:
            continue
        if share.interval is None:
            unsure.append((at, 100 * share.value))
            continue
        sure.append((at, 100 * share.value))
        bars += [(at, 100 * share.interval.low), (at, 100 * share.interval.high), (at, math.nan)]
    if bars:
        axes.plot(*zip(*bars, strict=True), "_-", color=color, markersize=6)
    for points, face in ((sure, color), (unsure, SURFACE)):
        if points:
            axes.plot(*zip(*points, strict=True), "o", color=color, markerfacecolor=face, markersize=5, zorder=3)


def _wait_axis(axes: Axes, bins: Sequence[WaitBin]) -> None:
    """Bins of equal width from the first to the last that is there, their edges named."""
    places = [EDGES_S.index(one.low_s) for one in bins]
    first, last = min(places), max(places)
    axes.set_xlim(first - 0.5, last + 0.5)
    edges = range(first, min(last + 2, len(EDGES_S)))
    axes.set_xticks([edge - 0.5 for edge in edges], [f"{EDGES_S[edge]:g}" for edge in edges])


def _reuse_bars(axes: Axes, condition: ConditionFigures, color: str) -> None:
    cached, allowed, ticks, labels = list[float](), list[float](), list[float](), list[str]()
    for run in condition.counted:
        if rearrivals := run.reuse.rearrivals:
            ticks.append(len(cached) + (len(rearrivals) - 1) / 2)
            labels.append(str(run.replicate))
            cached += [
                *(math.nan if each.cached_tokens is None else each.cached_tokens for each in rearrivals),
                math.nan,
            ]
            allowed += [*(each.reusable_tokens for each in rearrivals), math.nan]
    # One path for all bars of a kind: a shape of its own for each takes twenty times as long.
    edges = np.stack([np.arange(len(cached)) - 0.4, np.arange(len(cached)) + 0.4], axis=1).ravel()
    for tokens, is_filled in ((cached, True), (allowed, False)):
        heights = np.stack([tokens, np.full(len(tokens), math.nan)], axis=1).ravel()[:-1]
        axes.stairs(heights, edges, fill=is_filled, color=color, linewidth=0.9)
    axes.set_ylim(bottom=0)
    axes.set_xticks(ticks, labels)
    axes.tick_params(axis="x", length=0)
    axes.set_xlabel("replicate (one bar per re-arrival)")


def _reuse_points(axes: Axes, condition: ConditionFigures, color: str) -> None:
    rearrivals = [rearrival for rearrival in condition.reuse.rearrivals if rearrival.cached_tokens is not None]
    if not rearrivals:
        return
    expected = np.array([rearrival.reusable_tokens for rearrival in rearrivals])
    cached = np.array([rearrival.cached_tokens for rearrival in rearrivals])
    pairs, counts = np.unique(np.stack([expected, cached], axis=1), axis=0, return_counts=True)
    ceiling = float(max(1, pairs.max()))
    axes.plot([0, ceiling], [0, ceiling], color=GRID, linewidth=1.0, zorder=1)
    size = 8 + 60 * counts / counts.max()
    axes.scatter(pairs[:, 0], pairs[:, 1], s=size, color=color, alpha=0.6, linewidths=0)
    axes.set_xlabel("formula C [tokens]")


def _pad_limits(axes: Axes, include: float) -> None:
    low, high = axes.get_xlim()
    low, high = min(low, include), max(high, include)
    margin = max(0.04 * (high - low), 0.01)
    axes.set_xlim(low - margin, high + margin)


def sequence_plot(sheet: Sheet, status: SequentialStatus | None, place_of: Mapping[str, int]) -> str:
    """A panel for each comparison: single blocks, the mean and its interval at each look, the margin; "" without."""
    shown = [looks for looks in status.comparisons if looks.num_blocks] if status is not None else []
    if status is None or not shown:
        return ""
    figure, panels = sheet.panels(len(shown), "change of cost [%]", a_row=3, heights=(0.4, 2.6))
    for axes, looks in zip(panels, shown, strict=True):
        _panel(axes, looks, status, condition_color(place_of[looks.condition]))
    verdicts = "; ".join(f"{looks.condition}: {looks.verdict.value}, {looks.description}" for looks in shown)
    return sheet.render(figure, name="sequence", label=f"Interval of each comparison over blocks. {verdicts}.")


def _panel(axes: Axes, comparison: ComparisonLooks, status: SequentialStatus, color: str) -> None:
    stop = status.stop
    margin = [_percent(1 / (1 + stop.margin)), _percent(1 + stop.margin)]
    axes.axhspan(*margin, color=GRID, alpha=0.6, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.9)
    blocks = list(range(1, comparison.num_blocks + 1))
    changes = [_percent(block.ratio) for block in comparison.blocks if block.ratio]
    axes.plot(blocks, changes, "o", color=color, alpha=0.45, markersize=3.4)
    finite = [look for look in comparison.looks if look.has_interval]
    ends = [_percent(end) for look in finite[-6:] for end in (look.low, look.high)]
    values = [*margin, *changes, *ends]
    room = 0.12 * (max(values) - min(values))
    low, high = min(values) - room, max(values) + room
    known = [look for look in comparison.looks if math.isfinite(look.ratio)]
    seen, means = [look.num_blocks for look in known], [_percent(look.ratio) for look in known]
    lows = [max(low, _percent(look.low)) for look in known]
    highs = [min(high, _percent(look.high)) for look in known]
    axes.fill_between(seen, lows, highs, color=color, alpha=0.16, linewidth=0)
    axes.vlines(seen, lows, highs, color=color, linewidth=1.1)
    axes.plot(seen, means, color=color, linewidth=1.4)
    if comparison.verdict.is_final and finite:
        last = finite[-1]
        face = color if comparison.verdict.is_answer else SURFACE
        axes.plot([last.num_blocks], [_percent(last.ratio)], "D", color=color, markerfacecolor=face, markersize=6.5)
    axes.axvline(stop.budget, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
    title, xlabel = f"{comparison.condition}: {comparison.verdict.value}", f"blocks (budget {stop.budget})"
    axes.set(title=title, xlabel=xlabel, xlim=(0.5, stop.budget + 0.5), ylim=(low, high))
    axes.locator_params(axis="x", integer=True)
    axes.grid(visible=True, axis="y")


def _percent(ratio: float) -> float:
    """A ratio as a change in percent."""
    return 100 * (ratio - 1)


BLOCK_SPREAD = 0.5
# From so many devices on their names are slanted.
TURNED_NAMES = 9


def device_plot(sheet: Sheet, summary: ExperimentSummary) -> str:
    """Speeds of all devices and a panel for each comparison; "" with fewer than two devices."""
    found = summary.speeds
    if found is None:
        return ""
    compared = [
        each for each in summary.conditions if each.comparison is not None and each.comparison.b.devices is not None
    ]
    figure, panels = sheet.panels(1 + len(compared), a_row=3, heights=(0.4, 2.6))
    _speeds_panel(panels[0], found)
    for axes, condition in zip(panels[1:], compared, strict=True):
        _effect_panel(axes, condition, condition_color(summary.place_of[condition.name]))
    speeds = ", ".join(f"{each.device} {_percent(math.exp(fmean(each.values))):+.2f} %" for each in found.devices)
    return sheet.render(figure, name="devices", label=f"How fast each device is, and each comparison on it. {speeds}.")


def _speeds_panel(axes: Axes, speeds: Speeds) -> None:
    _device_frame(axes, [device.device for device in speeds.devices])
    axes.axhline(0, color=INK, linewidth=0.9)
    for place, device in enumerate(speeds.devices):
        step = BLOCK_SPREAD / max(1, len(device.values) - 1)
        left = place - (BLOCK_SPREAD / 2 if len(device.values) > 1 else 0)
        xs = [left + step * number for number in range(len(device.values))]
        changes = [_percent(math.exp(value)) for value in device.values]
        axes.plot(xs, changes, "o", color=MUTED, alpha=0.6, markersize=3.4)
        mean = _percent(math.exp(fmean(device.values)))
        axes.plot([place - 0.34, place + 0.34], [mean, mean], color=INK, linewidth=2.0)
    axes.set(title="time of each device (up: slower)", ylabel="B over A, from the mean [%]")


def _effect_panel(axes: Axes, condition: ConditionFigures, color: str) -> None:
    compared = condition.comparison
    assert compared is not None, "only comparisons are drawn"
    assert compared.b.devices is not None, "only those of several devices"
    _device_frame(axes, [device.device for device in compared.b.devices.devices])
    estimate = compared.b.devices.estimate
    if estimate is not None and math.isfinite((interval := estimate.interval()).high):
        axes.axhspan(interval.low, interval.high, color=GRID, alpha=0.7, linewidth=0)
        axes.axhline(interval.estimate, color=INK, linewidth=0.9, linestyle=(0, (4, 2)))
    for offset, effect, marker, face in (
        (-0.13, None if compared.a is None else compared.a.devices, "o", color),
        (0.13, compared.b.devices, "D", SURFACE),
    ):
        if effect is not None:
            _device_means(axes, effect, offset, marker=marker, colors=(color, face))
    axes.set(title=f"{condition.name} / {condition.baseline}", ylabel="cost ratio")


def _device_means(axes: Axes, effect: DeviceEffect, offset: float, *, marker: str, colors: tuple[str, str]) -> None:
    color, face = colors
    for place, device in enumerate(effect.devices):
        if not math.isnan(device.sd):
            ends = [math.exp(device.mean - device.sd), math.exp(device.mean + device.sd)]
            axes.plot([place + offset] * 2, ends, color=color, linewidth=1.2)
        axes.plot([place + offset], [math.exp(device.mean)], marker, color=color, markerfacecolor=face, markersize=6.5)


def _device_frame(axes: Axes, devices: list[str]) -> None:
    axes.set_xticks(range(len(devices)), devices, rotation=0 if len(devices) < TURNED_NAMES else 60)
    axes.set_xlim(-0.6, len(devices) - 0.4)
    axes.tick_params(axis="x", length=0)
    axes.grid(visible=True, axis="y")
