"""One table of rule sets: everybody who names one, checks one or tells of one reads it there."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from harness.errors import SpecError
from harness.extras.twin.environment import known_stacks
from harness.model.engine import EngineConfig
from harness.model.spec import ServerSpec
from harness.stacks.rbln.rules.kv_rules import (
    AUTO,
    NEWEST_STABLE,
    RULE_SETS,
    rule_set,
    rules_for_version,
    rules_for_vllm,
)


def test_every_release_whose_twin_is_locked_has_rules() -> None:
    assert [stack.version for stack in known_stacks() if rules_for_version(stack.version) is None] == []


@pytest.mark.parametrize(
    ("version", "name"),
    [
        ("0.11.1", "vendor-0.11.1"),
        ("0.11.2.post1", "vendor-0.11.2"),
        ("0.11.3a22", "vendor-0.12.0"),
        ("0.12.0+cpu", "vendor-0.12.0"),
        ("0.12.1a8", "vendor-0.12.1"),
    ],
)
def test_a_version_has_the_rules_of_its_release(version: str, name: str) -> None:
    assert rules_for_version(version).name == rule_set(AUTO, version).name == name


@pytest.mark.parametrize("version", ["", "0.12", "0.11.10", "0.12.1", "0.12.1a0", "0.11.3a0", "99.0.0", "main"])
def test_a_release_that_nobody_has_read_has_no_rules_of_its_own(version: str) -> None:
    assert rules_for_version(version) is None
    assert rule_set(AUTO, version).name == NEWEST_STABLE


@pytest.mark.parametrize(
    ("version", "name"),
    [("0.30.0", "vllm-paged-0.30"), ("0.31.0", "vllm-paged"), ("0.32.0+cpu", "vllm-paged"), ("0.33.0", "vllm-paged")],
)
def test_a_version_of_vllm_itself_has_the_rules_of_its_release(version: str, name: str) -> None:
    assert rules_for_vllm(version).name == name
    assert ServerSpec(model="m").rule_set(version).name == name
    assert ServerSpec(model="m").rule_set("0.99.0").name == ServerSpec(model="m").rule_set().name == "vllm-paged"


def test_no_two_rule_sets_claim_one_release() -> None:
    releases = [release for rules in RULE_SETS.values() for release in (*rules.releases, *rules.vllm)]
    assert len(set(releases)) == len(releases)


def test_auto_is_the_default_and_becomes_the_newest_stable_release_where_nothing_serves() -> None:
    assert ServerSpec().rules == AUTO
    assert EngineConfig.from_server(ServerSpec()).rules == NEWEST_STABLE
    assert RULE_SETS[NEWEST_STABLE].releases


def test_unknown_rules_are_refused_with_the_names_of_those_there_are() -> None:
    with pytest.raises(ValidationError, match=r"vendor-0\.12\.1"):
        ServerSpec(rules="vendor-9")
    with pytest.raises(SpecError, match=r"vendor-0\.12\.1"):
        EngineConfig(2, (2,), 2, rules="vendor-9")


def test_an_admission_limit_is_refused_by_rules_that_know_none_and_above_the_compiled_one() -> None:
    for name, rules in RULE_SETS.items():
        if rules.has_active_limit:
            assert EngineConfig.from_server(ServerSpec(rules=name, max_active_seqs=3)).active_limit == 3
        else:
            with pytest.raises(ValidationError, match="max_active_seqs"):
                ServerSpec(rules=name, max_active_seqs=3)
    with pytest.raises(ValidationError, match="can only lower"):
        ServerSpec(rules="vendor-0.12.1", max_active_seqs=9)


def test_an_admission_limit_under_auto_is_refused_where_the_newest_stable_release_knows_none() -> None:
    with pytest.raises(SpecError, match="max_active_seqs"):
        EngineConfig.from_server(ServerSpec(max_active_seqs=3))
