"""The HTML report of an experiment on disk, and its table of conditions on a terminal.

The file appears whole or not at all, and opens without a network. No figure is computed here. This is where the flow
ends: people read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from harness.analysis import ExperimentSummary
from harness.analysis.method.compare import Verdict
from harness.analysis.method.stats import Interval
from harness.analysis.method.summary import ConditionFigures
from harness.clock import NS_PER_S
from harness.errors import RecordsError
from harness.kinds import origin_note
from harness.outputs import check_output
from harness.records import SealedRun
from harness.records.disk import write_synced
from harness.spec import factors_text

if TYPE_CHECKING:
    from rich.table import Table

DASH = "\u2013"
VERDICTS = {
    Verdict.AGREE: "agree",
    Verdict.DIFFER: "[red]withheld[/]",
    Verdict.CANNOT_TELL: "[yellow]cannot tell[/]",
    Verdict.PREDICTED: "predicted",
}


def write_report(
    runs: Sequence[SealedRun], path: Path, *, title: str | None = None, timelines: Sequence[str] | None = None
) -> Path:
    """Write one self-contained HTML file about an experiment, and return its path.

    runs: all sealed runs of one experiment, invalid ones included (they are named, not counted). title: default: the
    experiment's own. timelines: labels "condition/replicate" of the runs to draw; default: one run per condition.
    Raises SpecError when there is nothing to report or a label is unknown, RecordsError when the disk refuses.
    """
    from harness.report.gather import gather
    from harness.report.page import render_page

    path = check_output(Path(path))
    page = render_page(gather(runs, title=title, timelines=timelines))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_synced(path, page.encode("utf-8"))
    except OSError as error:
        raise RecordsError(
            f"cannot write the report ({error.strerror or error})",
            where=str(path),
            hint="Free space or choose a writable place with --output",
        ) from error
    return path


def conditions_table(summary: ExperimentSummary) -> Table:
    """The conditions of an experiment as a table for the terminal; costs in seconds of the run's clock."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    origin = origin_note(summary.backend)
    unit = "s" if summary.time_scale == 1 else f"model s, \u00d7{summary.time_scale:g}"
    num_invalid = sum(not run.is_valid for run in summary.runs)
    counted = f"{len(summary.runs)} runs" + (f", {num_invalid} INVALID and not counted" if num_invalid else "")
    table = Table(
        title=Text(f"{summary.title} ({counted})" + (f"\n{origin}" if origin else "")),
        caption=Text(
            f"A, B: cost on both channels, sum over replicates [{unit}]; reused: of all re-arrivals; "
            "below A/base: its 95 % t interval, from three on; \u2020: per generated token, as the work differs"
        ),
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
    )
    # Every column is needed to read a row: on a narrow terminal cells wrap rather than lose a name or a digit.
    table.add_column("condition", overflow="fold")
    has_intervals = any(one.comparison is not None and one.comparison.interval_a for one in summary.conditions)
    for name in ("A", "B", "A/base", "B/base"):
        # Half an interval reads as another number; names fold before it does.
        is_whole = has_intervals and name == "A/base"
        table.add_column(name, justify="right", overflow="fold", no_wrap=is_whole)
    table.add_column("channels", overflow="fold")
    for name in ("steps", "padding", "reused"):
        table.add_column(name, justify="right", overflow="fold")
    for condition in summary.conditions:
        table.add_row(*_cells(condition))
    return table


def _cells(condition: ConditionFigures) -> tuple[str, ...]:
    compared = condition.comparison
    if compared is not None:
        verdict = VERDICTS[compared.verdict]
        mark = "" if compared.is_same_work else "\u2020"
        ratios = (
            _ratio(compared.ratio_a, mark, compared.interval_a),
            f"{compared.ratio_b:.4f}{mark}",
        )
    else:
        verdict, ratios = ("baseline" if condition.is_baseline else DASH), ("", "")
    return (
        condition.name + (f"\n[dim]{factors_text(condition.factors)}[/]" if condition.factors else ""),
        _seconds(condition.a_ns),
        _seconds(condition.b_ns),
        *ratios,
        verdict,
        f"{condition.num_steps:,}" if condition.num_steps else DASH,
        DASH if condition.padding.ratio is None else f"{condition.padding.ratio:.4f}",
        f"{condition.reuse.num_reused}/{condition.reuse.num_rearrivals}" if condition.reuse.num_rearrivals else DASH,
    )


def _ratio(ratio: float, mark: str, interval: Interval | None) -> str:
    return f"{ratio:.4f}{mark}" + ("" if interval is None else f"\n{interval.low:.3f}\u2013{interval.high:.3f}")


def _seconds(duration_ns: int | None) -> str:
    return DASH if duration_ns is None else f"{duration_ns / NS_PER_S:,.2f}"
