"""A real emulator process on a free loopback port, and what it wrote.

Its process is forked from one that has loaded everything; ``start_process`` starts the command itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.emulator import wait_for_address
from harness.measure.emulator.step_log import read_trace
from tests.support.forked import ForkedProcess, start_forked
from tests.support.processes import WITHIN_S

SCALE = 20.0


@dataclass
class Emulator:
    """One server process. ``client``: an HTTP client bound to its address."""

    process: subprocess.Popen[bytes] | ForkedProcess
    address: str
    log_path: Path
    trace_path: Path
    client: httpx.Client

    @property
    def log_so_far(self) -> str:
        """What a thread wrote by now: lines of an answer may come after the answer."""
        return self.log_path.read_text()

    @property
    def log(self) -> str:
        """The whole log, of a server that has ended."""
        self._must_have_ended()
        return self.log_so_far

    @property
    def trace(self) -> list[dict[str, Any]]:
        """All its steps, of a server that has ended."""
        self._must_have_ended()
        return read_trace(self.trace_path)

    def _must_have_ended(self) -> None:
        assert self.process.poll() is not None, "stop the server first: it may not have written all of it"

    def complete(self, prompt: Any, **fields: Any) -> dict[str, Any]:
        """The body of a successful /v1/completions answer."""
        answer = self.client.post("/v1/completions", json={"prompt": prompt, **fields})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """All events of a streamed answer; the stream must end with [DONE]."""
        answer = self.client.post(path, json={**body, "stream": True})
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = answer.text.removesuffix("\n\n").split("\n\n")
        assert events[-1] == "data: [DONE]"
        return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]

    def metric(self, name: str, **labels: str) -> float:
        """The value of one sample of /metrics."""
        for line in self.client.get("/metrics").text.splitlines():
            if line.startswith(f"{name}{{") and all(f'{key}="{value}"' in line for key, value in labels.items()):
                return float(line.rsplit(" ", 1)[1])
        raise AssertionError(f"no sample {name} {labels}")

    def stop(self) -> int:
        """SIGTERM and wait; the exit code."""
        self.process.terminate()
        return self.process.wait(WITHIN_S)


Start = Callable[..., Emulator]


def start_process(folder: Path, *flags: str, **config: Any) -> tuple[subprocess.Popen[bytes], Path]:
    """The server's command, which may not be ready yet, and where its log goes."""
    config_path, log_path = _written(folder, config)
    with log_path.open("wb") as log:
        command = [sys.executable, "-m", "harness.measure.emulator", "--config", str(config_path), *flags]
        return subprocess.Popen(command, stdout=log, stderr=log), log_path


def start_forked_process(folder: Path, *flags: str, **config: Any) -> tuple[ForkedProcess, Path]:
    """As ``start_process``, forked."""
    config_path, log_path = _written(folder, config)
    return _forked(("--config", str(config_path), *flags), log_path, log_path), log_path


def run_to_exit(folder: Path, *flags: str) -> tuple[int, str]:
    """Exit code and stderr of a server that cannot start."""
    error = folder / "stderr"
    return _forked(flags, folder / "stdout", error).wait(WITHIN_S), error.read_text()


def start_ready(folder: Path, *flags: str, idle_timeout_s: float | None = None, **config: Any) -> Emulator:
    """A server process that listens. idle_timeout_s: in place of ``server.IDLE_TIMEOUT_S``."""
    config_path, log_path = _written(folder, config)
    process = _forked(("--config", str(config_path), *flags), log_path, log_path, idle_timeout_s)
    address = wait_for_address(process, log_path)
    return Emulator(
        process, address, log_path, folder / "trace.jsonl", httpx.Client(base_url=address, timeout=WITHIN_S)
    )


def _forked(words: Sequence[str], out: Path, err: Path, idle_timeout_s: float | None = None) -> ForkedProcess:
    variables = dict(os.environ)
    return ForkedProcess(
        start_forked(_serve, words, idle_timeout_s, cwd=Path.cwd(), variables=variables, out=out, err=err)
    )


def _written(folder: Path, config: dict[str, Any]) -> tuple[Path, Path]:
    """The file of a configuration, and an empty log."""
    folder.mkdir(exist_ok=True)
    log_path, config_path = folder / "server.log", folder / "config.json"
    table = {"port": 0, "time_scale": SCALE, "trace_path": str(folder / "trace.jsonl"), **config}
    config_path.write_text(json.dumps(table))
    log_path.write_bytes(b"")
    return config_path, log_path


def _serve(words: Sequence[str], idle_timeout_s: float | None) -> None:
    from harness.measure.emulator import server
    from harness.measure.emulator.__main__ import main

    server.IDLE_TIMEOUT_S = idle_timeout_s or server.IDLE_TIMEOUT_S
    sys.exit(main(*words))


def end(emulator: Emulator) -> None:
    """No process is left behind."""
    emulator.client.close()
    if emulator.process.poll() is None:
        emulator.process.kill()
    emulator.process.wait(WITHIN_S)
