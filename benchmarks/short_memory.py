"""How well the simulator predicts a server whose KV memory is short: intervals over draws beside repeated runs.

``python -m benchmarks.short_memory FOLDER`` replays the same sessions with .5 to 2 times the KV memory that they need,
several times each, on the emulator, and prints a table. ``--vllm ENVIRONMENT MODEL COSTS`` does so on a real vLLM for
CPUs, with smaller sessions. Draws take what requests took beside their steps, and steps beside their costs, in runs of
another plan, on a vLLM with as much memory, just before or behind. The order of a repeat's runs is drawn; those that
FOLDER has are not made again.
"""

from __future__ import annotations

import sys
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heappush
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import typer

from harness.analysis.cost.reconstruct import step_prices
from harness.analysis.logs.engine_steps import step_log_of, step_spans
from harness.analysis.logs.replicas import core_requests
from harness.analysis.serving import latencies
from harness.analysis.sessions import session_times
from harness.clock import NS_PER_MS, NS_PER_S, ScaledClock
from harness.compiled.records import IntArray
from harness.errors import HarnessError, RunInvalidError, ServerError
from harness.measure.emulator.step_log import read_trace
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import values_of
from harness.model.engine import CostModel
from harness.model.engine.config import EngineConfig
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd
from harness.model.engine.paged import scheduler_of
from harness.model.experiment import PlannedRun, build_plan, resolve
from harness.model.plan.event_queue import ClientEvent
from harness.model.plan.model import Plan
from harness.model.sim.draws import FloatArray
from harness.model.sim.driver import Key, UnreadRequests, VirtualDriver
from harness.model.spec import ExperimentSpec, parse_experiment
from harness.runner.experiment import run_experiment
from harness.stacks.vllm.step_log import StepLog
from harness.table import Table, table_of, to_markdown

