"""Plays one history to the vendor's scheduler and to the engine, and shrinks a history on which they differ.

A vendor exception ends a history: what it would have done next is nobody's to say; those are counted, never hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tests.differential.engine_side import EngineServer
from tests.differential.histories import Abort, Geometry, History, Submit, simpler, without
from tests.differential.ledger import Outcome
from tests.differential.seen import Seen, difference
from tests.differential.vendor_side import VendorServer


def play(
    history: History,
    artifact: Path,
    make_engine: Callable[[Geometry], EngineServer] = EngineServer,
    make_vendor: Callable[[Geometry, Path], VendorServer] = VendorServer,
) -> Outcome:
    """Compare after every operation; stops at the first difference."""
    outcome = Outcome()
    vendor = make_vendor(history.geometry, artifact)
    engine = make_engine(history.geometry)
    for index, operation in enumerate(history.operations):
        outcome.at_operation = index
        if isinstance(operation, Submit):
            accepted = vendor.submit(operation)
            outcome.counts["refused handles"] += not accepted
            if accepted != engine.submit(operation):
                outcome.differences = [f"submitted: vendor {accepted}, engine {not accepted}"]
                return outcome
        elif isinstance(operation, Abort):
            theirs, ours = vendor.abort((operation.handle,)), engine.abort((operation.handle,))
            outcome.counts["aborts between steps"] += bool(theirs)
            if theirs != ours:
                outcome.differences = [f"lines of the abort: vendor {theirs!r}, engine {ours!r}"]
                return outcome
        else:
            try:
                seen = vendor.step(operation.aborts_inside, operation.failed_copy)
            except Exception as error:
                outcome.vendor_error = f"{type(error).__name__}: {error}"
                return outcome
            outcome.differences = difference(seen, engine.step(operation.aborts_inside, operation.failed_copy))
            _count(outcome, seen)
            if outcome.differences:
                return outcome
    return outcome


def _count(outcome: Outcome, seen: Seen) -> None:
    counts = outcome.counts
    if seen.kind != "IDLE":
        outcome.steps += 1
    counts[seen.kind] += 1
    counts["aborts inside a step"] += bool(seen.abort_lines)
    counts["preempting steps"] += bool(seen.preempted)
    counts["preempted"] += len(seen.preempted)
    counts["evictions"] += sum("[EVICTION]" in line for line in seen.lines)
    counts["prefills with reuse"] += bool(seen.cached_slots)
    counts["prefills reusing several slots"] += len(seen.cached_slots) > 1
    counts["false hash hits"] += seen.hash_hit_tokens > sum(seen.cached_lengths)
    counts["failed copies"] += bool(seen.recomputed_tokens)
    counts["dummy requests"] += seen.dummy_slot >= 0
    counts["finished"] += len(seen.finished)


def shrink(history: History, differs: Callable[[History], int], budget: int = 600) -> History:
    """A smaller history that still differs; differs(history) is the operation it does at, or -1.

    Drops ever smaller runs of operations, then makes the remaining ones do less.
    """
    at = differs(history)
    history = replace(history, operations=history.operations[: at + 1])
    size = max(1, len(history.operations) // 2)
    while size and budget > 0:
        first = 0
        while first < len(history.operations) and budget > 0:
            smaller = without(history, first, size)
            budget -= 1
            at = differs(smaller)
            if at >= 0:
                history = replace(smaller, operations=smaller.operations[: at + 1])
            else:
                first += size
        size //= 2
    return _simplify(history, differs, budget)


def _simplify(history: History, differs: Callable[[History], int], budget: int) -> History:
    index = 0
    while index < len(history.operations) and budget > 0:
        for candidate in simpler(history.operations[index]):
            operations = list(history.operations)
            operations[index] = candidate
            budget -= 1
            at = differs(replace(history, operations=tuple(operations)))
            if at >= 0:
                history = replace(history, operations=tuple(operations[: at + 1]))
                break
        else:
            index += 1
    return history


def as_text(history: History) -> str:
    """A history as Python source, to be pasted into a test."""
    lines = [f"History({history.geometry!r}, operations=("]
    lines += [f"    {operation!r}," for operation in history.operations]
    return "\n".join([*lines, "))"])
