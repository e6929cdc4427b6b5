"""``python -m tests.doors SECONDS [FOLDER]``: knock at every door in turn until the time is over; finds are kept.

What was found before is tried first, each time: the corpus. Exit code 1 when anything was found.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections import Counter
from pathlib import Path

from harness.clock import NS_PER_S, monotonic_ns
from tests.doors.doors import doors
from tests.doors.knock import Find, inputs, knock

AT_ONCE = 50


def main(seconds: float, corpus: Path) -> int:
    """How many doors did not answer as they promise."""
    seed = random.SystemRandom().randrange(1 << 32)
    rng = random.Random(seed)
    every = list(doors())
    until_ns = monotonic_ns() + int(seconds * NS_PER_S)
    finds: dict[str, Find] = {}
    tried: Counter[str] = Counter()
    for door in every:
        for path in sorted((corpus / door.name.replace(", ", "-").replace(" ", "-")).glob("*")):
            if (find := knock(door, path.read_bytes())) is not None:
                finds.setdefault(door.name, find)
    streams = {door.name: inputs(door, rng) for door in every}
    while monotonic_ns() < until_ns:
        for door in every:
            for _, content in zip(range(AT_ONCE), streams[door.name], strict=False):
                tried[door.name] += 1
                if (find := knock(door, content)) is not None:
                    _keep(find, corpus)
                    finds.setdefault(door.name, find)
                if monotonic_ns() > until_ns:
                    break
    print(f"{sum(tried.values())} inputs at {len(every)} doors, seed {seed}, corpus in {corpus}")
    for find in finds.values():
        print(f"{find.door}: {find.what.strip()}\n    input {find.content[:200]!r}")
    return 1 if finds else 0


def _keep(find: Find, corpus: Path) -> None:
    folder = corpus / find.door.replace(", ", "-").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / hashlib.sha256(find.content).hexdigest()[:16]).write_bytes(find.content)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "runs/fuzz")))
