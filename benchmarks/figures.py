"""What this harness and this machine can do, each figure beside its mark: client, emulator, parser, plans, simulator.

Benchmarks, not tests: a figure that misses its mark is printed, never hidden, and nothing fails. Shared machines are
noisy: compare within one sitting. Next: ``harness bench`` prints what this returns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.figure import Figure
from harness.clock import NS_PER_S, MonotonicClock

PLAN_REQUESTS = 100_000


def bench_parser() -> Iterator[Figure]:
    """Log lines parsed per second of CPU time, in both formats."""
    from benchmarks.parser import LINES_PER_S_MARK
    from benchmarks.parser import bench_parser as measure

    for log_format in ("precise", "default"):
        figure = measure(log_format=log_format)
        yield Figure(
            f"log parser, {log_format} format",
            f"{figure.lines_per_s:,.0f} lines/s",
            f">= {LINES_PER_S_MARK:,} lines/s",
            f"peak {figure.peak_bytes / 1e6:.1f} MB over {figure.lines:,} lines",
        )


def bench_plan() -> Iterator[Figure]:
    """A plan of 100,000 requests built and saved, in a process of its own so that its peak memory is its own."""
    code = (
        "import json, resource, sys, pathlib\n"
        "from harness.clock import MonotonicClock\n"
        "from harness.plan import build_plan, save_plan\n"
        "from harness.spec import WorkloadSpec\n"
        "clock = MonotonicClock(); began_ns = clock.now_ns()\n"
        f"plan = build_plan(WorkloadSpec(num_sessions={PLAN_REQUESTS // 2}), 1, 0)\n"
        "save_plan(plan, pathlib.Path(sys.argv[1]))\n"
        "spent_ns = clock.now_ns() - began_ns\n"
        "print(json.dumps([plan.num_requests, spent_ns, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))\n"
    )
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run([sys.executable, "-c", code, folder], check=True, capture_output=True, text=True)
        size_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
    num_requests, spent_ns, peak_kib = json.loads(done.stdout)
    yield Figure(
        f"plan of {num_requests:,} requests, built and saved",
        f"{spent_ns / NS_PER_S:.1f} s, {peak_kib / 1024:.0f} MB",
        "<= 10 s, <= 500 MB",
        f"file {size_bytes / 1e6:.1f} MB",
    )


def bench_simulator() -> Iterator[Figure]:
    """Simulated runs per second beside a naive walk, the paper's whole search, linearity, and a second process's
    start.
    """
    from benchmarks.simulator import simulator_figures

    yield from (Figure(*figure) for figure in simulator_figures())
    code = (
        "from harness.sim.search.chunks import Job, Rung\n"
        "from harness.sim.search.space import load_space\n"
        "job = Job(load_space('paper')); rung = Rung(0, -1, 0, True)\n"
        "job.evaluator.evaluate(job.candidates[0], job.groups(rung))\n"
        "from harness.clock import process_cpu_ns; print(process_cpu_ns())\n"
    )
    clock, spent_ns, cpu_ns = MonotonicClock(), list[int](), list[int]()
    for _ in range(3):
        began_ns = clock.now_ns()
        done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
        spent_ns.append(clock.now_ns() - began_ns)
        cpu_ns.append(int(done.stdout))
    yield Figure(
        "another process, from start to its first candidate",
        f"{min(spent_ns) / NS_PER_S:.2f} s",
        "<= 2 s",
        f"its 54 plans built; wall time, best of 3; {min(cpu_ns) / NS_PER_S:.2f} s of CPU",
    )


def bench_emulator() -> Iterator[Figure]:
    """How far the emulator's real steps are from the modelled period, at scale 1."""
    from benchmarks.emulator import measure_step_period

    for num_seqs in (1, 8, 16):
        error = measure_step_period(num_seqs)
        yield Figure(f"emulator step period, N={num_seqs}", str(error), "p50 <= 0.1 ms")


def bench_stopping() -> Iterator[Figure]:
    """Whether sequences, preset looks and powers keep their word on simulated experiments."""
    from benchmarks.stopping import bench_stopping as measure

    yield from measure()


def bench_devices() -> Iterator[Figure]:
    """Coverage with the device as a block and without, on simulated fleets."""
    from benchmarks.devices import bench_devices as measure

    yield from measure()


SECTIONS: dict[str, Callable[[], Iterator[Figure]]] = {
    "parser": bench_parser,
    "plan": bench_plan,
    "simulator": bench_simulator,
    "emulator": bench_emulator,
    "stopping": bench_stopping,
    "devices": bench_devices,
}
