"""The NPU guide's commands, in order, from an empty folder to a decision and its archive.

The packages are the real ones, from the twin's environment; driver, device and compiler are stand-ins. The stack runs
on the Python of that environment, the harness on that of the tests. The stand-in takes the times of the costs by which
the runs are judged, so the rule says PASS or FAIL. One exception: on a busy machine the host's work lasts longer than
the 25 ms that the stand-in hides between two calls. Then time in flight grows and modelled device time does not, and
the decision is WITHHELD because the two differ. No other reason is accepted.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from harness.extras.twin.backend import TWIN_WRITER, step_costs
from harness.extras.twin.environment import INSIDE, SETTINGS_VARIABLE, TwinEnvironment, twin_variables
from harness.model.engine import load_cost_model
from harness.stacks.rbln.launch.compile import DEFAULT_FREE_GIB, EXPORT, GIB
from tests.docs.pages import Block, blocks_of, page_text
from tests.support.command_line import harness
from tests.support.experiments import UNHURRIED_TOML
from tests.support.stacks import linked_environment, write_driver

pytestmark = [pytest.mark.live, pytest.mark.timeout(1800)]
BLOCKS = blocks_of(page_text("guides/npu"))
NEEDS_NPU = "needs an NPU"
DECIDED = r"^(PASS|FAIL) .*superiority: bucket-6 vs base"
APART = r"^WITHHELD .*superiority: bucket-6 vs base.*\n\s+modelled device time \(A\) gives a cost ratio of"
SMALLER = {
    "replicates = 5": "replicates = 3",
    "num_sessions = 6": """num_sessions = 6
wait_cap_s = 0.2
generate_tokens = {distribution = "uniform", low = 4, high = 16}""",
    "[limits]": UNHURRIED_TOML.strip(),
}
"""What the test changes in the guide's experiment: how much is sent, and no limit of lateness."""


def stand_in_stack(twin: TwinEnvironment, root: Path) -> Path:
    """A virtual environment as the guide installs it, whose compiler writes the twin's artifacts."""
    linked_environment(twin, root)
    (root / "bin" / "python").rename(root / "bin" / "python3")
    vllm = root / "bin" / "vllm"
    vllm.write_text(vllm.read_text().replace(f"#!{root / 'bin' / 'python'}\n", f"#!{root / 'bin' / 'python3'}\n"))
    (root / "bin" / "python").write_text(
        f'#!/bin/sh\n[ "$1" = {EXPORT} ] && shift && set -- {TWIN_WRITER} "$@"\nexec {root}/bin/python3 "$@"\n'
    )
    (root / "bin" / "python").chmod(0o755)
    # As an installed rebel-compiler would be: importable from the environment itself.
    next(root.glob("lib/python3.*/site-packages")).joinpath("stand_in.pth").write_text(f"{INSIDE}\n")
    return root


@pytest.fixture
def variables(twin: TwinEnvironment, tmp_path: Path) -> dict[str, str]:
    """Of the shell: a home of its own, a driver on PATH, and what the stand-in device takes."""
    settings = tmp_path / "device.json"
    costs = step_costs(load_cost_model("paper"), (1, 2, 4, 6, 8))
    settings.write_text(json.dumps({"timing": "period", "costs": costs}))
    own = {name: value for name, value in twin_variables(twin).items() if name != "PYTHONPATH"}
    path = f"{write_driver(tmp_path / 'driver')}:{os.environ['PATH']}"
    return {
        **os.environ,
        **own,
        SETTINGS_VARIABLE: str(settings),
        "HOME": str(tmp_path),
        "PATH": path,
        "COLUMNS": "200",
    }


def commands_after(first: str) -> list[tuple[Block, str]]:
    """What the page has its reader type, without comments, from one command on to the section about containers."""
    typed = [
        (block, re.sub(r"  +#.*", "", command))
        for block in BLOCKS
        if block.language == "console" and block.marks.get("not run") == NEEDS_NPU
        for command in block.commands
    ]
    start = next(place for place, (_, command) in enumerate(typed) if command.startswith(first))
    return typed[start:]


def test_every_command_of_the_guide_leads_to_a_decision_that_is_subject_to_its_rule(
    twin: TwinEnvironment, variables: dict[str, str], tmp_path: Path
) -> None:
    if (free := os.statvfs(tmp_path)).f_bavail * free.f_frsize < DEFAULT_FREE_GIB * GIB:
        pytest.skip("the compiler's stand-in asks for as much disk as the compiler")
    stack, artifacts, here = stand_in_stack(twin, tmp_path / "stack"), tmp_path / "artifacts", tmp_path
    compiled: list[str] = []
    answers: dict[str, str] = {}
    for _, command in commands_after("harness doctor --environment"):
        words = command.replace("/opt/stack", str(stack)).replace("/data/artifacts", str(artifacts))
        if words.startswith("harness "):
            done = harness(*shlex.split(words)[1:], cwd=here, environment=variables)
        else:
            done = subprocess.run(
                ["bash", "-c", words], cwd=here, env=variables, capture_output=True, text=True, check=False
            )
        decides = words.startswith(("harness decide", "harness prereg publish", "harness prereg check"))
        # On this machine the doctor may miss what no run of the guide needs.
        expected = (0, 4, 5) if decides else (0, 1) if words.startswith("harness doctor") else (0,)
        assert done.returncode in expected, f"{words}\n{done.stdout[-2000:]}\n{done.stderr}"
        compiled += re.findall(r"^(\S+): compiled in", done.stdout, re.MULTILINE)
        answers[" ".join(words.split()[:3])] = done.stdout
        if words.startswith("mkdir ca25"):
            here = tmp_path / "ca25"
            write_experiment(here / "ca25.toml", stack, compiled)
    assert "no rbln-smi" not in answers["harness doctor --environment"]
    assert "1 decision on confirmatory runs" in answers["harness decide ca25-buckets"]
    for command in ("harness decide ca25-buckets", "harness prereg check"):
        assert re.search(f"{DECIDED}|{APART}", answers[command], re.MULTILINE), answers[command]


def write_experiment(path: Path, stack: Path, compiled: list[str]) -> None:
    """The guide's file with the folders that its commands printed, at the size of a test."""
    (text,) = [block.text for block in BLOCKS if block.marks.get("file") == path.name]
    for name, folder in zip(re.findall(r'"(/data/artifacts/[^"]*)"', text), compiled, strict=True):
        text = text.replace(name, folder)
    for old, new in {**SMALLER, "/opt/stack": str(stack)}.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
