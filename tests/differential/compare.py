"""Plays one history to the vendor's scheduler and to the engine, and shrinks a history on which they differ.

What a plan can have is also played by the compiled simulator, and held to the same steps of the vendor's.

A vendor exception ends a history: what it would have done next is nobody's to say; those are counted, never hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from harness.errors import PlanError
from tests.differential.histories import Abort, History, Submit, draw_history, simpler, without
from tests.differential.seen import AnySeen, difference
from tests.differential.tally import Outcome


class Server(Protocol):
    """One scheduler in the state after its start."""

    def submit(self, request: Submit) -> bool: ...

    def abort(self, handles: tuple[int, ...]) -> tuple[str, ...]: ...

    def step(self, aborts_inside: tuple[int, ...], failed_copy: int = -1) -> AnySeen: ...


class Sides(NamedTuple):
    """What is compared: histories by (seed, steps), and the two servers of a history's geometry.

    compiled: what differs between the steps that the vendor took and the compiled simulator; None: it is not asked.
    """

    draw: Callable[[int, int], History]
    vendor: Callable[[Any], Server]
    engine: Callable[[Any], Server]
    compiled: Callable[[History, Any], list[str]] | None = None


def sides_of(rules: str, artifact: Path) -> Sides:
    """The vendor's classes and the engine under these rules; imports the vendor's packages.

    Admission limits and failed copies are drawn where the rules know them.
    """
    from harness.stacks.rbln.rules.kv_rules import RULE_SETS

    followed = RULE_SETS[rules]
    if followed.is_paged:
        from tests.differential.paged_vendor import PagedVendor, release_of

        if followed.never_mixes:
            from tests.differential.native_vendor import NativeVendor

            return paged_sides(partial(NativeVendor, artifact=artifact), rules, release_of())
        return paged_sides(partial(PagedVendor, artifact=artifact), rules, release_of())
    from tests.differential.engine_side import EngineServer
    from tests.differential.vendor_side import VendorServer

    draw = partial(
        draw_history, with_active_limit=followed.has_active_limit, with_failed_copies=followed.survives_copy_failure
    )
    return Sides(draw, partial(VendorServer, artifact=artifact), partial(EngineServer, rules=rules))


def paged_sides(
    vendor: Callable[[Any], Server], rules: str, release: str, plant: Callable[[Any], Any] = lambda config: config
) -> Sides:
    """A server with paged KV memory, and both engines under these rules. plant: a mistake in their configuration."""
    from harness.stacks.rbln.rules.kv_rules import RULE_SETS
    from tests.differential import paged_side

    def compiled(history: Any, seen: Any) -> list[str]:
        config = plant(paged_side.config_of(history.geometry, rules, release))
        return paged_side.differing(seen, paged_side.play_compiled(history, config))

    engine = partial(paged_side.PagedEngine, rules=rules, release=release, plant=plant)
    draw = partial(paged_side.draw_paged_history, with_drafts=True, is_native=RULE_SETS[rules].never_mixes)
    return Sides(draw, vendor, engine, compiled)


def play(history: History, sides: Sides) -> Outcome:
    """Compare after every operation; stops at the first difference."""
    outcome = Outcome()
    vendor = sides.vendor(history.geometry)
    engine = sides.engine(history.geometry)
    all_seen: list[AnySeen] = []
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
            all_seen.append(seen)
            if outcome.differences:
                return outcome
    if sides.compiled is not None and outcome.steps and getattr(history.geometry, "rates", ()):
        try:
            outcome.differences = sides.compiled(history, all_seen)
            outcome.counts["steps compiled too"] = outcome.steps
        except PlanError:
            # The simulator goes on to the last answer, which a prompt without a block for its drafts never gives.
            outcome.counts["histories without an end"] = 1
    return outcome


def _count(outcome: Outcome, seen: AnySeen) -> None:
    outcome.steps += not seen.is_idle
    outcome.counts.update(seen.counts())


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
