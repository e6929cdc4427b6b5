"""A real vLLM on the CPU that records its sessions and steps, started as a person starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.measure.server.process import free_port
from harness.stacks.vllm.step_log import INSIDE
from tests.support.checkout import ROOT

SMALL = ("--load-format", "dummy", "--enforce-eager", "--max-model-len", "4096", "--enable-prompt-tokens-details")
# A second thread would wait at each layer for one that another program keeps from its core.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def named_environment(target: str) -> Path:
    """The environment that VLLM_CPU names; the test is skipped without it. target: of make, which sets it."""
    if not (named := os.environ.get("VLLM_CPU", "")):
        pytest.skip(f"VLLM_CPU names no environment (make {target})")
    return (ROOT / named).resolve()


def tiny_model(folder: Path) -> str:
    """A model of four layers, without weights."""
    subprocess.run([sys.executable, ROOT / "tools" / "tiny_model.py", folder / "tiny", "4", "256"], check=True)
    return str(folder / "tiny")


@contextmanager
def serving(environment: Path, words: Sequence[str], folder: Path, name: str) -> Generator[str]:
    """The address of ``vllm serve`` with these words; it records NAME.jsonl and NAME.core_steps.jsonl in the folder."""
    address = f"http://127.0.0.1:{(port := free_port())}"
    command = [str(environment / "bin" / "vllm"), *words[1:], "--host", "127.0.0.1", "--port", str(port), *SMALL]
    files = {"VLLM_SESSIONS_FILE": f"{name}.jsonl", "VLLM_CORE_STEPS_FILE": f"{name}.core_steps.jsonl"}
    variables = {
        **os.environ,
        **{variable: str(folder / file) for variable, file in files.items()},
        **{"PYTHONPATH": str(INSIDE), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **ONE_THREAD},
    }
    with (folder / f"{name}.log").open("wb") as log:
        server = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
    try:
        yield address
    finally:
        server.terminate()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()


def serve_agents(environment: Path, url: str, agents: int, turns: int) -> None:
    """Wait for the server, and send the requests of ``openai_agents``."""
    from tests.support import openai_agents
    from tests.support.command_line import harness

    assert harness("doctor", "--url", url, "--wait", "9min").returncode == 0
    words = [str(environment / "bin" / "python"), openai_agents.__file__, url, str(agents), str(turns)]
    subprocess.run(words, check=True, timeout=600)
