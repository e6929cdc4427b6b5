"""How well the simulator predicts a server whose KV memory is short: intervals over draws beside repeated runs.

``python -m benchmarks.short_memory FOLDER`` replays the same sessions with .5 to 2 times the KV memory that they need,
several times each, on the emulator, and prints a table. Draws take what requests took beside their steps in a run of
another plan. ``--vllm ENVIRONMENT MODEL COSTS`` does so on a real vLLM for CPUs, with smaller sessions and the draws of
every prediction. Runs that FOLDER holds are not made again.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from harness.analysis.serving import latencies
from harness.analysis.sessions import session_times
from harness.clock import NS_PER_MS, NS_PER_S
from harness.compiled.records import IntArray
from harness.errors import HarnessError
from harness.measure.emulator.step_log import read_trace
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.model.engine.config import EngineConfig
from harness.model.experiment import PlannedRun, build_plan, resolve
from harness.model.plan.model import Plan
from harness.model.sim.draws import FloatArray, draw, nominal, perturbation_of, run_draws
from harness.model.sim.kernel.arrays import with_column
from harness.model.sim.plans import joined, plan_arrays
from harness.model.spec import ExperimentSpec, parse_experiment
from harness.runner.experiment import run_experiment
from harness.table import Table, table_of, to_markdown

SHARES = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Of the KV blocks that all sessions together hold at their ends."""
REPEATS = 4
DRAWS = 400
ENDS = (0.05, 0.5, 0.95)
LEAST_WIDTH = 0.01
"""An interval may be as wide as this part of the runs' mean, or twice their spread."""
TRIES = 20
"""Of a run that is INVALID."""
SEED = 11
BLOCK_TOKENS = 16
WIDE_MS = 60_000.0
WORKLOAD: Mapping[str, Any] = {
    "num_sessions": 16,
    "requests_per_session": 8,
    "prompt_tokens": {"distribution": "uniform", "low": 1500, "high": 4500},
    "new_tokens": {"distribution": "uniform", "low": 200, "high": 900},
    "generate_tokens": {"distribution": "uniform", "low": 60, "high": 200},
    "waits": "tracelab-v0.0.2",
    "wait_cap_s": 3.0,
    "start_offset_s": 0.15,
    "shared_prefix_tokens": 256,
}
SERVER: Mapping[str, Any] = {
    "rules": "vllm-paged",
    "cost_model": "emulated-gpu",
    "max_num_seqs": 8,
    "decode_buckets": [1, 2, 4, 8],
    "slot_tokens": 16384,
    "block_size": BLOCK_TOKENS,
}
ON_CPU: Mapping[str, Any] = {
    "num_sessions": 12,
    "requests_per_session": 4,
    "prompt_tokens": {"distribution": "uniform", "low": 300, "high": 900},
    "new_tokens": {"distribution": "uniform", "low": 50, "high": 200},
    "generate_tokens": {"distribution": "uniform", "low": 24, "high": 64},
    "waits": "tracelab-v0.0.2",
    "wait_cap_s": 0.5,
    "start_offset_s": 0.05,
    "shared_prefix_tokens": 128,
    "token_id_range": [300, 2000],
}
"""For a small model (tools/tiny_model.py), which has 2,048 tokens."""
CPU_SERVER: Mapping[str, Any] = {"max_num_seqs": 6, "slot_tokens": 2048, "block_size": 32}
STARTED: Mapping[str, Any] = {
    "extra_args": ["--load-format", "dummy", "--enforce-eager", "--dtype", "float32"],
    "env": {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"},
    "start_timeout_s": 500,
}
# A busy machine makes requests late, which the draws hold; a moved schedule, which they do not hold, is refused.
LIMITS: Mapping[str, float] = {
    "rearrival_lag_p99_ms": WIDE_MS,
    "start_spread_ms": WIDE_MS,
    "stall_ms": WIDE_MS,
    "stamp_lag_ms": WIDE_MS,
    "server_stall_ms": WIDE_MS,
    "schedule_moved_share": 0.001,
    "first_token_held_ms": WIDE_MS,
    "read_together_ms": WIDE_MS,
}


class Row(NamedTuple):
    """A figure at a share of the memory: the 90 % interval over draws and its median, and each repeated run."""

    share: float
    blocks: int
    figure: str
    low: float
    predicted: float
    high: float
    measured: tuple[float, ...]

    @property
    def spread(self) -> float:
        """The largest less the smallest run, in parts of their mean."""
        return (max(self.measured) - min(self.measured)) / mean(self.measured)

    @property
    def width(self) -> float:
        """Of the interval, in parts of the runs' mean."""
        return (self.high - self.low) / mean(self.measured)

    @property
    def holds(self) -> bool:
        """Whether the interval holds the runs' mean."""
        return self.low <= mean(self.measured) <= self.high

    @property
    def is_narrow(self) -> bool:
        """Whether it is at most as wide as it may be."""
        return self.width <= max(2 * self.spread, LEAST_WIDTH)

    @property
    def cells(self) -> dict[str, Any]:
        """A row of the table."""
        return {
            "KV memory": f"{self.share:g}",
            "blocks": self.blocks,
            "figure": self.figure,
            "predicted": f"{self.predicted:.3f}",
            "90 % of draws": f"{self.low:.3f} to {self.high:.3f}",
            "runs, mean": f"{mean(self.measured):.3f}",
            "off": f"{self.predicted / mean(self.measured) - 1:+.1%}",
            "width": f"{self.width:.1%}",
            "spread of the runs": f"{self.spread:.1%}",
            "holds": ("yes" if self.holds else "no") + ("" if self.is_narrow else ", wide"),
        }


def blocks_needed(plan: Plan, block_tokens: int) -> int:
    """KV blocks of all sessions at their ends, what they share counted once."""
    shared = plan.shared_prefix_tokens // block_tokens
    own = [-(-session.requests[-1].stream_tokens // block_tokens) - shared for session in plan.sessions]
    return sum(own) + shared


class Studied(NamedTuple):
    """A backend with its sessions and its server's keys."""

    backend: str
    workload: Mapping[str, Any]
    server: Mapping[str, Any]
    time_scale: float = 1.0

    def predicted(self, measured: SealedRun) -> Studied:
        """The simulator with the same rules, costs and steps. measured: shows what was left to a vLLM."""
        if self.backend == "emulator":
            return self._replace(backend="sim", time_scale=1.0)
        shown, limit = measured.simulated_server, self.server["max_num_seqs"]
        in_force = {key: getattr(shown, key) for key in ("max_num_batched_tokens", "async_scheduling")}
        kept = {key: self.server[key] for key in (*CPU_SERVER, "cost_model")}
        # No graphs: every step has its own size.
        own = {"rules": shown.rules, "decode_buckets": list(range(1, limit + 1))}
        return Studied("sim", self.workload, {**kept, **in_force, **own})


def experiment(
    studied: Studied, shares: Sequence[float] = SHARES, seed: int = SEED, limits: Mapping[str, float] = LIMITS
) -> ExperimentSpec:
    """A condition for each share of the memory; all replay one plan."""
    table = {
        "name": "short-memory",
        "backend": studied.backend,
        "time_scale": studied.time_scale,
        "base_seed": seed,
        "replicates": 1,
        "workload": dict(studied.workload),
        "limits": dict(limits),
        "server": dict(studied.server),
    }
    plain = parse_experiment({**table, "condition": [{"name": "any"}]}, where="short memory")
    needed = blocks_needed(build_plan(plain.workload, seed, 0), studied.server["block_size"])
    # One block is a placeholder.
    conditions = [
        {"name": f"memory-{share:g}", "server": {"num_gpu_blocks": 1 + round(share * needed)}} for share in shares
    ]
    return parse_experiment({**table, "condition": conditions}, where="short memory")


class Delays(NamedTuple):
    """What requests took beside their steps, ns; arrays of shape (requests,).

    arrive_ns: from the instant at which one was due to its arrival at the engine. first_ns, end_ns: from the end of the
    step of its first and its last token until the client had it.
    """

    arrive_ns: IntArray
    first_ns: IntArray
    end_ns: IntArray


NO_DELAYS = Delays(*np.zeros((3, 1), dtype=np.int64))


def delays_of(run: SealedRun) -> Delays:
    """Those of an emulated run without preemptions, by the emulator's own trace."""
    arrived: dict[str, int] = {}
    ends: defaultdict[str, list[int]] = defaultdict(list)
    for step in read_trace(run.path / layout.DEVICE_TRACE):
        arrived.update(step.get("arrivals", ()))
        for name in step.get("requests", ()):
            ends[name].append(step["start_ns"] + step["duration_ns"])
    rows = []
    for row, ttft_ns in zip(run.table("requests").to_pylist(), latencies(run).ttft_ns.tolist(), strict=True):
        name = f"{row['response_id']}-0"
        first_ns = row["sent_ns"] + ttft_ns - ends[name][-row["completion_tokens"]]
        rows.append((arrived[name] - row["due_ns"], first_ns, row["done_ns"] - ends[name][-1]))
    return Delays(*np.array(rows, dtype=np.int64).T)


class Drawn(NamedTuple):
    """Requests of one plan as its clients saw them; arrays of shape (draws, requests). session: of each request."""

    due_ns: IntArray
    first_ns: IntArray
    done_ns: IntArray
    cached_tokens: IntArray
    prompt_tokens: IntArray
    num_sessions: int

    def duration_s(self) -> FloatArray:
        return (self.done_ns.max(axis=1) - self.due_ns.min(axis=1)) / NS_PER_S

    def reuse(self) -> FloatArray:
        return self.cached_tokens.sum(axis=1) / self.prompt_tokens.sum()

    def ttft_ms(self, q: float) -> FloatArray:
        return np.quantile(self.first_ns - self.due_ns, q, axis=1) / NS_PER_MS

    def session_s(self) -> FloatArray:
        return (self.done_ns - self.due_ns).sum(axis=1) / self.num_sessions / NS_PER_S


def drawn(planned: PlannedRun, delays: Delays | None) -> Drawn:
    """Draws of a planned run. A delay is an event: the client sends the later. delays: None: as every prediction."""
    arrays, config = plan_arrays([planned.plan]), EngineConfig.from_server(planned.server)
    picks = np.random.default_rng(SEED).integers(
        len((delays or NO_DELAYS).arrive_ns), size=(DRAWS, len(arrays.requests))
    )
    arrive_ns, first_ns, end_ns = (column[picks] for column in delays or NO_DELAYS)
    if delays is None:
        perturbation = perturbation_of(planned.spec.prediction, planned.cost_file)
        draws = draw(arrays, config, planned.cost_model, perturbation, range(DRAWS))
    else:
        parts = []
        for arrive, end in zip(arrive_ns, end_ns, strict=True):
            # What follows the last request of a session delays nothing.
            late = with_column(arrays, "wait_ns", arrays.requests["wait_ns"] + end + np.append(arrive[1:], 0))
            sessions = arrays.sessions.copy()
            sessions["start_ns"][:] += arrive[sessions["first_request"]]
            parts.append(late._replace(sessions=sessions))
        draws = nominal(joined(parts), planned.cost_model)
    requests = run_draws(draws, config).requests
    of_draws = {
        name: requests[name].reshape(picks.shape)
        for name in ("arrival_ns", "first_token_ns", "completed_ns", "cached_tokens")
    }
    return Drawn(
        of_draws["arrival_ns"] - arrive_ns,
        of_draws["first_token_ns"] + first_ns,
        of_draws["completed_ns"] + end_ns,
        of_draws["cached_tokens"],
        arrays.requests["keep"] + arrays.requests["new"],
        len(arrays.sessions),
    )


def _duration_s(run: SealedRun) -> float:
    requests = run.table("requests")
    first_ns, last_ns = min(requests["sent_ns"].to_pylist()), max(requests["done_ns"].to_pylist())
    return (last_ns - first_ns) / NS_PER_S


def _reuse(run: SealedRun) -> float:
    requests = run.table("requests")
    return sum(requests["cached_tokens"].to_pylist()) / sum(requests["prompt_tokens"].to_pylist())


def _session_s(run: SealedRun) -> float:
    times = session_times(run)
    assert times is not None
    return float(times.own_ns.mean()) / NS_PER_S


def _ttft_ms(q: float) -> Callable[[SealedRun], float]:
    return lambda run: float(np.quantile(latencies(run).ttft_ns, q)) / NS_PER_MS


FIGURES: Mapping[str, tuple[Callable[[SealedRun], float], Callable[[Drawn], FloatArray]]] = {
    "duration, s": (_duration_s, Drawn.duration_s),
    "reuse (share of prompt tokens)": (_reuse, Drawn.reuse),
    "TTFT p50, ms": (_ttft_ms(0.5), partial(Drawn.ttft_ms, q=0.5)),
    "TTFT p90, ms": (_ttft_ms(0.9), partial(Drawn.ttft_ms, q=0.9)),
    "session time less waits, mean s": (_session_s, Drawn.session_s),
}
"""A figure of a run, and the same of draws, shape (draws,)."""


def rows_of(simulated: ExperimentSpec, measured: Sequence[Sequence[SealedRun]], delays: Delays | None) -> Iterator[Row]:
    """Rows by share. simulated: a condition for each; measured: a run of each, for each repeat."""
    for place, (share, (planned,)) in enumerate(zip(SHARES, resolve(simulated).by_condition.values(), strict=True)):
        draws = drawn(planned, delays)
        for name, (of_run, of_draws) in FIGURES.items():
            low, predicted, high = np.quantile(of_draws(draws), ENDS).tolist()
            runs = tuple(of_run(runs[place]) for runs in measured)
            yield Row(share, planned.server.num_gpu_blocks or 0, name, low, predicted, high, runs)


def runs_of(spec: ExperimentSpec, folder: Path) -> list[SealedRun]:
    """The run of each condition, made where it is not there and anew where it is INVALID; all were answered."""
    perform = partial(run_experiment, spec, runs_root=folder, retry_invalid=True)
    outcome, tries = perform(resume=folder.exists()), 1
    while outcome.invalid_runs and tries < TRIES:
        outcome, tries = perform(resume=True), tries + 1
    by_condition = {run.condition: run for run in outcome.require_valid().runs}
    return [by_condition[condition.name] for condition in spec.condition]


def table(rows: Sequence[Row]) -> Table:
    """The rows, how many intervals hold the runs' mean, and how many are too wide."""
    caption = (
        f"{sum(row.holds for row in rows)} of {len(rows)} intervals hold the mean of {len(rows[0].measured)} runs; "
        f"{sum(not row.is_narrow for row in rows)} are wider than twice the spread of the runs and {LEAST_WIDTH:.0%}."
    )
    return table_of("Predictions where KV memory is short", caption, [row.cells for row in rows])


def main(
    folder: Annotated[Path, typer.Argument(help="Keeps the runs.")],
    repeats: Annotated[int, typer.Option("--repeats", min=2, help="Runs of each share.")] = REPEATS,
    time_scale: Annotated[float, typer.Option("--time-scale", help="Emulated: model time over wall time.")] = 1.0,
    vllm: Annotated[
        tuple[str, str, str], typer.Option("--vllm", help="A vLLM for CPUs: environment, model, calibrated costs.")
    ] = ("", "", ""),
) -> None:
    """Print the table of predictions beside repeated runs."""
    studied = Studied("emulator", WORKLOAD, SERVER, time_scale)
    if any(vllm):
        named = dict(zip(("environment", "model", "cost_model"), vllm, strict=True))
        studied = Studied("vllm", ON_CPU, {**CPU_SERVER, **STARTED, **named})
    measured: list[list[SealedRun]] = []
    observed: list[Delays] = []
    for repeat in range(repeats):
        measured.append(runs_of(experiment(studied), folder / str(repeat)))
        if not any(vllm):
            # All sessions with all of their KV memory, another plan; beside each repeat, as a machine changes.
            another = experiment(studied, SHARES[-1:], SEED + 1, {**LIMITS, "schedule_moved_share": 1.0})
            observed.append(delays_of(*runs_of(another, folder / f"delays-{repeat}")))
    simulated, delays = experiment(studied.predicted(measured[0][0])), None
    if observed:
        delays = Delays(*(np.concatenate(columns) for columns in zip(*observed, strict=True)))
        medians = (f"{name} {np.median(column) / NS_PER_MS:.2f}" for name, column in delays._asdict().items())
        print(
            f"Medians of {len(delays.end_ns)} requests of another plan, ms: {', '.join(medians)}\n".replace("_ns", "")
        )
    print(to_markdown(table(list(rows_of(simulated, measured, delays)))))


if __name__ == "__main__":
    try:
        typer.run(main)
    except HarnessError as error:
        sys.stderr.write(f"short memory: {error}\n")
        sys.exit(2)
