"""Every command of the start and of the guides runs as its page has it, or the page says why a test cannot.

At 80 columns, no line of what it says is longer. ``tests/cli/test_tree.py`` runs the examples of the help.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from harness.measure.client.target import Endpoint
from harness.measure.server.ask import ask
from harness.measure.server.process import free_port
from tests.docs.pages import GUIDES, START, Block, blocks_of, page_text
from tests.support.command_line import WIDTH, harness, lines_beyond, start_harness
from tests.support.experiments import UNHURRIED_TOML
from tests.support.processes import comes_true
from tests.support.sshd import make_key

ANSWERS = {
    "guides/planning": {
        "harness power slots.toml --rule superiority": r"7 replicates show it cheaper with probability 0\.9",
    },
    "guides/preregistration": {
        "harness decide slots": r"costs \d\.\d % less .*: PASS",
    },
}
"""What commands answer, where their page promises it."""
THE_PAGES_PORT = "18000"
"""Of the servers that pages start."""
REASONS = {
    *("needs an NPU", "needs a GPU", "installs vLLM for the CPU", "needs other hosts", "needs a server of yours"),
    *("needs the packages of an agent", "builds containers", "minutes on the emulator"),
    *("needs an archive of somebody", "needs recordings of yours", "needs results of another tool"),
    *("needs runs of many releases", "the tests run inside this environment"),
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


def test_every_command_that_no_test_runs_has_one_of_the_reasons_and_every_reason_is_used() -> None:
    blocks = [block for name in (*START, *GUIDES) for block in blocks_of(page_text(name))]
    assert {block.marks["not run"] for block in blocks if "not run" in block.marks} == REASONS


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """An environment with a home of its own, in which there is a key to sign with."""
    key = tmp_path / "home" / ".ssh" / "id_ed25519"
    key.parent.mkdir(parents=True)
    make_key(key)
    return {**os.environ, "HOME": str(tmp_path / "home"), "COLUMNS": str(WIDTH)}


@pytest.mark.live
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", PAGES_WITH_COMMANDS)
def test_every_command_of_a_page_runs(
    name: str, shell: dict[str, str], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    port = free_port()
    for block in blocks_of(page_text(name)):
        if "file" in block.marks:
            (folder / block.marks["file"]).write_text(unhurried(on_port(port, block.text)))
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
        if not words.startswith("harness query "):
            assert lines_beyond(done.stdout) == [], words
        printed[command] = " ".join(done.stdout.split())
    for command, answer in ANSWERS.get(name, {}).items():
        assert re.search(answer, printed[command]), f"{command}\n{printed[command]}"


def on_port(port: int, text: str) -> str:
    """The same with a port that nobody else on this machine has: other tests may run beside these."""
    return text.replace(THE_PAGES_PORT, str(port))


def unhurried(text: str) -> str:
    """An experiment without limits of its own: how busy this machine is decides nothing."""
    return text + UNHURRIED_TOML if "[[condition]]" in text and "[limits]" not in text else text


def called(words: str, folder: Path, shell: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A line of a page; a ``harness`` command needs neither a shell nor a new interpreter."""
    if words.startswith("harness "):
        return harness(*words_of(words, shell), cwd=folder, environment=shell)
    return subprocess.run(
        ["bash", "-c", words], cwd=folder, env=shell, capture_output=True, text=True, check=False, timeout=600
    )


def words_of(command: str, shell: dict[str, str]) -> list[str]:
    """What a shell gives the program."""
    return [re.sub("^~", shell["HOME"], word) for word in shlex.split(command)[1:]]


def start_server(words: str, folder: Path, shell: dict[str, str], request: pytest.FixtureRequest) -> None:
    """Start what the page starts in the background, and wait until it answers; it ends with the test."""
    started = start_harness(*words_of(words, shell), cwd=folder, environment=shell)
    request.addfinalizer(started.wait)
    request.addfinalizer(started.kill)
    port = re.search(r"--port (\d+)", words)
    assert port is not None, words
    assert comes_true(lambda: ask(Endpoint("127.0.0.1", int(port[1])), "/health", deadline_s=10.0).status == 200)
