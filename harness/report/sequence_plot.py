"""The stopping rule as a picture: the interval of each comparison over blocks, its margin, and where it was decided.

What is drawn was computed by ``harness.analysis``; an interval that is still infinite fills its panel.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from harness.analysis.method.sequential import StopVerdict
from harness.analysis.method.stopping import ComparisonLooks, SequentialStatus
from harness.report.svg import GRID, INK, MUTED, SURFACE, Sheet, condition_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN = 10.66
MAX_PANELS_PER_ROW = 3
SEQUENCE_CAPTION = (
    "Dots: single blocks; line and bars: their mean and its interval at each look, valid however often it is looked; "
    "grey: what counts as equal; dotted: the budget; diamond: where it ended."
)


def sequence_plot(sheet: Sheet, status: SequentialStatus | None, place_of: Mapping[str, int]) -> str:
    """A panel for each comparison: single blocks, the mean and its interval at each look, the margin; "" without."""
    shown = [one for one in status.comparisons if one.num_blocks] if status is not None else []
    if status is None or not shown:
        return ""
    columns = min(MAX_PANELS_PER_ROW, len(shown))
    rows = -(-len(shown) // columns)
    figure = sheet.figure(WIDTH_IN * (1.0 if columns > 1 else 0.6), 0.4 + 2.6 * rows)
    panels = figure.subplots(rows, columns, squeeze=False)
    for axes, one in zip(panels.flat, shown, strict=False):
        _panel(axes, one, status, condition_color(place_of[one.condition]))
    for axes in panels.flat[len(shown) :]:
        axes.set_visible(False)
    for row in panels:
        row[0].set_ylabel("change of cost [%]")
    told = "; ".join(f"{one.condition}: {one.verdict.value}, {one.description}" for one in shown)
    return sheet.render(figure, name="sequence", label=f"Interval of each comparison over blocks. {told}.")


def _panel(axes: Axes, one: ComparisonLooks, status: SequentialStatus, color: str) -> None:
    stop = status.stop
    margin = [_percent(-stop.log_margin), _percent(stop.log_margin)]
    axes.axhspan(*margin, color=GRID, alpha=0.6, linewidth=0)
    axes.axhline(0, color=INK, linewidth=0.9)
    blocks = list(range(1, one.num_blocks + 1))
    axes.plot(blocks, [_percent(value) for value in one.values], "o", color=color, alpha=0.45, markersize=3.4)
    finite = [look for look in one.looks if math.isfinite(look.half_width)]
    ends = [_percent(end) for look in finite[-6:] for end in (look.low, look.high)]
    values = [*margin, *(_percent(value) for value in one.values), *ends]
    room = 0.12 * (max(values) - min(values))
    low, high = min(values) - room, max(values) + room
    seen = [look.num_blocks for look in one.looks if math.isfinite(look.mean)]
    means = [_percent(look.mean) for look in one.looks if math.isfinite(look.mean)]
    lows = [max(low, _percent(look.low)) for look in one.looks if math.isfinite(look.mean)]
    highs = [min(high, _percent(look.high)) for look in one.looks if math.isfinite(look.mean)]
    axes.fill_between(seen, lows, highs, color=color, alpha=0.16, linewidth=0)
    axes.vlines(seen, lows, highs, color=color, linewidth=1.1)
    axes.plot(seen, means, color=color, linewidth=1.4)
    if one.verdict.is_final and finite:
        last = finite[-1]
        face = color if one.verdict is not StopVerdict.INCONCLUSIVE else SURFACE
        axes.plot([last.num_blocks], [_percent(last.mean)], "D", color=color, markerfacecolor=face, markersize=6.5)
    axes.axvline(stop.budget, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
    axes.set_xlim(0.5, stop.budget + 0.5)
    axes.set_ylim(low, high)
    axes.set_title(f"{one.condition}: {one.verdict.value}")
    axes.set_xlabel(f"blocks (budget {stop.budget})")
    axes.grid(visible=True, axis="y")


def _percent(log_ratio: float) -> float:
    return 100 * math.expm1(log_ratio) if log_ratio < 700 else math.inf
