"""Power against blocks as one self-contained page: a curve for each comparison, equal and different side by side."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from harness.advise.power import Goal, Needed
from harness.analysis.planning.power import difference_power, equivalence_power
from harness.outputs import check_output, write_text
from harness.report.page import plain_page
from harness.report.svg import INK, MUTED, PAGE_WIDTH_IN, Sheet, condition_color

MOST_SHOWN = 120


def write_power_page(path: Path, title: str, needs: Sequence[Needed], goal: Goal, text: str) -> Path:
    """Write the page; text: the table and the lines to paste, as the terminal shows them."""
    path = check_output(path)
    with Sheet() as sheet:
        picture = power_plot(sheet, needs, goal)
    caption = (
        "Probability of the verdict by the number of blocks, exact for Gaussian log ratios; dotted: what is wanted."
    )
    main = f"<figure>{picture}<figcaption>{caption}</figcaption></figure><pre>{escape(text)}</pre>"
    write_text(path, plain_page(title, main))
    return path


def power_plot(sheet: Sheet, needs: Sequence[Needed], goal: Goal) -> str:
    """Two panels: power to show equivalence when there is no difference, and to show one as large as the margin."""
    figure = sheet.figure(PAGE_WIDTH_IN, 3.4)
    equal, different = figure.subplots(1, 2, sharey=True)
    widest = max((need.proposed or MOST_SHOWN for need in needs), default=MOST_SHOWN)
    blocks = list(range(2, min(MOST_SHOWN, max(8, round(1.4 * widest))) + 1))
    for place, need in enumerate(needs, 1):
        sd = max(need.components.sd, 1e-9)
        for axes, power in ((equal, equivalence_power), (different, difference_power)):
            curve = [power(n, sd, goal.log_margin, goal.alpha) for n in blocks]
            axes.plot(blocks, curve, color=condition_color(place), label=need.components.condition)
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
    names = ", ".join(f"{need.components.condition}: {need.proposed or 'more than can be had'}" for need in needs)
    return sheet.render(figure, name="power", label=f"Power against blocks. Blocks proposed: {names}.")
