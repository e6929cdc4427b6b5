"""Power against blocks as one self-contained page: a curve for each comparison, equal and different side by side.

Every figure was computed by ``harness.advise.power``. Nothing is read or run. This is where the flow ends: people read
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from harness.advise.power import Goal, Needed
from harness.analysis.method.power import difference_power, equivalence_power
from harness.outputs import check_output, escape_bidi
from harness.records.disk import write_synced
from harness.report.page import content_security_policy
from harness.report.svg import INK, MUTED, Sheet, condition_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH_IN, HEIGHT_IN = 10.66, 3.4
MOST_SHOWN = 120


def write_power_page(path: Path, title: str, found: Sequence[Needed], goal: Goal, text: str) -> Path:
    """Write the page; text: the table and the lines to paste, as the terminal shows them."""
    path = check_output(path)
    with Sheet() as sheet:
        picture = power_plot(sheet, found, goal)
    style = files("harness.report").joinpath("style.css").read_text(encoding="utf-8")
    page = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{content_security_policy()}">'
        f"<title>{escape(title)}</title>"
        f"<style>{style}</style></head><body><header><h1>{escape(title)}</h1></header><main><figure>{picture}<figcaption>"
        "Probability of the verdict by the number of blocks, exact for Gaussian log ratios; dotted: what is wanted."
        f"</figcaption></figure><pre>{escape(text)}</pre></main></body></html>\n"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_synced(path, escape_bidi(page).encode())
    return path


def power_plot(sheet: Sheet, found: Sequence[Needed], goal: Goal) -> str:
    """Two panels: power to show equivalence when there is no difference, and to show one as large as the margin."""
    figure = sheet.figure(WIDTH_IN, HEIGHT_IN)
    equal, different = figure.subplots(1, 2, sharey=True)
    widest = max((one.proposed or MOST_SHOWN for one in found), default=MOST_SHOWN)
    blocks = list(range(2, min(MOST_SHOWN, max(8, round(1.4 * widest))) + 1))
    for place, one in enumerate(found, 1):
        sd, name = max(one.components.sd, 1e-9), one.components.condition
        _curve(equal, blocks, [equivalence_power(n, sd, goal.log_margin, goal.alpha) for n in blocks], place, name)
        _curve(different, blocks, [difference_power(n, sd, goal.log_margin, goal.alpha) for n in blocks], place, name)
    equal.set_title(f"true ratio 1: shown to be equal within {goal.margin:.1%}")
    different.set_title(f"true ratio {1 + goal.margin:.3f}: shown to differ")
    for axes in (equal, different):
        axes.axhline(goal.power, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.set_ylim(0, 1.02)
        axes.set_xlim(0, blocks[-1])
        axes.grid(visible=True)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.set_xlabel("blocks")
    equal.set_ylabel("power")
    equal.legend(loc="lower right", labelcolor=INK)
    names = ", ".join(f"{one.components.condition}: {one.proposed or 'more than can be had'}" for one in found)
    return sheet.render(figure, name="power", label=f"Power against blocks. Blocks proposed: {names}.")


def _curve(axes: Axes, blocks: Sequence[int], power: Sequence[float], place: int, name: str) -> None:
    axes.plot(blocks, power, color=condition_color(place), label=name)
