"""How well the simulator predicts a server whose KV memory is short: predictions beside repeated runs.

``python -m benchmarks.short_memory FOLDER`` replays the same sessions with .5 to 2 times the KV memory that they need,
several times each, on the emulator, and prints a table. ``--vllm ENVIRONMENT MODEL COSTS`` does so on a real vLLM for
CPUs, with smaller sessions. Runs that FOLDER holds are not made again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer

from harness.analysis.serving import latencies
from harness.analysis.sessions import session_times
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import HarnessError
from harness.measure.records.run import SealedRun
from harness.model.experiment import build_plan
from harness.model.plan.model import Plan
from harness.model.spec import ExperimentSpec, parse_experiment
from harness.runner.experiment import run_experiment
from harness.table import Table, table_of, to_markdown

SHARES = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Of the KV blocks that all sessions together hold at their ends."""
REPEATS = 4
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
ALONE: Mapping[str, Any] = {
    "num_sessions": 1,
    "requests_per_session": 24,
    "new_tokens": {"distribution": "uniform", "low": 100, "high": 400},
    "generate_tokens": {"distribution": "uniform", "low": 4, "high": 12},
    "wait_cap_s": 0.2,
}
# A busy machine makes a run late, which the table shows: it refuses none.
LIMITS: Mapping[str, float] = {
    "rearrival_lag_p99_ms": WIDE_MS,
    "start_spread_ms": WIDE_MS,
    "stall_ms": WIDE_MS,
    "stamp_lag_ms": WIDE_MS,
    "server_stall_ms": WIDE_MS,
    "schedule_moved_share": 1.0,
    "first_token_held_ms": WIDE_MS,
    "read_together_ms": WIDE_MS,
}


