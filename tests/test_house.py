"""The house keeps its own rules: a module's test is found by its path, and no file or function outgrows its reader."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness.spec import load_toml
from tests.support.checkout import ROOT

TESTS = ROOT / "tests"
MIRRORED_OUTSIDE_THE_PACKAGE = {"benchmarks", "docker", "tools"}
CROSS_CUTTING = {"differential", "recipes", "support"}
"""The engine against the vendor's classes; what CONTRIBUTING.md promises; what tests share."""


def counterparts(test: Path) -> list[Path]:
    """Where the subject of a test file may lie: tests/a/test_b_c.py is about a/b_c, or an aspect of a/b or of a."""
    place = test.relative_to(TESTS).parent
    home = ROOT if place.parts[:1] and place.parts[0] in MIRRORED_OUTSIDE_THE_PACKAGE else ROOT / "harness"
    words = test.stem.removeprefix("test_").split("_")
    names = ["_".join(words[:end]) for end in range(len(words), 0, -1)]
    found = [home / place / name for name in names]
    return found + [home / place for name in names if name == place.name]


TEST_FILES = [
    path
    for path in sorted(TESTS.rglob("test_*.py"))
    if path.relative_to(TESTS).parts[0] not in {*CROSS_CUTTING, Path(__file__).name}
]


@pytest.mark.parametrize("test", TEST_FILES, ids=lambda path: str(path.relative_to(TESTS)))
def test_a_test_lies_where_its_subject_lies(test: Path) -> None:
    assert any(path.is_dir() or path.with_suffix(".py").is_file() for path in counterparts(test))


def test_the_design_and_the_import_contract_tell_the_same_floors() -> None:
    contracts = load_toml(ROOT / "pyproject.toml")["tool"]["importlinter"]["contracts"]
    checked = next(one["layers"] for one in contracts if one["type"] == "layers")
    design = (ROOT / "DESIGN.md").read_text()
    told = re.search(r"^Floors.*?\n(.*?)\.$", design, re.MULTILINE | re.DOTALL)
    assert told is not None
    floors = [[name.strip() for name in floor.split("|")] for floor in told[1].replace("`", "").split(">")]
    assert floors == [[name.strip().removeprefix("harness.") for name in floor.split("|")] for floor in checked]


def test_every_package_and_module_stands_on_a_floor() -> None:
    contracts = load_toml(ROOT / "pyproject.toml")["tool"]["importlinter"]["contracts"]
    checked = next(one["layers"] for one in contracts if one["type"] == "layers")
    on_a_floor = {name.strip().removeprefix("harness.") for floor in checked for name in floor.split("|")}
    parts = {
        path.stem for path in (ROOT / "harness").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert parts - on_a_floor == {"__init__", "__main__"}


CITED = re.compile(r'docs/(\w[\w-]*\.md)((?:,? (?:and )?"[^"]+")*)')


def test_every_section_of_the_docs_that_the_code_cites_is_there() -> None:
    headings = {
        page.name: set(re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE))
        for page in (ROOT / "docs").glob("*.md")
    }
    missing = [
        f"{path.relative_to(ROOT)}: {page} {section}"
        for path in sorted((ROOT / "harness").rglob("*.py"))
        for page, sections in CITED.findall(path.read_text())
        for section in (re.findall('"([^"]+)"', sections) or [None])
        if page not in headings or section not in {None, *headings[page]}
    ]
    assert missing == []


def test_the_code_cites_no_document_that_is_not_in_the_repository() -> None:
    elsewhere = re.compile(r"\bmethods \d|[Ss]tack[ -]facts|twin-facts|\bhouse\.md|methods\.md")
    found = [
        f"{path.relative_to(ROOT)}: {words[0]}"
        for folder in ("harness", "benchmarks", "plans", "docs")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in {".py", ".md", ".toml"} and (words := elsewhere.search(path.read_text()))
    ]
    assert found == []


def test_the_method_names_the_code_of_every_figure() -> None:
    page = (ROOT / "docs" / "method.md").read_text()
    modules = set(re.findall(r"`harness\.([\w.]+)`", page))
    assert modules
    homes = [ROOT / "harness" / name.replace(".", "/") for name in modules]
    assert [str(home) for home in homes if not (home.is_dir() or home.with_suffix(".py").is_file())] == []
