"""Which scheduler and KV rules exist: one table of names, the releases that follow each, and what sets them apart.

Nothing is decided here: a flag says which of the engine's functions take part, and everybody who needs a name, a
description or a version reads it here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

AUTO = "auto"
"""Stands for the rules of the release that serves; where no release serves, for ``NEWEST_STABLE``."""
NEWEST_STABLE = "vendor-0.12.0"


@dataclass(frozen=True)
class RuleSet:
    """What a server does with requests and KV memory, in the engine's terms.

    releases: vllm-rbln release numbers that behave so; none: no released server does, so results are computed, never
    comparable with a measurement. has_inner_blocks: two-level KV memory; without, one prompt length per slot.
    is_index_repaired: a reused inner block leaves the slot that held it, and blocks without a hash are freed to the
    front of the queue. evicts_by_last_use: slots leave by last use, not by allocation. keeps_matched_blocks: inner
    blocks that a look-up matched go to the tail of the free queue. sets_slot_aside: admission counts one slot as taken
    while 0 < n < limit. has_active_limit: knows --max-num-active-seqs. survives_copy_failure: a failed copy of cached
    KV becomes a full prefill, while counters still report the hit; without, the engine dies.
    """

    name: str
    description: str
    releases: tuple[str, ...] = ()
    has_inner_blocks: bool = True
    is_index_repaired: bool = False
    evicts_by_last_use: bool = False
    keeps_matched_blocks: bool = False
    sets_slot_aside: bool = False
    has_active_limit: bool = False
    survives_copy_failure: bool = False


_TABLE = (
    RuleSet(
        "vendor-0.11.1",
        "what the source of vllm-rbln 0.11.1 does, defects included",
        releases=("0.11.1",),
    ),
    RuleSet(
        "vendor-0.11.2",
        "the same with that release's repaired block index and changed order of freed blocks",
        releases=("0.11.2",),
        is_index_repaired=True,
    ),
    RuleSet(
        "vendor-0.12.0",
        "decides as vendor-0.11.2; a failed copy of cached KV becomes a full prefill instead of the engine's end",
        releases=("0.11.3", "0.12.0"),
        is_index_repaired=True,
        survives_copy_failure=True,
    ),
    RuleSet(
        "vendor-0.12.1",
        "the same with `max_active_seqs`, an admission limit below the compiled one",
        releases=("0.12.1",),
        is_index_repaired=True,
        survives_copy_failure=True,
        has_active_limit=True,
    ),
    RuleSet(
        "upstream-lru",
        "vendor-0.12.1 with the open upstream change: slots are evicted by last use, matched blocks are kept longest; "
        "computed, no released server does so",
        is_index_repaired=True,
        survives_copy_failure=True,
        has_active_limit=True,
        evicts_by_last_use=True,
        keeps_matched_blocks=True,
    ),
    RuleSet(
        "paper",
        "the published study's own simulator; use it only to reproduce its predictions",
        has_inner_blocks=False,
    ),
    RuleSet(
        "paper+dummy",
        "the same with a slot set aside for padding",
        has_inner_blocks=False,
        sets_slot_aside=True,
    ),
)
RULE_SETS = {rules.name: rules for rules in _TABLE}


def check_rules(name: str) -> str:
    """``name`` when it is a rule set's or ``auto``; ValueError lists them otherwise."""
    if name != AUTO and name not in RULE_SETS:
        raise ValueError(f"unknown rules {name!r}; choose one of {', '.join((AUTO, *RULE_SETS))}")
    return name


def check_active_limit(active: int | None, limit: int, rules: RuleSet | None) -> None:
    """ValueError when an admission limit lies outside 1..``limit``, or the rules (None: any) know none.

    Above the compiled limit the served engine dies at the first request too many. Source: vllm-rbln 0.12.1a8,
    v1/core/optimum_scheduler.py; vLLM 0.31.0, config/scheduler.py.
    """
    if active is None:
        return
    if not 1 <= active <= limit:
        raise ValueError(
            f"max_active_seqs ({active}) must lie in 1..max_num_seqs ({limit}): it can only lower the limit"
        )
    if rules is not None and not rules.has_active_limit:
        known = ", ".join(one.name for one in _TABLE if one.has_active_limit)
        raise ValueError(f"the rules {rules.name!r} know no max_active_seqs; drop it, or choose one of {known}")


def rule_set(name: str, version: str = "") -> RuleSet:
    """The rules called ``name``; ``auto`` is those of the vllm-rbln ``version`` that serves, else the newest stable.

    Raises ValueError for an unknown name; an unknown version counts as none.
    """
    if check_rules(name) == AUTO:
        return rules_for_version(version) or RULE_SETS[NEWEST_STABLE]
    return RULE_SETS[name]


def rules_for_version(version: str) -> RuleSet | None:
    """The rules of a vllm-rbln version ("0.12.1a8", "0.11.2.post1"); None for a release that nobody has read."""
    release = re.match(r"\d+\.\d+\.\d+", version)
    if release is None:
        return None
    return next((rules for rules in _TABLE if release[0] in rules.releases), None)


def rules_in_force(name: str, version: str = "") -> RuleSet:
    """What a server that is asked for ``name`` really follows: the rules of its release, where somebody has read it."""
    return rules_for_version(version) or rule_set(name)


def rules_in_words() -> str:
    """One Markdown line per rule set, as docs/stack.md prints them."""
    lines = [f"- `{AUTO}` (default): the rules of the release that serves; without one, `{NEWEST_STABLE}`."]
    lines += [f"- `{rules.name}`: {rules.description}." for rules in _TABLE]
    return "\n".join(lines)
