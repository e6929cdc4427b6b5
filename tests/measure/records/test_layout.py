from __future__ import annotations

import ast
from pathlib import Path

import harness
from harness.measure.records import layout

ROOT = Path(harness.__file__).parent
NAMES = {
    value
    for name, value in vars(layout).items()
    if name.isupper() and isinstance(value, str) and "." in value and not value.startswith(".")
}


def spelt_names(path: Path) -> set[str]:
    """The names that are strings of a module."""
    text = path.read_text(encoding="utf-8")
    if not any(name in text for name in NAMES):
        return set()
    nodes = ast.walk(ast.parse(text))
    return {node.value for node in nodes if isinstance(node, ast.Constant) and node.value in NAMES}


def test_no_other_module_spells_the_name_of_a_file_of_a_run():
    """But for what runs inside a server's interpreter, where the package is not there to be imported."""
    assert len(NAMES) > 15
    found = {
        str(path.relative_to(ROOT)): sorted(names)
        for path in ROOT.rglob("*.py")
        if "inside" not in path.parts and (names := spelt_names(path))
    }
    assert set(found) == {"measure/records/layout.py"}, found


def test_what_can_be_rebuilt_lies_in_a_folder_of_its_own():
    assert layout.table_path("requests") == "requests.parquet"
    assert layout.table_path("steps") == "derived/steps.parquet"


def test_every_raw_file_of_the_layout_can_be_written():
    assert all(layout.is_raw_name(name) for name in NAMES - {layout.MANIFEST, layout.LOCK})
