"""The sentence that documents show is the one that the program prints, in two lines of which the first is short."""

from __future__ import annotations

import re

import pytest

from harness.analysis.summary import summarise
from harness.model.spec import load_experiment
from harness.present.report.answers import answers
from harness.runner import run_experiment
from tests.support.checkout import ROOT

pytestmark = pytest.mark.same_everywhere


def test_the_sentence_of_the_demo_is_that_of_the_page_on_reports(tmp_path) -> None:
    spec = load_experiment("demo").model_copy(update={"backend": "sim", "time_scale": 1.0})
    page = (ROOT / "docs" / "reading-a-report.md").read_text(encoding="utf-8")
    quoted = " ".join(re.sub(r"^> ?", " ", line) for line in page.splitlines() if line.startswith(">"))
    said = answers(summarise(run_experiment(spec, runs_root=tmp_path).runs), lambda name: f"**{name}**")[-1]
    assert " ".join(quoted.split()) == f"{said.text} {said.basis}"


def test_the_readme_shows_both_lines() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = re.search(r"^(twelve-slots costs .*)\n((?:  .*\n)+)", readme, re.M)
    assert re.fullmatch(r"twelve-slots costs [\d.]+ % less than base \([\d.]+ to [\d.]+ % less\): cheaper\.", shown[1])
    assert " ".join(shown[2].split()).startswith(
        "6 valid runs, emulated, one draw of each plan; 95 % interval, cost model assumed exact; both channels agree; "
    )
