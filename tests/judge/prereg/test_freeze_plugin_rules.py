"""A rule kind of an installed package decides, and its code is frozen with what it decides."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness.errors import SpecError
from harness.judge.decisions.decide import Outcome
from harness.judge.prereg import decide
from harness.plugins import plugins
from tests.support.workplace import Workplace

PACKAGE = """
from typing import ClassVar, Literal

from harness.judge.decisions.decide import Decision, Outcome
from harness.judge.decisions.verdicts import Case
from harness.model.spec.rules import DecisionRule
from harness.plugins import Plugin

PLUGIN = Plugin(name="outsider", summary="a rule", rules={"enough-runs": "outsider:EnoughRule"})


class EnoughRule(DecisionRule):
    cases_at: ClassVar[str] = "outsider:cases"
    kind: Literal["enough-runs"]
    least: int = 1


def cases(rule, experiment):
    for name, runs in experiment.runs.items():
        outcome = Outcome.of(len(runs) >= rule.least)
        yield Case(name, len(runs), lambda: Decision(rule.name, name, outcome, f"{len(runs)} runs"), name)
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of a package that is installed for the test."""
    facts = tmp_path / "site" / "outsider-1.0.dist-info"
    facts.mkdir(parents=True)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: outsider\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[rbln_harness.plugins]\noutsider = outsider:PLUGIN\n")
    module = facts.parent / "outsider.py"
    module.write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(facts.parent))
    plugins.cache_clear()
    yield module
    sys.modules.pop("outsider", None)
    plugins.cache_clear()


def test_a_plugins_rule_decides_until_its_code_changes(place: Workplace, package: Path) -> None:
    place.rule_file.write_text('name = "enough"\nkind = "enough-runs"\nleast = 3\n')
    place.commit_all()
    frozen = place.freeze().path
    place.run_confirmatory(frozen)
    assert {each.outcome for each in decide(place.sealed).decisions} == {Outcome.PASS}
    package.write_text(PACKAGE.replace(">=", "<="))
    changed = decide(place.sealed).decisions
    assert {each.outcome for each in changed} == {Outcome.WITHHELD}
    assert all(
        "the package 'outsider', whose rule decides, is not the code that was frozen" in d.reason for d in changed
    )
    with pytest.raises(SpecError, match="the package 'outsider'"):
        place.run_confirmatory(frozen)
