"""All plots of a report and the words under them.

Plots are drawn by all cores, each by one; the order in which they are done changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable

from harness.processes import parallel_map
from harness.report.device_plot import DEVICES_CAPTION, device_plot
from harness.report.gather import LAG_P99, START_SPREAD
from harness.report.plots import cost_plot, lateness_plot, reuse_plot, step_histograms
from harness.report.sequence_plot import SEQUENCE_CAPTION, sequence_plot
from harness.report.serving_plots import serving_plot, sweep_plot
from harness.report.svg import Sheet
from harness.report.view import ReportView

# What a second process costs by itself, several times over.
DRAWING_WORTH_S = 0.15
COMPARED_CAPTION = (
    "Large marker: ratio of sums over replicates. Small dots: single replicates. Bar: 95 % interval, from three "
    "replicates on. The line at 1 is the baseline."
)
ALONE_CAPTION = "Filled: modelled device time (A). Open: time in flight (B)."


def plots_of(view: ReportView) -> dict[str, str]:
    """Each plot as SVG by its name, "" where there is nothing to draw, and its caption as HTML under NAME_caption."""
    note = view.time_caption
    limits = (_limit(view, LAG_P99), _limit(view, START_SPREAD))
    draw: dict[str, Callable[[Sheet], str]] = {
        "cost": lambda sheet: cost_plot(sheet, view),
        "cost_narrow": lambda sheet: cost_plot(sheet, view, is_narrow=True),
        "steps": lambda sheet: step_histograms(sheet, view),
        "serving": lambda sheet: serving_plot(sheet, view),
        "reuse": lambda sheet: reuse_plot(sheet, view),
        "lateness": lambda sheet: lateness_plot(sheet, view, limits),
        "sweep": lambda sheet: sweep_plot(sheet, view),
        "sequence": lambda sheet: sequence_plot(sheet, view.status, view.summary.place_of),
        "devices": lambda sheet: device_plot(sheet, view.summary),
    }
    names = list(draw)
    with Sheet() as sheet:
        drawn = parallel_map(lambda name, _tell: draw[name](sheet), names, worth_s=DRAWING_WORTH_S)
        plots = {names[place]: plot for place, plot in drawn}
    return {
        **plots,
        "cost_caption": note + _cost_caption(view),
        "serving_caption": f"{note}Share of the requests of the valid runs{view.summary.window} that had their first "
        "token, the next token, or their whole answer within a time.",
        "sequence_caption": SEQUENCE_CAPTION,
        "devices_caption": note + DEVICES_CAPTION,
        "sweep_caption": f"{note}Mean over valid runs; bars: 95 % t interval over runs, from three on.",
        "steps_caption": f"{note}Steps of all valid runs by n, the requests really in the step; shade: the bucket it "
        "ran in; hatched: the share of that bucket's positions that was padding. One scale for all panels.",
        "reuse_caption": f"{note}Outline: tokens that formula C allows; filled: tokens that the server reused. "
        "With many re-arrivals: points, measured over allowed, larger where several coincide."
        if plots["reuse"]
        else "",
        "lateness_caption": "<b>Wall time.</b> Left: share of re-arrivals sent within a lag, all runs of a condition "
        "together; the dotted line marks p99. Right: how far apart the first requests of a run left; "
        "a cross is an invalid run.",
    }


def _cost_caption(view: ReportView) -> str:
    if any(condition.comparison is not None for condition in view.conditions):
        return COMPARED_CAPTION
    return ALONE_CAPTION if len(view.channels) == 2 else ""


def _limit(view: ReportView, name: str) -> float | None:
    limits = {check.limit for checks in view.checks.values() for check in checks if check.name == name}
    return limits.pop() if len(limits) == 1 else None  # runs held to different limits share no line
