"""What came of the histories that a differential run has played so far."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Outcome:
    """What came of one history; here, so that who receives it from a worker need not import the vendor's packages.

    steps: compared ones, idle ones aside. counts: what happened in them. differences: of the first that differs.
    """

    steps: int = 0
    counts: Counter[str] = field(default_factory=Counter[str])
    differences: list[str] = field(default_factory=list[str])
    at_operation: int = -1
    vendor_error: str = ""


@dataclass
class Tally:
    """Steps by kind of server, what happened in them, histories that the vendor's own exception ended, and seeds."""

    steps: Counter[str] = field(default_factory=Counter[str])
    counts: Counter[str] = field(default_factory=Counter[str])
    errors: Counter[str] = field(default_factory=Counter[str])
    different: list[int] = field(default_factory=list[int])
    histories: int = 0

    @property
    def num_steps(self) -> int:
        return self.steps.total()

    def count(self, seed: int, kind: str, outcome: Outcome) -> None:
        """Take in one history."""
        self.histories += 1
        self.steps[kind] += outcome.steps
        self.counts.update(outcome.counts)
        if outcome.vendor_error:
            self.errors[outcome.vendor_error.splitlines()[0][:100]] += 1
        if outcome.differences:
            self.different.append(seed)

    def text(self) -> str:
        """A line per kind of server, what happened, and the sum."""
        lines = [f"{self.steps[kind]:>9,} steps: {kind}" for kind in sorted(self.steps)]
        lines.append("; ".join(f"{name} {count:,}" for name, count in sorted(self.counts.items())))
        ended = "histories ended by the vendor's own exception"
        lines += [f"{count:>9,} {ended}: {text}" for text, count in self.errors.most_common()]
        lines.append(
            f"{self.num_steps:,} steps in {self.histories:,} histories, {len(self.different)} with a difference"
        )
        return "\n".join(lines)
