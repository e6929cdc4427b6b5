"""The figures of one run, computed from its sealed records: one frozen value per run, summed elsewhere.

Every figure comes from the records alone; what cannot be computed is None, never zero. Next: ``summary`` sums runs into
conditions and compares them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from harness.analysis.method.lateness import lateness
from harness.analysis.method.padding import Padding, padding, steps_by_n_b
from harness.analysis.method.reconstruct import (
    ChannelA,
    StepCost,
    channel_a,
    channel_b,
    residual_ns,
    waiting_session_ns,
)
from harness.analysis.method.reuse import cached_tokens, computed_prefill_tokens, rearrivals
from harness.analysis.method.runfacts import cost_model_of
from harness.errors import PlanError
from harness.plan import Plan, read_plan
from harness.records import SealedRun

PLAN_NAME = "plan.jsonl"


@dataclass(frozen=True, slots=True)
class ReuseFigures:
    """Re-arrivals of a run and what they reused. Tokens; reusable is what formula C allows."""

    num_rearrivals: int = 0
    num_reused: int = 0
    num_partial: int = 0
    reused_tokens: int = 0
    reusable_tokens: int = 0


@dataclass(frozen=True, slots=True)
class LatenessFigures:
    """The harness's own lateness, wall ms of its machine; None where nothing of the kind was sent."""

    rearrival_p50_ms: float | None
    rearrival_p99_ms: float | None
    rearrival_max_ms: float | None
    start_spread_ms: float | None
    num_early: int


@dataclass(frozen=True, slots=True)
class RunFigures:
    """Figures of one run; times in model ns.

    a: channel A and its parts. b_ns: channel B. waiting_session_ns: W (session-ns), modelled, None when the log has no
    KV lines. evictions: by who caused them. cached_tokens: sum over all responses.
    """

    experiment: str
    condition: str
    replicate: int
    is_valid: bool
    treatment: str
    baseline: str
    a: ChannelA | None
    b_ns: int
    padding: Padding
    steps_by_n_b: Mapping[tuple[int, int], int]
    computed_prefill_tokens: int
    cached_tokens: int
    reuse: ReuseFigures
    evictions: Mapping[str, int]
    waiting_session_ns: int | None
    lateness: LatenessFigures
    num_requests: int
    num_failed: int
    generated_tokens: int = 0
    invalid_reasons: tuple[str, ...] = field(default=())

    @property
    def num_steps(self) -> int:
        return sum(self.steps_by_n_b.values())

    @property
    def histogram(self) -> dict[int, int]:
        """h(n), by ascending n."""
        total: Counter[int] = Counter()
        for (n, _b), count in self.steps_by_n_b.items():
            total[n] += count
        return dict(sorted(total.items()))

    @property
    def r_ns(self) -> int | None:
        """r = B - A; None without a step log."""
        return None if self.a is None else residual_ns(self.b_ns, self.a.total_ns)


def run_figures(run: SealedRun, cost_model: StepCost | None = None) -> RunFigures:
    """Every figure of one sealed run.

    cost_model: prices channel A; default: the one the run's server was configured with. Channel A is None when the
    run has no step log although it decoded.
    """
    manifest = run.manifest
    model = cost_model or cost_model_of(run)
    requests, steps, kv_events = run.table("requests"), run.table("steps"), run.table("kv_events")
    statuses = Counter(requests.column("status").to_pylist())
    generated = requests.column("completion_tokens").to_pylist()
    has_decoded = any((tokens or 0) > 1 for tokens in generated)
    is_observed = steps.num_rows > 0 or not has_decoded
    late = lateness(requests, manifest.clock.scale)
    return RunFigures(
        experiment=run.experiment,
        condition=run.condition,
        replicate=run.replicate,
        is_valid=run.is_valid,
        treatment=manifest.treatment,
        baseline=manifest.baseline,
        a=channel_a(steps, requests, model, kv_events) if is_observed else None,
        b_ns=channel_b(requests),
        padding=padding(steps),
        steps_by_n_b=steps_by_n_b(steps),
        computed_prefill_tokens=computed_prefill_tokens(requests),
        cached_tokens=cached_tokens(requests),
        reuse=reuse_figures(run),
        evictions=_evictions(run),
        waiting_session_ns=waiting_session_ns(kv_events, requests, model),
        lateness=LatenessFigures(
            rearrival_p50_ms=late.rearrival_quantile_ms(0.5),
            rearrival_p99_ms=late.rearrival_quantile_ms(0.99),
            rearrival_max_ms=late.rearrival_quantile_ms(1.0),
            start_spread_ms=late.start_spread_ms,
            num_early=late.num_early,
        ),
        num_requests=requests.num_rows,
        num_failed=requests.num_rows - statuses["ok"],
        generated_tokens=sum(tokens or 0 for tokens in generated),
        invalid_reasons=run.invalid_reasons,
    )


def reuse_figures(run: SealedRun) -> ReuseFigures:
    """Reuse of a run's re-arrivals, against formula C."""
    found = rearrivals(run.table("requests"), _plan_of(run.file(PLAN_NAME)))
    return ReuseFigures(
        num_rearrivals=len(found),
        num_reused=sum(rearrival.is_reused for rearrival in found),
        num_partial=sum(rearrival.is_partial for rearrival in found),
        reused_tokens=sum(rearrival.cached_tokens for rearrival in found),
        reusable_tokens=sum(rearrival.reusable_tokens for rearrival in found),
    )


def _plan_of(path: Path) -> Plan | None:
    if not path.exists():
        return None
    try:
        return read_plan(path)
    except PlanError:
        # Its bytes were sealed with the run: a plan of another version is no reason to lose the other figures.
        return None


def _evictions(run: SealedRun) -> dict[str, int]:
    events = run.table("kv_events")
    pairs = zip(events.column("kind").to_pylist(), events.column("caller").to_pylist(), strict=True)
    return dict(Counter(caller or "unknown" for kind, caller in pairs if kind == "eviction"))
