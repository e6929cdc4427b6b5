"""The page of a power calculation: the chance of each verdict by the number of blocks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from harness.html import code, figure, page
from harness.outputs import check_output, write_text
from harness.present.report.svg import INK, MUTED, PAGE_WIDTH_IN, Sheet, condition_color

if TYPE_CHECKING:
    from harness.judge.planning.needed import Goal, Needed

MOST_SHOWN = 120
POWER_POINTS = 24


def write_power_page(path: Path, title: str, needs: Sequence[Needed], goal: Goal, text: str) -> Path:
    """Write the page; text: the table and the lines to paste, as the terminal shows them."""
    path = check_output(path)
    with Sheet() as sheet:
        picture = power_plot(sheet, needs, goal)
    num_together = max(need.num_together for need in needs)
    judged = f", each with alpha / {num_together}" if num_together > 1 else ""
    of = f"by the number of blocks, for Gaussian log ratios{judged}"
    caption = f"Probability of the verdict {of}; dotted: what is wanted."
    write_text(path, page(title, [figure(picture, caption), code(text)]))
    return path


def power_plot(sheet: Sheet, needs: Sequence[Needed], goal: Goal) -> str:
    """Two panels: power to show equivalence when there is no difference, and to show one as large as the margin."""
    drawn = sheet.figure(PAGE_WIDTH_IN, 3.4)
    equal, different = drawn.subplots(1, 2, sharey=True)
    widest = max((need.proposed or MOST_SHOWN for need in needs), default=MOST_SHOWN)
    last = min(MOST_SHOWN, max(8, round(1.4 * widest)))
    blocks = sorted({round(number) for number in np.geomspace(2, last, num=POWER_POINTS)})
    for place, need in enumerate(needs, 1):
        curves = (
            (equal, [need.plan.power(n, 0.0, "equivalence") for n in blocks]),
            (different, [need.plan.power(n, need.at_margin, "difference") for n in blocks]),
        )
        for axes, curve in curves:
            axes.plot(blocks, curve, color=condition_color(place), label=need.components.condition)
    equal.set_title(f"true ratio 1: shown to be equal within {100 * goal.margin:.1f} %")
    different.set_title(f"true ratio {1 + goal.margin:.3f}: shown to differ")
    for axes in (equal, different):
        axes.axhline(goal.power, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
        axes.set(xlabel="blocks", xlim=(0, blocks[-1]), ylim=(0, 1.02))
        axes.grid(visible=True)
        axes.xaxis.get_major_locator().set_params(integer=True)
    equal.set_ylabel("power")
    equal.legend(loc="lower right", labelcolor=INK)
    names = ", ".join(f"{need.components.condition}: {need.proposed or 'more than can be had'}" for need in needs)
    return sheet.render(drawn, name="power", label=f"Power against blocks. Blocks proposed: {names}.")
