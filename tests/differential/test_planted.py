"""The comparison of paged schedulers sees mistakes, and sees none where there is none."""

from __future__ import annotations

import pytest

from harness.stacks.rbln.rules.kv_rules import NATIVE
from tests.differential.paged_side import EnginePlant
from tests.differential.planted import (
    PLANTED_ON_NATIVE,
    PLANTED_WITH_DRAFTS,
    first_with_drafts,
)


@pytest.mark.parametrize(("mistakes", "rules"), [(PLANTED_WITH_DRAFTS, ""), (PLANTED_ON_NATIVE, NATIVE)])
def test_each_mistake_with_drafts_is_noticed_in_both_engines_and_none_is_seen_where_none_is(
    mistakes: dict[str, EnginePlant], rules: str
) -> None:
    assert len(mistakes) >= 10
    assert first_with_drafts(lambda config: config, 20, 100, rules=rules) == {}
    noticed = {name: first_with_drafts(plant, 100, 100, rules=rules) for name, plant in mistakes.items()}
    assert {name: sorted(engines) for name, engines in noticed.items() if len(engines) < 2} == {}
