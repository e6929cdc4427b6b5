"""Every command of the start and of the guides runs as its page has it, or the page says why a test cannot.

The folder is full of files named as modules, of which none may be loaded.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from harness.measure.client.target import Endpoint
from harness.measure.server.ask import ask
from harness.measure.server.process import free_port
from tests.docs.pages import GUIDES, START, Block, blocks_of, page_text
from tests.support.checkout import ROOT
from tests.support.command_line import harness
from tests.support.processes import comes_true
from tests.support.strangers import Strangers

ANSWERS = {
    "guides/planning": {
        "harness power slots.toml --rule superiority": r"7 replicates show it cheaper with probability 0\.9",
    },
    "guides/preregistration": {
        "harness decide slots --runs runs/main": r"costs \d\.\d % less .*: PASS",
    },
}
"""What commands answer, where their page promises it."""
THE_PAGES_PORT = "18000"
"""Of the servers that pages start."""
REASONS = {
    "needs an NPU",
    "needs a GPU",
    "installs vLLM for the CPU",
    "needs other hosts",
    "builds containers",
    "minutes on the emulator",
    "needs recordings of yours",
    "needs results of another tool",
    "needs runs of many releases",
    "the tests run inside this environment",
}


def commands_run(name: str) -> list[tuple[Block, str]]:
    return [
        (block, command)
        for block in blocks_of(page_text(name))
        if block.language == "console" and "not run" not in block.marks
        for command in block.commands
    ]


PAGES_WITH_COMMANDS = [name for name in (*START, *GUIDES) if commands_run(name)]


@pytest.mark.parametrize("name", [*START, *GUIDES])
def test_a_command_that_no_test_runs_has_a_reason(name: str) -> None:
    given = {block.marks["not run"] for block in blocks_of(page_text(name)) if "not run" in block.marks}
    assert given <= REASONS


@pytest.mark.parametrize("name", [*START, *GUIDES])
def test_options_of_tests_are_given_to_a_command_that_is_there(name: str) -> None:
    for block in blocks_of(page_text(name)):
        for start in block.tested_with:
            assert any(command.startswith(f"harness {start} ") for command in block.commands), (name, start)


@pytest.mark.parametrize("name", [*START, *GUIDES])
def test_commands_stand_in_console_blocks(name: str) -> None:
    text = page_text(name)
    elsewhere = [block.text for block in blocks_of(text) if block.language in {"", "sh", "bash", "shell"}]
    assert elsewhere == []
    assert re.findall(r"^ +\$ .*|^    harness .*", text, re.MULTILINE) == []


def test_every_reason_is_used() -> None:
    given = {block.marks.get("not run") for name in (*START, *GUIDES) for block in blocks_of(page_text(name))}
    assert given >= REASONS


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment of a home of its own, in which ``harness`` and ``python`` are those of the tests."""
    programs, home = tmp_path / "bin", tmp_path / "home"
    (home / ".ssh").mkdir(parents=True)
    (home / ".config" / "git").mkdir(parents=True)
    # What ``Strangers`` leaves is no change of a page's repository.
    (home / ".config" / "git" / "ignore").write_text("*.py\n.loaded\n/harness/\n")
    programs.mkdir()
    # As pip writes it.
    script = f"#!{sys.executable}\nimport sys\nfrom harness.__main__ import main\nsys.exit(main())\n"
    for name, text in {"harness": script, "python": f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    key = home / ".ssh" / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    path = f"{programs}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "HOME": str(home), "PYTHONPATH": str(ROOT), "COLUMNS": "80"}


@pytest.mark.live
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PAGES_WITH_COMMANDS)
def test_every_command_of_a_page_runs(
    name: str, shell: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    strangers, port = Strangers(folder), free_port()
    for block in blocks_of(page_text(name)):
        if "file" in block.marks:
            (folder / block.marks["file"]).write_text(on_port(port, block.text))
    printed: dict[str, str] = {}
    for block, command in commands_run(name):
        words = on_port(port, command.partition("  #")[0].rstrip())
        for start, options in block.tested_with.items():
            if words.startswith(f"harness {start} "):
                words += f" {options}"
        if words.endswith("&"):
            start_server(words.removesuffix("&"), folder, shell, request)
            continue
        done = called(words, folder, shell)
        # At the size of a test, a decision may be open.
        is_rule = words.startswith(("harness decide ", "harness prereg publish ", "harness prereg check "))
        assert done.returncode in ((0, 5) if is_rule else (0,)), f"{words}\n{done.stdout[-500:]}\n{done.stderr}"
        printed[command] = " ".join(done.stdout.split())
    assert strangers.loaded == ""
    for command, answer in ANSWERS.get(name, {}).items():
        assert re.search(answer, printed[command]), f"{command}\n{printed[command]}"


def on_port(port: int, text: str) -> str:
    """The same with a port that nobody else on this machine has: other tests may run beside these."""
    return text.replace(THE_PAGES_PORT, str(port))


def called(words: str, folder: Path, shell: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A line of a page; a plain ``harness`` command needs neither a shell nor a new interpreter."""
    if words.startswith("harness ") and "~" not in words:
        return harness(*shlex.split(words)[1:], cwd=folder, environment=shell)
    return subprocess.run(
        ["bash", "-c", words], cwd=folder, env=shell, capture_output=True, text=True, check=False, timeout=600
    )


def start_server(words: str, folder: Path, shell: dict[str, str], request: pytest.FixtureRequest) -> None:
    """Start what the page starts in the background, and wait until it answers; it ends with the test."""
    started = subprocess.Popen(
        ["bash", "-c", f"exec {words}"], cwd=folder, env=shell, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    request.addfinalizer(started.wait)
    request.addfinalizer(started.kill)
    port = re.search(r"--port (\d+)", words)
    assert port is not None, words
    assert comes_true(lambda: ask(Endpoint("127.0.0.1", int(port[1])), "/health", deadline_s=10.0).status == 200)
