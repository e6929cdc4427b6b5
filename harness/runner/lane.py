"""Runs made one after another by one process, each told of when it begins and when it is sealed.

Whoever listens may be in this process or in another one. What is made next is settled before.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from harness.experiment import PlannedRun
from harness.records import RunKey, RunStore, SealedRun, keep_for_retry
from harness.runner.backends import backend_named
from harness.runner.run import Invocation


@dataclass(frozen=True, slots=True)
class Began:
    """A run is about to start its server."""

    key: RunKey


@dataclass(frozen=True, slots=True)
class Made:
    """A run is sealed."""

    run: SealedRun


def perform_in_order(
    runs: Sequence[PlannedRun], invocation: Invocation, again: Container[RunKey]
) -> Iterator[Began | Made]:
    """Make runs one after another and tell of each; ends early as the person wishes, or when nobody asks further.

    again: those that repeat an INVALID run, which is kept. Raises as the backend does.
    """
    for run in runs:
        if invocation.stop.after_run:
            return
        yield Began(run.key)
        if run.key in again:
            # Only now: what is not reached keeps its place.
            keep_for_retry(RunStore(invocation.runs_root).run(*run.key))
        sealed = backend_named(run.spec.backend).perform(run, invocation)
        if sealed is None:  # aborted by the person; nothing of it is kept as whole
            return
        yield Made(sealed)