class Row(NamedTuple):
    """A figure at a share of the memory: simulated, predicted with what requests add, and in each repeated run."""

    share: float
    blocks: int
    figure: str
    simulated: float
    predicted: float
    measured: tuple[float, ...]

    @property
    def off(self) -> float:
        """The prediction's difference from the mean of the runs, in parts of that mean."""
        return self.predicted / mean(self.measured) - 1

    @property
    def spread(self) -> float:
        """The largest less the smallest run, in parts of their mean."""
        return (max(self.measured) - min(self.measured)) / mean(self.measured)

    @property
    def cells(self) -> dict[str, Any]:
        """A row of the table."""
        return {
            "KV memory": f"{self.share:g}",
            "blocks": self.blocks,
            "figure": self.figure,
            "simulated": f"{self.simulated:.3f}",
            "predicted": f"{self.predicted:.3f}",
            "runs, mean": f"{mean(self.measured):.3f}",
            "prediction off": f"{self.off:+.1%}",
            "spread of the runs": f"{self.spread:.1%}",
            "inside": "yes" if min(self.measured) <= self.predicted <= max(self.measured) else "no",
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


def experiment(studied: Studied, shares: Sequence[float] = SHARES, seed: int = SEED) -> ExperimentSpec:
    """A condition for each share of the memory; all replay one plan."""
    table = {
        "name": "short-memory",
        "backend": studied.backend,
        "time_scale": studied.time_scale,
        "base_seed": seed,
        "replicates": 1,
        "workload": dict(studied.workload),
        "limits": dict(LIMITS),
        "server": dict(studied.server),
    }
    plain = parse_experiment({**table, "condition": [{"name": "any"}]}, where="short memory")
    needed = blocks_needed(build_plan(plain.workload, seed, 0), studied.server["block_size"])
    # One block is a placeholder.
    conditions = [
        {"name": f"memory-{share:g}", "server": {"num_gpu_blocks": 1 + round(share * needed)}} for share in shares
    ]
    return parse_experiment({**table, "condition": conditions}, where="short memory")


def _duration_s(run: SealedRun) -> float:
    requests = run.table("requests")
    first_ns, last_ns = min(requests["sent_ns"].to_pylist()), max(requests["done_ns"].to_pylist())
    return (last_ns - first_ns) / NS_PER_S


def _reuse(run: SealedRun) -> float:
    requests = run.table("requests")
    return sum(requests["cached_tokens"].to_pylist()) / sum(requests["prompt_tokens"].to_pylist())


def _ttft_ms(q: float) -> Callable[[SealedRun], float]:
    return lambda run: float(np.quantile(latencies(run).ttft_ns, q)) / NS_PER_MS


def _session_s(run: SealedRun) -> float:
    times = session_times(run)
    assert times is not None
    return float(times.own_ns.mean()) / NS_PER_S


def _nothing(_run: SealedRun, _ms: float) -> float:
    return 0.0


def _once(_run: SealedRun, ms: float) -> float:
    return ms


class Figure(NamedTuple):
    """A figure of a run, and what ms that each request takes beside its steps add to it."""

    of: Callable[[SealedRun], float]
    added: Callable[[SealedRun, float], float] = _nothing


def _ttft(q: float) -> Figure:
    return Figure(_ttft_ms(q), _once)


def _added_to_sessions_s(run: SealedRun, ms: float) -> float:
    requests = run.table("requests")
    return ms * NS_PER_MS / NS_PER_S * len(requests) / len(requests["session"].unique())


FIGURES: Mapping[str, Figure] = {
    "duration, s": Figure(_duration_s),
    "reuse (share of prompt tokens)": Figure(_reuse),
    "TTFT p50, ms": _ttft(0.5),
    "TTFT p90, ms": _ttft(0.9),
    "session time less waits, mean s": Figure(_session_s, _added_to_sessions_s),
}


def rows_of(
    simulated: Sequence[SealedRun], measured: Sequence[Sequence[SealedRun]], request_ms: float = 0.0
) -> Iterator[Row]:
    """Rows by share. simulated: a run of each share; measured: the same for each repeat."""
    for place, (share, model) in enumerate(zip(SHARES, simulated, strict=True)):
        blocks = int(model.manifest.server_spec["num_gpu_blocks"])
        for name, figure in FIGURES.items():
            value = figure.of(model)
            predicted = value + figure.added(model, request_ms)
            yield Row(share, blocks, name, value, predicted, tuple(figure.of(runs[place]) for runs in measured))


def request_ms(studied: Studied, folder: Path) -> float:
    """What a request takes beside its steps, median ms: of a session alone, in a plan that nothing is compared with."""
    alone = studied._replace(workload={**studied.workload, **ALONE})
    (run,) = runs_of(experiment(alone, SHARES[-1:], SEED + 1), folder / "alone")
    (model,) = runs_of(experiment(alone.predicted(run), SHARES[-1:], SEED + 1), folder / "alone-simulated")
    return float(np.median(latencies(run).ttft_ns - latencies(model).ttft_ns)) / NS_PER_MS


def runs_of(spec: ExperimentSpec, folder: Path) -> list[SealedRun]:
    """The run of each condition, made where it is not there; every request was answered."""
    made = run_experiment(spec, runs_root=folder, resume=folder.exists()).require_valid().runs
    by_condition = {run.condition: run for run in made}
    return [by_condition[condition.name] for condition in spec.condition]


def table(rows: Sequence[Row]) -> Table:
    """The rows, and how many predictions lie inside the runs' spread."""
    num_inside = sum(row.cells["inside"] == "yes" for row in rows)
    worst = max(rows, key=lambda row: abs(row.off))
    caption = (
        f"{num_inside} of {len(rows)} predictions lie between the smallest and the largest of "
        f"{len(rows[0].measured)} runs; the farthest is {worst.off:+.1%} ({worst.figure}, {worst.share:g})."
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
    measured = [runs_of(experiment(studied), folder / str(repeat)) for repeat in range(repeats)]
    simulated = runs_of(experiment(studied.predicted(measured[0][0])), folder / "predicted")
    # A vLLM's costs are known to several per cent only.
    added_ms = 0.0 if any(vllm) else request_ms(studied, folder)
    print(to_markdown(table(list(rows_of(simulated, measured, added_ms)))))
    print(f"\nA request takes {added_ms:.3f} ms beside its steps (median of a session alone, in another plan).")


if __name__ == "__main__":
    try:
        typer.run(main)
    except HarnessError as error:
        sys.stderr.write(f"short memory: {error}\n")
        sys.exit(2)
