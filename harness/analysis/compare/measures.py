"""Every measure in which conditions are compared. Adding a measure is a row of ``MEASURES``.

Compare, gate, history, the comparison of releases and the tables for other programs take their figures from here.
Definitions: docs/reference/method-comparisons.md, "Measures".
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal, NamedTuple

import numpy as np

from harness.analysis.energy import Energy, energy_of_sessions, run_energy
from harness.analysis.figures import run_figures
from harness.analysis.serving import latencies, metric_bounds, slo_of
from harness.analysis.sessions import session_times
from harness.analysis.stats import MIN_BEYOND, FloatArray, log_mean_values, quantile
from harness.clock import NS_PER_MS, NS_PER_S
from harness.measure.records.manifest import Manifest, table_at
from harness.measure.records.run import SealedRun, once_per_run
from harness.model.plan.event_queue import whole_sessions
from harness.model.spec.sections import Basis


class Value(NamedTuple):
    """One run's figure: an amount, and of how many units. Ratios are of the sums of both."""

    amount: float
    units: float = 1.0


class Bounds(NamedTuple):
    """What a figure of one run can be, in the unit of its column."""

    at_least: float
    at_most: float


End = Literal["at_least", "at_most"]


class Counted(str, Enum):
    """What a quantile is over."""

    REQUESTS = "requests"
    SESSIONS = "sessions"

    def number(self, run: SealedRun) -> int:
        """How many a run has: requests whose first token was seen, sessions that finished."""
        if self is Counted.REQUESTS:
            return int(np.count_nonzero(~np.isnan(latencies(run).ttft_ns)))
        times = session_times(run)
        return 0 if times is None else len(times.own_ns)


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a run.

    name: as users ask for it. column: the name with its unit, as tables have it. of: None where the run does not show
    it. is_lower_better: which way is better. words: what a shown ratio below and above 1 is called. quantile: over what
    is counted of a run. limit: the largest ratio to a baseline that ``harness gate`` accepts unless the user gives
    another; None: judged only when it is named. least: no run can have less; there a value has no meaning. may_be_zero:
    of some runs of a ratio of sums. target: the key of [slo] that it depends on. bounds: what it can be in a run, by
    what ``open_by`` says; None where it is exact. ends: which of them can differ from it.
    """

    name: str
    column: str
    meaning: str
    of: Callable[[SealedRun], Value | None]
    is_lower_better: bool = True
    words: tuple[str, str] = ("lower", "higher")
    quantile: float | None = None
    limit: float | None = None
    least: float = 0.0
    may_be_zero: bool = False
    counted: Counted = Counted.REQUESTS
    target: str = ""
    bounds: Callable[[SealedRun], Bounds | None] | None = None
    ends: tuple[End, ...] = ()
    open_by: str = "tokens were read late"

    def bound_column(self, end: End) -> str:
        """The column of a bound: ttft_p50_at_least_ms, J_per_token_at_least."""
        name = self.column.removesuffix("_ms")
        return f"{name}_{end}{self.column.removeprefix(name)}"

    @property
    def num_needed(self) -> int:
        """Requests or sessions a side from which on it is judged: MIN_BEYOND beyond a quantile."""
        return 1 if self.quantile is None else round(MIN_BEYOND / (1 - self.quantile))

    def has_ratio(self, value: Value | None) -> bool:
        """Whether a value can stand in a ratio: it is known, above 0 and not below what a run can have."""
        if value is None or value.units <= 0 or value.amount < 0 or (value.amount == 0 and not self.may_be_zero):
            return False
        return value.amount / value.units >= self.least

    def target_of(self, manifest: Manifest) -> object:
        """The target in [slo] that its value in a run depends on; None where it depends on none."""
        return table_at(manifest.requested_experiment, "slo").get(self.target)


def log_values(values: Sequence[Value]) -> FloatArray:
    """Values, one a run, whose mean is ln(sum of amounts / sum of units) and whose spread gives its error."""
    return log_mean_values([value.amount for value in values], [value.units for value in values])


def mean_of(values: Sequence[Value]) -> float:
    """The measure over several runs: sum of amounts / sum of units."""
    return sum(value.amount for value in values) / sum(value.units for value in values)


def value_over(measure: Measure, runs: Iterable[SealedRun]) -> float | None:
    """The measure over several runs; None where a run does not show it, or there is none."""
    values = [measure.of(run) for run in runs]
    known = [value for value in values if value is not None]
    is_known = known and len(known) == len(values) and sum(value.units for value in known)
    return mean_of(known) if is_known else None


def _percentile(of: str, q: float) -> Callable[[SealedRun], Value | None]:
    """A percentile of a latency over the requests of a run, ms."""

    def value(run: SealedRun) -> Value | None:
        values: FloatArray = getattr(latencies(run), of)
        values = values[~np.isnan(values)]
        return Value(quantile(values, q) / NS_PER_MS) if len(values) else None

    return value


def bound_over(measure: Measure, runs: Sequence[SealedRun], end: End) -> float | None:
    """What the measure over several runs can be at this end; None where it is exact, or not known."""
    observed = None if measure.bounds is None else value_over(measure, runs)
    if observed is None or measure.bounds is None:
        return None
    values = [(value, measure.bounds(run)) for run in runs if (value := measure.of(run)) is not None]
    amounts = [value.amount if bound is None else float(getattr(bound, end)) * value.units for value, bound in values]
    mean = sum(amounts) / sum(value.units for value, _bound in values)
    return None if all(bound is None for _value, bound in values) or mean == observed else mean


def _bounds(metric: str, of: Callable[[FloatArray], float]) -> Callable[[SealedRun], Bounds | None]:
    """The bounds of a figure of a run's latencies, ms; they hold the figure of the values themselves too."""

    def bounds(run: SealedRun) -> Bounds | None:
        observed = latencies(run)
        values: FloatArray = getattr(observed, f"{metric}_ns")
        values = values[~np.isnan(values)]
        if observed.late is None or not len(values):
            return None
        value_ns, *ends_ns = (of(each) for each in (values, *metric_bounds(observed, metric)))
        return Bounds(min(value_ns, *ends_ns) / NS_PER_MS, max(value_ns, *ends_ns) / NS_PER_MS)

    return bounds


