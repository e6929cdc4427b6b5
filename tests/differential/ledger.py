"""What a differential run has played so far: sums that can be written down, so that a long run may be interrupted.

A ledger holds results of one rule set, one length of histories and one state of the code; others in it are passed over.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
COMPARED_CODE = (
    "harness/model/engine",
    "harness/measure/emulator/logs.py",
    "harness/model/plan/blocks.py",
    *(
        f"tests/differential/{name}.py"
        for name in (
            *("compare", "engine_side", "histories", "paged_side", "paged_vendor", "seen"),
            *("vendor_copies", "vendor_side", "vllm_requests"),
        )
    ),
)
"""What decides how a history is drawn and how the engine plays it."""


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

    def add(self, other: Tally) -> None:
        """Take in what another run counted."""
        self.histories += other.histories
        self.steps.update(other.steps)
        self.counts.update(other.counts)
        self.errors.update(other.errors)
        self.different += other.different

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


class Ledger:
    """A file with one line per finished batch of seeds; without a file nothing is kept."""

    def __init__(self, path: Path | None, key: Sequence[str | int]) -> None:
        self._path = path
        self._key = list(key)
        self._known: dict[tuple[int, int], Tally] = {}
        for record in _records(path):
            if record["key"] == self._key:
                self._known[record["first"], record["last"]] = _tally(record["tally"])

    def recall(self, seeds: range) -> Tally | None:
        """What an earlier run of the same code counted for these seeds."""
        return self._known.get((seeds.start, seeds.stop))

    def record(self, seeds: range, tally: Tally) -> None:
        """Keep a finished batch. A batch with a difference is not kept: it is to be seen again."""
        if self._path is None or tally.different:
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        line = {"key": self._key, "first": seeds.start, "last": seeds.stop, "tally": vars(tally)}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _records(path: Path | None) -> list[dict[str, Any]]:
    if path is None or not path.is_file():
        return []
    records: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            records.append(json.loads(line))
        except ValueError:
            # The line that an interruption tore.
            continue
    return records


def _tally(fields: dict[str, Any]) -> Tally:
    counters = {name: Counter[str](fields[name]) for name in ("steps", "counts", "errors")}
    return Tally(**counters, different=fields["different"], histories=fields["histories"])


def code_hash() -> str:
    """A hash of the code that is compared and of the code that compares."""
    digest = hashlib.sha256()
    for name in COMPARED_CODE:
        path = CHECKOUT / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]
