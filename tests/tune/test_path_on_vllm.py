"""The whole path on a real vLLM for CPUs: agents are served and recorded, and a planted gain comes out confirmed.

VLLM_CPU names its environment (``make vllm-cpu-path``); without it this is skipped.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from harness.measure.server.process import free_port
from harness.model.engine import load_cost_model
from harness.model.spec import load_experiment
from harness.stacks.vllm.step_log import INSIDE
from tests.support import openai_agents
from tests.support.checkout import ROOT
from tests.support.command_line import harness

pytestmark = [pytest.mark.live, pytest.mark.timeout(5400)]
AGENTS, TURNS = 5, 6
NUM_REQUESTS = AGENTS * TURNS + openai_agents.ALONE
# Both servers and the client share the cores of a small machine: how late it was decides nothing here.
LIMITS = {
    **dict.fromkeys(("rearrival_lag_p99_ms", "start_spread_ms", "read_together_ms", "stall_ms"), 60_000),
    **dict.fromkeys(("stamp_lag_ms", "server_stall_ms", "first_token_held_ms"), 60_000),
}
SMALL = ("--load-format", "dummy", "--enforce-eager", "--max-model-len", "4096", "--enable-prompt-tokens-details")
# A second thread would wait at each layer for one that another program keeps from its core.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextmanager
def serving(environment: Path, words: Sequence[str], folder: Path, name: str) -> Generator[str]:
    """The address of ``vllm serve`` with these words; it records its sessions and steps in the folder."""
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


def test_a_server_begun_with_too_few_requests_at_once_is_recorded_and_its_gain_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = os.environ.get("VLLM_CPU", "")
    if not named:
        pytest.skip("VLLM_CPU names no environment (make vllm-cpu-path)")
    environment, model = (ROOT / named).resolve(), str(tmp_path / "tiny")
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, ROOT / "tools" / "tiny_model.py", model, "4", "256"], check=True)
    limits = [word for key, value in LIMITS.items() for word in ("--set", f"limits.{key}={value}")]
    words = ["vllm", "serve", model, "--max-num-seqs", "2", "--block-size", "32"]
    with serving(environment, words, tmp_path, "today") as url:
        assert harness("doctor", "--url", url, "--wait", "9min").returncode == 0
        agents = [str(environment / "bin" / "python"), openai_agents.__file__, url, str(AGENTS), str(TURNS)]
        subprocess.run(agents, check=True, timeout=600)

        command = ["tune", "--from", "today.jsonl", "--for", url, *limits]
        first = harness(*command)
        assert first.returncode == 0, first.stdout + first.stderr
        assert "0 decisions differ" in first.stdout
        assert f"{AGENTS + 1} sessions, {NUM_REQUESTS} requests" in Path("tune-today.toml").read_text()
        server = load_experiment("tune-today.toml").server
        assert server.max_num_seqs == 2
        assert load_cost_model(server.cost_model).source.endswith("today.core_steps.jsonl, of up to 2 requests at once")
        assert f"price: the costs of '{server.cost_model}'" in first.stdout

        names = re.findall(r"--candidate (\w+)=URL", first.stdout)
        printed = re.search(rf"{names[0]}: (.*vllm serve .*)", first.stdout)
        assert printed is not None
        words = shlex.split(printed[1])
        with serving(environment, words[words.index("vllm") :], tmp_path, names[0]) as candidate:
            log = tmp_path / f"{names[0]}.core_steps.jsonl"
            harness("doctor", "--url", candidate, "--wait", "9min")
            command = [str(Path(sys.executable).with_name("harness")), *command]
            command += ["--candidate", f"{names[0]}={candidate},{log}"]
            last = subprocess.run(command, capture_output=True, text=True, timeout=3300, check=False)
    said = " ".join(last.stdout.split())
    # A busy machine may hide the gain; nothing else may.
    verdicts = {0: r"% less time in flight \([^)]*\), confirmed", 5: "not told apart"}
    assert last.returncode in verdicts, last.stdout + last.stderr
    assert re.search(verdicts[last.returncode], said), last.stdout