def _percentile_bounds(metric: str, q: float) -> Callable[[SealedRun], Bounds | None]:
    return _bounds(metric, lambda values: quantile(values, q))


BOTH: tuple[End, End] = ("at_least", "at_most")


def _cost(basis: Basis) -> Callable[[SealedRun], Value | None]:
    return lambda run: per_token(run, run_figures(run).cost_ns(basis))


def per_token(run: SealedRun, cost_ns: int | None) -> Value | None:
    """A cost of a run, s, and its generated tokens; None where either is not known."""
    tokens = run_figures(run).generated_tokens
    return None if cost_ns is None or not tokens else Value(cost_ns / NS_PER_S, tokens)


def _tpot(run: SealedRun) -> Value | None:
    values = latencies(run).tpot_ns
    values = values[~np.isnan(values)]
    return Value(float(values.mean()) / NS_PER_MS) if len(values) else None


def _tokens_per_s(run: SealedRun) -> Value | None:
    observed = latencies(run)
    return Value(int(observed.tokens.sum()) / observed.span_ns * NS_PER_S) if observed.span_ns else None


def _reuse(run: SealedRun) -> Value | None:
    figures = run_figures(run)
    computed = figures.computed_prefill_tokens
    return None if computed is None else Value(computed, figures.num_requests)


def _padding(run: SealedRun) -> Value | None:
    padded, slots = run_figures(run).padding
    return Value(slots, slots - padded) if slots > padded else None


def _session(q: float) -> Callable[[SealedRun], Value | None]:
    """A percentile of the active time over the sessions of a run, s."""

    def value(run: SealedRun) -> Value | None:
        times = session_times(run)
        if times is None or not len(times.own_ns):
            return None
        return Value(quantile(times.own_ns.astype(np.float64), q) / NS_PER_S)

    return value


def _energy_per_token(run: SealedRun) -> Value | None:
    energy, tokens = run_energy(run), run_figures(run).generated_tokens
    return None if energy is None or not tokens else Value(energy.joules, tokens)


@once_per_run
def session_energy(run: SealedRun) -> Energy | None:
    """The energy of the sessions that began in the window: those that J_per_session counts."""
    times, plan = session_times(run), run.plan_if_readable
    if times is None or plan is None:
        return None
    whole = whole_sessions(plan)
    return energy_of_sessions(run, np.isin(whole, whole[times.session]))


def _energy_per_session(run: SealedRun) -> Value | None:
    energy, times = session_energy(run), session_times(run)
    return None if energy is None or times is None or not len(times.own_ns) else Value(energy.joules, len(times.own_ns))


