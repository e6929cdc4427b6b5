"""Cumulative waiting W of other sessions during prefills, measured where something saw it, beside what the model says.

The observer inside a server gives it exactly; stamps of log and streams give it where clients streamed. It is session
time and never part of device time.
Definition: docs/method.md, "Waiting": W_j = integral of K_j(t) dt over a prefill.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.analysis.logs.observer import held_back, load_observer
from harness.analysis.method.interference import measured_waiting_session_ns
from harness.analysis.method.reuse import sum_or_none
from harness.analysis.method.verdicts import ExperimentRuns
from harness.clock import NS_PER_S
from harness.records import SealedRun, layout
from harness.table import Cell, Table, table_of


class MeasuredWaiting(NamedTuple):
    """session_ns: W in session-nanoseconds of the run's clock. source: "observer", or "stamps and streams"."""

    session_ns: int
    source: str


def measured_waiting(run: SealedRun) -> MeasuredWaiting | None:
    """W of a run as it was seen; None where nothing saw it: no observer, and no streams or no stamps.

    Observer: over each prefill step, its duration times the requests that were running beside it; its instants are the
    machine's own clock, so they are scaled to the run's.
    """
    path = run.file(layout.OBSERVER)
    if path.exists():
        prefills = held_back(load_observer(path).steps)
        wall_ns = np.asarray(prefills["duration_ns"]) * np.asarray(prefills["others"])
        return MeasuredWaiting(round(float(wall_ns.sum()) * run.manifest.time_scale), "observer")
    session_ns = measured_waiting_session_ns(run)
    return None if session_ns is None else MeasuredWaiting(session_ns, "stamps and streams")


def waiting_table(experiment: ExperimentRuns) -> Table:
    """W per condition, modelled and measured, over the replicates where it was measured; none without any."""
    rows: list[dict[str, Cell]] = []
    for condition, runs in experiment.runs.items():
        seen = {run.replicate: found for run in runs if (found := measured_waiting(run)) is not None}
        if not seen:
            continue
        figures = [one for one in experiment.figures(condition) if one.replicate in seen]
        modelled_ns = sum_or_none(one.waiting_session_ns for one in figures)
        measured_ns = sum(found.session_ns for found in seen.values())
        rows.append(
            {
                "condition": condition,
                "W_modelled_session_s": None if modelled_ns is None else modelled_ns / NS_PER_S,
                "W_measured_session_s": measured_ns / NS_PER_S,
                "measured_over_modelled": measured_ns / modelled_ns if modelled_ns else None,
                "source": ", ".join(sorted({found.source for found in seen.values()})),
                "replicates": len(seen),
            }
        )
    caption = "Waiting of other sessions during prefills, sums over replicates; session time, no device time"
    return table_of("waiting", caption, rows)
