"""What ``tools/cpu_budget.py`` counts and prints: processes too, by folder, beside the budgets of CONTRIBUTING.md."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tools.cpu_budget import START, budgets, folder_of, lines_of

pytestmark = pytest.mark.same_everywhere

SPINS = """
import subprocess, sys
SPIN = "import time\\nwhile time.process_time() < .2: pass"
def test_here(): exec(SPIN.replace("< .2", f"< {__import__('time').process_time() + .2}"))
def test_in_a_process(): subprocess.run([sys.executable, "-c", SPIN], check=True)
"""
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Without the other plug-ins, which take longer to load than these tests run."""


def test_a_file_costs_what_its_tests_and_their_processes_spend(tmp_path: Path) -> None:
    for name, text in (("dear", SPINS), ("cheap", "def test_nothing(): pass")):
        (tmp_path / "tests" / name).mkdir(parents=True)
        (tmp_path / "tests" / name / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "xdist", "-n", "1", "-p", "tools.cpu_budget", "tests"],
        cwd=tmp_path,
        env={**os.environ, **ALONE, "PYTHONPATH": str(ROOT), "CPU_COSTS": str(tmp_path / "costs.json")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tests/dear " in done.stdout
    spent_s = json.loads((tmp_path / "costs.json").read_text())
    assert spent_s["tests/dear/test_dear.py"] >= 0.35, "two times .2 s, less the ticks of a clock"
    assert spent_s["tests/cheap/test_cheap.py"] < 0.2


def test_folders_stand_beside_their_budgets_and_one_without_a_budget_by_itself() -> None:
    spent_s = {START: 2.0, "tests/cli/test_a.py": 3.0, "tests/cli/sub/test_b.py": 4.0, "tests/test_c.py": 1.0}
    assert [" ".join(line.split()) for line in lines_of(spent_s, {"tests/cli": 5})] == [
        "tests/cli 7.0 s of 5 s",
        f"{START} 2.0 s",
        "tests 1.0 s",
        "all 10.0 s of 5 s",
    ]


def test_every_budget_is_of_a_folder_that_has_tests() -> None:
    allowed_s = budgets((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert allowed_s
    assert set(allowed_s) <= {folder_of(file) for file in files}