SHARES = (0.5, 0.7, 1.0, 1.4, 2.0)
"""Of the KV blocks that all sessions together hold at their ends."""
REPEATS = 4
DRAWS = 200
ENDS = (0.05, 0.5, 0.95)
LEAST_WIDTH = 0.01
"""An interval may be as wide as this part of the runs' mean, or twice their spread."""
TRIES = 20
"""Of a run that is INVALID, or whose server fails."""
SEED = 11
RECENT_NS = 5 * NS_PER_MS
"""What was due before has nothing to do with a request; taken as a distance, no step runs."""
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
# An engine with a worker of its own waits for it by yielding its core all the time, and keeps the client from it.
ONE_PROCESS = ("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor")
STARTED: Mapping[str, Any] = {
    "extra_args": ["--load-format", "dummy", "--enforce-eager", "--dtype", "float32", *ONE_PROCESS],
    "env": {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "0"},
    "start_timeout_s": 500,
    "stop_grace_s": 1,
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


def experiment(studied: Studied, share: float, seed: int = SEED) -> ExperimentSpec:
    """Of one run with a share of the memory. seed: of the plan; one of another plan may have a moved schedule."""
    table = {
        "name": "short-memory",
        "backend": studied.backend,
        "time_scale": studied.time_scale,
        "base_seed": seed,
        "replicates": 1,
        "workload": dict(studied.workload),
        "limits": {**LIMITS, "schedule_moved_share": LIMITS["schedule_moved_share"] if seed == SEED else 1.0},
        "server": dict(studied.server),
    }
    plain = parse_experiment({**table, "condition": [{"name": "any"}]}, where="short memory")
    needed = blocks_needed(build_plan(plain.workload, seed, 0), studied.server["block_size"])
    # One block is a placeholder.
    condition = {"name": f"memory-{share:g}", "server": {"num_gpu_blocks": 1 + round(share * needed)}}
    return parse_experiment({**table, "condition": [condition]}, where="short memory")


class Record(NamedTuple):
    """What a server recorded of a run, in ns of the run's clock.

    spans: the beginning and the end of each step, in order. came_ns: by (session, request), when it was there for the
    engine. tokens_ns: by the same, the ends of the steps of its first and its last token. prices_ns: of each step by
    the costs; empty where it lasts as long.
    """

    spans: Sequence[tuple[int, int]]
    came_ns: Mapping[Key, int]
    tokens_ns: Mapping[Key, tuple[int, int]]
    prices_ns: Sequence[int] = ()


def record_of_trace(run: SealedRun) -> Record:
    """That of an emulated run without preemptions."""
    spans, arrived, ends = list[tuple[int, int]](), dict[str, int](), defaultdict[str, list[int]](list)
    for step in read_trace(run.path / layout.DEVICE_TRACE):
        arrived.update(step.get("arrivals", ()))
        if names := step.get("requests"):
            spans.append((step["start_ns"], step["start_ns"] + step["duration_ns"]))
            for name in names:
                ends[name].append(spans[-1][1])
    came_ns, tokens_ns = dict[Key, int](), dict[Key, tuple[int, int]]()
    for session, request, name, tokens in values_of(
        run.table("requests"), "session", "request", "response_id", "completion_tokens"
    ):
        of_request = ends[f"{name}-0"]
        came_ns[session, request] = arrived[f"{name}-0"]
        tokens_ns[session, request] = of_request[-tokens], of_request[-1]
    return Record(spans, came_ns, tokens_ns)


def record_of_core(log: StepLog, requests: pa.Table, clock: ScaledClock, costs: CostModel) -> Record:
    """That of the engine core of a vLLM without asynchronous scheduling. requests: see ``core_requests``."""
    priced = zip(step_spans(log), step_prices(log, costs) or (), log.cores[0].steps, strict=True)
    ran = [(span, price_ns, step.values["schedule_ns"]) for span, price_ns, step in priced if span and price_ns]
    spans = [(clock.from_monotonic_ns(first), clock.from_monotonic_ns(last)) for (first, last), *_ in ran]
    decided_ns = [clock.from_monotonic_ns(at_ns) for *_, at_ns in ran]
    came_ns, tokens_ns = dict[Key, int](), dict[Key, tuple[int, int]]()
    for session, request, queued_ns, *tokens in values_of(
        requests, "session", "request", "queued_ns", "first_token_ns", "last_ns"
    ):
        taken = bisect_left(decided_ns, queued_ns)
        # The engine looks between two steps, of which one begins as the other ends: it came while that one ran.
        came_ns[session, request] = queued_ns if queued_ns <= spans[taken][0] else spans[taken - 1][0] + 1
        tokens_ns[session, request] = tuple(tokens)
    return Record(spans, came_ns, tokens_ns, [price_ns for _, price_ns, _ in ran])


class Delays(NamedTuple):
    """What requests took beside their steps, and steps beside their costs, ns; arrays of shape (requests,), (steps,).

    What a request met when it was due: until_ns, how long the step still ran, or -RECENT_NS while none did; since_ns,
    how long ago another was due, RECENT_NS at most, and twice that for the first of all. late_ns: from the end of that
    step, or from the instant itself, until it was there for the engine; below 0 where it was there before. first_ns,
    end_ns: from the end of the step of its first and its last token until the client had it. price_ns, lasted_ns: of
    each step.
    """

    until_ns: IntArray
    since_ns: IntArray
    late_ns: IntArray
    first_ns: IntArray
    end_ns: IntArray
    price_ns: IntArray
    lasted_ns: IntArray


def delays_of(requests: Sequence[Mapping[str, Any]], ttft_ns: Sequence[float], record: Record) -> Delays:
    """Those of a run. requests: rows of its table; ttft_ns: of each."""
    rows, begins_ns, before_ns = list[tuple[int, ...]](), [first for first, _ in record.spans], None
    for row, ttft in sorted(zip(requests, ttft_ns, strict=True), key=lambda each: each[0]["due_ns"]):
        key, due_ns = (row["session"], row["request"]), row["due_ns"]
        place = bisect_right(begins_ns, due_ns) - 1
        rest_ns = max(record.spans[place][1] - due_ns, 0) if place >= 0 else 0
        first_ns, last_ns = record.tokens_ns[key]
        rows.append(
            (
                *met(rest_ns, due_ns, before_ns),
                max(record.came_ns[key] - due_ns, 0) - rest_ns,
                row["sent_ns"] + round(ttft) - first_ns,
                row["done_ns"] - last_ns,
            )
        )
        before_ns = due_ns
    lasted_ns = [last - first for first, last in record.spans] if record.prices_ns else []
    of_steps = np.array([[*record.prices_ns], lasted_ns], dtype=np.int64)
    order = of_steps[0].argsort(kind="stable")
    return Delays(*np.array(rows, dtype=np.int64).T, *of_steps[:, order])


def met(rest_ns: int, due_ns: int, before_ns: int | None) -> tuple[int, int]:
    """What a request meets when it is due, see ``Delays``. rest_ns: of the step; before_ns: when another was due."""
    since_ns = 2 * RECENT_NS if before_ns is None else min(due_ns - before_ns, RECENT_NS)
    return rest_ns or -RECENT_NS, since_ns


def delays_of_run(run: SealedRun) -> Delays:
    """Those of a run of the emulator, or of a vLLM."""
    if (log := step_log_of(run)) is not None and log.cores:
        record = record_of_core(log, core_requests(run), ScaledClock(run.manifest.clock.scale), run.cost_model)
    else:
        record = record_of_trace(run)
    return delays_of(run.table("requests").to_pylist(), latencies(run).ttft_ns.tolist(), record)


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


class DrawnRun(VirtualDriver):
    """A draw: a request is as late as one of other runs that met the like: in that state they share what makes it late.

    A step lasts, beside its costs, as one of nearly that price in one of these runs, as runs differ as a whole.
    """

    takes_equal_steps = True

    def __init__(self, planned: PlannedRun, delays: Sequence[Delays], number: int) -> None:
        config, self._own = EngineConfig.from_server(planned.server), delays[number % len(delays)]
        lasting_ns = self._lasting_ns if len(self._own.price_ns) else None
        super().__init__(planned.plan, [EngineCore(scheduler_of(config, planned.cost_model), lasting_ns=lasting_ns)])
        of_all = [np.concatenate(columns) for columns in zip(*delays, strict=True)]
        self._until_ns, self._since_ns, self._late_ns = of_all[:3]
        self._num_near, self._generator = len(delays), np.random.default_rng((SEED, number))
        self._unread = UnreadRequests(planned.plan, config)
        self.requests, self.due_ns, self.done_ns = dict[Key, EngineRequest](), dict[Key, int](), dict[Key, int]()

    def seen(self) -> list[tuple[int, ...]]:
        """Play it; of each request in the plan's order: due_ns, first_ns, done_ns, cached_tokens."""
        self.play()
        return [
            (
                self.due_ns[key],
                request.first_token_ns + self._one_of(self._own.first_ns),
                self.done_ns[key],
                request.cached_tokens,
            )
            for key, request in sorted(self.requests.items())
        ]

    def send(self, event: ClientEvent) -> None:
        key, now_ns, ends_ns = (event.session, event.request), event.at_ns, self._ends_ns[0]
        if key in self.due_ns:
            return super().send(event)
        rest_ns = ends_ns[bisect_left(ends_ns, now_ns)] - now_ns if ends_ns else 0
        until_ns, since_ns = met(rest_ns, now_ns, next(reversed(self.due_ns.values()), None))
        apart_ns = np.abs(self._until_ns - until_ns) + np.abs(self._since_ns - since_ns)
        late_ns = self._one_of(self._late_ns[apart_ns.argpartition(self._num_near - 1)[: self._num_near]])
        self.due_ns[key] = now_ns
        return heappush(self._due, event._replace(at_ns=now_ns + max(rest_ns + late_ns, 0)))

    def request_of(self, event: ClientEvent) -> EngineRequest:
        request = self._unread.request_of(event, len(self.names))
        return self.requests.setdefault((event.session, event.request), request)

    def ended(self, _server: int, end: StepEnd, /) -> None:
        for request, num_tokens in zip(end.requests, end.num_tokens, strict=True):
            request.num_generated += num_tokens

    def _over(self, key: Key, at_ns: int) -> None:
        self.done_ns[key] = at_ns + self._one_of(self._own.end_ns)
        super()._over(key, self.done_ns[key])

    def _lasting_ns(self, price_ns: int) -> int:
        prices_ns = self._own.price_ns
        first = int(np.searchsorted(prices_ns, price_ns)) - self._num_near // 2
        first = min(max(first, 0), max(len(prices_ns) - self._num_near, 0))
        at = first + int(self._generator.integers(min(self._num_near, len(prices_ns))))
        return round(price_ns * self._own.lasted_ns[at] / prices_ns[at])

    def _one_of(self, values: IntArray) -> int:
        return int(values[self._generator.integers(len(values))])


def drawn(planned: PlannedRun, delays: Sequence[Delays]) -> Drawn:
    """Draws of a planned run; delays: of other runs."""
    draws = np.array([DrawnRun(planned, delays, number).seen() for number in range(DRAWS)], dtype=np.int64)
    due_ns, first_ns, done_ns, cached_tokens = np.moveaxis(draws, 2, 0)
    prompts = np.array([request.prompt_tokens for request in planned.plan.requests])
    return Drawn(due_ns, first_ns, done_ns, cached_tokens, prompts, planned.plan.num_sessions)


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


def rows_of(studied: Studied, share: float, runs: Sequence[SealedRun], delays: Sequence[Delays]) -> Iterator[Row]:
    """Rows of a share. runs: its repeats; delays: of other runs."""
    (planned,) = resolve(experiment(studied.predicted(runs[0]), share))
    draws = drawn(planned, delays)
    for name, (of_run, of_draws) in FIGURES.items():
        low, predicted, high = np.quantile(of_draws(draws), ENDS).tolist()
        yield Row(share, planned.server.num_gpu_blocks or 0, name, low, predicted, high, tuple(map(of_run, runs)))


def run_of(spec: ExperimentSpec, folder: Path, tries: int = TRIES) -> SealedRun:
    """The run, made where it is not there and anew where it is INVALID or its server fails; all were answered."""
    try:
        outcome = run_experiment(spec, runs_root=folder, resume=folder.exists(), retry_invalid=True)
        return outcome.require_valid().runs[0]
    except (RunInvalidError, ServerError):
        if tries == 1:
            raise
    return run_of(spec, folder, tries - 1)


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
    # Another plan, beside each repeat, as a machine changes. On a vLLM with as much memory, as steps last another
    # part of their costs with less; on an emulator with the most, as its trace tells less of preempted requests.
    others = {share: share if any(vllm) else SHARES[-1] for share in SHARES}
    runs = defaultdict[tuple[int, float], list[SealedRun]](list)
    for repeat in range(repeats):
        order = np.random.default_rng((SEED, repeat))
        for share in order.permutation(SHARES).tolist():
            # One after the other, as a machine's speed may change within minutes.
            for seed in order.permutation([SEED, SEED + 1] if share in others.values() else [SEED]).tolist():
                made = run_of(experiment(studied, share, seed), folder / f"{seed}-{share:g}-{repeat}")
                runs[seed, share].append(made)
    delays = {share: [delays_of_run(run) for run in runs[SEED + 1, share]] for share in {*others.values()}}
    pooled = Delays(*(np.concatenate(columns) for columns in zip(*chain(*delays.values()), strict=True)))
    medians = (
        f"{name[:-3]} {np.median(column) / NS_PER_MS:.2f}" for name, column in pooled._asdict().items() if len(column)
    )
    print(f"Medians of {len(pooled.end_ns)} requests of another plan, ms: {', '.join(medians)}\n")
    rows = (rows_of(studied, share, runs[SEED, share], delays[other]) for share, other in others.items())
    print(to_markdown(table(list(chain(*rows)))))


if __name__ == "__main__":
    try:
        typer.run(main)
    except HarnessError as error:
        sys.stderr.write(f"short memory: {error}\n")
        sys.exit(2)
