"""What routing does to reuse and cost: figures of replicas, simulated or measured, and policies compared on the same
plans.

Two losses of reuse are kept apart: by routing (the session came back to another replica) and by eviction (it came back
to the same one, and its slot was gone).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from harness.analysis.compare.answer import result_of
from harness.analysis.compare.measures import Value
from harness.analysis.compare.ratio import Family, blocks_of, paired_ratio
from harness.analysis.cost.padding import padding_of, steps_by_n_b, total_padding
from harness.analysis.cost.reconstruct import first_tokens_ns, union_ns
from harness.analysis.figures import costs_of_servers
from harness.analysis.logs.replicas import engines_of, servers_in
from harness.analysis.reuse import ONE_POOL, ReuseRule, continuations, rearrivals, reuse_rule
from harness.analysis.run_tables import RequestKey, with_logged_prefills
from harness.analysis.stats import grouped
from harness.clock import NS_PER_S
from harness.errors import RecordsError, SpecError
from harness.measure.records.run import SealedRun
from harness.measure.records.schema import values_of
from harness.model.plan.event_queue import whole_sessions
from harness.model.plan.model import Plan
from harness.present.report.view import Routing
from harness.table import Cell, Table, interval_text, table_of


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFigures:
    """One plan on its replicas. Seconds are model seconds; tokens are of prompts.

    device_s: by replica, the sum of its step times (modelled device time, A). in_flight_s: by replica, the union of
    what it had in flight (B). router_in_flight_s: the union of all. batches: by replica, decode steps by (n, b).
    num_returns: answered requests that continue an earlier one. num_home: of these, served by the replica that served
    the one before. reusable_tokens: what returning prompts could reuse of the turn before, were all replicas one.
    kept_tokens: of these, reused. lost_by_eviction_tokens: computed on the same replica, and not reused.
    lost_by_routing_tokens: the rest, computed on another replica, evicted there since or not. ttft_s: of each request.
    session_s: of each session, without its waits.
    """

    device_s: tuple[float, ...]
    in_flight_s: tuple[float, ...]
    router_in_flight_s: float
    batches: tuple[Mapping[tuple[int, int], int], ...]
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
    def busy(self) -> float:
        """Mean share of the replicas that have something in flight, over the time in which any has; 1 is all."""
        most_s = self.router_in_flight_s * len(self.in_flight_s)
        return sum(self.in_flight_s) / most_s if most_s else 0.0

    @property
    def imbalance(self) -> float:
        """Device time of the busiest replica over the mean of all; 1 is even."""
        return max(self.device_s) * len(self.device_s) / self.total_device_s if self.total_device_s else 1.0


class Served(NamedTuple):
    """What became of a plan behind a router, from whatever saw it. device_ns: by replica. batches: of each replica,
    decode steps by (n, b). served_by: replica of each request that is known. first_token_ns: by request."""

    plan: Plan
    requests: pa.Table
    rule: ReuseRule
    served_by: Mapping[RequestKey, int]
    device_ns: Sequence[int]
    batches: Sequence[Mapping[tuple[int, int], int]]
    first_token_ns: Mapping[RequestKey, int]


def figures_of_sealed(run: SealedRun) -> ReplicaFigures:
    """The figures of a sealed run, of one server too; RecordsError where its records do not tell them."""
    servers, served_by, plan = servers_in(run), engines_of(run), run.plan_if_readable
    requests = with_logged_prefills(run.table("requests"), run.table("kv_events"))
    rows = values_of(requests, "session", "request", "prompt_tokens")
    answered = [(session, request) for session, request, prompt in rows if prompt is not None]
    if len(servers) == 1:
        served_by = dict.fromkeys(answered, 0)
    costs = costs_of_servers(servers, requests, served_by, run.cost_model)
    unknown = len(answered) - len(served_by)
    if plan is None or unknown:
        raise RecordsError(
            "its plan cannot be read" if plan is None else f"nobody says which replica served {unknown} requests",
            where=run.label,
            hint="Start the replicas with a log that names requests, or give server.replica_header",
        )
    if costs is None:
        raise RecordsError(
            "what a replica cost is unknown: its steps were not logged, or the cost model has no price for them",
            where=run.label,
            hint="Calibrate the server, and give the file as server.cost_model",
        )
    batches = [steps_by_n_b(server.steps) for server in servers]
    firsts = first_tokens_ns(run.table("chunks"))
    device_ns = [cost.total_ns for cost in costs]
    return figures_of(Served(plan, requests, reuse_rule(run), served_by, device_ns, batches, firsts))


def figures_by_condition(valid: Sequence[SealedRun]) -> dict[str, list[ReplicaFigures]]:
    """The figures of each replicate that every condition has, conditions in their order.

    Raises SpecError where there is none, RecordsError where the records of a run do not tell its figures.
    """
    by_condition = grouped(valid, lambda run: run.condition)
    common = set.intersection(*({run.replicate for run in each} for each in by_condition.values())) if valid else set()
    if not common:
        where = valid[0].experiment if valid else None
        raise SpecError(
            "no replicate has a valid run of every condition", where=where, hint="`harness runs` lists them"
        )
    if all(len(servers_in(run)) == 1 for run in valid):
        raise RecordsError("has runs of one server only", where=valid[0].experiment, hint="Set server.replicas in it")
    order = list(dict.fromkeys(condition.name for condition in valid[0].spec.condition))
    return {
        name: [figures_of_sealed(run) for run in by_condition[name] if run.replicate in common]
        for name in sorted(by_condition, key=order.index)
    }


def routing_of(valid: Sequence[SealedRun]) -> list[Routing]:
    """What a report shows of replicas, by condition; errors as ``figures_by_condition``."""
    found: list[Routing] = []
    for name, figures in figures_by_condition([run for run in valid if run.server.is_routed]).items():
        reuse, counts = _reuse(figures), np.array([each.num_requests for each in figures]).sum(axis=0)
        shares = tuple((counts / max(counts.sum(), 1)).tolist())
        returns = sum(each.num_returns for each in figures)
        lost = reuse["lost_routing"], reuse["lost_eviction"]
        found.append(Routing(name, returns, reuse["home"], reuse["kept"], *lost, shares))
    return found


def figures_of(done: Served) -> ReplicaFigures:
    """The figures of a plan behind a router."""
    requests, served_by = done.requests, done.served_by
    anywhere = rearrivals(requests, done.plan, done.rule, ONE_POOL)
    here = rearrivals(requests, done.plan, done.rule, served_by)
    most = np.array([each.reusable_tokens for each in anywhere], dtype=np.int64)
    each_kept = np.minimum([each.cached_tokens or 0 for each in anywhere], most)
    # A replica that never saw the session may hold what other sessions share with it.
    on_replica = int(np.maximum(np.minimum([each.reusable_tokens for each in here], most), each_kept).sum())
    reusable, kept = int(most.sum()), int(each_kept.sum())
    parents, _kept = continuations(done.plan)
    spans: list[list[tuple[int, int]]] = [[] for _ in done.device_ns]
    for session, request, sent_ns, done_ns in values_of(requests, "session", "request", "sent_ns", "done_ns"):
        if (session, request) in served_by and None not in (sent_ns, done_ns):
            spans[served_by[session, request]].append((sent_ns, done_ns))
    returns = [(each.session, each.request) for each in anywhere]
    return ReplicaFigures(
        device_s=tuple(ns / NS_PER_S for ns in done.device_ns),
        in_flight_s=tuple(union_ns(each) / NS_PER_S for each in spans),
        router_in_flight_s=union_ns(span for each in spans for span in each) / NS_PER_S,
        batches=tuple(done.batches),
        num_requests=tuple(map(len, spans)),
        num_returns=len(returns),
        num_home=sum(served_by.get(key) == served_by.get(parents.get(key, (key[0], key[1] - 1))) for key in returns),
        reusable_tokens=reusable,
        lost_by_routing_tokens=reusable - on_replica,
        lost_by_eviction_tokens=on_replica - kept,
        kept_tokens=kept,
        generated_tokens=sum(tokens or 0 for (tokens,) in values_of(requests, "completion_tokens")),
        ttft_s=tuple(_ttft_s(requests, done.first_token_ns)),
        session_s=tuple(_session_s(done.plan, requests)),
    )


def _ttft_s(requests: pa.Table, first_token_ns: Mapping[RequestKey, int]) -> list[float]:
    rows = values_of(requests, "session", "request", "sent_ns")
    return [
        (first_token_ns[session, request] - sent_ns) / NS_PER_S
        for session, request, sent_ns in rows
        if (session, request) in first_token_ns
    ]


def _session_s(plan: Plan, requests: pa.Table) -> list[float]:
    """The active time of each whole session: that in which something of it was due or in flight."""
    whole, spans = whole_sessions(plan), dict[int, list[tuple[int, int]]]()
    for session, due_ns, done_ns in values_of(requests, "session", "due_ns", "done_ns"):
        if done_ns is not None:
            spans.setdefault(int(whole[session]), []).append((due_ns, done_ns))
    return [union_ns(each) / NS_PER_S for each in spans.values()]


class _NoPlace(NamedTuple):
    """A simulated run has no device of a fleet."""

    device: str = ""
    unit: int = 0


def of_each_replica(played: Mapping[str, Sequence[ReplicaFigures]], origin: str) -> Table:
    """What each replica did, means over the plans. played: see ``compare_policies``."""
    rows: list[dict[str, Cell]] = []
    for name, figures in played.items():
        total = sum(sum(each.num_requests) for each in figures)
        for replica in range(len(figures[0].device_s)):
            rows.append(
                {
                    "condition": name,
                    "replica": replica,
                    "requests": sum(each.num_requests[replica] for each in figures),
                    "share": sum(each.num_requests[replica] for each in figures) / total if total else None,
                    "device_s": _mean(each.device_s[replica] for each in figures),
                    "in_flight_s": _mean(each.in_flight_s[replica] for each in figures),
                    **_steps(figures, replica),
                }
            )
    about = (
        "device_s: modelled device time (A), a plan. in_flight_s: the union of its requests' intervals (B), a plan. "
        "steps: decode steps, all plans; n, b: requests and compiled size of a step, mean"
    )
    return table_of("each replica", about, rows, origin)


def _steps(figures: Sequence[ReplicaFigures], replica: int) -> dict[str, Cell]:
    steps = sum(sum(each.batches[replica].values()) for each in figures)
    padded, positions = total_padding(padding_of(each.batches[replica]) for each in figures)
    return {
        "steps": steps,
        "n": (positions - padded) / steps if steps else None,
        "b": positions / steps if steps else None,
        "padding": padded / positions if positions else None,
    }


def compare_policies(played: Mapping[str, Sequence[ReplicaFigures]], origin: str) -> tuple[Table, Table]:
    """What each policy costs, against the first; and where the reuse of returning sessions went.

    played: by condition, the figures of each of the same plans; the first one is the baseline.
    """
    names = list(played)
    base = played[names[0]]
    nums = sorted({len(each.device_s) for each in (figures[0] for figures in played.values())})
    family = Family(max(1, len(names) - 1))
    costs: list[dict[str, Cell]] = []
    for name in names:
        figures = played[name]
        is_base: dict[str, Cell] = {"ratio": None, "95 %": None, "shown": "baseline"}
        costs.append(
            {
                "condition": name,
                "device_s": _mean(each.total_device_s for each in figures),
                **(is_base if name == names[0] else _against(figures, base, family)),
                "session_p90_s": _pooled(figures, "session_s", 90),
                "ttft_p50_ms": _pooled(figures, "ttft_s", 50) * 1000,
                "busiest": _mean(each.imbalance for each in figures),
                "busy": _mean(each.busy for each in figures),
            }
        )
    reuse = [{"condition": name, **_reuse(played[name])} for name in names]
    return (
        table_of(
            "cost of routing",
            f"{' or '.join(map(str, nums))} replicas, {len(base)} plans. device_s: modelled device time of all "
            "replicas (A), a plan. "
            f"ratio: a token's, against {names[0]}, by plan. busiest: device time of the busiest replica over the mean"
            ". busy: share of the replicas that work while any does",
            costs,
            origin,
        ),
        table_of(
            "reuse of returning sessions",
            "home: returning requests served by the replica of the turn before. Shares of the tokens that they could "
            "reuse, were all replicas one: kept; lost_routing: computed on another replica, which may have evicted "
            "them since; lost_eviction: on the same, gone",
            reuse,
            origin,
        ),
    )


def _against(own: Sequence[ReplicaFigures], base: Sequence[ReplicaFigures], family: Family) -> dict[str, Cell]:
    values = [
        [Value(each.total_device_s, each.generated_tokens) for each in figures if each.generated_tokens]
        for figures in (own, base)
    ]
    result = result_of(paired_ratio(blocks_of(*values), [_NoPlace()] * len(own)), len(own), family)
    interval = result.interval
    return {
        "ratio": result.ratio,
        "95 %": None if interval is None else interval_text(interval.low, interval.high, 3, "\u2013"),
        "shown": result.verdict.label(),
    }


def _reuse(figures: Sequence[ReplicaFigures]) -> dict[str, float | None]:
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
