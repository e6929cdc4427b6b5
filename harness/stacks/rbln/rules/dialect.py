"""How answers, errors, metrics and log differ between releases of the served stack.

A release without an entry answers as the release before it. Scheduling is in ``harness.stacks.rbln.rules.kv_rules``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.stacks.rbln.rules.kv_rules import NEWEST_STABLE, RULE_SETS, RuleSet, release_of


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
    null_fields: Sequence[str]
    has_usage_details: bool
    has_empty_tool_calls: bool
    names_fields: bool
    kv_device: str
    reports_pool: bool
    counts_preemptions: bool
    cache_config: Mapping[str, object]


_TABLE = json.loads(Path(__file__).with_name("dialects.json").read_text(encoding="utf-8"))
DIALECTS = {
    release: Dialect(**{**fields, "cache_config": _TABLE["cache_config"][fields["cache_config"]]})
    for release, fields in _TABLE["releases"].items()
}
"""By vllm-rbln release, oldest first. The answers of 0.11.2 were not compared; those of 0.11.1 are assumed."""


def dialect_of(rules: RuleSet) -> Dialect:
    """The dialect of the newest release that follows ``rules``; of the newest stable release when none does."""
    release = (rules.releases or RULE_SETS[NEWEST_STABLE].releases)[-1]
    known_so_far = [dialect for known, dialect in DIALECTS.items() if release_of(known) <= release_of(release)]
    return known_so_far[-1]
