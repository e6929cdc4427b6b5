"""The name of a run, as plans, records and ledgers share it."""

from __future__ import annotations

from typing import NamedTuple


class RunKey(NamedTuple):
    """The name of a run: experiment, condition, replicate."""

    experiment: str
    condition: str
    replicate: int
