"""Serving figures: what a user of the server felt, as percentiles over requests, and rates over runs.

Every instant is the client's, but the end of queueing, which the server's log tells; what was not observed is absent,
never zero. Where tokens were read late, a latency has bounds. Nothing is compared here.
Definitions: docs/reference/method-sessions.md, "Serving figures"; docs/evidence/client-timing.md, "Chunks read
together".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from harness.analysis.cost.devices import independent_samples, positive_mean_interval
from harness.analysis.cost.reconstruct import received_ns, with_tokens
from harness.analysis.figures import cells, place_of
from harness.analysis.logs.replicas import core_requests
from harness.analysis.run_tables import join_request_id, request_keys
from harness.analysis.stats import (
    MIN_BEYOND,
    ROUNDING,
    FloatArray,
    IntArray,
    Interval,
    NoInterval,
    effective_number,
    median_bound,
    quantile,
    quantile_intervals,
    quantiles,
    ratio,
)
from harness.clock import NS_PER_MS, NS_PER_S
from harness.measure.records.run import SealedRun, once_per_run
from harness.measure.records.schema import rows_where, values_of
from harness.model.plan.event_queue import UserTimelines, users_of
from harness.model.spec import SloSpec, WindowSpec
from harness.model.spec.sections import FOREVER_NS


class TokenChunks(NamedTuple):
    """Chunks with tokens, by request, in order of arrival; arrays of shape (chunks,).

    row: of its request. at_ns: when it came at the latest, see ``received_ns``. earliest_ns: and at the earliest, which
    is the same where its stamp is exact.
    """

    row: IntArray
    at_ns: IntArray
    num_tokens: IntArray
    earliest_ns: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class LateReads:
    """What the latencies of a run with inexact stamps can be, model ns. TTFT itself is the most that it can be.

    ttft_at_least_ns, tpot_at_least_ns, tpot_at_most_ns: shape (requests,), nan where they are exact. itl_at_least_ns,
    itl_at_most_ns, itl_row: one per token after the first chunk of a request; the request it belongs to.
    """

    ttft_at_least_ns: FloatArray
    tpot_at_least_ns: FloatArray
    tpot_at_most_ns: FloatArray
    itl_at_least_ns: FloatArray
    itl_at_most_ns: FloatArray
    itl_row: IntArray


def late_reads(chunks: TokenChunks, sent_ns: IntArray, tokens: IntArray) -> LateReads | None:
    """The bounds of each time; None where all stamps are exact. sent_ns, tokens: of each request, shape (requests,)."""
    row, at_ns, num_tokens, earliest_ns = chunks
    is_late = earliest_ns < at_ns
    if not is_late.any():
        return None
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    ends = np.append(starts[1:], len(row)) - 1
    having = row[starts]
    later = np.where(tokens[having] > 1, tokens[having] - 1, np.nan)
    ttft_ns, least_ns, most_ns = (np.full(len(sent_ns), np.nan) for _ in range(3))
    ttft_ns[having] = np.where(is_late[starts], earliest_ns[starts] - sent_ns[having], np.nan)
    least_ns[having] = np.where(is_late[ends], np.maximum(0, earliest_ns[ends] - at_ns[starts]) / later, np.nan)
    most_ns[having] = np.where(is_late[starts], (at_ns[ends] - earliest_ns[starts]) / later, np.nan)
    after = np.flatnonzero(np.diff(row, prepend=-1) == 0)
    count = num_tokens[after]
    return LateReads(
        ttft_at_least_ns=ttft_ns,
        tpot_at_least_ns=least_ns,
        tpot_at_most_ns=most_ns,
        itl_at_least_ns=np.repeat(np.maximum(0, earliest_ns[after] - at_ns[after - 1]) / count, count),
        itl_at_most_ns=np.repeat((at_ns[after] - earliest_ns[after - 1]) / count, count),
        itl_row=np.repeat(row[after], count),
    )


QUANTILES = (0.5, 0.9, 0.99)
# Of the bound of a typical run: it needs seven runs.
CONFIDENCE = 0.99
# What lies beyond a high percentile may be decided by few sessions or runs, and a dozen runs may hold none of them. So
# a percentile of these has an interval only where MIN_BEYOND sessions, above the median MIN_BEYOND runs are expected
# beyond it, and where the runs share what lies there: as evenly as this part of them would, if each of them had the
# same. With open arrivals rare long queues decide: there they have one up to MOST_OPEN_QUANTILE alone
# (docs/evidence/error-rates.md).
LEAST_SHARED = 0.6
MEDIAN = 0.5
MOST_OPEN_QUANTILE = 0.9
QUEUED = ("ttft", "e2e", "queue", "session")
HOW_SURE = (
    "interval: 95 %, over runs like these, from six runs and ten values beyond the percentile on; of TTFT, E2E, "
    "queueing and sessions p90 from 100 runs on; typical run: with "
    "99 % confidence, half of all runs like these have this percentile of their own at or below it, from seven runs on "
    "(p99: of 100 values each). Like these: the same server and settings, plans drawn as these were. Rare cases: a few "
    "long queues, sessions or runs decide the high percentiles, and these runs may hold none of them"
)
# What chunks that were read together leave uncertain.
BOUNDED = ("ttft", "tpot", "itl")
METRICS = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2e": "end to end",
    "queue": "queueing",
}
# Of a session with more turns, the rest is one group.
MAX_TURNS = 6


@dataclass(frozen=True, slots=True, eq=False)
class Latencies:
    """Answered requests of one run that lie in its measurement window; times in model ns, nan where not observed.

    session, turn, prefix, ttft_ns, e2e_ns, queue_ns, tpot_ns, tokens, prompt_tokens: shape (requests,). prefix:
    "first", "reused" or "recomputed", "unknown". prompt_tokens: as the server counted them, else as planned. itl_ns,
    itl_row: one per token after a request's first; the request it belongs to. span_ns: from the first send to the last
    end in the window. device, unit: where in a fleet it ran. has_open_arrivals: its sessions start at different times,
    whoever is still served. late: bounds, where the client read tokens late.
    """

    session: IntArray
    turn: IntArray
    prefix: NDArray[np.str_]
    ttft_ns: FloatArray
    e2e_ns: FloatArray
    queue_ns: FloatArray
    tpot_ns: FloatArray
    tokens: IntArray
    prompt_tokens: IntArray
    itl_ns: FloatArray
    itl_row: IntArray
    span_ns: int
    device: str = ""
    unit: int = 0
    has_open_arrivals: bool = False
    late: LateReads | None = None


@dataclass(frozen=True, slots=True)
class Percentile:
    """One percentile over all requests, ns. interval: over runs like these; why: why there is none.

    typical_bound: with CONFIDENCE, half of all runs like these have this percentile of their own at or below it; None
    below seven runs, or where one of them has too few requests for a percentile of its own. at_least, at_most: what it
    can be, as the client read tokens late; None where it can be nothing else.
    """

    q: float
    value: float
    interval: Interval | None
    why: NoInterval | None
    typical_bound: float | None
    at_least: float | None = None
    at_most: float | None = None


class Mean(NamedTuple):
    """The mean of all values, ns. at_least, at_most: as of a ``Percentile``."""

    value: float
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True, slots=True)
class LatencyDistribution:
    """One metric of one group of requests ("all", a prefix, a turn)."""

    metric: str
    group: str
    num_values: int
    percentiles: tuple[Percentile, ...]
    mean: Mean

    def at(self, q: float) -> Percentile:
        """The percentile q; KeyError for one that is not computed."""
        return {percentile.q: percentile for percentile in self.percentiles}[q]


@dataclass(frozen=True, slots=True)
class Rate:
    """A rate in model time: mean over runs, and its t interval on the log scale, None below three runs.

    none_of: of how many requests or sessions it counts none, so that nothing scatters; None where it counts some.
    num_runs: that count none.
    """

    mean: float
    interval: Interval | None
    none_of: int | None = None
    num_runs: int = 0

    @property
    def most_share(self) -> float | None:
        """The share that it may be of, with 95 % confidence, each run one draw of it; None where some are."""
        return 1 - 0.05 ** (1 / self.num_runs) if self.num_runs else None


@dataclass(frozen=True, slots=True)
class ServingFigures:
    """What a condition served, over its valid runs. tokens: those of answers; input_tokens: of the answered prompts.

    goodput: requests per second within the [slo]; None without one.
    """

    condition: str
    num_runs: int
    num_requests: int
    distributions: tuple[LatencyDistribution, ...]
    tokens_per_s: Rate
    input_tokens_per_s: Rate
    total_tokens_per_s: Rate
    requests_per_s: Rate
    goodput_per_s: Rate | None
    good_share: float | None

    def of(self, metric: str, group: str = "all") -> LatencyDistribution | None:
        """The distribution of a metric in a group; None where nothing of it was observed."""
        wanted = (metric, group)
        return next((each for each in self.distributions if (each.metric, each.group) == wanted), None)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(distribution.group for distribution in self.distributions))


def window_of(run: SealedRun) -> WindowSpec:
    """The measurement window that the experiment of a run asked for."""
    return WindowSpec.model_validate(run.manifest.requested_experiment.get("window") or {})


def slo_of(run: SealedRun) -> SloSpec:
    """The latency targets that the experiment of a run states."""
    return SloSpec.model_validate(run.manifest.requested_experiment.get("slo") or {})


def window_ns(run: SealedRun, requests: pa.Table) -> tuple[int, int]:
    """[first, last) instants of a run's window; nothing is in it where a user finished too few requests."""
    window = window_of(run)
    due_ns = requests.column("due_ns").to_numpy()
    ready_ns = 0
    if window.after_requests:
        users = users_of(np.array([-1 if session.after is None else session.after for session in run.plan.sessions]))
        ended = requests.filter(requests.column("done_ns").is_valid())
        timelines = UserTimelines.of(users[ended.column("session").to_numpy()], ended.column("done_ns").to_numpy())
        has_all = len(timelines.users) == len(np.unique(users))
        is_ready = has_all and timelines.num_requests.min() >= window.after_requests
        ready_ns = timelines.window_start(window.after_requests) if is_ready else FOREVER_NS
    return window.bounds_ns(int(due_ns.min()) if len(due_ns) else 0, ready_ns)


