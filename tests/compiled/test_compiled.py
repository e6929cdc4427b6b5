"""Machine code is kept between processes and never outlives the sources it was made of."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "harness"

CALLER = """
import numpy as np
from {package}.compiled import compiled
from {package}.model.engine.callee import Memory, tripled

@compiled
def held(memory: Memory) -> int:
    return tripled(memory)

def answer() -> int:
    return held(Memory(np.full(1, 14, dtype=np.int64)))
"""
CALLEE = """
from typing import Any, NamedTuple
from {package}.compiled import by_kind, jit
from {package}.model.engine.factor import FACTOR

class Memory(NamedTuple):
    held: Any

@jit
def product(number: int) -> int:
    return number * FACTOR

@jit
def tripled_memory(memory: Memory) -> int:
    return product(memory.held[0])

tripled = by_kind({{Memory: tripled_memory}})
"""
"""The callee is behind another one, which the kind of tables chooses."""


def little_package(folder: Path) -> Path:
    """A copy of the decorator in a package of the same name, with a caller, its callee, and a constant of that."""
    engine = folder / "harness" / "model" / "engine"
    engine.mkdir(parents=True)
    for package in (engine.parents[1], engine.parent, engine):
        (package / "__init__.py").touch()
    shutil.copytree(PACKAGE / "compiled", engine.parents[1] / "compiled", ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in {"caller": CALLER, "callee": CALLEE, "factor": "FACTOR = 3\n"}.items():
        (engine / f"{name}.py").write_text(text.format(package="harness"))
    return engine


def answer(engine: Path) -> tuple[int, int, str]:
    """(what the caller returns in a process of its own, files of machine code kept until then, what it said)."""
    program = "import harness.model.engine.caller as it; print(it.answer())"
    environment = os.environ | {"PYTHONPATH": str(engine.parents[2]), "NUMBA_CACHE_DIR": str(engine / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=engine.parents[2],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout), len(list((engine / "cache").rglob("*.aot.o"))), done.stderr


def test_machine_code_is_made_anew_where_a_callee_or_constant_was_edited_and_kept_otherwise(
    tmp_path: Path,
) -> None:
    engine = little_package(tmp_path)
    first = answer(engine)
    assert first[0] == 42
    assert first[2].startswith("compiling harness/model/engine/caller.py for this machine: once")
    assert answer(engine) == (*first[:2], ""), "the second process adds no machine code, and has nothing to say"
    for name in ("caller", "callee"):
        path = engine / f"{name}.py"
        path.write_text("# edited\n" + path.read_text() + "\n\ndef other() -> int:\n    return 1\n")
    (engine / "factor.py").write_text("OTHER = 5\nFACTOR = 3\n")
    assert answer(engine) == (*first[:2], ""), "no compiled function was changed"
    callee = engine / "callee.py"
    callee.write_text(callee.read_text().replace("* FACTOR", "* FACTOR + 1"))
    assert answer(engine)[0] == 43
    (engine / "factor.py").write_text("FACTOR = 2\n")
    assert answer(engine)[0] == 29


def test_processes_that_come_together_make_machine_code_once(tmp_path: Path) -> None:
    engine = little_package(tmp_path)
    program = "import sys, harness.model.engine.caller as it; print(it.answer(), 'numba' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(engine / "cache")}
    command = [sys.executable, "-c", program]
    together = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    said = sorted(process.communicate()[0].strip() for process in together)
    assert said == ["42 False", "42 False", "42 True"], "who waited for the code needed nothing to make it with"


def test_a_function_that_names_a_module_is_refused_since_changes_there_would_go_unseen(tmp_path: Path) -> None:
    engine = little_package(tmp_path)
    caller = engine / "caller.py"
    text = caller.read_text().replace("import numpy", "from harness.model.engine import callee\nimport numpy")
    caller.write_text(text.replace("return tripled", "return callee.tripled"))
    with pytest.raises(subprocess.CalledProcessError) as failed:
        answer(engine)
    assert "import what it needs from callee" in failed.value.stderr
