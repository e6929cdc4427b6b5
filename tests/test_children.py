"""A child of ours loads this harness and nothing that lies in the working folder."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.children import own_command, script_command
from harness.measure.server.vllm_serve import find_stack
from tests.support.checkout import ROOT
from tests.support.emulated_vllm import emulated_vllm
from tests.support.strangers import Strangers

SHOW = "import sys, random, numpy, harness; print(harness.__file__, sys.argv)"


@pytest.fixture
def strangers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Strangers:
    monkeypatch.chdir(tmp_path)
    return Strangers(tmp_path)


def run(command: tuple[str, ...], text: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, input=text, env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("variables", [{}, {"PYTHONSAFEPATH": "1"}], ids=["plain", "safe-path"])
def test_a_child_in_a_folder_of_strangers_loads_this_harness(variables: dict[str, str], strangers: Strangers) -> None:
    done = run(own_command("builtins:exec", SHOW), **variables)
    assert done.stdout.split()[0] == str(ROOT / "harness" / "__init__.py"), done.stderr
    assert strangers.loaded == ""


def test_the_program_as_pip_writes_it_loads_nothing_of_the_folder(strangers: Strangers, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "harness"
    program.parent.mkdir()
    program.write_text("import sys\nfrom harness.__main__ import main\nsys.exit(main())\n")
    done = run((sys.executable, str(program), "simulate", "demo", "--draws", "1"), PYTHONPATH=str(ROOT))
    assert "bucket6-waits / base-waits" in done.stdout, done.stderr
    assert strangers.loaded == ""


def test_what_the_user_put_on_the_path_stays_there(strangers: Strangers, tmp_path: Path) -> None:
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "mine.py").write_text("print('mine')")
    for command, text in (
        (own_command("builtins:exec", "import mine"), ""),
        (script_command(sys.executable), "import mine"),
    ):
        assert run(command, text, PYTHONPATH=str(beside)).stdout == "mine\n"
    assert strangers.loaded == ""


def test_a_function_gets_its_words_as_text_and_returns_the_exit_status(strangers: Strangers) -> None:
    done = run(own_command("builtins:int", "7"))
    assert (done.returncode, done.stderr) == (7, "")
    assert run(own_command("builtins:print", Path("a b"), 1)).stdout == "a b 1\n"
    assert strangers.loaded == ""


def test_a_script_of_another_interpreter_loads_nothing_of_the_folder(strangers: Strangers) -> None:
    done = run(
        script_command(sys.executable), "from __future__ import annotations\nimport json, random\nprint('größe')"
    )
    assert done.stdout == "größe\n", done.stderr
    assert strangers.loaded == ""


def test_a_stack_is_looked_for_without_the_folder(strangers: Strangers, tmp_path: Path) -> None:
    environment = emulated_vllm(tmp_path / "environment")
    (vllm,) = environment.rglob("vllm-*.dist-info")
    vllm.with_name("torch-2.13.0.dist-info").mkdir()
    # A folder without its file of metadata is no installed package.
    assert find_stack(str(environment), ["vllm", "torch"], hint="").versions == {"vllm": "0.30.0"}
    assert strangers.loaded == ""


def test_every_module_that_runs_in_a_child_loads_among_strangers(strangers: Strangers) -> None:
    sources = [path.read_text() for path in (ROOT / "harness").rglob("*.py")]
    modules = {module for text in sources for module in re.findall(r'"(harness\.[\w.]+):\w+"', text)}
    assert {"harness.measure.emulator.__main__", "harness.runner.fleet.worker"} <= modules
    done = run(own_command("builtins:exec", f"import {', '.join(sorted(modules))}; print('all')"))
    assert done.stdout == "all\n", done.stderr
    assert strangers.loaded == ""


INTERPRETERS = {
    "children.py": "the one place that starts them",
    "extras/twin/backend.py": "runs a file of ours by its path",
    "extras/twin/install.py": "its own interpreter is one of those that a twin may have",
}


def test_interpreters_are_started_in_one_place() -> None:
    """``-m`` and ``-c`` put the working folder on the path, so no other module writes such a command."""
    package = ROOT / "harness"
    named = {
        str(path.relative_to(package))
        for path in sorted(package.rglob("*.py"))
        if "inside" not in path.parts and "executable" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
    }
    assert named == set(INTERPRETERS)
