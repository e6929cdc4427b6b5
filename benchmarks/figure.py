"""One line of the benchmark, as every section gives it: a value, its mark, and samples beside those of a reference.

A reference is simpler code for the same work, run in turns with it, so that figures of two machines can be compared.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

from harness.clock import NS_PER_S, process_cpu_ns

Better = Literal["less", "more"]
BYTES_PER_KIB = 1024
STATUS = Path("/proc/self/status")


class Measured(NamedTuple):
    """samples: the figure of each repetition; reference: that of the reference run right beside it, in the same unit.

    beside: what the reference is. better: whether less (a time) or more (a rate) of the unit is better.
    """

    samples: tuple[float, ...]
    reference: tuple[float, ...]
    beside: str
    better: Better = "less"

    @property
    def times_as_good(self) -> list[float]:
        """Of each repetition, how many times as fast as its reference it was; above 1 is better."""
        pairs = zip(self.samples, self.reference, strict=True)
        return [sample / other if self.better == "more" else other / sample for sample, other in pairs]

    def __str__(self) -> str:
        ratios = self.times_as_good
        low, middle, high = (
            f"{each:,.3g}" if each < 1000 else f"{each:,.0f}"
            for each in (min(ratios), statistics.median(ratios), max(ratios))
        )
        return f"{middle} [{low} .. {high}] times as good as {self.beside}"


class Figure(NamedTuple):
    """``mark``: the goal, "" where there is none. measured: None where no speed is measured."""

    name: str
    value: str
    mark: str = ""
    note: str = ""
    measured: Measured | None = None

    def __str__(self) -> str:
        beside = f"  {self.measured}" if self.measured else ""
        mark = f"  (mark: {self.mark})" if self.mark else ""
        note = f"  {self.note}" if self.note else ""
        return f"{self.name:<46} {self.value}{beside}{mark}{note}"


def in_turns(
    sample: Callable[[], float], reference: Callable[[], float], repeats: int, beside: str, better: Better = "less"
) -> Measured:
    """``repeats`` samples of each, one after the other, so that what disturbs the machine disturbs both."""
    pairs = [(sample(), reference()) for _ in range(repeats)]
    return Measured(tuple(pair[0] for pair in pairs), tuple(pair[1] for pair in pairs), beside, better)


def cpu_s(work: Callable[[], object]) -> float:
    """CPU seconds of this process that ``work`` takes."""
    began_ns = process_cpu_ns()
    work()
    return (process_cpu_ns() - began_ns) / NS_PER_S


def per_cpu_s(work: Callable[[], int], at_least_s: float) -> float:
    """What ``work`` counts, per CPU second; it is repeated until that many have passed."""
    count, spent_s = 0, 0.0
    began_ns = process_cpu_ns()
    while spent_s < at_least_s:
        count += work()
        spent_s = (process_cpu_ns() - began_ns) / NS_PER_S
    return count / spent_s


def resident_bytes(field: str) -> int:
    """Memory of this process: VmRSS now, VmHWM at most. The peak of getrusage includes that of the parent."""
    (line,) = [line for line in STATUS.read_text(encoding="ascii").splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * BYTES_PER_KIB
