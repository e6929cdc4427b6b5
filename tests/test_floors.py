"""DESIGN.md tells the floors that the import contract holds."""

from __future__ import annotations

import re
from pathlib import Path

from harness.spec import load_toml

ROOT = Path(__file__).resolve().parent.parent


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
