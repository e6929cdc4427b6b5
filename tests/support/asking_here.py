"""Scrapes of a run by the run's own process: a process for them takes a third of a second to start.

``tests/measure/server/test_ask.py`` tries the process itself. A request by httpx holds up a replay for milliseconds,
which limits of a minute bear.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import harness.runner.run
from harness.measure.server.ask import NO_HEADERS, Get, Reply, ask_metrics


@contextmanager
def asking_here(url: str, headers: Mapping[str, str] = NO_HEADERS) -> Generator[Get]:
    """As ``asking_process``, in the thread that asks."""
    place = url

    def get(deadline_s: float) -> Reply:
        nonlocal place
        reply, place = ask_metrics(place, deadline_s=deadline_s, headers=headers)
        return reply

    yield get


def ask_here() -> None:
    """From now on runs of this process ask so."""
    harness.runner.run.asking_process = asking_here
