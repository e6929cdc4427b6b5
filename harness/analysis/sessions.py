"""A session's active time, sessions within a target, and whether sessions ask for more than their server can do.

Active: from its first request to its last token, less its waits. A session that failed, or whose last answer the
client left, has no time. Where sessions ask for too much, queues grow, and all other figures follow from that.
Definitions: docs/reference/method-sessions.md, "Sessions".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from harness.analysis.cost.devices import estimate_of, independent_samples
from harness.analysis.figures import RunFigures, cells, place_of
from harness.analysis.serving import (
    MEDIAN,
    RATE_CELLS,
    Percentile,
    Rate,
    has_open_arrivals,
    percentile_cells,
    percentiles_of,
    slo_of,
    token_chunks,
    window_ns,
)
from harness.analysis.stats import ROUNDING, FloatArray, IntArray, NoInterval, grouped, log_mean_values
from harness.clock import NS_PER_S
from harness.kinds import kind_of_run
from harness.measure.records.run import SealedRun, once_per_run
from harness.measure.records.schema import ABORTED
from harness.model.plan.event_queue import begun_in_the_middle, whole_sessions
from harness.model.plan.model import Plan
from harness.model.spec import ServerSpec

NS_PER_H = 3600 * NS_PER_S
# Sessions of one run depend on each other: with fewer beyond a percentile than these, its intervals held too seldom,
# with open arrivals in half of the experiments (docs/evidence/error-rates.md).
LEAST_BEYOND = 100
HOW_TIMED = (
    "active time of a session: from its first send to its last token, less its waits; of the sessions that begin in "
    "the window, each to its end"
)


class SessionOutcome(IntEnum):
    """How a session ended. LEFT: the client left its last answer, as planned. FAILED: any request of it failed."""

    FINISHED = 0
    LEFT = 1
    FAILED = 2


@dataclass(frozen=True, slots=True, eq=False)
class SessionTimes:
    """Sessions of one run that began in its measurement window, by their first send; times in model ns.

    session: the lowest index of its parts in the plan. num_requests: of all its parts. last_ns: its last token; the end
    of its last answer where answers are not streamed, or it did not finish. wait_ns: time between the two in which
    nothing of it was due or in flight. outcome: see ``Outcome``. device, unit: where in a fleet it ran.
    has_open_arrivals: see ``Latencies``.
    """

    session: IntArray
    num_requests: IntArray
    first_ns: IntArray
    last_ns: IntArray
    wait_ns: IntArray
    outcome: IntArray
    device: str = ""
    unit: int = 0
    has_open_arrivals: bool = False

    @property
    def own_ns(self) -> IntArray:
        """The active time of every session that finished."""
        return (self.last_ns - self.first_ns - self.wait_ns)[self.outcome == SessionOutcome.FINISHED]

    @property
    def span_h(self) -> float:
        """From the first send to the last end of these sessions, in hours."""
        return int(self.last_ns.max() - self.first_ns.min()) / NS_PER_H if len(self.session) else 0.0

    def num_within(self, target_s: float) -> int:
        """Sessions that finished with an active time of at most the target."""
        return int(np.count_nonzero(self.own_ns <= round(target_s * NS_PER_S)))


@once_per_run
def session_times(run: SealedRun) -> SessionTimes | None:
    """The sessions of a run that began in its window; None where its plan cannot be read."""
    plan = run.plan_if_readable
    if plan is None:
        return None
    requests, whole = run.table("requests"), whole_sessions(plan)
    first_ns, until_ns = window_ns(run, requests)
    left_out = begun_in_the_middle(plan, whole)
    sessions = [
        one for one in _sessions(requests, whole) if first_ns <= one.due_ns < until_ns and one.session not in left_out
    ]
    rows: IntArray = np.array(sorted(sessions, key=lambda one: one.first_ns), dtype=np.int64)
    columns = dict(zip(_Session._fields, rows.reshape(-1, len(_Session._fields)).T, strict=True))
    place = place_of(run)
    return SessionTimes(
        session=columns["session"],
        num_requests=columns["num_requests"],
        first_ns=columns["first_ns"],
        last_ns=_last_ns(run, requests, columns),
        wait_ns=columns["wait_ns"],
        outcome=columns["outcome"],
        device=place["device"],
        unit=place["unit"],
        has_open_arrivals=has_open_arrivals(run),
    )


class _Session(NamedTuple):
    """One session. due_ns: of its first request. last_row: of the answer that ended last, in the table of requests."""

    session: int
    num_requests: int
    due_ns: int
    first_ns: int
    done_ns: int
    wait_ns: int
    last_row: int
    outcome: int


def _sessions(requests: pa.Table, whole: IntArray) -> Iterator[_Session]:
    """Every whole session that these requests are of."""
    session, number, due_ns = (requests.column(name).to_numpy() for name in ("session", "request", "due_ns"))
    of = whole[session]
    # What was not sent, or never ended, took no time.
    sent_ns, done_ns = (
        np.where(column.is_valid().to_numpy(), column.fill_null(0).to_numpy(), due_ns)
        for column in (requests.column("sent_ns"), requests.column("done_ns"))
    )
    is_left, is_ok = (requests.column("status").to_numpy() == status for status in (ABORTED, "ok"))
    order = np.lexsort((due_ns, of))
    starts = np.flatnonzero(np.diff(of[order], prepend=-1))
    for rows in np.split(order, starts[1:]) if len(order) else ():
        last_row = rows[np.lexsort((number[rows], session[rows], done_ns[rows]))[-1]]
        ended_ns = np.maximum.accumulate(done_ns[rows])
        outcome = (
            SessionOutcome.FAILED if not np.all(is_ok[rows] | is_left[rows]) else SessionOutcome(int(is_left[last_row]))
        )
        yield _Session(
            session=int(of[last_row]),
            num_requests=len(rows),
            due_ns=int(due_ns[rows[0]]),
            first_ns=int(sent_ns[rows].min()),
            done_ns=int(ended_ns[-1]),
            wait_ns=int(np.maximum(due_ns[rows[1:]] - ended_ns[:-1], 0).sum()),
            last_row=int(last_row),
            outcome=outcome,
        )


def _last_ns(run: SealedRun, requests: pa.Table, columns: dict[str, IntArray]) -> IntArray:
    """The last token of every session that finished; the end of the last answer where its tokens were not seen."""
    last_ns = columns["done_ns"].copy()
    if not run.manifest.requested_client.get("stream", True):
        return last_ns
    finished = np.flatnonzero(columns["outcome"] == SessionOutcome.FINISHED)
    row, at_ns, *_ = token_chunks(run, requests.take(columns["last_row"][finished]))
    ends = np.flatnonzero(np.diff(row, append=-1))
    last_ns[finished[row[ends]]] = at_ns[ends]
    return last_ns


@dataclass(frozen=True, slots=True)
class SessionFigures:
    """Sessions of a condition over its valid runs.

    num_finished: those that the percentiles are over; num_others: those that failed or were left. percentiles: of own
    times, ns. target_s: of [slo], None without one. within_per_h: sessions finished within it per hour of model time, a
    ratio of sums; share_within: of all sessions.
    """

    condition: str
    num_runs: int
    num_finished: int
    num_others: int
    percentiles: tuple[Percentile, ...]
    target_s: float | None = None
    within_per_h: Rate | None = None
    share_within: float | None = None


def session_figures(condition: str, runs: Sequence[SealedRun]) -> SessionFigures | None:
    """The sessions of one condition over its valid ``runs``; None where no session finished, or a plan is unknown."""
    observed = [times for run in runs if (times := session_times(run)) is not None and len(times.session)]
    having = [times for times in observed if len(times.own_ns)]
    if not having or any(session_times(run) is None for run in runs):
        return None
    samples, unit = independent_samples([times.own_ns.astype(np.float64) for times in having], having)
    target_s = slo_of(runs[0]).session_s
    within = None if target_s is None else [times.num_within(target_s) for times in observed]
    num_sessions, num_finished = (
        sum(map(len, of)) for of in zip(*((t.session, t.own_ns) for t in observed), strict=True)
    )
    return SessionFigures(
        condition=condition,
        num_runs=len(observed),
        num_finished=num_finished,
        num_others=num_sessions - num_finished,
        percentiles=session_percentiles(samples, unit, any(times.has_open_arrivals for times in having)),
        target_s=target_s,
        within_per_h=None if within is None else _per_h(within, observed),
        share_within=None if within is None else sum(within) / num_sessions,
    )


def session_percentiles(samples: Sequence[FloatArray], unit: str, is_open: bool) -> tuple[Percentile, ...]:
    """QUANTILES of active times; above the median, and in open arrivals, intervals over runs from LEAST_BEYOND on."""
    num_values = sum(map(len, samples))
    return tuple(
        replace(one, interval=None, why=NoInterval.RARE)
        if one.interval is not None
        and (is_open or one.q > MEDIAN)
        and num_values * (1 - one.q) < LEAST_BEYOND - ROUNDING
        else one
        for one in percentiles_of(samples, unit, is_open, num_values)
    )


def _per_h(within: Sequence[int], runs: Sequence[SessionTimes]) -> Rate:
    """Sessions within the target per hour: a ratio of sums, as a measure has it."""
    spans_h = [times.span_h for times in runs]
    if not any(within):
        return Rate(0.0, None, sum(len(times.session) for times in runs), len(runs))
    estimate = estimate_of(log_mean_values(within, spans_h).tolist(), runs)
    return Rate(sum(within) / sum(spans_h), None if estimate is None else estimate.interval())


def session_rows(figures: Sequence[SessionFigures]) -> list[dict[str, object]]:
    """Rows like those of ``serving_rows``: active times in ms, sessions finished within the target per hour."""
    rows: list[dict[str, object]] = []
    for one in figures:
        row: dict[str, object] = {"condition": one.condition, "group": "all", "metric": "session", "unit": "ms"}
        rows.append(row | {"num_values": one.num_finished} | percentile_cells(one.percentiles))
        if one.within_per_h is not None:
            row |= {"metric": "sessions_within_target_per_h", "unit": "1/h", "num_values": one.num_runs}
            rows.append(row | cells(one.within_per_h, RATE_CELLS))
    return rows


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
        plans = [run.plan_if_readable if has_costs(run) else None for run, _ in group]
        known = [
            factor
            for (run, each), plan in zip(group, plans, strict=True)
            if plan is not None and (factor := overload(plan, each.a_ns, run.server.num_replicas)) is not None
        ]
        if len(known) == len(group):
            by_condition[name] = sum(known) / len(known)
    return by_condition


def has_costs(run: SealedRun) -> bool:
    """Whether the costs of its server are known: named, those that it runs by, or those that it shows."""
    if run.server.cost_model != DEFAULT_COSTS:
        return True
    kind = kind_of_run(run.manifest.backend)
    # An emulator shows by which costs it runs.
    shows_costs = kind.has_device is False and bool(run.manifest.effective.get("shown"))
    return not run.server.is_paged and (kind.is_restarted or shows_costs)
