"""A real vLLM on the CPU that records its sessions and steps, started as a person starts it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from harness.measure.server.process import free_port
from harness.stacks.vllm.step_log import INSIDE
from tests.support.checkout import ROOT

# The engine would wait for a worker of its own by yielding its core all the time, and so keep the client from it.
ONE_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
SMALL = ("--load-format", "dummy", "--enforce-eager", *ONE_PROCESS)
# A second thread would wait at each layer for one that another program keeps from its core.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
VARIABLES = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", **ONE_THREAD}


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
    command += ["--max-model-len", "4096", "--enable-prompt-tokens-details"]
    files = {"VLLM_SESSIONS_FILE": f"{name}.jsonl", "VLLM_CORE_STEPS_FILE": f"{name}.core_steps.jsonl"}
    variables = {
        **os.environ,
        **{variable: str(folder / file) for variable, file in files.items()},
        **{"PYTHONPATH": str(INSIDE), **VARIABLES},
    }
    with (folder / f"{name}.log").open("wb") as log:
        server = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
    try:
        yield address
    finally:
        server.terminate()
        with suppress(subprocess.TimeoutExpired):
            server.wait(60)
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def started_by_the_harness(environment: Path) -> list[str]:
    """The options of ``harness tune`` with which it starts such servers itself."""
    env = ", ".join(f'{name} = "{value}"' for name, value in VARIABLES.items())
    keys = {"environment": environment, "extra_args": json.dumps(SMALL), "env": f"{{{env}}}"}
    return ["--backend", "vllm", *(word for key, value in keys.items() for word in ("--set", f"server.{key}={value}"))]


def serve_agents(environment: Path, url: str, agents: int, turns: int) -> None:
    """Wait for the server, and send the requests of ``openai_agents``."""
    from tests.support import openai_agents
    from tests.support.command_line import harness

    asked = harness("doctor", "--url", url, "--wait", "20min")
    assert asked.returncode == 0, asked.stdout + asked.stderr
    words = [str(environment / "bin" / "python"), openai_agents.__file__, url, str(agents), str(turns)]
    subprocess.run(words, check=True, timeout=600)
