"""Other clients talk to a real vLLM that records them: is each session imported as that client counts it, and replayed?

``python -m tests.support.others_on_vllm VLLM AIPERF FOLDER``: environments of vLLM and of AIPerf. AIPerf holds
conversations of several turns; ``vllm bench serve`` sends prompts that begin alike and are no session of each other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from benchmarks.generators import write_tokenizer
from harness.extras.sessions.commands import lines_of, replay_files
from harness.measure.server.process import free_port
from harness.model.traces.recording import read_trace
from harness.stacks.vllm.step_log import INSIDE
from tests.support.processes import comes_true
from tests.support.sessions_of_aiperf import Both, Lengths, conversations, converse, imported, print_same
from tools.tiny_model import write_model

# The text of a turn is the text of the turn before and more, so that a session shows in its blocks.
TEMPLATE = "{% for m in messages %}({{ m.role }}){{ m.content }}{% endfor %}(assistant)"
NO_END = {"ignore_eos": True, "logit_bias": {"0": -100}}
"""The end's token is no text, so that what a client sends again would lack it."""
PROMPTS, PREFIXES, PREFIX_TOKENS, SUFFIX_TOKENS, ANSWER_TOKENS = 60, 4, 256, 64, 24
BLOCK_TOKENS = 32
START_S = 300.0


def write_text_model(folder: Path) -> None:
    """A small model whose every token but the end's is a letter: any answer is a text of as many tokens."""
    write_model(folder)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    write_tokenizer(folder)
    letters = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": letters["vocab_size"]}))


@contextmanager
def recording_server(environment: Path, folder: Path, model: Path) -> Generator[str]:
    """The address of a vLLM that writes sessions.jsonl and core_steps.jsonl into the folder."""
    folder.mkdir(parents=True)
    port = free_port()
    files = {"VLLM_SESSIONS_FILE": "sessions.jsonl", "VLLM_CORE_STEPS_FILE": "core_steps.jsonl"}
    variables = {
        **os.environ,
        **{name: str(folder / file) for name, file in files.items()},
        **{"PYTHONPATH": str(INSIDE), "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
    }
    command = [
        *(str(environment / "bin/vllm"), "serve", str(model), "--port", str(port), "--load-format", "dummy"),
        *("--enforce-eager", "--max-num-seqs", "8", "--max-model-len", "4096", "--block-size", str(BLOCK_TOKENS)),
        *("--generation-config", "vllm", "--chat-template", TEMPLATE, "--enable-prefix-caching"),
    ]
    with (folder / "server.log").open("wb") as log:
        process = subprocess.Popen(command, env=variables, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        comes_true(lambda: process.poll() is not None or answers(url), START_S)
        if not answers(url):
            raise RuntimeError(f"no vLLM answers at {url}: {folder / 'server.log'}")
        yield url
    finally:
        process.terminate()
        process.wait(60)


def answers(url: str) -> bool:
    """Whether /health does."""
    try:
        return httpx.get(f"{url}/health", timeout=1).is_success
    except httpx.HTTPError:
        return False


def bench(environment: Path, folder: Path, model: Path, url: str) -> Counter[Lengths]:
    """Requests of ``vllm bench serve`` by their lengths, as it counts them."""
    command = [
        *(str(environment / "bin/vllm"), "bench", "serve", "--base-url", url, "--model", str(model), "--ignore-eos"),
        *("--dataset-name", "prefix_repetition", "--num-prompts", str(PROMPTS), "--seed", "5"),
        *("--prefix-repetition-prefix-len", str(PREFIX_TOKENS), "--prefix-repetition-suffix-len", str(SUFFIX_TOKENS)),
        *("--prefix-repetition-num-prefixes", str(PREFIXES), "--prefix-repetition-output-len", str(ANSWER_TOKENS)),
        *("--request-rate", "6", "--save-result", "--save-detailed", "--result-dir", str(folder)),
        *("--result-filename", "bench.json"),
    ]
    with (folder / "bench.log").open("wb") as log:
        variables = {**os.environ, "HF_HUB_OFFLINE": "1"}
        subprocess.run(command, check=True, env=variables, stdout=log, stderr=log, timeout=400)
    found: Mapping[str, Sequence[int]] = json.loads((folder / "bench.json").read_text())
    pairs = zip(found["input_lens"], found["output_lens"], strict=True)
    return Counter((pair,) for pair in pairs)


def print_found(folder: Path, what: str, wanted: Counter[Lengths]) -> None:
    """How many sessions are imported as the client counts them, and what the replay says."""
    print_same(what, Both(wanted, imported(folder)))
    print("\n".join(f"  {label}" for label in read_trace(folder / "trace.jsonl").head.labels))
    replayed, config = replay_files([folder / "sessions.jsonl"], folder / "core_steps.jsonl")
    print("\n".join(lines_of(replayed, config, "")))


def main(vllm: Path, aiperf: Path, folder: Path) -> None:
    """Print what was found."""
    vllm, aiperf, folder = (path.absolute() for path in (vllm, aiperf, folder))
    model = folder / "model"
    write_text_model(model)
    of_aiperf, of_bench = folder / "of-aiperf", folder / "of-bench"
    with recording_server(vllm, of_aiperf, model) as url:
        converse(aiperf, of_aiperf, url, str(model), model, NO_END)
    print_found(of_aiperf, "AIPerf", conversations(of_aiperf))
    with recording_server(vllm, of_bench, model) as url:
        wanted = bench(vllm, of_bench, model, url)
    print_found(of_bench, "vllm bench serve", wanted)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]))
