"""Proof that the comparison sees and shrinks: a vendor's scheduler that evicts in another order than its release does.

Prints the shrunk history; exit status 0 when a difference was found.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from vllm_rbln.v1.core.prefix_cache_manager.optimum_eviction_policy import LRUEvictionPolicy

from tests.differential import compare
from tests.differential.histories import Geometry, History, draw_history
from tests.differential.vendor_side import VendorServer


class LastUsedFirst(VendorServer):
    """The vendor with its own other policy, which it ships and never builds: slots leave by last use."""

    def __init__(self, geometry: Geometry, artifact: Path) -> None:
        super().__init__(geometry, artifact)
        if geometry.prefix_caching:
            self.scheduler.kv_cache_manager.prefix_cache_manager._eviction_policy = LRUEvictionPolicy()


def main(artifact: Path, rules: str) -> int:
    """Find a history on which the changed vendor differs from the engine, and shrink it."""
    sides = compare.sides_of(rules, artifact)._replace(vendor=partial(LastUsedFirst, artifact=artifact))

    def differs(history: History) -> int:
        outcome = compare.play(history, sides)
        return outcome.at_operation if outcome.differences else -1

    for seed in range(40):
        history = draw_history(seed, 150)
        if differs(history) >= 0:
            smallest = compare.shrink(history, differs, budget=300)
            print(compare.as_text(smallest))
            print(f"{len(smallest.operations)} operations")
            return 0
    print("no difference found")
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
