"""Padding of decode steps: pure arithmetic over (n, b) pairs, no model and no time.

Definitions: docs/reference/method.md, "Padding".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

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


def padding_of(steps: Mapping[tuple[int, int], int]) -> Padding:
    """Padded and total bucket positions over decode steps by (n, b)."""
    bucket_slots = sum(b * count for (_n, b), count in steps.items())
    return Padding(bucket_slots - sum(n * count for (n, _b), count in steps.items()), bucket_slots)


def total_padding(paddings: Iterable[Padding]) -> Padding:
    """Numerators and denominators summed before dividing."""
    listed = list(paddings)
    return Padding(sum(one.padded_slots for one in listed), sum(one.bucket_slots for one in listed))
