"""The paper's predicted figures come out to every printed digit under its rules; the vendor's rules stand
beside them.
"""

from __future__ import annotations

import pytest

from harness.extras.paper.printed import (
    BASELINE,
    COMPARISONS,
    SELECTED,
    disagreements,
    page,
    prediction_figures,
    run_search,
    search_figures,
    sums,
)
from tests.support.checkout import ROOT


@pytest.mark.parametrize("rules", ["paper", "paper+dummy"])
def test_every_row_of_table_s12_is_reproduced_to_the_digit(rules: str) -> None:
    figures = list(prediction_figures(rules))
    assert sum(figure.printed != "" for figure in figures) >= 12 + 12 + 8
    assert disagreements(figures) == []


def test_the_search_and_tables_s10_and_s11_are_reproduced_to_the_digit() -> None:
    figures = list(search_figures(run_search("paper")))
    assert sum(figure.printed != "" for figure in figures) >= 6 * 7
    assert disagreements(figures) == []


def test_the_dummy_rule_leaves_the_selection_and_the_top_twenty_unchanged() -> None:
    dummy = run_search("paper+dummy")
    assert disagreements(list(search_figures(dummy))) == []
    assert dummy.candidate(dummy.ranked[0]) == SELECTED
    assert set(run_search("paper").ranked[:20]) == set(dummy.ranked[:20])


def test_the_vendors_rules_differ_only_through_the_baseline() -> None:
    for row in COMPARISONS:
        paper, vendor = (sums(row.candidate, row.users, row.seed, rules) for rules in ("paper", "vendor-0.11.1"))
        assert vendor.reused == paper.reused
        if row.candidate != BASELINE:
            assert vendor.device_ns == paper.device_ns


def test_the_page_in_docs_is_what_the_command_writes_today() -> None:
    written = ROOT / "docs" / "evidence" / "paper-rules.md"
    assert written.read_text(encoding="utf-8") == page()
