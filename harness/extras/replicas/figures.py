"""What routing does to reuse and cost: figures of simulated replicas, and policies compared on the same plans.

Two losses of reuse are kept apart: by routing (the session came back to another replica) and by eviction (it came back
to the same one, and its slot was gone).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from harness.clock import NS_PER_S
from harness.extras.replicas.virtual import Replica, ReplicaRun
from harness.judge.analysis.cost.reconstruct import union_ns
from harness.judge.analysis.reuse import INNER_BLOCKS, ONE_POOL, ReuseRule, continuations, rearrivals
from harness.judge.compare.measures import Value
from harness.judge.compare.ratio import paired_ratio
from harness.judge.compare.result import Family, result_of
from harness.measure.records.schema import values_of
from harness.model.engine.paged import PagedScheduler
from harness.model.plan.event_queue import whole_sessions
from harness.table import Cell, Table, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFigures:
    """One plan on its replicas. Seconds are model seconds; tokens are of prompts.

    device_s: by replica, the sum of its step times (modelled device time, A). in_flight_s: by replica, the union of
    what it had in flight (B). door_in_flight_s: the union of all. num_returns: answered requests that continue an
    earlier one. num_home: of these, served by the replica that served the one before. reusable_tokens: what returning
    prompts could reuse of the turn before, were all replicas one. lost_by_routing_tokens: of these, on another replica.
    lost_by_eviction_tokens: on the same one, and not reused. kept_tokens: reused. ttft_s: of each request. session_s:
    of each session, without its waits.
    """

    device_s: tuple[float, ...]
    in_flight_s: tuple[float, ...]
    door_in_flight_s: float
    end_s: float
    padding: float
    num_requests: tuple[int, ...]
    num_returns: int
    num_home: int
    reusable_tokens: int
    lost_by_routing_tokens: int
    lost_by_eviction_tokens: int
    kept_tokens: int
    generated_tokens: int
    ttft_s: tuple[float, ...]
    session_s: tuple[float, ...]

    @property
    def total_device_s(self) -> float:
        """Of all replicas."""
        return sum(self.device_s)

    @property
    def imbalance(self) -> float:
        """Device time of the busiest replica over the mean of all; 1 is even."""
        return max(self.device_s) * len(self.device_s) / self.total_device_s if self.total_device_s else 1.0


def figures_of(run: ReplicaRun) -> ReplicaFigures:
    """The figures of a simulated run."""
    requests, rule = run.requests_table(), _rule_of(run)
    anywhere = rearrivals(requests, run.plan, rule, ONE_POOL)
    here = rearrivals(requests, run.plan, rule, run.served_by)
    reusable = sum(each.reusable_tokens for each in anywhere)
    on_replica = sum(min(each.reusable_tokens, most.reusable_tokens) for each, most in zip(here, anywhere, strict=True))
    kept = sum(
        min(each.cached_tokens or 0, each.reusable_tokens, most.reusable_tokens)
        for each, most in zip(here, anywhere, strict=True)
    )
    parents, _kept = continuations(run.plan)
    spans: list[list[tuple[int, int]]] = [[] for _ in run.replicas]
    for session, request, sent_ns, done_ns in values_of(requests, "session", "request", "sent_ns", "done_ns"):
        spans[run.served_by[session, request]].append((sent_ns, done_ns))
    returns = [(each.session, each.request) for each in anywhere]
    return ReplicaFigures(
        device_s=tuple(replica.device_ns / NS_PER_S for replica in run.replicas),
        in_flight_s=tuple(union_ns(each) / NS_PER_S for each in spans),
        door_in_flight_s=union_ns(span for each in spans for span in each) / NS_PER_S,
        end_s=run.end_ns / NS_PER_S,
        padding=padding_of(run.replicas),
        num_requests=tuple(map(len, spans)),
        num_returns=len(returns),
        num_home=sum(run.served_by[key] == run.served_by[parents.get(key, (key[0], key[1] - 1))] for key in returns),
        reusable_tokens=reusable,
        lost_by_routing_tokens=reusable - on_replica,
        lost_by_eviction_tokens=on_replica - kept,
        kept_tokens=kept,
        generated_tokens=sum(tokens or 0 for (tokens,) in values_of(requests, "completion_tokens")),
        ttft_s=tuple(_ttft_s(run, requests)),
        session_s=tuple(_session_s(run, requests)),
    )


def padding_of(replicas: Sequence[Replica]) -> float:
    """Share of positions of all decode steps that no request used."""
    batches = [(n, b, count) for replica in replicas for (n, b), count in replica.batches.items()]
    positions = sum(b * count for _, b, count in batches)
    return sum((b - n) * count for n, b, count in batches) / positions if positions else 0.0


def _rule_of(run: ReplicaRun) -> ReuseRule:
    scheduler = run.replicas[0].core.scheduler
    if not isinstance(scheduler, PagedScheduler):
        return INNER_BLOCKS
    return ReuseRule(scheduler.config.block_size, keeps_generated=True)


def _ttft_s(run: ReplicaRun, requests: pa.Table) -> list[float]:
    rows = values_of(requests, "session", "request", "sent_ns")
    return [
        (run.first_token_ns[session, request] - sent_ns) / NS_PER_S
        for session, request, sent_ns in rows
        if (session, request) in run.first_token_ns
    ]


def _session_s(run: ReplicaRun, requests: pa.Table) -> list[float]:
    """The own time of each whole session: that in which something of it was due or in flight."""
    whole, spans = whole_sessions(run.plan), dict[int, list[tuple[int, int]]]()
    for session, due_ns, done_ns in values_of(requests, "session", "due_ns", "done_ns"):
        spans.setdefault(int(whole[session]), []).append((due_ns, done_ns))
    return [union_ns(each) / NS_PER_S for each in spans.values()]


class _Place(NamedTuple):
    """A simulated run has no device of a fleet."""

    device: str = ""
    unit: int = 0


class Tables(NamedTuple):
    """costs: what each policy costs, against the first. reuse: where the reuse of returning sessions went."""

    costs: Table
    reuse: Table


def compare_policies(played: Mapping[str, Sequence[ReplicaFigures]], origin: str) -> Tables:
    """Policies on the same plans. played: by policy, the figures of each plan; the first policy is the baseline."""
    names = list(played)
    base = played[names[0]]
    family = Family(max(1, len(names) - 1))
    costs: list[dict[str, Cell]] = []
    for name in names:
        figures = played[name]
        row: dict[str, Cell] = {
            "policy": name,
            "device_s": _mean(each.total_device_s for each in figures),
            "ratio": None,
            "95 %": None,
            "shown": "baseline" if name == names[0] else None,
            "session_p90_s": _pooled(figures, "session_s", 90),
            "ttft_p50_ms": _pooled(figures, "ttft_s", 50) * 1000,
            "busiest": _mean(each.imbalance for each in figures),
        }
        if name != names[0]:
            row |= _against(figures, base, family)
        costs.append(row)
    reuse = [{"policy": name, **_reuse(played[name])} for name in names]
    num_replicas = len(base[0].device_s)
    return Tables(
        table_of(
            "cost of routing",
            f"{num_replicas} replicas, {len(base)} plans. device_s: modelled device time of all replicas (A), a plan. "
            f"ratio: a token's, against {names[0]}, by plan. busiest: device time of the busiest replica over the mean",
            costs,
            origin,
        ),
        table_of(
            "reuse of returning sessions",
            "home: returning requests served by the replica of the turn before. Shares of the tokens that they could "
            "reuse, were all replicas one: kept; lost_routing: on another replica; lost_eviction: on the same, gone",
            reuse,
            origin,
        ),
    )


def _against(own: Sequence[ReplicaFigures], base: Sequence[ReplicaFigures], family: Family) -> dict[str, Cell]:
    values = [
        [Value(each.total_device_s, each.generated_tokens) for each in figures if each.generated_tokens]
        for figures in (own, base)
    ]
    result = result_of(paired_ratio(values[0], values[1], [_Place()] * len(own)), len(own), family)
    interval = result.interval
    return {
        "ratio": result.ratio,
        "95 %": None if interval is None else f"{interval.low:.3f}\u2013{interval.high:.3f}",
        "shown": result.verdict.said(),
    }


def _reuse(figures: Sequence[ReplicaFigures]) -> dict[str, Cell]:
    reusable = sum(each.reusable_tokens for each in figures)
    returns = sum(each.num_returns for each in figures)

    def share(name: str) -> float | None:
        return sum(getattr(each, name) for each in figures) / reusable if reusable else None

    return {
        "returns": returns,
        "home": sum(each.num_home for each in figures) / returns if returns else None,
        "reusable_tokens": reusable,
        "kept": share("kept_tokens"),
        "lost_routing": share("lost_by_routing_tokens"),
        "lost_eviction": share("lost_by_eviction_tokens"),
    }


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


def _pooled(figures: Sequence[ReplicaFigures], name: str, percent: int) -> float:
    return float(np.percentile([value for each in figures for value in getattr(each, name)], percent))
