"""The table of findings is what the code finds, and the page, the terminal and the hints are the table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from harness.measure.records.findings import BEFORE, finding, finding_rows, findings_markdown
from harness.model.spec.base import load_toml
from tests.support.checkout import ROOT
from tests.support.command_line import harness

PAGE = ROOT / "docs" / "reference" / "findings.md"
SOURCES = {path: path.read_text(encoding="utf-8") for path in sorted((ROOT / "harness").rglob("*.py"))}


def calls(name: str) -> Iterator[ast.Call]:
    for text in SOURCES.values():
        if f"{name}(" in text:
            yield from (
                node
                for node in ast.walk(ast.parse(text))
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
            )


def texts(node: ast.AST) -> list[str]:
    return [part.value for part in ast.walk(node) if isinstance(part, ast.Constant) and isinstance(part.value, str)]


def test_every_code_that_is_found_has_a_row_and_every_row_is_found_somewhere() -> None:
    found = {code for call in calls("finding") for code in texts(call.args[0])}
    assert len(found) > 80
    assert found <= finding_rows().keys()
    words = {word for text in SOURCES.values() for word in re.findall(r'"([a-z-]+)"', text)}
    assert [code for code in finding_rows() if code.removeprefix("tolerated-") not in words] == []


def test_findings_are_made_by_the_table_alone() -> None:
    direct = [texts(keyword.value) for call in calls("Finding") for keyword in call.keywords if keyword.arg == "code"]
    assert direct == [["tolerated-"], []]


def test_the_hint_and_severity_of_a_finding_are_those_of_its_row_unless_the_evidence_decides() -> None:
    row = finding_rows()["step-size"]
    assert (finding("step-size", "n 3 in size 8").severity, finding("step-size", "").hint) == ("invalid", row.do)
    assert finding("step-size", "", do="Measure again").hint == "Measure again"
    assert finding("read-together", "", severity="invalid").severity == "invalid"
    with pytest.raises(AssertionError, match="does not say that step-size may be info"):
        finding("step-size", "", severity="info")


def test_the_page_is_the_table_and_the_terminal_explains_a_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert page == findings_markdown(), "write it again: harness explain findings -o docs/reference/findings.md"
    assert BEFORE in page
    explained = harness("explain", "clock-moved").stdout
    assert explained.startswith("clock-moved (warning or invalid): The wall clock was set during the run.")
    assert "Did you mean 'clock-moved'?" in harness("explain", "clock-move").stderr


def test_every_refusal_on_the_page_is_a_message_of_the_code() -> None:
    # A long literal may be written in two parts.
    sources = re.sub(r'"\s*f?"', "", " ".join(SOURCES.values()))
    refusals = load_toml(ROOT / "harness" / "measure" / "records" / "refusals.toml")["refusal"]
    missing: list[str] = []
    for row in refusals:
        for message in re.findall(r"`([^`]+)`", row["says"]):
            # The longest piece around what a message fills in.
            pieces = re.split(r"\.\.\.|\b(?:N|unknown|patched)\b|[\d.]*\d[\d.]*", message)
            piece = max(pieces, key=len).strip(" ,;:")
            missing += [piece] if piece not in sources else []
    assert missing == []
    assert len(refusals) > 10
