"""Proof that the comparison sees and shrinks: an engine that never recognises the third block of a prompt.

Prints the shrunk history; exit status 0 when a difference was found. Next: ``test_differential`` counts its operations.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.differential import compare
from tests.differential.engine_side import EngineServer
from tests.differential.histories import FRESH, History, Submit, draw_history, head

BLIND_BLOCK = 2


class ThirdBlockBlind(EngineServer):
    """An engine that is wrong about one thing: it sees another text in the third block of every prompt."""

    def submit(self, request: Submit) -> bool:
        kept = self._block_tokens * BLIND_BLOCK
        if request.prompt_tokens > kept:
            # Never the same text twice, so that its hash is never found.
            own = (FRESH + (1 << 18) + request.handle, 0, request.prompt_tokens - kept)
            request = request._replace(prompt=(*head(request.prompt, kept), own))
        return super().submit(request)


def main(artifact: Path) -> int:
    """Find a history on which the wrong engine differs, and shrink it."""

    def differs(history: History) -> int:
        outcome = compare.play(history, artifact, ThirdBlockBlind)
        return outcome.at_operation if outcome.differences else -1

    for seed in range(20):
        history = draw_history(seed, 150)
        if differs(history) >= 0:
            smallest = compare.shrink(history, differs, budget=300)
            print(compare.as_text(smallest))
            print(f"{len(smallest.operations)} operations")
            return 0
    print("no difference found")
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
