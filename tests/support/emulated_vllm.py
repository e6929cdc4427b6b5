"""A ``vllm`` command in an environment of its own: ``vllm serve`` starts the emulated GPU server.

It has its own cost model, whatever the experiment names: what prices its steps must be calibrated.
A model that is a folder has the vocabulary that its config.json says. With ``--enforce-eager`` no step has a graph;
with ``--speculative-config`` the step log says that it drafts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.checkout import ROOT

SERVE = """
import argparse, json, os, pathlib, sys

from harness.measure.emulator import driver
from harness.measure.emulator.__main__ import main
from harness.measure.emulator.metrics import ServerMetrics
from harness.model.engine.config import EngineConfig

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("serve")
parser.add_argument("model")
for name in ("host", "port", "max-num-seqs", "max-model-len", "num-gpu-blocks-override", "block-size"):
    parser.add_argument(f"--{name}")
parser.add_argument("--max-num-batched-tokens")
parser.add_argument("--speculative-config", type=json.loads)
parser.add_argument("--cudagraph-capture-sizes", nargs="+")
parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
parser.add_argument("--enforce-eager", action="store_true")
options, _of_the_log = parser.parse_known_args()
flags = {
    "host": options.host,
    "port": options.port,
    "model": options.model,
    "max-num-seqs": options.max_num_seqs,
    "slot-tokens": options.max_model_len,
    "decode-buckets": options.cudagraph_capture_sizes and ",".join(options.cudagraph_capture_sizes),
    "num-gpu-blocks": options.num_gpu_blocks_override,
    "block-size": options.block_size,
    "max-num-batched-tokens": options.max_num_batched_tokens,
    "step-log": os.environ["VLLM_STEP_LOG_FILE"],
}
arguments = [word for flag, value in flags.items() if value is not None for word in (f"--{flag}", value)]
config = pathlib.Path(options.model, "config.json")
arguments += ["--vocab-size", str(json.loads(config.read_text())["vocab_size"])] if config.is_file() else []
arguments += [] if options.enable_prefix_caching else ["--no-prefix-caching"]
shown = {}
if options.enforce_eager:
    shown |= {"enforce_eager": True, "cudagraph_mode": "NONE", "cudagraph_capture_sizes": []}
    EngineConfig.graph_of = lambda config, tokens: ("NONE", sum(tokens))
if options.speculative_config:
    shown["num_speculative_tokens"] = options.speculative_config["num_speculative_tokens"]
step_log_header, render = driver.step_log_header, ServerMetrics.render


def header(*arguments):
    made = step_log_header(*arguments)
    return made | {"effective": made["effective"] | shown}


def metrics(*arguments, **options):
    # A vLLM does not say that it is emulated.
    lines = render(*arguments, **options).split(b"\\n")
    return b"\\n".join(line for line in lines if b"emulator:config_info" not in line)


driver.step_log_header, ServerMetrics.render = header, metrics
sys.exit(main("--rules", "vllm-paged", "--cost-model", COST_MODEL, *arguments))
"""


def emulated_vllm(folder: Path, cost_model: str = "emulated-gpu") -> Path:
    """A virtual environment, as ``server.environment`` names it. cost_model: of the emulated server."""
    info = folder / "site" / "vllm-0.30.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.30.0\n")
    (folder / "serve.py").write_text(f"COST_MODEL = {cost_model!r}\n{SERVE}")
    (folder / "bin").mkdir()
    search = f'PYTHONPATH="${{PYTHONPATH:+$PYTHONPATH:}}{info.parent}:{ROOT}"'
    for name, script in (("python", ""), ("vllm", f'"{folder / "serve.py"}" ')):
        command = folder / "bin" / name
        command.write_text(f'#!/bin/sh\n{search} exec "{sys.executable}" {script}"$@"\n')
        command.chmod(0o755)
    return folder
