"""Compare the vendor's scheduler with the engine over many random histories; one summary line per kind of server.

Run with the twin's Python: ``python -m tests.differential --artifact DIR --seeds 0:400``. Exit status 0 means no
difference. Next: ``make differential`` and the short sweep of the tests.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.differential.compare import Outcome

DIFFERENCE_STATUS = 1


def outcome_of(seed: int, num_steps: int, artifact: Path, rules: str) -> tuple[int, str, Outcome]:
    """Play the history of one seed; the vendor's packages are imported in the worker only."""
    from tests.differential.compare import play
    from tests.differential.engine_side import EngineServer
    from tests.differential.histories import draw_history

    history = draw_history(seed, num_steps)
    return seed, history.geometry.kind, play(history, artifact, partial(EngineServer, rules=rules))


def report_difference(seed: int, num_steps: int, artifact: Path, rules: str, outcome: Outcome) -> None:
    """Print the difference and the smallest history that shows it."""
    from tests.differential.compare import as_text, play, shrink
    from tests.differential.engine_side import EngineServer
    from tests.differential.histories import History, draw_history

    engine = partial(EngineServer, rules=rules)

    def differs(history: History) -> int:
        played = play(history, artifact, engine)
        return played.at_operation if played.differences else -1

    print(f"seed {seed}: differs at operation {outcome.at_operation}:", *outcome.differences, sep="\n  ", flush=True)
    smallest = shrink(draw_history(seed, num_steps), differs)
    print("smallest history found:\n" + as_text(smallest))
    print(*play(smallest, artifact, engine).differences, sep="\n")


def main() -> int:
    """Play all seeds; 1 when any differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--artifact", type=Path, required=True, help="a folder that `harness twin artifact` wrote")
    parser.add_argument("--seeds", default="0:100", help="first:last, last not included")
    parser.add_argument("--steps", type=int, default=600, help="steps per history")
    parser.add_argument("--rules", default="vendor-0.11.1", help="the engine's rules; must name the installed version")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--until-steps", type=int, default=0, help="stop once this many steps were compared")
    parser.add_argument("--shrink", type=int, default=1, help="how many differences to shrink")
    options = parser.parse_args()
    first, last = (int(part) for part in options.seeds.split(":"))
    steps: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    different: list[tuple[int, Outcome]] = []
    histories = 0
    with ProcessPoolExecutor(options.workers) as pool:
        for batch in range(first, last, 64):
            seeds = range(batch, min(batch + 64, last))
            jobs = [pool.submit(outcome_of, seed, options.steps, options.artifact, options.rules) for seed in seeds]
            for job in jobs:
                seed, kind, outcome = job.result()
                histories += 1
                steps[kind] += outcome.steps
                counts.update(outcome.counts)
                if outcome.vendor_error:
                    errors[outcome.vendor_error.splitlines()[0][:100]] += 1
                if outcome.differences:
                    different.append((seed, outcome))
            if options.until_steps and steps.total() >= options.until_steps:
                break
    for kind in sorted(steps):
        print(f"{steps[kind]:>9,} steps: {kind}")
    print("; ".join(f"{name} {count:,}" for name, count in sorted(counts.items())))
    for text, count in errors.most_common():
        print(f"{count:>9,} histories ended by the vendor's own exception: {text}")
    print(f"{steps.total():,} steps in {histories:,} histories, {len(different)} with a difference", flush=True)
    for seed, outcome in different[: options.shrink]:
        report_difference(seed, options.steps, options.artifact, options.rules, outcome)
    return DIFFERENCE_STATUS if different else 0


if __name__ == "__main__":
    sys.exit(main())
