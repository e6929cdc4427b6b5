"""Another client's conversations on an emulated vLLM that records them: are they imported as that client counts them?

``python -m tests.support.sessions_of_aiperf ENVIRONMENT FOLDER``. ENVIRONMENT: where AIPerf is installed. Its chats of
several turns go to the emulator; sessions, turns and the server's counts of tokens are compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.emulator import wait_for_address
from benchmarks.generators import write_tokenizer
from harness.model.traces.importing import import_trace
from harness.model.traces.recording import read_trace
from harness.runner.backends.emulator import EMULATED_MODEL

CONVERSATIONS, TURNS, AT_A_TIME = 20, 5, 4
Lengths = tuple[tuple[int, int], ...]
"""(prompt, answer) tokens of each turn, as the server counts them."""
SERVER = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "slot_tokens": 16384, "num_gpu_blocks": 6000}


class Both(NamedTuple):
    """Conversations by their lengths: of the client, and of the import."""

    client: Counter[Lengths]
    imported: Counter[Lengths]


@contextmanager
def recording_emulator(folder: Path) -> Generator[str]:
    """The address of an emulator that writes sessions.jsonl into the folder."""
    config, log = folder / "config.json", folder / "server.log"
    folder.mkdir(parents=True, exist_ok=True)
    table = {"port": 0, "time_scale": 4.0, "sessions_path": str(folder / "sessions.jsonl"), "server": SERVER}
    config.write_text(json.dumps(table))
    server = [sys.executable, "-m", "harness.measure.emulator", "--config", str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(server, stdout=output, stderr=output)
    try:
        yield wait_for_address(process, log)
    finally:
        process.terminate()
        process.wait(20)


def converse(environment: Path, folder: Path, url: str, model: str, tokenizer: Path, inputs: dict[str, Any]) -> None:
    """Let AIPerf talk to a server. inputs: more of each request's body."""
    command = [
        *(str(environment / "bin" / "aiperf"), "profile", "--model", model, "--endpoint-type", "chat"),
        *("--streaming", "--url", url, "--tokenizer", str(tokenizer)),
        *("--conversation-num", str(CONVERSATIONS), "--conversation-turn-mean", str(TURNS)),
        *("--conversation-turn-stddev", "1", "--conversation-turn-delay-mean", "100"),
        *("--isl", "200", "--isl-stddev", "40", "--osl", "60", "--osl-stddev", "10"),
        *("--concurrency", str(AT_A_TIME), "--use-server-token-count", "--extra-inputs", json.dumps(inputs)),
        *("--ui", "none", "--artifact-dir", str(folder / "aiperf"), "--random-seed", "5"),
    ]
    subprocess.run(command, check=True, cwd=folder, timeout=400)


def conversations(folder: Path) -> Counter[Lengths]:
    """By their lengths, as AIPerf wrote them."""
    turns: dict[str, list[tuple[int, int, int]]] = {}
    for line in next(folder.rglob("profile_export.jsonl")).read_text().splitlines():
        record = json.loads(line)
        named, counted = record["metadata"], record["metrics"]
        asked, answered = (int(counted[f"{side}_sequence_length"]["value"]) for side in ("input", "output"))
        turns.setdefault(named["x_correlation_id"], []).append((named["turn_index"], asked, answered))
    return Counter(tuple(turn[1:] for turn in sorted(each)) for each in turns.values())


def imported(folder: Path) -> Counter[Lengths]:
    """Sessions by their lengths, as the import has them."""
    import_trace([folder / "sessions.jsonl"], folder / "trace.jsonl", name="recorded")
    recordings = read_trace(folder / "trace.jsonl").recordings
    return Counter(tuple((one.prompt_tokens, one.generate_tokens) for one in each.requests) for each in recordings)


def print_same(what: str, found: Both) -> None:
    """How many sessions are imported as the client counts them, and the others."""
    same = (found.client & found.imported).total()
    requests = sum(len(each) * count for each, count in found.client.items())
    print(f"{same} of {found.client.total()} sessions ({requests} requests) are imported as {what} counts them")
    for name, left in ((what, found.client - found.imported), ("import", found.imported - found.client)):
        for lengths, count in left.items():
            print(f"only {name}, {count} times: {lengths}")


def main(environment: Path, folder: Path) -> int:
    """Print how many conversations are the same."""
    environment, folder = environment.absolute(), folder.absolute()
    with recording_emulator(folder) as url:
        tokenizer = folder / "tokenizer"
        tokenizer.mkdir()
        write_tokenizer(tokenizer)
        converse(environment, folder, url, EMULATED_MODEL, tokenizer, {"ignore_eos": True})
    found = Both(conversations(folder), imported(folder))
    print_same("AIPerf", found)
    return 0 if found.client == found.imported else 1


if __name__ == "__main__":
    sys.exit(main(*map(Path, sys.argv[1:3])))
