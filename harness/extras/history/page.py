"""Histories of figures as a table, as lines, and as plots. Nothing is computed here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from harness.analysis.figures import cells, same
from harness.errors import SpecError
from harness.extras.history.points import History, HistoryPoint
from harness.html import plain_page
from harness.judge.decisions.gate import FIGURES
from harness.outputs import check_output, write_text
from harness.present.report.svg import INK, MUTED, PAGE_WIDTH_IN, Sheet, condition_color
from harness.table import Table, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

HISTORY_HEIGHT_IN = 2.9


def history_table(histories: Sequence[History]) -> Table:
    """A row for each point of each history."""
    rows = (
        {
            "experiment": history.experiment,
            "condition": history.condition,
            "figure": history.figure,
            "date": point.date,
            "release": point.release,
            "place": point.place,
            "runs": point.num_runs,
            "value": point.value,
            **cells(point.interval, same("low", "high")),
            "change": point.change,
        }
        for history in histories
        for point in history.points
    )
    caption = (
        "value: mean over runs, low to high its 95 % interval; change: the level from here on over the level before."
    )
    origins = " ".join(dict.fromkeys(history.origin for history in histories if history.origin))
    return table_of("Figures over releases", caption, rows, origins)


def history_lines(histories: Sequence[History]) -> Iterator[str]:
    """A sentence for each change, or that there is none, and the notes."""
    for history in histories:
        name = f"{history.condition}, {history.figure}"
        for point in history.changes:
            yield f"{name}: from {point.date[:10]} ({point.release}, {point.place}) on {_change(point)}"
        if not history.changes:
            yield f"{name}: no change shown"
        yield from (f"note: {name}: {note}" for note in history.notes)


def write_history(path: Path, histories: Sequence[History]) -> Path:
    """The plots as an HTML page, or as one SVG file; SpecError for another suffix."""
    if path.suffix not in {".html", ".svg"}:
        raise SpecError("is neither .html nor .svg", where=str(path), hint="Name a file with one of these suffixes")
    text = "\n".join(history_lines(histories))
    origins = " ".join(dict.fromkeys(history.origin for history in histories if history.origin))
    if path.suffix == ".svg":
        return _write_history_svg(path, histories, origins)
    with Sheet() as sheet:
        plots = "".join(_history_picture(sheet, history, place) for place, history in enumerate(histories))
    title = f"History of {', '.join(dict.fromkeys(history.experiment for history in histories))}"
    caption = f"Means over runs with 95 % intervals, by date; a dashed line: the level changed. {escape(origins)}"
    main = f"{plots}<figure><figcaption>{caption}</figcaption></figure><pre>{escape(text)}</pre>"
    write_text(path, plain_page(title, main))
    return path


def _write_history_svg(path: Path, histories: Sequence[History], origins: str) -> Path:
    with Sheet() as sheet:
        figure = sheet.figure(PAGE_WIDTH_IN, HISTORY_HEIGHT_IN * len(histories))
        figure.set_layout_engine("constrained")
        for axes, history in zip(figure.subplots(len(histories), 1, squeeze=False)[:, 0], histories, strict=True):
            _history_plot(axes, history)
            axes.set_title(_history_title(history), loc="left", color=INK)
        figure.suptitle(origins, fontsize=8.5, color=MUTED)
        figure.savefig(check_output(path), format="svg", metadata={"Date": None})
    return path


def _history_picture(sheet: Sheet, history: History, place: int) -> str:
    """One plot below its heading."""
    figure = sheet.figure(PAGE_WIDTH_IN, HISTORY_HEIGHT_IN)
    _history_plot(figure.subplots(), history)
    label = " ".join(history_lines([history]))
    picture = sheet.render(figure, name=f"history{place}", label=label)
    return f"<h2>{escape(_history_title(history))}</h2><figure>{picture}</figure>"


def _history_title(history: History) -> str:
    return f"{history.condition}: {FIGURES[history.figure].meaning}"


def _history_plot(axes: Axes, history: History) -> None:
    places = range(len(history.points))
    color = condition_color(1)
    axes.plot(places, [point.value for point in history.points], color=color, marker="o", markersize=4, linewidth=0.9)
    for place, point in enumerate(history.points):
        if point.interval is not None:
            axes.vlines(place, point.interval.low, point.interval.high, color=color, linewidth=1.4)
        if point.change is not None:
            axes.axvline(place - 0.5, color=MUTED, linewidth=0.9, linestyle=(0, (3, 2)))
            axes.annotate(_change(point), (place - 0.45, 1.0), xycoords=("data", "axes fraction"), va="top", fontsize=8)
    axes.set_xticks(list(places), [f"{point.date[:10]}\n{point.release}" for point in history.points], fontsize=7)
    axes.grid(visible=True, axis="y")


def _change(point: HistoryPoint) -> str:
    return f"{100 * ((point.change or 1.0) - 1):+.1f} %"
