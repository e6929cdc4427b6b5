from __future__ import annotations

import ast
from pathlib import Path

import pytest

import harness
from harness.measure.records import layout

ROOT = Path(harness.__file__).parent
NAMES = {
    value
    for name, value in vars(layout).items()
    if name.isupper() and isinstance(value, str) and "." in value and not value.startswith(".")
}


def strings_of(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_no_other_module_spells_the_name_of_a_file_of_a_run():
    """But for what runs inside a server's interpreter, where the package is not there to be imported."""
    assert len(NAMES) > 15
    found = {
        str(path.relative_to(ROOT)): sorted(strings_of(path) & NAMES)
        for path in ROOT.rglob("*.py")
        if strings_of(path) & NAMES and "inside" not in path.parts
    }
    assert set(found) == {"measure/records/layout.py"}, found


def test_what_can_be_rebuilt_lies_in_a_folder_of_its_own():
    assert layout.table_path("requests") == "requests.parquet"
    assert layout.table_path("steps") == "derived/steps.parquet"


@pytest.mark.parametrize("name", ["../up", "manifest.json", "writer.lock", "steps.parquet", ".hidden", ""])
def test_a_raw_file_cannot_take_a_name_that_means_something_else(name: str):
    assert not layout.is_raw_name(name)


def test_every_raw_file_of_the_layout_can_be_written():
    assert all(layout.is_raw_name(name) for name in NAMES - {layout.MANIFEST, layout.LOCK})
