"""What the paper prints and no other module counts: totals under rows, loaded memory.

Sums and counts only; a total of shares is the share of the total.
Definitions: docs/method.md, "Decomposition of a bucket change"; Tables XV and S7.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from harness.analysis.method.tabular import Cell
from harness.records import SealedRun, layout

GIB = 1 << 30
SERVING_SHARE = 0.5


class Contribution(NamedTuple):
    """One row of Table S7. n: a request count, "Other" or "Total"; shares of the total of their column."""

    n: str
    num_steps: int
    bucket_change: str
    slots_removed: int
    share_of_slots: float
    drop_of_p: float
    share_of_drop: float


def contributions(rows: Sequence[Mapping[str, Cell]], num_steps: int) -> list[Contribution]:
    """Rows of changed n, then all other steps, then the total. num_steps: decode steps over all n."""
    found = [
        Contribution(
            str(row["n"]),
            _int(row["h(n)"]),
            str(row["bucket_change"]),
            _int(row["slots_removed"]),
            _float(row["share_of_slots"]),
            _float(row["drop_of_p"]),
            _float(row["share_of_drop"]),
        )
        for row in rows
    ]
    if not found:
        return []
    changed = sum(one.num_steps for one in found)
    other = Contribution("Other", num_steps - changed, "No change", 0, 0.0, 0.0, 0.0)
    total = Contribution(
        "Total",
        num_steps,
        "-",
        sum(one.slots_removed for one in found),
        sum(one.share_of_slots for one in found),
        sum(one.drop_of_p for one in found),
        sum(one.share_of_drop for one in found),
    )
    return [*found, other, total]


def loaded_memory_gib(run: SealedRun) -> tuple[float, float] | None:
    """Least and most memory in use on a device that served the run, at its fullest; None without reports.

    A device serves when it holds more than half of what the fullest one holds: the model lies evenly on its devices.
    """
    path = run.file(layout.DEVICES)
    if not path.exists():
        return None
    reports = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # The first report is older than the server, the last one younger.
    fullest = max(([_used(one) for one in report.get("readings", ())] for report in reports), key=sum, default=[])
    used = [one for one in fullest if one]
    serving = [one for one in used if one > SERVING_SHARE * max(used)]
    return (min(serving) / GIB, max(serving) / GIB) if serving else None


def _used(reading: Mapping[str, Any]) -> int:
    return int(reading.get("memory_used_bytes") or 0)


def _int(cell: Cell) -> int:
    return int(cell) if isinstance(cell, int | float) else 0


def _float(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else 0.0
