"""Mistakes planted in the rules of drafts, one at a time: does the comparison see each?

Nothing of vLLM is imported: the other side is the compiled scheduler, which ``make differential`` holds to vLLM's own.
Where vLLM is installed, ``python -m tests.differential.planted MODEL [RULES]`` plants them beside it, or beside the
native path of vllm-rbln.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from harness.model.engine.config import EngineConfig
from harness.stacks.rbln.rules.kv_rules import NATIVE, PAGED, RULE_SETS
from tests.differential.compare import Server, paged_sides, play, sides_of
from tests.differential.paged_side import EnginePlant, PagedEngine


def drafting_with(**changes: Any) -> EnginePlant:
    """Rules of drafts that are others: a function of the right value for each."""

    def plant(config: EngineConfig) -> EngineConfig:
        drafts = config.drafts
        return replace(
            config, drafts=replace(drafts, **{name: to(getattr(drafts, name)) for name, to in changes.items()})
        )

    return plant


PLANTED_WITH_DRAFTS: dict[str, EnginePlant] = {
    "no room for drafts": drafting_with(lookahead_tokens=lambda _: 0),
    "room for a token more": drafting_with(lookahead_tokens=lambda tokens: tokens + 1),
    "the last match dropped or not": drafting_with(drops_last_match=operator.not_),
    "keys that name the token after or not": drafting_with(key_lookahead=operator.not_),
    "accepted drafts matched too early or late": drafting_with(registers_drafts=operator.not_),
    "a draft more": drafting_with(num_drafts=lambda number: number + 1, rates=lambda rates: rates and (*rates, 0.0)),
    "a slot of the budget more": drafting_with(draft_slots=lambda slots: slots + 1),
    "a token of the budget more": lambda config: replace(
        config, max_num_batched_tokens=config.max_num_batched_tokens + 1
    ),
    "the next step decided ahead or not": lambda config: replace(config, async_scheduling=not config.async_scheduling),
    "one accepted less": drafting_with(rates=lambda rates: rates and (*rates[1:], 0.0)),
}
"""Mistakes in the rules of a server that drafts. Where acceptance is told, the last of them makes none."""


PLANTED_ON_NATIVE: dict[str, EnginePlant] = {
    **{
        name: plant
        for name, plant in PLANTED_WITH_DRAFTS.items()
        if name not in ("keys that name the token after or not", "the next step decided ahead or not")
    },
    "prompts beside decodes": lambda config: replace(config, rules="vllm-paged-0.30", decode_buckets=(1,)),
    "a part of a prompt too long": lambda config: replace(
        config, long_prefill_tokens=config.long_prefill_tokens and config.long_prefill_tokens + 1
    ),
    "fewer buckets": lambda config: replace(config, decode_buckets=config.decode_buckets[-1:]),
}
"""The same where each part of a prompt runs alone."""


NEWEST = RULE_SETS[PAGED].vllm[-1]


def first_with_drafts(
    plant: EnginePlant,
    num_histories: int,
    num_steps: int,
    release: str = NEWEST,
    vendor: Callable[[Any], Server] | None = None,
    rules: str = "",
) -> dict[str, int]:
    """The first seed by which each engine with that mistake differs from ``vendor``; default: the engine without.

    rules: default: those of the release.
    """
    rules = rules or next(each.name for each in RULE_SETS.values() if release in each.vllm)
    right = partial(PagedEngine, rules=rules, release=release)
    planted = paged_sides(vendor or right, rules, release, plant)
    engines = {"stepwise": planted._replace(compiled=None), "compiled": planted._replace(engine=right)}
    found: dict[str, int] = {}
    for seed in range(num_histories):
        history: Any = planted.draw(seed, num_steps)
        for name, sides in engines.items():
            is_played = history.geometry.num_drafts and (name == "stepwise" or history.geometry.rates)
            if is_played and name not in found and play(history, sides).differences:
                found[name] = seed
        if len(found) == len(engines):
            break
    return found


def main(model: str, rules: str = "") -> None:
    """Print which of the mistakes with drafts each engine shows beside the released classes, and by which history."""
    from tests.differential.paged_vendor import release_of

    mistakes = PLANTED_ON_NATIVE if rules == NATIVE else PLANTED_WITH_DRAFTS
    vendor = sides_of(rules or PAGED, Path(model)).vendor
    for name, plant in {"nothing": lambda config: config, **mistakes}.items():
        print(f"{name}: {first_with_drafts(plant, 40, 100, release_of(), vendor, rules)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
