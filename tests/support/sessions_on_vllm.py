"""A real vLLM records the sessions that the harness plays: are they imported as they were planned, and replayed?

``python -m tests.support.sessions_on_vllm ENVIRONMENT FOLDER [MODEL] [KEY=VALUE ...]`` starts ``vllm serve`` of that
environment twice, with the recorder and without, and prints what was found. MODEL: default: a tiny one of random
weights. KEY=VALUE: more of [server] as JSON, such as ``extra_args=[]`` on a GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

from harness.analysis.logs.engine_steps import step_log_of
from harness.extras.sessions.commands import lines_of, read_engine, rules_of
from harness.extras.sessions.replay import Replay, replay
from harness.measure.records.run import SealedRun
from harness.model.engine import load_cost_model
from harness.model.plan.model import Plan
from harness.model.spec import parse_experiment
from harness.model.traces.importing import import_trace
from harness.model.traces.recording import Recording, TraceFile, read_trace
from harness.runner.experiment import run_experiment
from harness.runner.paired import compare_pair
from tests.support.checkout import ROOT

SESSIONS, TURNS = 40, 5


class Found(NamedTuple):
    """Planned sessions that the import has whole, requests that it has beside them, and the replay of all."""

    num_whole: int
    num_others: int
    replayed: Replay
    lines: list[str]
    trace: TraceFile


def experiment(environment: str, folder: Path, model: str, more: dict[str, Any]) -> dict[str, Any]:
    """Sessions with waits for tools, on a server that records them."""
    server: dict[str, Any] = {
        "model": model,
        "environment": environment,
        "extra_args": ["--load-format", "dummy", "--enforce-eager"],
        "env": {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"},
        "start_timeout_s": 500,
        "max_num_seqs": 4,
        "slot_tokens": 4096,
        "block_size": 32,
        **more,
    }
    recording = {"server": {"env": {**server["env"], "VLLM_SESSIONS_FILE": str(folder / "sessions.jsonl")}}}
    return {
        "name": "sessions",
        "backend": "vllm",
        "replicates": 1,
        "base_seed": 5,
        "workload": {
            "num_sessions": SESSIONS,
            "requests_per_session": TURNS,
            "prompt_tokens": {"distribution": "uniform", "low": 100, "high": 300},
            "new_tokens": {"distribution": "uniform", "low": 20, "high": 80},
            "generate_tokens": {"distribution": "uniform", "low": 32, "high": 48},
            "waits": "tracelab-v0.0.2",
            "wait_cap_s": 0.5,
            "token_id_range": [300, 2000],
        },
        "limits": {"rearrival_lag_p99_ms": 9000.0, "start_spread_ms": 9000.0, "read_together_ms": 9000.0},
        "server": server,
        "condition": [{"name": "recorded", **recording}, {"name": "plain"}],
    }


def run(environment: str, folder: Path, model: str = "", more: dict[str, Any] | None = None) -> dict[str, SealedRun]:
    """The sealed runs by condition."""
    folder.mkdir(parents=True, exist_ok=True)
    if not model:
        model = str(folder / "tiny")
        subprocess.run([sys.executable, ROOT / "tools/tiny_model.py", model], check=True)
    spec = parse_experiment(experiment(environment, folder, model, more or {}), where="sessions on vllm")
    return {each.condition: each for each in run_experiment(spec, runs_root=folder / "runs").runs}


def look(recorded: SealedRun, folder: Path) -> Found:
    """Hold the import and the replay to what was planned and recorded."""
    files = sorted(folder.glob("sessions*.jsonl"))
    for file in files:
        as_of_agents(file)
    import_trace(files, folder / "trace.jsonl", name="recorded")
    trace = read_trace(folder / "trace.jsonl")
    planned = Counter(lengths_planned(recorded.plan))
    imported = Counter(lengths_imported(each) for each in trace.recordings)
    whole = planned & imported
    others = trace.num_requests - sum(len(each) * count for each, count in whole.items())
    log = step_log_of(recorded)
    requests, chains, _size = read_engine(files, 0)
    config = rules_of(log.settings, log.vllm)
    found = replay(config, load_cost_model("emulated-gpu"), requests, chains, log.cores[0].steps)
    return Found(whole.total(), others, found, lines_of(found, config, ""), trace)


def as_of_agents(file: Path) -> None:
    """Take the mark of the harness off the requests that it played in place of agents."""
    file.write_text(file.read_text().replace(',"harness":1', ""))


Lengths = tuple[tuple[int, int, int], ...]
"""(prompt, kept, generated) of each turn."""


def lengths_planned(plan: Plan) -> list[Lengths]:
    """Of each session of a plan."""
    return [
        tuple((request.prompt_tokens, request.keep_tokens, request.generate_tokens) for request in session.requests)
        for session in plan.sessions
    ]


def lengths_imported(recording: Recording) -> Lengths:
    """Of an imported session."""
    return tuple((each.prompt_tokens, each.keep_tokens, each.generate_tokens) for each in recording.requests)


def main(environment: str, folder: str, *rest: str) -> int:
    """Run both conditions, and print."""
    model = next((word for word in rest if "=" not in word), "")
    more = {key: json.loads(value) for key, _, value in (word.partition("=") for word in rest if "=" in word)}
    runs = run(environment, Path(folder), model, more)
    found = look(runs["recorded"], Path(folder))
    print(
        f"{found.num_whole} of {SESSIONS} sessions of {TURNS} turns imported whole; {found.num_others} other requests"
    )
    print("\n".join(found.lines))
    print("labels:", *found.trace.head.labels, sep="\n  ")
    for name, each in runs.items():
        print(name, "valid" if each.is_valid else each.invalid_reasons)
    for line in compare_pair(runs["plain"], runs["recorded"]).lines:
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
