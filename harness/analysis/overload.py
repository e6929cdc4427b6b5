"""Whether sessions ask for more than their server can do: then queues grow, and all other figures follow from that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.analysis.figures import RunFigures
from harness.analysis.stats import grouped
from harness.kinds import kind_of_run
from harness.measure.records.run import SealedRun
from harness.model.plan.model import Plan
from harness.model.spec import ServerSpec

DEFAULT_COSTS = str(ServerSpec.model_fields["cost_model"].default)


def overload(plan: Plan, device_ns: int | None, num_servers: int = 1) -> float | None:
    """How many times more device time a plan asks of each server than passes until its last request could arrive.

    None where that is at most 1, and for sessions that start together or after one another: these wait by themselves.
    """
    starts = [session.start_offset_ns for session in plan.sessions]
    is_closed = any(session.after is not None and session.continues is None for session in plan.sessions)
    if device_ns is None or is_closed or max(starts) == min(starts):
        return None
    last = max(
        session.start_offset_ns + sum(request.wait_after_ns for request in session.requests[:-1])
        for session in plan.sessions
    )
    factor = device_ns / num_servers / last if last else None
    return factor if factor is not None and factor > 1 else None


def overloads(runs: Sequence[SealedRun], figures: Sequence[RunFigures]) -> Mapping[str, float]:
    """By condition, the mean factor of its valid runs, where each of them is overloaded and its costs are known.

    figures: of the runs, in their order.
    """
    by_condition: dict[str, float] = {}
    valid = [(run, each) for run, each in zip(runs, figures, strict=True) if run.is_valid]
    for name, group in grouped(valid, lambda pair: pair[1].condition).items():
        factors = [_factor(run, each) for run, each in group]
        known = [factor for factor in factors if factor is not None]
        if len(known) == len(factors):
            by_condition[name] = sum(known) / len(known)
    return by_condition


def _factor(run: SealedRun, figures: RunFigures) -> float | None:
    plan = run.plan_if_readable if figures.a_ns is not None and has_costs(run) else None
    return None if plan is None else overload(plan, figures.a_ns, run.server.num_replicas)


def has_costs(run: SealedRun) -> bool:
    """Whether the costs of its server are known: named, those that it runs by, or those that it shows."""
    is_fresh = kind_of_run(run.manifest.backend).is_restarted
    is_usual = run.server.cost_model == DEFAULT_COSTS
    return not is_usual or not (run.server.is_paged or not (is_fresh or _shows_costs(run)))


def _shows_costs(run: SealedRun) -> bool:
    """Whether the server shows by which costs it runs, as an emulator does."""
    return kind_of_run(run.manifest.backend).has_device is False and bool(run.manifest.effective.get("shown"))
