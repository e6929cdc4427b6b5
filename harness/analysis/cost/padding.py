"""Padding of decode steps: pure arithmetic over (n, b) pairs, no model and no time.

Definitions: docs/reference/method.md, "Padding".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa


class Padding(NamedTuple):
    """Bucket positions of decode steps: ``padded_slots`` of ``bucket_slots`` held no request."""

    padded_slots: int
    bucket_slots: int

    @property
    def ratio(self) -> float | None:
        """p = sum(b - n) / sum(b); None without steps."""
        return self.padded_slots / self.bucket_slots if self.bucket_slots else None


def steps_by_n_b(steps: pa.Table) -> dict[tuple[int, int], int]:
    """Decode steps by (requests really in the step, bucket). steps: columns n, b."""
    pairs = zip(steps.column("n").to_pylist(), steps.column("b").to_pylist(), strict=True)
    return dict(sorted(Counter(pairs).items()))


def padding(steps: pa.Table) -> Padding:
    """Padded and total bucket positions over decode steps."""
    n, b = steps.column("n").to_numpy(), steps.column("b").to_numpy()
    bucket_slots = int(b.sum(dtype=np.int64))
    return Padding(bucket_slots - int(n.sum(dtype=np.int64)), bucket_slots)


def total_padding(paddings: Iterable[Padding]) -> Padding:
    """Numerators and denominators summed before dividing."""
    listed = list(paddings)
    return Padding(sum(one.padded_slots for one in listed), sum(one.bucket_slots for one in listed))