@once_per_run
def requests_in_window(run: SealedRun) -> pa.Table:
    """The requests of a run that were due in its measurement window, whatever became of them."""
    requests = run.table("requests")
    due_ns = requests.column("due_ns").to_numpy()
    first_ns, last_ns = window_ns(run, requests)
    return requests.filter(pa.array((due_ns >= first_ns) & (due_ns < last_ns)))


@once_per_run
def latencies(run: SealedRun) -> Latencies:
    """What every answered request of a run's measurement window waited for, and when its tokens came."""
    kept, place = rows_where(requests_in_window(run), "status", "ok"), place_of(run)
    sent_ns, done_ns = kept.column("sent_ns").to_numpy(), kept.column("done_ns").to_numpy()
    turn = kept.column("request").to_numpy().astype(np.int64)
    cached, counted = kept.column("cached_tokens"), kept.column("prompt_tokens")
    is_reused = cached.fill_null(0).to_numpy() > 0
    again = np.where(cached.is_valid().to_numpy(), "recomputed", "unknown")
    tokens = kept.column("completion_tokens").to_numpy().astype(np.int64)
    ttft_ns, tpot_ns = np.full(len(turn), np.nan), np.full(len(turn), np.nan)
    itl_ns, itl_row, late = np.empty(0), np.empty(0, dtype=np.int64), None
    if run.manifest.requested_client.get("stream", True):
        chunks = token_chunks(run, kept)
        late = late_reads(chunks, sent_ns, tokens)
        row, at_ns, num_tokens = _arrivals(chunks.row, chunks.at_ns, chunks.num_tokens)
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        ends = np.append(starts[1:], len(row))[: len(starts)] - 1
        having = row[starts]
        ttft_ns[having] = at_ns[starts] - sent_ns[having]
        later = tokens[having] - 1
        tpot_ns[having] = np.where(later > 0, (at_ns[ends] - at_ns[starts]) / np.maximum(later, 1), np.nan)
        is_later = np.diff(row, prepend=-1) == 0
        gaps = np.diff(at_ns, prepend=0)[is_later] / num_tokens[is_later]
        itl_ns, itl_row = np.repeat(gaps, num_tokens[is_later]), np.repeat(row[is_later], num_tokens[is_later])
    return Latencies(
        session=kept.column("session").to_numpy().astype(np.int64),
        turn=turn,
        prefix=np.where(is_reused, "reused", np.where(turn > 0, again, "first")),
        ttft_ns=ttft_ns,
        e2e_ns=(done_ns - sent_ns).astype(np.float64),
        queue_ns=_queueing_ns(run, kept.column("response_id").to_pylist(), sent_ns),
        tpot_ns=tpot_ns,
        tokens=tokens,
        prompt_tokens=np.where(
            counted.is_valid().to_numpy(),
            counted.fill_null(0).to_numpy(),
            kept.column("planned_prompt_tokens").to_numpy(),
        ),
        itl_ns=itl_ns,
        itl_row=itl_row,
        span_ns=int(done_ns.max() - sent_ns.min()) if len(turn) else 0,
        device=place["device"],
        unit=place["unit"],
        has_open_arrivals=has_open_arrivals(run),
        late=late,
    )


