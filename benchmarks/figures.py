"""What this harness and this machine can do, each figure beside its mark: client, emulator, parser, plans, simulator.

Benchmarks, not tests: a figure that misses its mark is printed, never hidden, and nothing fails. Shared machines are
noisy: compare within one benchmark run.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

from benchmarks.figure import Figure, Measured, cpu_s, in_turns
from harness.clock import NS_PER_MS, NS_PER_S, NS_PER_US, MonotonicClock

PLAN_REQUESTS = 100_000
# Of what starts a process of its own.
PROCESS_REPEATS = 4


def bench_parser() -> Iterator[Figure]:
    """Log lines parsed per second of CPU time, in both formats."""
    from benchmarks.parser import LINES_PER_S_MARK
    from benchmarks.parser import bench_parser as measure

    for log_format in ("precise", "default"):
        parsed = measure(log_format=log_format)
        yield Figure(
            f"log parser, {log_format} format",
            f"{max(parsed.lines_per_s):,.0f} lines/s",
            f">= {LINES_PER_S_MARK:,} lines/s",
            f"peak {parsed.peak_bytes / 1e6:.1f} MB over {parsed.lines:,} lines",
            Measured(parsed.lines_per_s, parsed.split_per_s, "a loop that only splits the lines", "more"),
        )


def bench_plan() -> Iterator[Figure]:
    """A plan of 100,000 requests built and saved, in a process of its own so that its peak memory is its own."""
    code = (
        "import json, sys, pathlib\n"
        "from benchmarks.figure import resident_bytes\n"
        "from harness.clock import process_cpu_ns\n"
        "from harness.model.experiment import build_plan\n"
        "from harness.model.plan.files import save_plan\n"
        "from harness.model.spec import WorkloadSpec\n"
        "began_ns = process_cpu_ns()\n"
        f"plan = build_plan(WorkloadSpec(num_sessions={PLAN_REQUESTS // 2}), 1, 0)\n"
        "save_plan(plan, pathlib.Path(sys.argv[1]))\n"
        "spent_ns = process_cpu_ns() - began_ns\n"
        "print(json.dumps([spent_ns, resident_bytes('VmHWM')]))\n"
    )
    peaks: list[int] = []
    with tempfile.TemporaryDirectory() as folder:

        def build() -> float:
            done = subprocess.run([sys.executable, "-c", code, folder], check=True, capture_output=True, text=True)
            spent_ns, peak_bytes = json.loads(done.stdout)
            peaks.append(peak_bytes)
            return spent_ns / NS_PER_S

        measured = in_turns(build, lambda: cpu_s(_plain_lines), PROCESS_REPEATS, "as many lines by json.dumps")
        size_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
    yield Figure(
        f"plan of {PLAN_REQUESTS:,} requests, built and saved",
        f"{min(measured.samples):.1f} s, {max(peaks) / 1e6:.0f} MB",
        "<= 10 s, <= 500 MB",
        f"CPU time; file {size_bytes / 1e6:.1f} MB",
        measured,
    )


def _plain_lines() -> bytes:
    """A line of JSON for each request of such a plan, hashed: the least that a saved plan can be in plain Python."""
    line = {"session": 0, "request": 1, "keep": 1000, "new": 300, "generate": 250, "wait_after_ns": 1_500_000_000}
    return hashlib.sha256("\n".join(json.dumps(line) for _ in range(PLAN_REQUESTS)).encode()).digest()


def bench_simulator() -> Iterator[Figure]:
    """Simulated runs per second beside a naive walk, the paper's whole search, linearity, and a second process's
    start.
    """
    from benchmarks.simulator import simulator_figures

    yield from simulator_figures()
    code = (
        "from harness.extras.search.evaluate import Evaluator\n"
        "from harness.extras.search.space import load_space\n"
        "evaluator = Evaluator(load_space('paper'))\n"
        "evaluator.evaluate(evaluator.candidates[0], evaluator.groups)\n"
    )
    measured = in_turns(lambda: _child_cpu_s(code), lambda: _child_cpu_s("import numpy"), 8, "importing numpy alone")
    yield Figure(
        "another process, from start to its first candidate",
        f"{min(measured.samples):.2f} s",
        "<= 0.7 s",
        "of CPU, its 54 plans built",
        measured,
    )


def _child_cpu_s(code: str) -> float:
    """CPU seconds of a Python process of its own that runs ``code``."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def bench_emulator() -> Iterator[Figure]:
    """How far the emulator's real steps are from the modelled period, at scale 1."""
    from benchmarks.emulator import StepPeriodError, measure_step_period

    for num_seqs in (1, 8, 16):
        errors: list[StepPeriodError] = []

        def sample(num_seqs: int = num_seqs, errors: list[StepPeriodError] = errors) -> float:
            errors.append(measure_step_period(num_seqs))
            return errors[-1].p50_us

        measured = in_turns(sample, bare_sleep_us, PROCESS_REPEATS, "a bare sleep to a deadline")
        yield Figure(f"emulator step period, N={num_seqs}", str(errors[0]), "p50 <= 0.1 ms", "", measured)


def bare_sleep_us(num_sleeps: int = 100) -> float:
    """Median lateness, in microseconds, of sleeps of 5 ms in this process."""
    clock, late_ns = MonotonicClock(), list[int]()
    for _ in range(num_sleeps):
        due_ns = clock.now_ns() + 5 * NS_PER_MS
        clock.sleep_until_ns(due_ns)
        late_ns.append(clock.now_ns() - due_ns)
    return statistics.median(late_ns) / NS_PER_US


def section(name: str, module: str = "") -> Callable[[], Iterator[Figure]]:
    """The figures of a module, by default of the section's name, which is imported when they are wanted."""

    def measure() -> Iterator[Figure]:
        yield from getattr(import_module(f"benchmarks.{module or name}"), f"bench_{name}")()

    return measure


SECTIONS: dict[str, Callable[[], Iterator[Figure]]] = {
    "parser": bench_parser,
    "plan": bench_plan,
    "simulator": bench_simulator,
    "paged": section("paged"),
    "emulator": bench_emulator,
    "stopping": section("stopping"),
    "heavy_tails": section("heavy_tails"),
    "power": section("power"),
    "coverage": section("coverage"),
    "gate": section("gate"),
    "tuning": section("tuning"),
    "agents": section("agents"),
    "spaces": section("spaces"),
    "targets": section("targets", "spaces"),
    "prediction": section("prediction"),
    "channels": section("channels"),
    "costs": section("costs"),
    "devices": section("devices"),
    "memory": section("long_run"),
    "late": section("late"),
}
