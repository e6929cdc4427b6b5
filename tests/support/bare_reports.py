"""Reports without figures, which cost most and which most tests do not look at; ``tests/present/report`` does."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import harness.present.report.page

_plots_of = harness.present.report.page.plots_of


def leave_out() -> None:
    """From now on reports of this process have none."""
    import harness.present.report.page

    harness.present.report.page.plots_of = _no_plots


@contextmanager
def with_figures() -> Generator[None]:
    """Reports that are written within have their figures."""
    left_out, harness.present.report.page.plots_of = harness.present.report.page.plots_of, _plots_of
    try:
        yield
    finally:
        harness.present.report.page.plots_of = left_out


def _no_plots(_view: object) -> defaultdict[str, str]:
    return defaultdict(str)
