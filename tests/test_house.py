"""The repository keeps its rules: a module's test is found by its path, documents name what is there."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from harness.model.spec import load_toml
from tests.support.checkout import ROOT

TESTS = ROOT / "tests"
MIRRORED_OUTSIDE_THE_PACKAGE = {"benchmarks", "docker", "tools"}
CROSS_CUTTING = {"differential", "docs", "fuzz", "recipes", "studies", "support"}
"""The engine against the vendor's classes; documents; every parser; what CONTRIBUTING.md promises; studies of error
rates; what tests share."""


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


def test_a_test_lies_where_its_subject_lies() -> None:
    assert TEST_FILES
    homes = {test: counterparts(test) for test in TEST_FILES}
    assert [
        str(test.relative_to(TESTS))
        for test, paths in homes.items()
        if not any(path.is_dir() or path.with_suffix(".py").is_file() for path in paths)
    ] == []


def test_the_tests_that_the_makefile_runs_are_there() -> None:
    named = re.findall(r"\btests(?:/\w+)+(?:\.py)?", (ROOT / "Makefile").read_text())
    assert len(named) > 5
    assert [path for path in named if not (ROOT / path).exists()] == []


def floors_of_the_contract() -> list[set[str]]:
    """Names on each floor, the highest first."""
    contracts = load_toml(ROOT / "pyproject.toml")["tool"]["importlinter"]["contracts"]
    layers = next(one["layers"] for one in contracts if one["name"].startswith("Wings"))
    return [{name.strip() for name in layer.split("|")} for layer in layers]


def test_the_design_and_the_import_contract_tell_the_same_floors() -> None:
    design = (ROOT / "DESIGN.md").read_text()
    drawn = re.search(r"^Floors.*?\n(.*?)\.$", design, re.MULTILINE | re.DOTALL)
    assert [set(re.findall(r"[\w.]+", floor)) for floor in drawn[1].split(">")] == floors_of_the_contract()


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package, by its path there."""
    package = ROOT / "harness"
    paths = sorted(package.rglob("*.py"))
    return {str(path.relative_to(package)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_the_walk_of_an_experiment_names_functions_that_are_there() -> None:
    walk = re.findall(r"^\d+\. `([\w/]+\.py):(\w+)`", (ROOT / "DESIGN.md").read_text(), re.MULTILINE)
    assert 0 < len(walk) <= 12
    assert len({path for path, _ in walk}) == len(walk)
    for path, name in walk:
        tree = ast.parse((ROOT / "harness" / path).read_text())
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{path}:{name}"


@cache
def tracked_text() -> dict[str, str]:
    """Every tracked text file of the checkout, by its name; a test outside of git has none to read."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    return {name: (ROOT / name).read_text(encoding="utf-8", errors="replace") for name in names}


def test_no_file_names_a_package_index() -> None:
    # Written apart, or this file would name one.
    address = re.compile(r"py" + r"pi\.org|python" + r"hosted\.org|download\.pytorch" + r"\.org")
    assert [name for name, text in tracked_text().items() if address.search(text)] == []


def test_no_file_names_a_place_on_a_developers_machine() -> None:
    place = re.compile(r"(?<![\w.$}/-])/(?:home/(?!user|somebody)\w|Users/\w|root/(?!\.netrc)|tmp/bash_)")
    assert [name for name, text in tracked_text().items() if place.search(text)] == []


VERSION_OF_THE_STACK = re.compile(r"\b0\.1[12]\.\d")
ROOMS_THAT_NAME_A_VERSION = ("stacks/", "extras/other_stacks/", "extras/paper/", "extras/twin/")
"""The stacks, the twin, and the published case, which was measured on one release."""


def words_that_a_program_acts_on(tree: ast.Module) -> Iterator[str]:
    """String constants but for docstrings, which give sources and examples."""
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


def test_nothing_outside_its_room_acts_on_a_version_of_the_stack() -> None:
    found = [
        f"{name}: {words}"
        for name, tree in modules().items()
        if not name.startswith(ROOMS_THAT_NAME_A_VERSION)
        for words in words_that_a_program_acts_on(tree)
        if VERSION_OF_THE_STACK.search(words)
    ]
    assert found == []


ESCAPED = {"escape_controls", "json.dumps"}
"""What makes a text safe to print."""
DOOR = "cli/terminal.py"


def printed_by(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, what) of everything that reaches a stream, or makes a console of rich, and was not escaped there."""
    for node in ast.walk(tree):
        what = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {"typer.echo", "typer.secho", "click.echo"}:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Call) and what.rpartition(".")[2] == "Console":
            yield node.lineno, what
        elif what == "print" or re.fullmatch(r"sys\.(__)?std(out|err)(__)?\.(buffer\.)?write(lines)?", what):
            for each in node.args:
                is_escaped = isinstance(each, ast.Call) and ast.unparse(each.func) in ESCAPED
                if not (isinstance(each, ast.Constant) or is_escaped):
                    yield node.lineno, ast.unparse(node)


def test_nothing_prints_but_what_is_constant_or_escaped() -> None:
    """A text from a file, an archive or a server has no effect on a terminal. ``inside`` runs in a vendor's process."""
    found = [
        f"{name}:{line}: {what}"
        for name, tree in modules().items()
        if name != DOOR and "/inside/" not in name
        for line, what in printed_by(tree)
    ]
    assert found == []


def test_every_page_is_escaped_as_a_whole() -> None:
    pages = {
        name for name, tree in modules().items() for words in words_that_a_program_acts_on(tree) if "<html" in words
    }
    assert pages == {"html/__init__.py"}
    for name in (*pages, "present/report/page.py"):
        assert "return escape_controls(" in (ROOT / "harness" / name).read_text(encoding="utf-8")


def test_every_module_loads_on_this_interpreter() -> None:
    """What runs in a server's own interpreter (``inside``) is loaded there, not here."""
    names = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "harness").rglob("*.py"))
        if "inside" not in path.parts and path.name != "__main__.py"
    ]
    script = f"import importlib\nfor name in {names}: importlib.import_module(name)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("module", "most_lines"), [("harness.model.sim.simulate", 15_000), ("harness.measure.client.run", 8_400)]
)
def test_who_reads_the_simulator_or_the_client_reads_little_else(module: str, most_lines: int) -> None:
    script = (
        f"import sys, {module}; print(*(each.__file__ for each in sys.modules.values() if hasattr(each, '__file__')))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    files = [Path(name) for name in done.stdout.split() if Path(name).is_relative_to(ROOT / "harness")]
    assert files
    assert sum(path.read_text(encoding="utf-8").count("\n") for path in files) < most_lines


def test_no_two_public_classes_share_a_name() -> None:
    """Files in a folder ``inside`` run in a vendor's process."""
    places: dict[str, list[str]] = {}
    for path in (ROOT / "harness").rglob("*.py"):
        if "inside" not in path.parts:
            for name in re.findall(r"^class ([A-Z]\w*)", path.read_text(encoding="utf-8"), re.MULTILINE):
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    # An answer of a comparison and that of a tune, which holds some of the former.
    places.pop("Answer")
    assert {name: files for name, files in places.items() if len(files) > 1} == {}


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
    page = "\n".join(page.read_text() for page in (ROOT / "docs" / "reference").glob("method*.md"))
    modules = set(re.findall(r"`harness\.([\w.]+)`", page))
    assert modules
    homes = [ROOT / "harness" / name.replace(".", "/") for name in modules]
    assert [str(home) for home in homes if not (home.is_dir() or home.with_suffix(".py").is_file())] == []
