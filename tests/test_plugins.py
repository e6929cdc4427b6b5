"""A package adds a command, a backend, formats and an analysis by its entry point; one that breaks is left out.

The package is built and installed into an environment of its own, as a user's is. Source: CONTRIBUTING.md, "A plug-in".
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.plugins import Plugin, Registry, part_at, plugins
from tests.support.checkout import ROOT
from tests.support.command_line import harness_apart
from tests.support.copied_checkout import TRIED_BACKEND

PROJECT = """
[build-system]
requires = ["hatchling>=1.25"]
build-backend = "hatchling.build"
[project]
name = "tried-plugin"
version = "1.2"
[project.entry-points."rbln_harness.plugins"]
tried = "tried_plugin:PLUGIN"
broken = "tried_plugin.broken:PLUGIN"
leaving = "tried_plugin.leaving:PLUGIN"
[tool.hatch.build.targets.wheel]
packages = ["tried_plugin"]
"""
PACKAGE = """
from harness.kinds import BackendKind
from harness.plugins import Plugin

PLUGIN = Plugin(
    name="tried",
    summary="a backend, two formats, an analysis and a command, to try",
    commands={"tried hello": "tried_plugin.parts:hello", "records count": "tried_plugin.parts:count"},
    groups={"tried": "Commands of the plug-in."},
    kinds=(BackendKind(name="tried", label="tried by its plug-in", scales_time=True, is_virtual=True),),
    backends={"tried": "tried_plugin.parts:BACKEND", "sim": "tried_plugin.leaving:BACKEND"},
    export_formats={"tokens": "tried_plugin.parts:TOKENS"},
    trace_formats={"pairs": "tried_plugin.parts:PAIRS"},
    analyses={"counted": "tried_plugin.parts:COUNTED"},
)
"""
PARTS = (
    TRIED_BACKEND
    + '''\

from harness.judge.catalogue import Analysis
from harness.present.export import Format
from harness.table import table_of
from harness.model.traces.base import TraceFormat, json_records
from harness.model.traces.recording import RecordedRequest, Recording


TOKENS = Format("tokens", (), {"tokens.json": lambda run: [request.output_tokens for request in run.requests]})
COUNTED = Analysis(
    "counted",
    "how many runs there are",
    (lambda experiment: table_of("counted", "Runs of all conditions", [{"runs": len(experiment.valid_runs)}]),),
)


def read_pairs(paths, notes, progress):
    for path in paths:
        for *_, record in json_records(path, notes, progress):
            request = RecordedRequest(None, (), 0, "none", record["in"], 0, record["out"])
            yield Recording(str(path), 0, (request,))


PAIRS = TraceFormat("together", read_pairs, keys=(frozenset({"in", "out"}),))


def hello() -> None:
    """Say hello."""
    print("hello from a plug-in")


def count() -> None:
    """Count to three."""
    print("1 2 3")
'''
)


TRIED = ["--backend", "tried", "--replicates", "1", "--set", 'analysis="counted"']


@pytest.fixture(scope="module")
def harness(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command of an environment with the harness's packages, the harness, and the plug-in, each installed."""
    root = tmp_path_factory.mktemp("plugin")
    package = root / "source" / "tried_plugin"
    package.mkdir(parents=True)
    (root / "source" / "pyproject.toml").write_text(PROJECT)
    (package / "__init__.py").write_text(PACKAGE)
    (package / "parts.py").write_text(PARTS)
    (package / "broken.py").write_text("import a_package_that_nobody_has\n")
    (package / "leaving.py").write_text("raise GeneratorExit('a plug-in that leaves')\n")
    environment = root / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", environment], check=True)
    python = environment / "bin" / "python"
    (site,) = environment.glob("lib/python*/site-packages")
    # The packages of this environment stand for those that an index would give.
    (site / "packages.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")
    uv = [Path(sys.executable).with_name("uv"), "pip", "install", "--quiet", "--python", python, "--no-index"]
    places = [str(root / "source"), "--editable", str(ROOT)]
    subprocess.run([*uv, "--no-build-isolation", "--no-deps", *places], check=True)
    return environment / "bin" / "harness"


def run(harness: Path, *arguments: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([harness, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def called(harness: Path, *arguments: str, cwd: Path) -> str:
    """What a command prints that finds the plug-in where it is installed; a forked one, not a new interpreter."""
    (site,) = harness.parents[1].glob("lib/python*/site-packages")
    done = harness_apart(*arguments, cwd=cwd, checkout=site)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_installed_plugin_measures_exports_reads_and_adds_commands(harness: Path, tmp_path: Path) -> None:
    made = run(harness, "run", "demo", *TRIED, "--runs", "runs", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    called(harness, "records", "export", "demo", "--format", "tokens", "-o", "out", "--runs", "runs", cwd=tmp_path)
    (first, *_) = sorted((tmp_path / "out").rglob("tokens.json"))
    assert all(tokens > 0 for tokens in json.loads(first.read_text()))
    (tmp_path / "pairs.jsonl").write_text('{"in": 500, "out": 20}\n')
    assert "pairs" in called(harness, "trace", "import", "pairs.jsonl", "-o", "trace.jsonl", cwd=tmp_path)
    analysed = called(harness, "paper", "analyse", "demo", "--runs", "runs", cwd=tmp_path)
    assert "Runs of all conditions" in analysed
    assert called(harness, "tried", "hello", cwd=tmp_path) == "hello from a plug-in\n"
    assert called(harness, "records", "count", cwd=tmp_path) == "1 2 3\n"


def test_the_doctor_lists_plugins_and_says_in_one_line_what_does_not_load(harness: Path, tmp_path: Path) -> None:
    # No line folds, whatever the width of the pipe.
    lines = run(harness, "doctor", cwd=tmp_path, COLUMNS="1000").stdout.splitlines()
    assert any("plug-in" in line and "tried: a backend, two formats" in line for line in lines)
    text = " ".join(" ".join(lines).split())
    left_out = "(tried-plugin 1.2) does not load and is left out:"
    assert re.search(rf"broken {re.escape(left_out)} \w+: No module named 'a_package_that_nobody_has'", text)
    assert f"leaving {left_out} GeneratorExit: a plug-in that leaves" in text
    assert "ok backend sim" in text, "a plug-in cannot take its name"


def test_the_extras_of_the_harness_register_as_any_plugin_does() -> None:
    assert {"otel", "paper", "peers", "perfetto", "twin"} <= {plugin.name for plugin in plugins().usable}
    folders = {path.name for path in (ROOT / "harness" / "extras").iterdir() if (path / "__init__.py").is_file()}
    assert folders == {plugin.name for plugin in plugins().usable}


@pytest.mark.parametrize("plugin", plugins().usable, ids=lambda plugin: plugin.name)
def test_every_part_of_an_extra_loads(plugin: Plugin) -> None:
    sorts = (
        *("commands", "backends", "export_formats", "trace_formats", "analyses", "rules", "result_files", "services"),
        "doctor",
    )
    places = [place for sort in sorts for place in getattr(plugin, sort).values()]
    assert places
    assert all(part_at(place) is not None for place in places)


def test_a_name_of_the_core_cannot_be_taken_by_a_plugin() -> None:
    formats = Registry("export_formats", {"aiperf": "the core's own"})
    assert formats["aiperf"] == "the core's own"
    assert list(formats).count("aiperf") == 1
