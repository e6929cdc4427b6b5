"""Reports without what most tests do not look at and what costs most: figures, and the search for a hint.

``tests/present/report`` looks at figures, ``tests/tune/test_hint.py`` at hints.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator
from contextlib import contextmanager

import harness.present.report.page
import harness.tune.hint

_plots_of = harness.present.report.page.plots_of


def leave_out() -> None:
    """From now on reports of this process have neither."""
    import harness.present.report.page
    import harness.tune.hint

    harness.present.report.page.plots_of = _no_plots
    harness.tune.hint.hint = _no_hint


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


def _no_hint(_sealed: object, _source: object = "") -> None:
    return None
