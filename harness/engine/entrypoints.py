"""The functions of ``steps`` that Python calls, compiled; the simulator's kernel needs none of them.

Nothing is decided here.
"""

from __future__ import annotations

from harness.compiled import compiled
from harness.engine import steps
from harness.engine.state import EngineState


@compiled
def submit(state: EngineState, row: int, prompt: int, max_tokens: int, stop_tokens: int, session: int) -> None:
    """Queue a request at the tail."""
    steps.submit(state, row, prompt, max_tokens, stop_tokens, session)


@compiled
def schedule(state: EngineState) -> int:
    """Decide the next step and return its kind."""
    return steps.schedule(state)


@compiled
def equal_steps(state: EngineState) -> int:
    """How many decode steps exactly like the one just scheduled can follow each other, this one included."""
    return steps.equal_steps(state)


@compiled
def finish_steps(state: EngineState, num_steps: int) -> int:
    """Append ``num_steps`` tokens to everyone in the batch, free the finished, return how many there are."""
    return steps.finish_steps(state, num_steps)


@compiled
def abort(state: EngineState, row: int) -> None:
    """Drop a request that waits or runs."""
    steps.abort(state, row)
