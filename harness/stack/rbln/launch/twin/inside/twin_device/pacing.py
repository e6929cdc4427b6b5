"""Modelled time: when a device call may return. No other module of the device reads or waits for time.

In "period" mode a step starts at the end of the previous step, so the host's work is hidden inside it; in "device"
mode it starts when called. Lateness is never caught up.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

TimingMode = Literal["period", "device", "none"]
FS_PER_NS = 1_000_000
HIDDEN_HOST_NS = 25_000_000
"""A shorter gap between two calls means that the host prepared the next step and was not idle."""


def now_ns() -> int:
    """CLOCK_MONOTONIC, the clock of the harness and of vLLM's own events."""
    return time.monotonic_ns()  # noqa: TID251 - runs inside the server, where the harness's clock is not


def wait_until(deadline_ns: int) -> None:
    """Return at ``deadline_ns``, or at once when it has passed."""
    left_ns = deadline_ns - now_ns()
    if left_ns > 0:
        time.sleep(left_ns / 1e9)  # noqa: TID251 - as above


@dataclass(frozen=True)
class StepCosts:
    """A cost model's coefficients in whole femtoseconds, computed by the harness for this artifact's buckets.

    Decode: bucket_fs[b] + alpha + beta n + context * (sum of lengths). Prefill of q tokens after C cached ones: over
    its ceil(q / chunk) calls j, call + token q + position (C + chunk j).
    """

    bucket_fs: Mapping[int, int]
    alpha_fs: int = 0
    beta_fs: int = 0
    context_fs: int = 0
    chunk_tokens: int = 128
    call_fs: int = 0
    token_fs: int = 0
    position_fs: int = 0

    def decode_ns(self, bucket: int, num_seqs: int, context_tokens: int) -> int:
        """Duration of one decode step."""
        total = self.bucket_fs[bucket] + self.alpha_fs + self.beta_fs * num_seqs + self.context_fs * context_tokens
        return (total + FS_PER_NS // 2) // FS_PER_NS

    def prefill_ns(self, computed_tokens: int, cached_tokens: int) -> int:
        """Duration of a prefill up to and including ``computed_tokens``."""
        calls = -(-computed_tokens // self.chunk_tokens)
        positions = calls * cached_tokens + self.chunk_tokens * (calls * (calls - 1) // 2)
        total = calls * (self.call_fs + self.token_fs * computed_tokens) + self.position_fs * positions
        return (total + FS_PER_NS // 2) // FS_PER_NS


class Pacer:
    """Start and end of each step of one device."""

    def __init__(self, mode: TimingMode) -> None:
        self.mode: TimingMode = mode
        self._step_start_ns = 0
        self._last_end_ns = 0

    def begin(self) -> int:
        """Begin a step; returns its start, ns."""
        now = now_ns()
        hides_host = self.mode == "period" and now - self._last_end_ns < HIDDEN_HOST_NS
        self._step_start_ns = self._last_end_ns if hides_host else now
        return self._step_start_ns

    def end(self, duration_ns: int) -> int:
        """Wait until the step is ``duration_ns`` old; returns its end, ns. Called for each chunk of a prefill."""
        if self.mode != "none":
            wait_until(self._step_start_ns + duration_ns)
        self._last_end_ns = now_ns()
        if self.mode == "period":
            # A late wake-up is this machine's fault and is taken out; a late call is real and stays.
            late_ns = self._last_end_ns - (self._step_start_ns + duration_ns)
            if late_ns < 1_000_000:
                self._last_end_ns -= late_ns
        return self._last_end_ns


def costs_from(table: Mapping[str, object]) -> StepCosts:
    """StepCosts from the settings file; bucket keys arrive as text."""
    buckets = table["bucket_fs"]
    assert isinstance(buckets, Mapping)
    numbers = {key: int(str(value)) for key, value in table.items() if key != "bucket_fs"}
    return StepCosts(bucket_fs={int(str(key)): int(str(value)) for key, value in buckets.items()}, **numbers)


def sum_of_lengths(positions: Sequence[int]) -> int:
    """Sum of the sequence lengths of a decode step's rows: the token at position p is the (p + 1)th."""
    return sum(positions) + len(positions)
