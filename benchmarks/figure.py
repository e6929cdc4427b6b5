"""One line of the benchmark, as every section gives it.

Next: ``figures`` gathers the sections.
"""

from __future__ import annotations

from typing import NamedTuple


class Figure(NamedTuple):
    """``mark``: the goal, "" where there is none."""

    name: str
    value: str
    mark: str
    note: str = ""
