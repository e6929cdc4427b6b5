"""What no run of replicas could do is refused before anything starts: one check for a run and for its dry run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from harness.cli.tree import app
from harness.errors import HarnessError
from harness.extras.replicas.router_launch import router_launch
from harness.model.spec.server import RouterSpec

TWO = "replicas = 2\n"
REFUSED = {
    "nginx is not modelled": ("sim", TWO + 'router = {kind = "nginx"}'),
    "the router no-such-router is not in PATH": (
        "emulator",
        TWO + 'router = {kind = "command", command = ["no-such-router", "{port}", "{urls}"]}',
    ),
    "command needs {port}": ("emulator", TWO + 'router = {kind = "command", command = ["sh", "{port}"]}'),
    "has no [chunked_prefill]": ("sim", 'rules = "vllm-paged"\ncost_model = "paper"\nnum_gpu_blocks = 600'),
    "there is no second memory to load from": (
        "sim",
        'rules = "vllm-paged"\ncost_model = "emulated-gpu"\nnum_gpu_blocks = 600\noffload_block_us = 20.0',
    ),
    "the harness's own router takes no command": (
        "sim",
        TWO + 'router = {command = ["no-such-router", "{port}", "{urls}"]}',
    ),
    "takes no command and no environment": ("emulator", TWO + 'router = {environment = "there"}'),
    "one server has no router": ("sim", 'router = {policy = "session-affinity"}'),
    "need replica_urls": ("attached", 'url = "http://127.0.0.1:1"\n' + TWO),
    "metrics_url is of one server": (
        "attached",
        'url = "http://127.0.0.1:1"\nreplica_urls = ["http://127.0.0.1:2", "http://127.0.0.1:3"]\n'
        'metrics_url = "http://127.0.0.1:4/metrics"',
    ),
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_dry_run_refuses_what_a_run_refuses_in_the_same_words(words: str, tmp_path: Path) -> None:
    backend, server = REFUSED[words]
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nbackend = "{backend}"\n[server]\n{server}\n[[condition]]\nname = "a"\n')
    said: list[str] = []
    for more in (["--dry-run"], []):
        command = ["run", str(path), "--runs", str(tmp_path / "runs"), *more]
        done = CliRunner().invoke(app, command, env={"COLUMNS": "1000"})
        said.append(str(done.exception) if isinstance(done.exception, HarnessError) else done.output)
        assert done.exit_code != 0
    assert words in " ".join(said[0].split())
    assert said[0] == said[1]


@pytest.mark.parametrize("name", ['a;b {c} "d"', "plain", "back\\slash"])
def test_nginx_reads_paths_of_any_folder(name: str, tmp_path: Path) -> None:
    programs = tmp_path / "environment" / "bin"
    programs.mkdir(parents=True)
    (programs / "nginx").write_text("#!/bin/sh\n")
    (programs / "nginx").chmod(0o755)
    folder = tmp_path / name
    folder.mkdir()
    router = RouterSpec(kind="nginx", environment=str(tmp_path / "environment"))
    plan = router_launch(router, ["http://127.0.0.1:1", "http://127.0.0.1:2"], folder)
    lines = [line.strip() for line in Path(plan.files["config"]).read_text().splitlines()]
    (pid,) = [line for line in lines if line.startswith("pid ")]
    assert pid.startswith('pid "')
    assert pid.endswith('/nginx.pid";')
    assert _read(pid[5:-2]) == str(folder / "router.tmp" / "nginx.pid")


def _read(word: str) -> str:
    """As nginx reads what stands between quotes."""
    text: list[Any] = []
    letters = iter(word)
    for letter in letters:
        assert letter != '"'
        text.append(next(letters) if letter == "\\" else letter)
    return "".join(text)
