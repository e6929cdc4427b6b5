"""How well the emulator keeps time: its step period against the cost model's, from the stamps of sent chunks.

It starts a server process of its own and stops it; nothing else is measured.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from harness.clock import NS_PER_MS, NS_PER_US, MonotonicClock
from harness.measure.emulator.step_log import read_trace

READY_WITHIN_NS = 180_000 * NS_PER_MS
PROMPT_TOKENS = 64


@dataclass(frozen=True)
class StepPeriodError:
    """|time between two steps' chunks - modelled step time|, wall microseconds, over ``num_periods`` decode periods.

    wake_p50_us: how late the host saw a step's end. stalls: how often the schedule had to move.
    """

    num_seqs: int
    num_periods: int
    p50_us: float
    p99_us: float
    max_us: float
    wake_p50_us: float
    stalls: int

    def __str__(self) -> str:
        return (
            f"emulator step period, N={self.num_seqs}: error p50 {self.p50_us:.0f} us, p99 {self.p99_us:.0f} us, "
            f"max {self.max_us:.0f} us over {self.num_periods} periods; woken late p50 {self.wake_p50_us:.0f} us; "
            f"stalls {self.stalls}"
        )


def measure_step_period(num_seqs: int = 16, num_tokens: int = 200, *, spin_us: int | None = None) -> StepPeriodError:
    """Stream ``num_seqs`` answers of ``num_tokens`` tokens at once from a fresh server at scale 1."""
    with tempfile.TemporaryDirectory() as folder:
        trace_path = Path(folder) / "trace.jsonl"
        buckets = sorted({1, 2, 4, 8, 16, num_seqs})
        config: dict[str, Any] = {
            "server": {"max_num_seqs": buckets[-1], "decode_buckets": buckets},
            "port": 0,
            "trace_path": str(trace_path),
        }
        if spin_us is not None:
            config["spin_us"] = spin_us
        config_path = Path(folder) / "config.json"
        config_path.write_text(json.dumps(config))
        _serve_and_load(config_path, Path(folder) / "server.log", num_seqs, num_tokens)
        return summarise(read_trace(trace_path), num_seqs)


def summarise(trace: list[dict[str, Any]], num_seqs: int) -> StepPeriodError:
    """The figures of the trace's decode periods with ``num_seqs`` requests before and after."""
    errors: list[int] = []
    wakes: list[int] = []
    previous: dict[str, Any] | None = None
    for record in trace:
        if previous is not None and _is_full_decode(previous, num_seqs) and _is_full_decode(record, num_seqs):
            errors.append(abs(record["emitted_ns"] - previous["emitted_ns"] - record["duration_ns"]))
            wakes.append(record["woken_ns"] - record["start_ns"] - record["duration_ns"])
        previous = record
    values = np.asarray(errors) / NS_PER_US
    return StepPeriodError(
        num_seqs,
        len(errors),
        float(np.percentile(values, 50)),
        float(np.percentile(values, 99)),
        float(values.max()),
        float(np.percentile(wakes, 50)) / NS_PER_US,
        sum(record["kind"] == "STALL" for record in trace),
    )


def _is_full_decode(record: dict[str, Any], num_seqs: int) -> bool:
    return record["kind"] == "DECODE" and record["n"] == num_seqs


def _serve_and_load(config_path: Path, log_path: Path, num_seqs: int, num_tokens: int) -> None:
    with log_path.open("wb") as log:
        command = [sys.executable, "-m", "harness.measure.emulator", "--config", str(config_path)]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            asyncio.run(_load(wait_for_address(server, log_path), num_seqs, num_tokens))
        finally:
            server.terminate()
            server.wait()


def wait_for_address(server: subprocess.Popen[bytes], log_path: Path) -> str:
    """The URL in the server's log once it is ready; raises RuntimeError with the log when it never is."""
    clock = MonotonicClock()
    deadline_ns = clock.now_ns() + READY_WITHIN_NS
    while server.poll() is None and clock.now_ns() < deadline_ns:
        text = log_path.read_text(errors="replace")
        if "Application startup complete." in text:
            return next(line.split()[-1] for line in text.splitlines() if "Starting vLLM server on" in line)
        clock.sleep_until_ns(clock.now_ns() + 20 * NS_PER_MS)
    raise RuntimeError(f"the emulator did not start:\n{log_path.read_text(errors='replace')}")


async def _load(address: str, num_seqs: int, num_tokens: int) -> None:
    async with httpx.AsyncClient(base_url=address, timeout=600) as client:
        await asyncio.gather(*(_stream(client, index, num_tokens) for index in range(num_seqs)))


async def _stream(client: httpx.AsyncClient, index: int, num_tokens: int) -> None:
    prompt = [1000 + index * PROMPT_TOKENS + place for place in range(PROMPT_TOKENS)]
    body = {"prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            pass


def main() -> None:
    """Print the error at N = 1, 8 and 16."""
    for num_seqs in (1, 8, 16):
        sys.stdout.write(f"{measure_step_period(num_seqs)}\n")


if __name__ == "__main__":
    main()