def _sampled(
    of: Callable[[SealedRun], Value | None], energy_of: Callable[[SealedRun], Energy | None]
) -> Callable[[SealedRun], Bounds | None]:
    """What joules a unit can be, as power was sampled; None where it stood still."""

    def bounds(run: SealedRun) -> Bounds | None:
        energy, value = energy_of(run), of(run)
        if energy is None or value is None or not energy.error_joules:
            return None
        error = energy.error_joules
        return Bounds(max(energy.joules - error, 0.0) / value.units, (energy.joules + error) / value.units)

    return bounds


def _within_target(run: SealedRun) -> Value | None:
    times, target_s = session_times(run), slo_of(run).session_s
    if times is None or target_s is None or not times.span_h:
        return None
    return Value(times.num_within(target_s), times.span_h)


def _session_measure(percent: int) -> Measure:
    return Measure(
        f"session_p{percent}",
        f"session_p{percent}_s",
        f"p{percent} of the active time of a session (first send to last token, less its waits), s",
        _session(percent / 100),
        quantile=percent / 100,
        counted=Counted.SESSIONS,
    )


COST_WORDS = ("cheaper", "more expensive")
# Costs are per generated token, since the sides may have done other work.
MEASURES: Mapping[str, Measure] = {
    measure.name: measure
    for measure in (
        Measure("A", "A_s_per_token", "modelled device time (A) per generated token, s", _cost("a"), words=COST_WORDS),
        Measure(
            "S",
            "S_s_per_token",
            "time in steps (S), measured in the engine, per generated token, s",
            _cost("s"),
            words=COST_WORDS,
        ),
        Measure("B", "B_s_per_token", "time in flight (B) per generated token, s", _cost("b"), words=COST_WORDS),
        Measure(
            "cost",
            "cost_s_per_token",
            "time in flight (B) per generated token, s",
            _cost("b"),
            words=COST_WORDS,
            limit=1.01,
        ),
        Measure(
            "ttft_p50",
            "ttft_p50_ms",
            "median time to first token, ms",
            _percentile("ttft_ns", 0.5),
            quantile=0.5,
            limit=1.05,
            bounds=_percentile_bounds("ttft", 0.5),
            ends=("at_least",),
        ),
        Measure(
            "ttft_p99",
            "ttft_p99_ms",
            "p99 of the time to first token, ms",
            _percentile("ttft_ns", 0.99),
            quantile=0.99,
            limit=1.10,
            bounds=_percentile_bounds("ttft", 0.99),
            ends=("at_least",),
        ),
        Measure(
            "tpot",
            "tpot_ms",
            "mean time per output token, ms",
            _tpot,
            limit=1.01,
            bounds=_bounds("tpot", lambda values: float(values.mean())),
            ends=BOTH,
        ),
        Measure(
            "itl_p50",
            "itl_p50_ms",
            "median time between tokens, ms",
            _percentile("itl_ns", 0.5),
            quantile=0.5,
            bounds=_percentile_bounds("itl", 0.5),
            ends=BOTH,
        ),
        Measure("e2e_p50", "e2e_p50_ms", "median time of a whole answer, ms", _percentile("e2e_ns", 0.5), quantile=0.5),
        *map(_session_measure, (50, 90, 99)),
        Measure(
            "session_goodput",
            "session_goodput_per_h",
            "sessions finished within [slo] session_s, per hour",
            _within_target,
            is_lower_better=False,
            may_be_zero=True,
            counted=Counted.SESSIONS,
            target="session_s",
        ),
        Measure("tokens", "tokens_per_s", "generated tokens per second", _tokens_per_s, is_lower_better=False),
        Measure(
            "reuse",
            "computed_tokens_per_request",
            "prompt tokens computed per request (less reuse: more)",
            _reuse,
            limit=1.01,
        ),
        Measure(
            "padding",
            "slots_per_occupied_slot",
            "decode slots per occupied slot (more padding: more)",
            _padding,
            limit=1.01,
            least=1.0,
        ),
        Measure(
            "energy",
            "J_per_token",
            "energy of the devices in flight per generated token, J",
            _energy_per_token,
            bounds=_sampled(_energy_per_token, run_energy),
            ends=BOTH,
            open_by="power was sampled",
        ),
        Measure(
            "energy_session",
            "J_per_session",
            "energy of the devices in flight that the sessions of the window have, per finished one, J",
            _energy_per_session,
            counted=Counted.SESSIONS,
            bounds=_sampled(_energy_per_session, session_energy),
            ends=BOTH,
            open_by="power was sampled",
        ),
    )
}
# A and B of a simulation are the same cost.
OF_SIMULATIONS = ("cost",)
OF_SERVERS = ("A", "S", "B")
