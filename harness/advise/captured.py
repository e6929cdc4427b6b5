"""Proposes captured sizes for a vLLM whose decode steps ran without a graph, and writes the experiment that tests them.

The gain is measured step time less what the cost model gives for a captured step; the simulator says what it does to
the runs as a whole. Nothing is run here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from harness.advise.advise import SEED_RANGE, Validation, commands_of
from harness.analysis import run_figures
from harness.analysis.logs.engine_steps import covering_sizes, decode_periods, step_log_of
from harness.clock import NS_PER_MS, NS_PER_S
from harness.engine import CostModel
from harness.errors import SpecError
from harness.plan.build import derive_seed
from harness.records import SealedRun
from harness.sim import simulate
from harness.stack.rbln.rules.kv_rules import AUTO


@dataclass(frozen=True)
class CaptureAdvice:
    """Steps without a graph in the valid runs of a condition, and the sizes that would cover them. Times in ns.

    eager_by_n: how many there were. eager_ns: the median of their times, where two of a size followed each other.
    captured_ns: of a captured step of n requests, by the cost model; None where it states no such times.
    eager_extra_ns: what a step without a graph takes more, by the cost model. b_ns: channel B. simulated_ns: device
    time of the runs' plans with the captured sizes, and with the proposed sizes; None without a price of such steps.
    files: of the experiment that tests the proposal, and of its criteria.
    """

    condition: str
    captured: tuple[int, ...]
    num_steps: int
    eager_by_n: Mapping[int, int]
    eager_ns: Mapping[int, float]
    captured_ns: Mapping[int, int] | None
    eager_extra_ns: int
    b_ns: int
    simulated_ns: tuple[int, int] | None = None
    files: tuple[Path, Path] | None = None

    @property
    def decode_buckets(self) -> tuple[int, ...]:
        """The proposed captured sizes."""
        return covering_sizes(self.eager_by_n, self.captured)

    @property
    def saving_ns(self) -> float | None:
        """What capturing them is predicted to save; None without a cost model, or where no time is known.

        A size whose time was not measured counts with the cost model's price of a step without a graph.
        """
        if self.captured_ns is None or not (self.eager_ns or self.eager_extra_ns):
            return None
        measured = self._measured_extra_ns
        return sum(measured.get(n, self.eager_extra_ns) * count for n, count in self.eager_by_n.items())

    @property
    def price_ns(self) -> int:
        """What a step without a graph takes more: by the cost model, else the mean of the measured times."""
        measured = self._measured_extra_ns
        if self.eager_extra_ns or not measured:
            return self.eager_extra_ns
        num_steps = sum(self.eager_by_n[n] for n in measured)
        return max(0, round(sum(extra * self.eager_by_n[n] for n, extra in measured.items()) / num_steps))

    @property
    def _measured_extra_ns(self) -> dict[int, float]:
        captured = self.captured_ns
        return {} if captured is None else {n: spent - captured[n] for n, spent in self.eager_ns.items()}

    def lines(self) -> Iterator[str]:
        """The advice as lines of text."""
        num_eager = sum(self.eager_by_n.values())
        yield f"condition {self.condition!r}: {self.num_steps:,} decode steps, captured sizes {list(self.captured)}"
        if not num_eager:
            yield "proposal: none; every decode step ran as a graph, or graphs are off"
            return
        yield f"  without a graph: {num_eager:,} steps, {num_eager / self.num_steps:.1%}"
        for n, count in self.eager_by_n.items():
            spent = f", {self.eager_ns[n] / NS_PER_MS:.2f} ms each (median)" if n in self.eager_ns else ""
            model = "" if self.captured_ns is None else f"; captured {self.captured_ns[n] / NS_PER_MS:.2f} ms (model)"
            yield f"    n = {n}: {count:,}{spent}{model}"
        yield f"proposal: server.decode_buckets = {list(self.decode_buckets)}"
        if self.captured and min(self.eager_by_n) > self.captured[-1]:
            yield f"  or server.max_num_seqs = {self.captured[-1]}, where fewer requests at once are enough"
        yield f"  {self._gain()}"
        if self.simulated_ns is not None:
            today, proposed = (ns / NS_PER_S for ns in self.simulated_ns)
            yield (
                f"  simulated with {self.price_ns / NS_PER_MS:.2f} ms more for each step without a graph: device time "
                f"{today:.2f} s, with the proposal {proposed:.2f} s ({proposed / today:.4f})"
            )
        if self.files is not None:
            if not self.eager_extra_ns:
                yield f"  add this price to the cost model, for predictions: [eager] step_ns = {self.price_ns}"
            yield from commands_of(*self.files)

    def _gain(self) -> str:
        if self.captured_ns is None:
            return (
                "predicted gain: not known, no cost model of this server; name one with [chunked_prefill] in "
                "server.cost_model"
            )
        if self.saving_ns is None:
            return (
                "predicted gain: not known, no two such steps of a size followed each other, and the cost model has no "
                "[eager] step_ns"
            )
        share = self.saving_ns / self.b_ns if self.b_ns else 0.0
        return f"predicted gain: {self.saving_ns / NS_PER_S:.2f} s, {share:.1%} of the time in flight"


def capture_advice(runs: Sequence[SealedRun], output: Path, *, condition: str = "") -> CaptureAdvice:
    """The advice for one condition (default: the baseline), its experiment written into the folder ``output``.

    Raises SpecError where no valid run of the condition has a step log.
    """
    name = condition or runs[0].spec.baseline_name
    logs = [
        (run, log) for run in runs if run.condition == name and run.is_valid and (log := step_log_of(run)) is not None
    ]
    if not logs:
        raise SpecError(f"condition {name!r} has no valid run with a step log", where="advise", hint="Run it first")
    eager: Counter[int] = Counter()
    spent: dict[int, list[int]] = {}
    for _run, log in logs:
        eager.update(log.eager_by_n)
        for period in decode_periods(log):
            if period.n in log.eager_by_n and period.is_eager:
                spent.setdefault(period.n, []).append(period.period_ns)
    model = logs[0][0].cost_model
    advice = CaptureAdvice(
        condition=name,
        captured=logs[0][0].manifest.decode_buckets,
        num_steps=sum(log.decode_steps.num_rows for _run, log in logs),
        eager_by_n=dict(sorted(eager.items())),
        eager_ns={n: median(times) for n, times in sorted(spent.items())},
        captured_ns=None if model.chunk_step_fs is None else {n: model.decode_step_ns(n, n) for n in eager},
        eager_extra_ns=model.eager_ns,
        b_ns=sum(run_figures(run).b_ns for run, _log in logs),
    )
    if not advice.price_ns or not advice.eager_by_n:
        return advice
    costs = replace(model, eager_ns=advice.price_ns)
    return replace(
        advice,
        simulated_ns=_simulated(advice, (run for run, _log in logs), costs),
        files=_validation(advice, logs[0][0]).write(output),
    )


def _simulated(advice: CaptureAdvice, runs: Iterable[SealedRun], costs: CostModel) -> tuple[int, int]:
    """Device time of the plans of these runs, as they were served and with the proposed sizes."""
    today_ns = proposed_ns = 0
    for run in runs:
        server = run.simulated_server
        today_ns += simulate(run.plan, server, costs).device_ns
        proposed = server.model_copy(update={"decode_buckets": advice.decode_buckets})
        proposed_ns += simulate(run.plan, proposed, costs).device_ns
    return today_ns, proposed_ns


def _validation(advice: CaptureAdvice, run: SealedRun) -> Validation:
    server = run.server.model_copy(update={"rules": AUTO}) if run.server.is_vllm else run.server
    seed = derive_seed(run.spec.base_seed, "advise/validation") % SEED_RANGE
    return Validation(run.spec, server, {"captured": server.shape._replace(decode_buckets=advice.decode_buckets)}, seed)
