"""How answers, errors, metrics and log differ between releases of the served stack.

A release without an entry answers as the release before it. Scheduling is in ``harness.stack.rbln.kv_rules``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from harness.stack.rbln.kv_rules import NEWEST_STABLE, RULE_SETS, RuleSet

# Fields of vLLM's CacheConfig that depend on no setting, by the version of vLLM.
_CACHE_CONFIG = json.loads(Path(__file__).with_name("cache_config.json").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Dialect:
    """How a release answers.

    vllm: the version it pins. null_fields: last fields of an answer without streaming, always null here.
    has_usage_details: usage has null and zero where older releases omit the field. has_empty_tool_calls: a chat message
    has an empty list of calls. names_fields: an error names the wrong field. kv_device: device of the KV cache in the
    log. reports_pool: the pool size is among the cache's labels and in a line of the log. counts_preemptions: there is
    a histogram of preemptions. cache_config: labels of vllm:cache_config_info that depend on no setting.
    """

    vllm: str
    null_fields: tuple[str, ...]
    has_usage_details: bool
    has_empty_tool_calls: bool
    names_fields: bool
    kv_device: str
    reports_pool: bool
    counts_preemptions: bool
    cache_config: Mapping[str, object]


_OF_0_11_1 = Dialect(
    vllm="0.22.0",
    null_fields=("kv_transfer_params",),
    has_usage_details=False,
    has_empty_tool_calls=True,
    names_fields=False,
    kv_device="GPU",
    reports_pool=False,
    counts_preemptions=False,
    cache_config=_CACHE_CONFIG["0.22.0"],
)
_OF_0_12_0 = Dialect(
    vllm="0.30.0",
    null_fields=("kv_transfer_params", "ec_transfer_params", "metrics"),
    has_usage_details=True,
    has_empty_tool_calls=False,
    names_fields=True,
    kv_device="CPU",
    reports_pool=True,
    counts_preemptions=True,
    cache_config=_CACHE_CONFIG["0.30.0"],
)
DIALECTS = {
    "0.11.1": _OF_0_11_1,
    # Its answers were not compared; those of 0.11.1 are assumed.
    "0.11.2": replace(_OF_0_11_1, vllm="0.24.0"),
    "0.12.0": _OF_0_12_0,
    "0.12.1": replace(_OF_0_12_0, vllm="0.31.0", cache_config=_CACHE_CONFIG["0.31.0"]),
}
"""By vllm-rbln release, oldest first."""


def dialect_of(rules: RuleSet) -> Dialect:
    """The dialect of the newest release that follows ``rules``; of the newest stable release when none does."""
    release = (rules.releases or RULE_SETS[NEWEST_STABLE].releases)[-1]
    known_so_far = [dialect for known, dialect in DIALECTS.items() if _number(known) <= _number(release)]
    return known_so_far[-1]


def _number(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))
