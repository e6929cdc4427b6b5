"""Makes runs one after another in one process, with an event when a run begins and when it is sealed.

Also judges whether an INVALID run would fail again: all its requests failed alike, or its settings differ.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from harness.experiment import PlannedRun
from harness.records import RunKey, RunStore, SealedRun, keep_for_retry
from harness.records.schema import ABORTED
from harness.runner.backends import backend_named
from harness.runner.run import RunContext


@dataclass(frozen=True, slots=True)
class Began:
    """A run is about to start its server."""

    key: RunKey


@dataclass(frozen=True, slots=True)
class Made:
    """A run is sealed."""

    run: SealedRun


def perform_in_order(
    runs: Sequence[PlannedRun], context: RunContext, again: Container[RunKey]
) -> Iterator[Began | Made]:
    """Make runs one after another; ends early when the user stops it or the caller stops iterating.

    again: runs that repeat an INVALID run, which is kept. Raises as the backend does.
    """
    for run in runs:
        if context.stop.after_run:
            return
        yield Began(run.key)
        if run.key in again:
            # Only now: INVALID runs that are not reached keep their names.
            keep_for_retry(RunStore(context.runs_root).run(*run.key))
        sealed = backend_named(run.spec.backend).perform(run, context)
        if sealed is None:  # aborted by the user
            return
        yield Made(sealed)


ANSWERED = ("ok", ABORTED)
# Reasons that no repetition changes.
LASTING = ("setting-differs:", "setting-unshown:", "metrics-missing:")
_NUMBERS = re.compile(r"\b[\da-f-]*\d[\da-f-]*\b", re.IGNORECASE)


def failed_alike(run: SealedRun) -> str:
    """The common failure of all requests of a run, as the first reported it; "" where an answer came or they differ.

    Numbers and ids in the messages may differ.
    """
    if run.is_valid:
        return ""
    rows = run.table("requests").select(["status", "error"]).to_pylist()
    sent = [row for row in rows if row["status"] != "not_sent"]
    kinds = {(row["status"], _NUMBERS.sub("#", row["error"])) for row in sent}
    if len(kinds) != 1 or sent[0]["status"] in ANSWERED:
        return ""
    return f"{sent[0]['status']}: {sent[0]['error']}" if sent[0]["error"] else str(sent[0]["status"])


def will_fail_again(run: SealedRun) -> bool:
    """Whether a repetition of this INVALID run would be INVALID for the same reason."""
    return any(reason.startswith(LASTING) for reason in run.invalid_reasons) or bool(failed_alike(run))
