"""Compare the vendor's scheduler with the engine over many random histories; one summary line per kind of server.

Run with the twin's Python: ``python -m tests.differential --artifact DIR --seeds 0:400``. Exit status 0 means no
difference.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import signal
import sys
from concurrent.futures import Executor, ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from tests.differential.tally import Outcome, Tally

if TYPE_CHECKING:
    from tests.differential.histories import History

DIFFERENCE_STATUS = 1
INTERRUPTED_STATUS = 130
BATCH_SEEDS = 16


def outcome_of(seed: int, num_steps: int, artifact: Path, rules: str) -> tuple[int, str, Outcome]:
    """Play the history of one seed; the vendor's packages are imported in the worker only."""
    from tests.differential.compare import play, sides_of

    sides = sides_of(rules, artifact)
    history = sides.draw(seed, num_steps)
    outcome = play(history, sides)
    gc.collect()
    return seed, history.geometry.kind, outcome


def report_difference(seed: int, num_steps: int, artifact: Path, rules: str) -> None:
    """Print the difference and the smallest history that shows it."""
    from tests.differential.compare import as_text, play, shrink, sides_of

    sides = sides_of(rules, artifact)

    def differs(history: History) -> int:
        played = play(history, sides)
        return played.at_operation if played.differences else -1

    history = sides.draw(seed, num_steps)
    outcome = play(history, sides)
    print(f"seed {seed}: differs at operation {outcome.at_operation}:", *outcome.differences, sep="\n  ", flush=True)
    smallest = shrink(history, differs)
    print("smallest history found:\n" + as_text(smallest))
    print(*play(smallest, sides).differences, sep="\n")


def main() -> int:
    """Play all seeds; 1 when any differs."""
    options = _options()
    first, last = (int(part) for part in options.seeds.split(":"))
    total = Tally()
    with ProcessPoolExecutor(
        options.workers, initializer=begin_worker, initargs=(options.rules, options.artifact)
    ) as pool:
        for batch in range(first, last, BATCH_SEEDS):
            play_batch(pool, range(batch, min(batch + BATCH_SEEDS, last)), options, total)
            if options.until_steps:
                print(f"{total.num_steps:,} of {options.until_steps:,} steps", file=sys.stderr, flush=True)
                if total.num_steps >= options.until_steps:
                    break
    print(total.text(), flush=True)
    for seed in total.different[: options.shrink]:
        report_difference(seed, options.steps, options.artifact, options.rules)
    return DIFFERENCE_STATUS if total.different else 0


def begin_worker(rules: str, artifact: Path) -> None:
    """In a worker: leave Ctrl-C to the main process, and spend no time on what no comparison needs."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from tests.differential.compare import sides_of

    sides_of(rules, artifact)
    # A third of the time went into walking the heap of the vendor's packages: it is walked once, then per history.
    gc.collect()
    gc.freeze()
    gc.disable()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--artifact", type=Path, required=True, help="a folder that `harness server twin artifact` wrote"
    )
    parser.add_argument("--seeds", default="0:100", help="first:last, last not included")
    parser.add_argument("--steps", type=int, default=600, help="steps per history")
    parser.add_argument("--rules", default="vendor-0.11.1", help="the engine's rules; must name the installed version")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--until-steps", type=int, default=0, help="stop once this many steps were compared")
    parser.add_argument("--shrink", type=int, default=1, help="how many differences to shrink")
    return parser.parse_args()


def play_batch(pool: Executor, seeds: range, options: argparse.Namespace, total: Tally) -> None:
    """Count the histories of some seeds, which are played on all workers."""
    for job in [pool.submit(outcome_of, seed, options.steps, options.artifact, options.rules) for seed in seeds]:
        try:
            seed, kind, outcome = job.result()
        except KeyboardInterrupt:
            # Waiting for this batch would take minutes.
            for worker in multiprocessing.active_children():
                worker.terminate()
            raise
        total.count(seed, kind, outcome)
        if outcome.differences:
            print(f"seed {seed}: {outcome.differences[0]}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED_STATUS)
