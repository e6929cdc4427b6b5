"""Histories of figures as a table, as a page with a picture each, and as a file for Apache Otava. Computes nothing."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.analysis.figures import cells, same
from harness.errors import SpecError
from harness.extras.history.points import History
from harness.html import code, figure, page, section
from harness.judge.decisions.gate import FIGURES
from harness.outputs import write_text
from harness.present.report.svg import PAGE_WIDTH_IN, Sheet, condition_color
from harness.table import Table, table_of, to_html

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
        }
        for history in histories
        for point in history.points
    )
    origins = " ".join(dict.fromkeys(history.origin for history in histories if history.origin))
    return table_of("Figures over releases", "value: mean over runs, low to high its 95 % interval.", rows, origins)


def history_notes(histories: Sequence[History]) -> Iterator[str]:
    """What a reader must know of the points, a line each."""
    for history in histories:
        yield from (f"note: {history.condition}, {history.figure}: {note}" for note in history.notes)


def write_history(path: Path, histories: Sequence[History]) -> Path:
    """Writes a page (.html), or a file for Apache Otava (.csv); SpecError for another suffix."""
    if path.suffix not in {".html", ".csv"}:
        raise SpecError("is neither .html nor .csv", where=str(path), hint="Name a file with one of these suffixes")
    write_text(path, _page(histories) if path.suffix == ".html" else otava_csv(histories))
    return path


def otava_csv(histories: Sequence[History]) -> str:
    """A row for each place by date, a column for each figure of a condition, as Otava's CSV tests read them."""
    series = {
        f"{history.experiment}.{history.condition}.{history.figure}": {point.place: point for point in history.points}
        for history in histories
    }
    places = {point.place: point for history in histories for point in history.points}
    rows = [
        (
            point.date,
            point.release,
            place,
            *(points[place].value if place in points else "" for points in series.values()),
        )
        for place, point in sorted(places.items(), key=lambda item: item[1].date)
    ]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([("time", "release", "place", *series), *rows])
    return text.getvalue()


def _page(histories: Sequence[History]) -> str:
    with Sheet() as sheet:
        plots = [_picture(sheet, history, place) for place, history in enumerate(histories)]
    title = f"History of {', '.join(dict.fromkeys(history.experiment for history in histories))}"
    return page(title, [*plots, to_html(history_table(histories)), code("\n".join(history_notes(histories)))])


def _picture(sheet: Sheet, history: History, place: int) -> str:
    """One plot below its heading."""
    drawn = sheet.figure(PAGE_WIDTH_IN, HISTORY_HEIGHT_IN)
    _plot(drawn.subplots(), history)
    title = f"{history.condition}: {FIGURES[history.figure].meaning}"
    picture = sheet.render(drawn, name=f"history{place}", label=f"{title}, by date; the table has its numbers")
    return section(title, figure(picture))


def _plot(axes: Axes, history: History) -> None:
    places = range(len(history.points))
    color = condition_color(1)
    axes.plot(places, [point.value for point in history.points], color=color, marker="o", markersize=4, linewidth=0.9)
    for place, point in enumerate(history.points):
        if point.interval is not None:
            axes.vlines(place, point.interval.low, point.interval.high, color=color, linewidth=1.4)
    axes.set_xticks(list(places), [f"{point.date[:10]}\n{point.release}" for point in history.points], fontsize=7)
    axes.grid(visible=True, axis="y")
