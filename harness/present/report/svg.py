"""Matplotlib figures as inline SVG whose colours follow the page (light, dark, print).

Figures are drawn in placeholder colours that are replaced by CSS variables, so one SVG serves every theme.
"""

from __future__ import annotations

import io
import os
import re
from html import escape
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

try:
    Path.home()
except RuntimeError:
    # matplotlib looks for settings in the user's home folder, and raises without one. Now it makes a temporary folder.
    os.environ.setdefault("MPLCONFIGDIR", os.devnull)

PAGE_WIDTH_IN = 10.66
NUM_CONDITION_COLORS = 8
NUM_BUCKET_COLORS = 8

INK = "#010101"
MUTED = "#020202"
GRID = "#030303"
SURFACE = "#040404"
WARN = "#050505"


def condition_color(index: int) -> str:
    """Placeholder of a condition's colour; the palette repeats after NUM_CONDITION_COLORS."""
    return f"#0a00{index % NUM_CONDITION_COLORS:02x}"


def bucket_color(rank: int, num_buckets: int) -> str:
    """Placeholder of a bucket's shade: rank 0 is the smallest bucket; shades spread over the whole ramp."""
    last = NUM_BUCKET_COLORS - 1
    shade = last if num_buckets <= 1 else round(rank * last / (num_buckets - 1))
    return f"#0b00{shade:02x}"


_VARIABLES = {
    INK: "--ink",
    MUTED: "--muted",
    GRID: "--grid",
    SURFACE: "--surface",
    WARN: "--warn",
    **{condition_color(i): f"--c{i}" for i in range(NUM_CONDITION_COLORS)},
    **{f"#0b00{i:02x}": f"--b{i}" for i in range(NUM_BUCKET_COLORS)},
}
_COLOR = re.compile("|".join(_VARIABLES))

_STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "report",
    "font.family": "DejaVu Sans",  # ships with matplotlib; wider than the system font the page then uses
    "font.size": 9.0,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titley": 1.0,  # set here: else each drawing measures all ticks to place it
    "axes.labelsize": 9.0,
    "axes.linewidth": 0.7,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "hatch.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.linewidth": 1.4,
}


def _no_manual(_artist: object) -> str:
    return ""


class Sheet:
    """A context in which figures are drawn in the page's style; ``figure`` makes them, ``render`` ends them."""

    def __init__(self) -> None:
        import matplotlib as mpl
        from matplotlib import artist

        # Each class of matplotlib writes its manual when it is loaded, a third of the loading; nobody reads it here.
        kwdoc, artist.kwdoc = artist.kwdoc, _no_manual
        try:
            import_module("matplotlib.figure")
        finally:
            artist.kwdoc = kwdoc
        self._context: Any = mpl.rc_context(_STYLE)

    def __enter__(self) -> Sheet:
        self._context.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._context.__exit__(*exception)

    def figure(self, width: float, height: float) -> Figure:
        """A new figure; inches, of which the page shows 96 px each at full width."""
        # Figure, not pyplot: no global state, no backend choice, no window.
        from matplotlib.figure import Figure

        return Figure(figsize=(width, height), layout="constrained")

    def panels(  # noqa: PLR0913  # the layout of a grid
        self,
        num: int,
        ylabel: str = "",
        *,
        a_row: int,
        heights: tuple[float, float],
        is_shared: bool = False,
        pair_width: float = 1.0,
    ) -> tuple[Figure, list[Axes]]:
        """A figure of ``num`` panels, at most ``a_row`` in a row; heights: of what is above the rows, and of each row.

        ylabel: of the first panel of each row. is_shared: the panels have one vertical axis. pair_width: of two
        panels, as a share of the page.
        """
        columns = min(a_row, num)
        rows, (above, row) = -(-num // columns), heights
        width = PAGE_WIDTH_IN * {1: 0.6, 2: pair_width}.get(columns, 1.0)
        figure = self.figure(width, above + row * rows)
        panels = list(figure.subplots(rows, columns, sharey=is_shared, squeeze=False).flat)
        for unused in panels[num:]:
            unused.set_visible(False)
        for first in panels[:num:columns]:
            first.set_ylabel(ylabel)
        return figure, panels[:num]

    def render(self, figure: Figure, *, name: str, label: str) -> str:
        """The figure as one <svg> element for screen readers and every theme.

        name: prefix of its ids, unique on the page. label: what the figure shows, in one sentence.
        """
        from matplotlib.backends.backend_svg import FigureCanvasSVG

        buffer = io.StringIO()
        # Not savefig: it draws a figure twice, once for its layout alone.
        FigureCanvasSVG(figure).print_svg(
            buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
        return _inline(buffer.getvalue(), name=name, label=label)


def _inline(document: str, *, name: str, label: str) -> str:
    """An SVG document as an inline element: no prolog, no metadata, own ids, CSS colours and fonts."""
    body = document[document.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)  # would apply to the whole page
    body = re.sub(r'\bid="([^"]+)"', rf'id="{name}-\1"', body)
    body = re.sub(r'(xlink:href="|url\()#', rf"\1#{name}-", body)
    body = body.replace("xlink:href=", "href=")
    body = _COLOR.sub(lambda match: f"var({_VARIABLES[match.group()]})", body)
    body = re.sub(r"font: ([0-9.]+px )'DejaVu Sans'[^;\"]*", r"font: \1var(--sans)", body)
    body = re.sub(r"font(-family)?: 'DejaVu Sans'[^;\"]*", "font-family: var(--sans)", body)
    view_box = re.search(r'viewBox="([^"]+)"', body)
    box = view_box.group(1) if view_box else "0 0 100 100"
    inner = body[body.index(">") + 1 :]
    inner = re.sub(r">\s+<", "><", re.sub(r"\s+", " ", inner)).strip()
    width = float(box.split()[2]) * 96 / 72
    return (
        f'<svg role="img" aria-label="{escape(label)}" viewBox="{box}" style="width:{width:.0f}px" class="plot">{inner}'
    )
