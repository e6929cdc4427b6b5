"""Proposes captured sizes for a vLLM whose decode steps ran without a graph, and writes the experiment that tests them.

The gain is measured step time less what the cost model gives for a captured step; the simulator says what it does to
the runs as a whole. Nothing is run here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from harness.analysis import run_figures
from harness.analysis.logs.engine_steps import covering_sizes, decode_periods, step_log_of
from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SpecError
from harness.judge.advise.advise import SEED_RANGE, Validation, commands_of
from harness.measure.records.run import SealedRun
from harness.model.engine import CostModel
from harness.model.plan.build import derive_seed
from harness.model.sim import simulate
from harness.stacks.rbln.rules.kv_rules import AUTO
from harness.stacks.vllm.step_log import StepLog


@dataclass(frozen=True)
class EagerSteps:
    """Decode steps without a graph, by their number of requests.

    count: how many there were. measured_ns: the median of their times, where two of a size followed each other.
    model: the costs of the server.
    """

    count: Mapping[int, int]
    measured_ns: Mapping[int, float]
    model: CostModel

    @classmethod
    def of(cls, logs: Sequence[StepLog], model: CostModel) -> EagerSteps:
        count: Counter[int] = Counter()
        times_ns: dict[int, list[int]] = {}
        for log in logs:
            count.update(log.eager_by_n)
            for period in decode_periods(log):
                if period.n in log.eager_by_n and period.is_eager:
                    times_ns.setdefault(period.n, []).append(period.period_ns)
        measured_ns = {n: median(times) for n, times in times_ns.items()}
        return cls(dict(sorted(count.items())), measured_ns, model)

    def captured_ns(self, n: int) -> int | None:
        """What the cost model gives for a captured step; None where it states no such times."""
        return None if self.model.chunk_step_fs is None else self.model.decode_step_ns(n, n)

    @property
    def extra_ns(self) -> dict[int, float]:
        """What a step of each measured size took more than a captured step."""
        captured = {n: self.captured_ns(n) for n in self.measured_ns}
        return {n: self.measured_ns[n] - ns for n, ns in captured.items() if ns is not None}

    @property
    def price_ns(self) -> int:
        """What a step without a graph takes more: by the cost model, else the mean of the measured times."""
        extra_ns = self.extra_ns
        if self.model.eager_ns or not extra_ns:
            return self.model.eager_ns
        num_steps = sum(self.count[n] for n in extra_ns)
        return max(0, round(sum(extra * self.count[n] for n, extra in extra_ns.items()) / num_steps))

    def gain(self, b_ns: int) -> str:
        """What capturing these sizes is predicted to save, and its share of the time in flight ``b_ns``."""
        if self.model.chunk_step_fs is None:
            return (
                "predicted gain: not known, no cost model of this server; name one with [chunked_prefill] in "
                "server.cost_model"
            )
        if not (self.measured_ns or self.model.eager_ns):
            return (
                "predicted gain: not known, no two such steps of a size followed each other, and the cost model has no "
                "[eager] step_ns"
            )
        # A size whose time was not measured counts with the cost model's price.
        extra_ns = self.extra_ns
        saving_ns = sum(extra_ns.get(n, self.model.eager_ns) * count for n, count in self.count.items())
        share = saving_ns / b_ns if b_ns else 0.0
        return f"predicted gain: {saving_ns / NS_PER_S:.2f} s, {100 * share:.1f} % of the time in flight"


def refuse_drafts(log: StepLog, condition: str) -> None:
    """SpecError for the log of a server with speculative decoding, whose sizes no number of requests can tell.

    Source: vLLM 0.33.0, config/compilation.py, adjust_cudagraph_sizes_for_spec_decode(); v1/cudagraph_dispatcher.py.
    """
    if drafts := log.num_drafts:
        raise SpecError(
            f"condition {condition!r} drafts {drafts} tokens a step: a captured size then counts tokens, is rounded to "
            f"a multiple of {drafts + 1}, and a step in which a request has fewer drafts takes no whole graph, so "
            "that numbers of requests say nothing of sizes",
            where="advise",
            hint="Measure lists of sizes as conditions, and compare them: harness compare",
        )


def capture_advice(runs: Sequence[SealedRun], output: Path, *, condition: str = "") -> Iterator[str]:
    """The advice for one condition (default: the baseline) as lines, its experiment written into the folder ``output``.

    Raises SpecError where no valid run of the condition has a step log.
    """
    name = condition or runs[0].spec.baseline_name
    logs = [
        (run, log) for run in runs if run.condition == name and run.is_valid and (log := step_log_of(run)) is not None
    ]
    if not logs:
        raise SpecError(f"condition {name!r} has no valid run with a step log", where="advise", hint="Run it first")
    for _run, log in logs:
        refuse_drafts(log, name)
    first = logs[0][0]
    captured = first.manifest.decode_buckets
    eager = EagerSteps.of([log for _run, log in logs], first.cost_model)
    num_steps = sum(log.decode_steps.num_rows for _run, log in logs)
    yield f"condition {name!r}: {num_steps:,} decode steps, captured sizes {list(captured)}"
    if not eager.count:
        yield "proposal: none; every decode step ran as a graph, or graphs are off"
        return
    num_eager = sum(eager.count.values())
    yield f"  without a graph: {num_eager:,} steps, {100 * num_eager / num_steps:.1f} %"
    for n, count in eager.count.items():
        measured = f", {eager.measured_ns[n] / NS_PER_MS:.2f} ms each (median)" if n in eager.measured_ns else ""
        captured_ns = eager.captured_ns(n)
        model = "" if captured_ns is None else f"; captured {captured_ns / NS_PER_MS:.2f} ms (model)"
        yield f"    n = {n}: {count:,}{measured}{model}"
    proposed = covering_sizes(eager.count, captured)
    yield f"proposal: server.decode_buckets = {list(proposed)}"
    ranks = logs[0][1].effective.get("tensor_parallel_size") or 1
    if ranks > 1:
        yield (
            f"  the server is spread over {ranks} devices: the cost model, which says nothing of this, has to be "
            "fitted on as many"
        )
    if captured and min(eager.count) > captured[-1]:
        yield f"  or server.max_num_seqs = {captured[-1]}, where fewer requests at once are enough"
    yield f"  {eager.gain(sum(run_figures(run).b_ns for run, _log in logs))}"
    price_ns = eager.price_ns
    if not price_ns:
        return
    today_s, proposed_s = _simulated_s([run for run, _log in logs], proposed, replace(eager.model, eager_ns=price_ns))
    yield (
        f"  simulated with {price_ns / NS_PER_MS:.2f} ms more for each step without a graph: device time "
        f"{today_s:.2f} s, with the proposal {proposed_s:.2f} s ({proposed_s / today_s:.4f})"
    )
    if not eager.model.eager_ns:
        yield f"  add this price to the cost model, for predictions: [eager] step_ns = {price_ns}"
    server = first.server.model_copy(update={"rules": AUTO}) if first.server.is_vllm else first.server
    seed = derive_seed(first.spec.base_seed, "advise/validation") % SEED_RANGE
    shapes = {"captured": server.shape._replace(decode_buckets=proposed)}
    yield from commands_of(*Validation(first.spec, server, shapes, seed).write(output))


def _simulated_s(runs: Sequence[SealedRun], decode_buckets: tuple[int, ...], costs: CostModel) -> tuple[float, float]:
    """Device seconds of the plans of these runs, as they were served and with the proposed sizes."""
    today_ns = proposed_ns = 0
    for run in runs:
        server = run.simulated_server
        today_ns += simulate(run.plan, server, costs).device_ns
        proposed = server.model_copy(update={"decode_buckets": decode_buckets})
        proposed_ns += simulate(run.plan, proposed, costs).device_ns
    return today_ns / NS_PER_S, proposed_ns / NS_PER_S
