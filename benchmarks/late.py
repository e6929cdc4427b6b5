"""Does a client that reads late say so? Runs through a stamping proxy, beside busy processes and on a quiet machine.

``python -m benchmarks late``: 20 runs of each client beside two busy processes for each core, then 5 without them.
Every run is an experiment of its own, sealed and judged. The server is the emulator: its times are modelled, and only
the difference to the wire is a figure here.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from benchmarks.emulator import wait_for_address
from benchmarks.figure import Figure
from benchmarks.wire import Seen, wire
from harness.clock import NS_PER_MS
from harness.judge.analysis.serving import latencies
from harness.measure.records import RunStore, SealedRun
from harness.measure.records.schema import values_of
from harness.model.spec import ExperimentSpec
from harness.processes import num_cores
from harness.runner import run_experiment

NUM_BUSY, NUM_QUIET = 20, 5
NUM_TOKENS = 24
FAR_MS, NEAR_MS = 5.0, 0.2
END_WITHIN_S = 20


class LateRun(NamedTuple):
    """One run beside the wire. apart_ms: mean of its TTFT less the wire's. is_marked: INVALID or with the finding."""

    apart_ms: float
    bound_ms: float
    is_valid: bool
    is_marked: bool

    @property
    def is_held(self) -> bool:
        """Whether the run says of itself what the wire shows."""
        return abs(self.apart_ms) <= FAR_MS or self.is_marked


def experiment(url: str, client: str, seed: int) -> ExperimentSpec:
    """One run of six sessions on the server at ``url``. Only a late read can make it INVALID."""
    return ExperimentSpec.model_validate(
        {
            "name": f"late-{client}-{seed}",
            "backend": "attached",
            "replicates": 1,
            "base_seed": seed,
            "client": {"name": client},
            "workload": {
                "num_sessions": 6,
                "requests_per_session": 2,
                "waits": "none",
                "prompt_tokens": {"distribution": "fixed", "value": 300},
                "generate_tokens": {"distribution": "fixed", "value": NUM_TOKENS},
            },
            "limits": {
                "rearrival_lag_p99_ms": 5000.0,
                "start_spread_ms": 5000.0,
                "stall_ms": 60000.0,
                "stamp_lag_ms": 60000.0,
                "first_token_held_ms": 5000.0,
                "server_stall_ms": 60000.0,
                "schedule_moved_share": 1.0,
                "needs_stall_meter": False,
            },
            "server": {"url": url},
            "condition": [{"name": "base"}],
        }
    )


@contextmanager
def emulator(folder: Path) -> Generator[str]:
    """The URL of an emulator that runs until the block ends."""
    config, log = folder / "config.json", folder / "server.log"
    table: dict[str, Any] = {"port": 0, "time_scale": 1.0, "server": {"kv_slots": 64}}
    config.write_text(json.dumps(table))
    command = [sys.executable, "-m", "harness.measure.emulator", "--config", str(config)]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield wait_for_address(process, log)
    finally:
        process.terminate()
        process.wait(END_WITHIN_S)


@contextmanager
def busy_cores(num_processes: int) -> Generator[None]:
    """So many processes that never rest."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def late_run(server_url: str, client: str, seed: int, folder: Path) -> LateRun:
    """One sealed run through the proxy, beside what the proxy saw."""
    with wire(server_url) as proxy:
        run_experiment(experiment(proxy.url, client, seed), runs_root=folder)
    (run,) = RunStore(folder).sealed(f"late-{client}-{seed}")
    return beside_wire(run, {each.request_id: each for each in proxy.seen(NUM_TOKENS)})


def beside_wire(run: SealedRun, seen: dict[str, Seen]) -> LateRun:
    """A run beside the wire. seen: by request id."""
    answered = latencies(run)
    rows = values_of(run.table("requests"), "session", "request", "request_id")
    names = {(session, request): name for session, request, name in rows}
    figures = zip(answered.session.tolist(), answered.turn.tolist(), answered.ttft_ns.tolist(), strict=True)
    apart_ms = [ttft_ns / NS_PER_MS - seen[names[session, turn]].ttft_ms for session, turn, ttft_ns in figures]
    facts = run.manifest.client_audit["read_together"]["first"]
    is_marked = any(finding.code == "read-together" for finding in run.manifest.findings)
    return LateRun(fmean(apart_ms), facts["sum_ms"] / max(1, facts["num"]), run.is_valid, is_marked or not run.is_valid)


def bench_late() -> Iterator[Figure]:
    """TTFT beside the wire's: what differs by more than 5 ms is marked, and on a quiet machine nothing differs."""
    for client in ("epoll", "aiohttp"):
        with tempfile.TemporaryDirectory() as name, emulator(Path(name)) as url:
            with busy_cores(2 * num_cores()):
                busy = [late_run(url, client, seed, Path(name)) for seed in range(NUM_BUSY)]
            quiet = [late_run(url, client, NUM_BUSY + seed, Path(name)) for seed in range(NUM_QUIET)]
        far = [run for run in busy if abs(run.apart_ms) > FAR_MS]
        yield Figure(
            f"{client}, busy: runs that say what the wire shows",
            f"{sum(run.is_held for run in busy)} of {len(busy)}",
            f"{len(busy)} of {len(busy)}",
            f"{len(far)} differ by more than {FAR_MS:g} ms, {sum(run.is_marked for run in far)} of them are marked; "
            f"INVALID: {sum(not run.is_valid for run in busy)}",
        )
        yield _apart(f"{client}, busy: TTFT less the wire's", busy, "")
        yield _apart(f"{client}, quiet: TTFT less the wire's", quiet, f"<= {NEAR_MS} ms")


def _apart(name: str, runs: list[LateRun], mark: str) -> Figure:
    apart, bounds = [run.apart_ms for run in runs], [run.bound_ms for run in runs]
    value = f"{median(apart):.3f} ms [{min(apart):.3f} .. {max(apart):.3f}]"
    note = f"the client's bound: {median(bounds):.3f} ms [{min(bounds):.3f} .. {max(bounds):.3f}]"
    return Figure(name, value, mark, f"mean of a run, median and range of {len(runs)} runs; {note}")