def has_open_arrivals(run: SealedRun) -> bool:
    """Whether sessions that wait for no other one start at different times; True where the plan cannot be read."""
    plan = run.plan_if_readable
    return plan is None or len({session.start_offset_ns for session in plan.sessions if session.after is None}) > 1


def _arrivals(row: IntArray, at_ns: IntArray, num_tokens: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The same, with chunks of a request that were read together as one: when each of them came is not known."""
    is_new = (np.diff(row, prepend=-1) != 0) | (np.diff(at_ns, prepend=-1) != 0)
    starts = np.flatnonzero(is_new)
    return row[starts], at_ns[starts], np.add.reduceat(num_tokens, starts) if len(starts) else num_tokens


def token_chunks(run: SealedRun, requests: pa.Table) -> TokenChunks:
    """The chunks with tokens of these requests; their row is the place of the request in the table."""
    chunks = with_tokens(run.table("chunks"))
    wanted = request_keys(requests)
    order = np.argsort(wanted)
    keys = request_keys(chunks)
    place = np.minimum(np.searchsorted(wanted[order], keys), max(0, len(order) - 1))
    row = order[place] if len(order) else np.zeros(len(keys), dtype=np.int64)
    is_wanted = wanted[row] == keys if len(order) else np.zeros(len(keys), dtype=np.bool_)
    chunks = chunks.filter(pa.array(is_wanted))
    row, at_ns, earliest = row[is_wanted], received_ns(chunks), chunks.column("earliest_ns")
    earliest_ns = np.where(earliest.is_valid().to_numpy(), earliest.fill_null(0).to_numpy(), at_ns)
    num_tokens = chunks.column("num_tokens").to_numpy().astype(np.int64)
    sorting = np.lexsort((at_ns, row))
    return TokenChunks(row[sorting], at_ns[sorting], num_tokens[sorting], earliest_ns[sorting])


def _queueing_ns(run: SealedRun, response_ids: Sequence[str], sent_ns: IntArray) -> FloatArray:
    """From the send to the first ALLOC line of each request; nan where the log does not show it.

    In a vLLM that was observed from inside, to the schedule() of its first step.
    """
    allocs = rows_where(run.table("kv_events"), "kind", "alloc")
    admitted = [*values_of(allocs, "request_id", "log_ns"), *values_of(core_requests(run), "request_id", "admitted_ns")]
    row_of = {response_id: row for row, response_id in enumerate(response_ids) if response_id}
    queue_ns = np.full(len(response_ids), np.nan)
    for log_id, at_ns in admitted:
        response_id = join_request_id(log_id, row_of)
        if response_id is not None and at_ns is not None and math.isnan(queue_ns[row_of[response_id]]):
            # The log's stamp is of the receipt of a line and may precede the client's own by its rounding.
            queue_ns[row_of[response_id]] = max(0, at_ns - int(sent_ns[row_of[response_id]]))
    return queue_ns


def serving_figures(condition: str, runs: Sequence[SealedRun]) -> ServingFigures | None:
    """Serving figures of one condition over its valid ``runs``; None where nothing was answered."""
    observed = [answered for run in runs if len((answered := latencies(run)).turn)]
    if not observed:
        return None
    slo = slo_of(runs[0])
    good = [is_good(run, slo) for run in observed] if slo.is_set else None
    spans_s = [run.span_ns / NS_PER_S for run in observed]
    counts = [len(run.turn) for run in observed]
    made, sent = ([int(getattr(run, name).sum()) for run in observed] for name in ("tokens", "prompt_tokens"))
    return ServingFigures(
        condition=condition,
        num_runs=len(observed),
        num_requests=sum(counts),
        distributions=tuple(_distributions(observed)),
        tokens_per_s=_rate(made, spans_s, observed),
        input_tokens_per_s=_rate(sent, spans_s, observed),
        total_tokens_per_s=_rate([*map(sum, zip(made, sent, strict=True))], spans_s, observed),
        requests_per_s=_rate(counts, spans_s, observed),
        goodput_per_s=None if good is None else _rate([int(is_good.sum()) for is_good in good], spans_s, observed),
        good_share=None if good is None else sum(int(is_good.sum()) for is_good in good) / sum(counts),
    )


def is_good(run: Latencies, slo: SloSpec) -> NDArray[np.bool_]:
    """Which requests met every target that is set. A latency that was not observed meets no target."""
    met = np.ones(len(run.turn), dtype=np.bool_)
    # An answer of one token has no gap that could be too long.
    has_no_gap = (run.tokens == 1) & ~np.isnan(run.ttft_ns)
    if slo.ttft_ms is not None:
        met &= run.ttft_ns <= slo.ttft_ms * NS_PER_MS
    if slo.tpot_ms is not None:
        met &= (run.tpot_ns <= slo.tpot_ms * NS_PER_MS) | has_no_gap
    if slo.itl_ms is not None:
        met &= (_gap_ns(run, slo.itl_percentile) <= slo.itl_ms * NS_PER_MS) | has_no_gap
    if slo.e2e_ms is not None:
        met &= run.e2e_ns <= slo.e2e_ms * NS_PER_MS
    return met


def _gap_ns(run: Latencies, percentile: float) -> FloatArray:
    """The given percentile of the gaps between the tokens of each request; nan for a request without gaps."""
    gap_ns = np.full(len(run.turn), np.nan)
    sorting = np.argsort(run.itl_row, kind="stable")
    rows, starts = np.unique(run.itl_row[sorting], return_index=True)
    for row, gaps in zip(rows, np.split(run.itl_ns[sorting], starts[1:]), strict=True):
        gap_ns[row] = np.percentile(gaps, percentile)
    return gap_ns


def _rate(amounts: Sequence[int], spans_s: Sequence[float], runs: Sequence[Latencies]) -> Rate:
    rates = [amount / span if span else 0.0 for amount, span in zip(amounts, spans_s, strict=True)]
    interval = positive_mean_interval(rates, runs, unit="runs")
    if not any(amounts):
        return Rate(0.0, None, sum(len(run.turn) for run in runs), len(runs))
    return Rate(sum(rates) / len(rates) if interval is None else interval.estimate, interval)


def _distributions(observed: Sequence[Latencies]) -> list[LatencyDistribution]:
    groups: dict[str, Callable[[Latencies], NDArray[np.bool_]]] = {"all": lambda run: np.ones(len(run.turn), np.bool_)}
    for prefix in ("first", "reused", "recomputed", "unknown"):
        groups[prefix] = lambda run, prefix=prefix: run.prefix == prefix
    most = max(int(run.turn.max()) for run in observed)
    for turn in range(min(most + 1, MAX_TURNS) if most else 0):
        if turn == MAX_TURNS - 1 and most >= MAX_TURNS:
            groups[f"turn {turn}+"] = lambda run, turn=turn: run.turn >= turn
        else:
            groups[f"turn {turn}"] = lambda run, turn=turn: run.turn == turn
    distributions = (
        _distribution(metric, group, [(run, is_in(run)) for run in observed])
        for group, is_in in groups.items()
        for metric in METRICS
    )
    return [distribution for distribution in distributions if distribution is not None]


def _values(run: Latencies, metric: str, is_in: NDArray[np.bool_]) -> FloatArray:
    if metric == "itl":
        return run.itl_ns[is_in[run.itl_row]] if len(run.itl_row) else run.itl_ns
    values: FloatArray = getattr(run, f"{metric}_ns")[is_in]
    return values[~np.isnan(values)]


def metric_bounds(run: Latencies, metric: str, is_in: NDArray[np.bool_] | None = None) -> tuple[FloatArray, FloatArray]:
    """The least and the most that each value of a metric can be, in no order; the values where all are exact.

    is_in: which requests; None: all. Of ITL there are more values where chunks were read together.
    """
    is_in = np.ones(len(run.turn), dtype=np.bool_) if is_in is None else is_in
    late = run.late if metric in BOUNDED else None
    if late is None:
        return _values(run, metric, is_in), _values(run, metric, is_in)
    if metric == "itl":
        is_here = is_in[late.itl_row]
        return late.itl_at_least_ns[is_here], late.itl_at_most_ns[is_here]
    values: FloatArray = getattr(run, f"{metric}_ns")
    least: FloatArray = getattr(late, f"{metric}_at_least_ns")
    most = late.tpot_at_most_ns if metric == "tpot" else values
    is_known = is_in & ~np.isnan(values)
    low, high = (np.where(np.isnan(end), values, end)[is_known] for end in (least, most))
    return low, high


def _distribution(
    metric: str, group: str, observed: Sequence[tuple[Latencies, NDArray[np.bool_]]]
) -> LatencyDistribution | None:
    seen = [(run, is_in, values) for run, is_in in observed if len(values := _values(run, metric, is_in))]
    if not seen:
        return None
    runs = [run for run, _, _ in seen]
    samples, unit = independent_samples([values for _, _, values in seen], runs)
    is_open = metric in QUEUED and any(run.has_open_arrivals for run in runs)
    num_sessions = sum(len(np.unique(run.session[is_in])) for run, is_in, _ in seen) if metric in QUEUED else None
    percentiles = percentiles_of(samples, unit, is_open, num_sessions)
    mean = Mean(float(np.concatenate([values for _, _, values in seen]).mean()))
    if any(run.late is not None for run in runs):
        bounds = zip(*(metric_bounds(run, metric, is_in) for run, is_in, _ in seen), strict=True)
        low, high = map(np.concatenate, bounds)
        percentiles = tuple(with_bounds(each, low, high) for each in percentiles)
        mean = Mean(**_within(mean.value, float(low.mean()), float(high.mean())))
    return LatencyDistribution(metric, group, sum(map(len, samples)), percentiles, mean)


def with_bounds(percentile: Percentile, low_ns: FloatArray, high_ns: FloatArray) -> Percentile:
    """With what it can be, and moved to there. low_ns, high_ns: the least and the most that each value can be.

    Of gaps there are more where chunks were read together, so that their percentile may lie outside what it can be.
    One that was moved is a bound, and has it.
    """
    ends = _within(percentile.value, *(quantile(values, percentile.q) for values in (low_ns, high_ns)))
    value, interval = ends["value"], percentile.interval
    if interval is not None:
        interval = replace(interval, estimate=value, low=min(interval.low, value), high=max(interval.high, value))
    return replace(percentile, interval=interval, **ends)


def _within(value: float, low: float, high: float) -> dict[str, Any]:
    """The value, moved to within its bounds, and those that say something."""
    moved = min(max(value, low), high)
    is_moved = moved != value
    return {
        "value": moved,
        "at_least": low if low < moved or (is_moved and moved == low) else None,
        "at_most": high if high > moved or (is_moved and moved == high) else None,
    }


def percentiles_of(
    samples: Sequence[FloatArray], unit: str, is_open: bool, num_sessions: int | None
) -> tuple[Percentile, ...]:
    """QUANTILES of all values, by independent samples.

    is_open: a time in a queue with open arrivals. num_sessions: that these are times of; None: gaps between tokens,
    which follow the steps of the server, so that no rare session or queue decides them.
    """
    made: list[Percentile] = []
    found = quantile_intervals(samples, QUANTILES, unit=unit)
    of_each = zip(*(quantiles(sample, QUANTILES) for sample in samples), strict=True)
    of_every = quantiles(np.concatenate(samples), QUANTILES)
    for q, of_all, one, of_samples in zip(QUANTILES, of_every, found, of_each, strict=True):
        may_be_rare = num_sessions is not None and (
            (len(samples) if q > MEDIAN else num_sessions) * min(q, 1 - q) < MIN_BEYOND - ROUNDING
            or (is_open and q > MOST_OPEN_QUANTILE)
            or _is_uneven(samples, of_all, is_open)
        )
        why = one if isinstance(one, NoInterval) else NoInterval.RARE
        ends = (one, None) if isinstance(one, Interval) and not may_be_rare else (None, why)
        made.append(Percentile(q, of_all, *ends, _typical_bound(samples, of_samples, q)))
    return tuple(made)


def _is_uneven(samples: Sequence[FloatArray], of_all: float, is_open: bool) -> bool:
    """Whether few of the samples hold what lies beyond a percentile; closed, by more than chance gives."""
    beyond: FloatArray = np.array([np.count_nonzero(sample > of_all) for sample in samples], dtype=np.float64)
    chance = 1.0 if is_open else float(beyond.sum() / (beyond.sum() + len(samples)))
    return effective_number(beyond) < LEAST_SHARED * chance * len(samples)


def _typical_bound(samples: Sequence[FloatArray], of_samples: Sequence[float], q: float) -> float | None:
    if min(map(len, samples)) * (1 - q) < 1 - ROUNDING:
        return None
    return median_bound(of_samples, CONFIDENCE)


def serving_rows(figures: Sequence[ServingFigures]) -> list[dict[str, object]]:
    """One row per condition, group and metric, and one per rate; times in ms, rates per second, ends of intervals."""
    rows: list[dict[str, object]] = []
    for condition in figures:
        for distribution in condition.distributions:
            row: dict[str, object] = {
                "condition": condition.condition,
                "group": distribution.group,
                "metric": distribution.metric,
                "unit": "ms",
                "num_values": distribution.num_values,
            }
            mean = cells(distribution.mean, {f"mean{end}": path for end, path in _MEAN_CELLS.items()})
            row |= {name: ratio(value_ns, NS_PER_MS) for name, value_ns in mean.items()}
            rows.append(row | percentile_cells(distribution.percentiles))
        for name in RATES:
            if (rate := getattr(condition, name)) is not None:
                row = {"condition": condition.condition, "group": "all", "metric": name, "unit": "1/s"}
                rows.append({**row, "num_values": condition.num_runs, **cells(rate, RATE_CELLS)})
    return rows


RATES = ("tokens_per_s", "input_tokens_per_s", "total_tokens_per_s", "requests_per_s", "goodput_per_s")
RATE_CELLS = {"mean": "mean", "mean_low": "interval.low", "mean_high": "interval.high", "none_of": "none_of"}
_MEAN_CELLS = {"": "value", "_at_least": "at_least", "_at_most": "at_most"}
_PERCENTILE_CELLS = {
    "": "value",
    "_low": "interval.low",
    "_high": "interval.high",
    "_typical_bound": "typical_bound",
    "_at_least": "at_least",
    "_at_most": "at_most",
}


def percentile_cells(percentiles: Sequence[Percentile]) -> dict[str, float | str | None]:
    """Percentiles in ms, with the ends of their intervals, the bound of a typical run, what they can be where tokens
    were read late, and why there is no interval.
    """
    row: dict[str, float | str | None] = {}
    for percentile in percentiles:
        name = f"p{percentile.q * 100:.0f}"
        values_ns = cells(percentile, {name + end: path for end, path in _PERCENTILE_CELLS.items()})
        row |= {key: ratio(value_ns, NS_PER_MS) for key, value_ns in values_ns.items()}
        row[f"{name}_no_interval"] = None if percentile.why is None else percentile.why.value
    return row
