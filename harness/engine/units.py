"""Femtoseconds, in which costs are summed before the one rounding to nanoseconds. Constants only."""

from __future__ import annotations

FS_PER_NS = 1_000_000
FS_PER_US = 1_000_000_000
FS_PER_MS = 1_000_000_000_000
FS_PER_S = 1_000_000_000_000_000
