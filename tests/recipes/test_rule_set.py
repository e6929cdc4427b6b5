"""A rule set is its five files: a toy one, written into a copy of the checkout, is served, simulated and checked.

Nothing but the files that CONTRIBUTING.md names is changed in the copy; a recipe that needs another place fails here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT

NEEDED = ("harness", "benchmarks", "plans", "patches", "tests", "pyproject.toml", "README.md")
EDITS = {
    "harness/stack/rbln/kv_rules.py": (
        (
            "    survives_copy_failure: bool = False\n",
            "    survives_copy_failure: bool = False\n    forgets: bool = False\n",
        ),
        (
            "_TABLE = (\n",
            '_TABLE = (\n    RuleSet("tried", "a toy that reuses nothing", releases=("98.7.6",), forgets=True),\n',
        ),
    ),
    "harness/engine/state.py": (("    sets_slot_aside: int\n", "    sets_slot_aside: int\n    forgets: int\n"),),
    "harness/engine/vendor.py": (
        ("    while num_hits < most_blocks:\n", "    while num_hits < most_blocks and state.server[0].forgets == 0:\n"),
    ),
    "tests/support/oracle.py": (
        (
            "        hits: list[int] = []\n",
            "        hits: list[int] = []\n        if self.rules.forgets:\n            return hits\n",
        ),
    ),
    "README.md": (("- `vendor-0.11.1`:", "- `tried`: a toy that reuses nothing.\n- `vendor-0.11.1`:"),),
}
EXPERIMENT = """
name = "toy"
backend = "sim"
base_seed = 5
replicates = 1

[workload]
num_sessions = 2
waits = "none"

[[condition]]
name = "toy"
server.rules = "tried"

[[condition]]
name = "vendor"
"""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkout with the toy's five edits."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in NEEDED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, folder / name)
    for name, pairs in EDITS.items():
        text = (folder / name).read_text()
        for old, new in pairs:
            assert text.count(old) == 1, (name, old)
            text = text.replace(old, new)
        (folder / name).write_text(text)
    return folder


def python(folder: Path, *words: str) -> str:
    # What is compiled here runs for a moment: LLVM need not optimise it.
    # What runs for a moment need not be compiled; chain keys wrap, which numpy warns of.
    environment = os.environ | {"PYTHONPATH": str(folder), "NUMBA_DISABLE_JIT": "1"}
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_the_recipe_names_the_files_that_the_toy_took() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text()
    part = re.search(r"^## A rule set\n(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL)
    assert part is not None
    assert re.findall(r"^\d\. `([^`]+)`", part[1], re.MULTILINE) == list(EDITS)


def test_a_rule_set_of_its_own_is_checked_against_the_second_opinion_and_measured(copy: Path) -> None:
    # The engine decides as the oracle under the toy's rules too, and the table's own tests hold.
    checks = ("tests/stack/rbln/test_kv_rules.py", "tests/engine/test_scheduler_against_oracle.py")
    python(copy, "-m", "pytest", "-q", "-W", "ignore:overflow", *checks, "-k", "tried or kv_rules")
    (copy / "toy.toml").write_text(EXPERIMENT)
    python(copy, "-m", "harness", "run", "toy.toml", "--runs", "runs")
    reused = python(
        copy, "-m", "harness", "query", "--runs", "runs", "--format", "csv",
        "select condition, max(cached_tokens) > 0 from requests group by 1 order by 1",
    )  # fmt: skip
    assert re.findall(r"(toy|vendor)\W+(\w+)", reused.lower()) == [("toy", "false"), ("vendor", "true")], reused
