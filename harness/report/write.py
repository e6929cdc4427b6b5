"""The HTML report of an experiment on disk.

The file appears whole or not at all, and opens without a network. No figure is computed here. This is where the flow
ends: people read it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.analysis import ExperimentSummary
from harness.errors import RecordsError, SpecError
from harness.outputs import check_output
from harness.records import SealedRun
from harness.records.disk import write_synced
from harness.report.view import Results


def check_report_page(path: Path) -> Path:
    """``path`` again when a report can go there: a new file, an empty one, or an earlier report of the harness."""
    if check_output(path).is_file() and (there := path.read_bytes()):
        is_report = there[:15].lower() == b"<!doctype html>" and b"rbln-harness" in there
        if not is_report:
            hint = "Name another file; `harness report --force` replaces it"
            raise SpecError("is there already and is no report of the harness", where=str(path), hint=hint)
    return path


def write_report(
    runs: Sequence[SealedRun],
    path: Path,
    *,
    title: str | None = None,
    timelines: Sequence[str] | None = None,
    results: Results | None = None,
    summary: ExperimentSummary | None = None,
) -> Path:
    """Write one self-contained HTML file about an experiment, and return its path.

    runs: all sealed runs of one experiment, invalid ones included (they are named, not counted). title: default: the
    experiment's own. timelines: labels "condition/replicate" of the runs to draw; shown first; default: one of each
    condition, and every other to choose. results: of the experiment's own analysis and rules. summary: of these runs,
    where it is at hand.
    Raises SpecError when there is nothing to report or a label is unknown, RecordsError when the disk refuses.
    """
    from harness.report.gather import gather
    from harness.report.page import render_page

    path = check_report_page(Path(path))
    page = render_page(gather(runs, title=title, timelines=timelines, results=results, page=path, summary=summary))
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
