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
from typing import NamedTuple

from harness.clock import NS_PER_S, MonotonicClock

SIMULATED_PLANS = 54
PLAN_REQUESTS = 100_000


class Figure(NamedTuple):
    """One line of the benchmark. ``mark``: the goal, "" where there is none."""

    name: str
    value: str
    mark: str
    note: str = ""


def bench_parser() -> Iterator[Figure]:
    """Log lines parsed per second of CPU time, in both formats."""
    from harness.analysis.bench import LINES_PER_S_MARK
    from harness.analysis.bench import bench_parser as measure

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
        "from harness.plan import build_plan\n"
        "from harness.spec import WorkloadSpec\n"
        "clock = MonotonicClock(); began_ns = clock.now_ns()\n"
        f"plan = build_plan(WorkloadSpec(num_sessions={PLAN_REQUESTS // 2}), 1, 0)\n"
        "plan.save(pathlib.Path(sys.argv[1]))\n"
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
    """Simulated runs per second on one core: N = 6, 8, 10 with two requests each, after warm-up."""
    from harness.engine import EngineConfig, load_cost_model
    from harness.plan import build_plan
    from harness.sim import plan_arrays, run_totals
    from harness.spec import RulesName, ServerSpec, WorkloadSpec

    per_size = SIMULATED_PLANS // 3
    plans = [build_plan(WorkloadSpec(num_sessions=n), 20260910, k) for n in (6, 8, 10) for k in range(per_size)]
    arrays, model, clock = plan_arrays(plans), load_cost_model("paper"), MonotonicClock()
    marks: dict[RulesName, str] = {"paper": ">= 50,000 /s", "vendor-0.11.1": ">= 30,000 /s"}
    for rules, mark in marks.items():
        config = EngineConfig.from_server(ServerSpec(rules=rules))
        run_totals(arrays, config, model)
        began_ns, num_runs = clock.now_ns(), 0
        while clock.now_ns() - began_ns < NS_PER_S:
            num_runs += len(run_totals(arrays, config, model))
        rate = num_runs * NS_PER_S / (clock.now_ns() - began_ns)
        yield Figure(f"simulated runs, rules {rules}", f"{rate:,.0f} /s", mark, f"{num_runs:,} runs")


def bench_emulator() -> Iterator[Figure]:
    """How far the emulator's real steps are from the modelled period, at scale 1."""
    from harness.emulator.bench import measure_step_period

    for num_seqs in (1, 8, 16):
        error = measure_step_period(num_seqs)
        yield Figure(f"emulator step period, N={num_seqs}", str(error), "p50 <= 0.1 ms")


SECTIONS: dict[str, Callable[[], Iterator[Figure]]] = {
    "parser": bench_parser,
    "plan": bench_plan,
    "simulator": bench_simulator,
    "emulator": bench_emulator,
}
