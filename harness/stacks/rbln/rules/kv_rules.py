"""The table of scheduler and KV rules: names, the releases that follow them, and the flags by which they differ.

A flag selects functions of the engine; nothing is scheduled here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

AUTO = "auto"
"""Stands for the rules of the release that serves; where no release serves, for ``NEWEST_STABLE``."""
NEWEST_STABLE = "vendor-0.12.0"
NATIVE = "rbln-native-0.12"
"""Rules of vllm-rbln's native path, which ``auto`` never is: they have to be named."""
PAGED = "vllm-paged"
"""The newest rules of vLLM itself, on any device that pads decode steps to captured sizes."""


@dataclass(frozen=True)
class RuleSet:
    """How a server schedules requests and manages KV memory, as flags of the engine.

    releases: vllm-rbln releases with these rules, a pre-release by its whole version. vllm: releases of vLLM itself.
    Both empty: simulation only, not comparable with a measurement.
    has_inner_blocks: two-level KV memory; else a prompt length per slot. is_index_repaired: a reused inner block is
    removed from its old slot, and blocks without a hash are freed to the front of the queue. evicts_by_last_use: slots
    are evicted by last use, not by allocation. keeps_matched_blocks: inner blocks matched by a look-up go to the tail
    of the free queue. sets_slot_aside: admission counts a slot as taken while 0 < n < max_num_seqs. has_active_limit:
    supports --max-num-active-seqs. survives_copy_failure: a failed copy of cached KV becomes a full prefill, while
    counters still report the hit; else the engine dies. is_paged: paged KV memory and chunked prefill, as
    in vLLM itself. caps_lone_requests: ``long_prefill_tokens`` also holds for a request that no other waits or runs
    beside. never_mixes: a part of a prompt runs alone, decode batches are compiled for numbers of requests, and drafts
    wait while a prompt runs.
    """

    name: str
    description: str
    releases: tuple[str, ...] = ()
    vllm: tuple[str, ...] = ()
    has_inner_blocks: bool = True
    is_index_repaired: bool = False
    evicts_by_last_use: bool = False
    keeps_matched_blocks: bool = False
    sets_slot_aside: bool = False
    has_active_limit: bool = False
    survives_copy_failure: bool = False
    is_paged: bool = False
    caps_lone_requests: bool = False
    never_mixes: bool = False


_TABLE = (
    RuleSet("vendor-0.11.1", "what the source of vllm-rbln 0.11.1 does, defects included", releases=("0.11.1",)),
    RuleSet(
        "vendor-0.11.2",
        "the same with that release's repaired block index and changed order of freed blocks",
        releases=("0.11.2",),
        is_index_repaired=True,
    ),
    RuleSet(
        "vendor-0.12.0",
        "as vendor-0.11.2, but a failed copy of cached KV becomes a full prefill instead of ending the engine",
        releases=("0.11.3a22", "0.12.0"),
        is_index_repaired=True,
        survives_copy_failure=True,
    ),
    RuleSet(
        "vendor-0.12.1",
        "the same with `max_active_seqs`, an admission limit below the compiled one",
        releases=("0.12.1a8",),
        is_index_repaired=True,
        survives_copy_failure=True,
        has_active_limit=True,
    ),
    RuleSet(
        "upstream-lru",
        "vendor-0.12.1 with the open upstream change: slots are evicted by last use, matched blocks are kept longest; "
        "simulation only, no released server behaves this way",
        is_index_repaired=True,
        survives_copy_failure=True,
        has_active_limit=True,
        evicts_by_last_use=True,
        keeps_matched_blocks=True,
    ),
    RuleSet(
        "paper", "the published study's own simulator; use it only to reproduce its predictions", has_inner_blocks=False
    ),
    RuleSet("paper+dummy", "the same with a slot set aside for padding", has_inner_blocks=False, sets_slot_aside=True),
    RuleSet(
        "vllm-paged-0.30",
        "what the scheduler of vLLM 0.30.0 does: `vllm-paged`, but `long_prefill_tokens` also cuts the prompt of a "
        "request that is alone",
        vllm=("0.30.0",),
        has_inner_blocks=False,
        is_paged=True,
        caps_lone_requests=True,
    ),
    RuleSet(
        PAGED,
        "what the scheduler of vLLM 0.31.0 to 0.33.0 does on a GPU: paged KV memory, chunked prefill, decode padded to "
        "captured sizes; asynchronous scheduling on request",
        vllm=("0.31.0", "0.32.0", "0.33.0"),
        has_inner_blocks=False,
        is_paged=True,
    ),
    RuleSet(
        NATIVE,
        "what the scheduler of vllm-rbln 0.12.0's native path does, started with `--no-rbln-enable-sub-block-cache`: "
        "paged KV memory, each part of a prompt alone, decode in compiled batch sizes; simulation only, never run",
        has_inner_blocks=False,
        is_paged=True,
        caps_lone_requests=True,
        never_mixes=True,
    ),
)
RULE_SETS = {rules.name: rules for rules in _TABLE}


def is_paged(name: str) -> bool:
    """Whether the rules called ``name`` are those of vLLM itself; ``auto`` and unknown names are not."""
    return name in RULE_SETS and RULE_SETS[name].is_paged


def check_rules(name: str) -> str:
    """``name`` when it is a rule set's or ``auto``; ValueError lists them otherwise."""
    if name != AUTO and name not in RULE_SETS:
        raise ValueError(f"unknown rules {name!r}; choose one of {', '.join((AUTO, *RULE_SETS))}")
    return name


def check_active_limit(active: int | None, limit: int, rules: RuleSet | None) -> None:
    """ValueError when an admission limit lies outside 1..``limit``, or the rules (None: any) do not support it.

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
        known = ", ".join(known.name for known in _TABLE if known.has_active_limit)
        raise ValueError(f"the rules {rules.name!r} do not support max_active_seqs; drop it, or choose one of {known}")


def rule_set(name: str, version: str = "") -> RuleSet:
    """The rules called ``name``; ``auto``: those of the serving vllm-rbln ``version``, else the newest stable rules.

    Raises ValueError for an unknown name. An unknown version counts as "".
    """
    if check_rules(name) == AUTO:
        return rules_for_version(version) or RULE_SETS[NEWEST_STABLE]
    return RULE_SETS[name]


def rules_for_version(version: str) -> RuleSet | None:
    """The rules of a vllm-rbln version ("0.12.1a8", "0.11.2.post1"); None for one that nobody has read.

    A pre-release may decide as the release before it or as the one after it, so that each has to be read itself.
    """
    read = _read_version(version)
    return next((rules for rules in _TABLE if read in rules.releases), None)


def rules_for_vllm(version: str) -> RuleSet | None:
    """The rules of a version of vLLM itself ("0.32.0+cpu"); None for one that nobody has read."""
    read = _read_version(version)
    return next((rules for rules in _TABLE if read in rules.vllm), None)


def _read_version(version: str) -> str:
    """A version without what builds and post-releases add, which change no decision."""
    return re.sub(r"(\.post\d+)?(\+.*)?$", "", version)


def release_of(version: str) -> tuple[int, ...]:
    """The release number in a version: (0, 12, 1) in "0.12.1a8"; () where there is none."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()


def rules_in_words() -> str:
    """A Markdown line per rule set, as ``harness explain server`` prints them."""
    lines = [
        f"- `{AUTO}` (default): of vLLM itself `{PAGED}`; else the rules of the release that serves, or without one "
        f"`{NEWEST_STABLE}`."
    ]
    lines += [f"- `{rules.name}`: {rules.description}." for rules in _TABLE]
    return "\n".join(lines)
