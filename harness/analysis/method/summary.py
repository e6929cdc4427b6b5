"""An experiment's conditions: sums over replicates, cost ratios on both channels, and whether the channels agree.

Ratios are ratios of sums over the replicates that both conditions have, valid runs only; nothing is averaged over
ratios and nothing is decided.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from harness.analysis.method.answer import Answer, answers, main_answers
from harness.analysis.method.compare import Comparison, Verdict, check_channels, compare
from harness.analysis.method.figures import ReuseFigures, RunFigures, figures_at, run_figures
from harness.analysis.method.invariants import check_experiment
from harness.analysis.method.padding import Padding, removed_slots, shapley_split
from harness.analysis.method.reconstruct import StepCost
from harness.analysis.method.reuse import Ceilings, total_ceilings
from harness.analysis.method.serving import ServingFigures, serving_figures, serving_rows, window_of
from harness.analysis.method.speeds import Speeds, device_findings, device_tables, speeds
from harness.analysis.method.stats import Interval
from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.kinds import kind_of_run, origin_note
from harness.records import Finding, SealedRun, declared_by, served_by
from harness.spec import Factor, Factors
from harness.table import Cell, Table, table_of, to_html

# Columns of ``to_arrow`` that a notebook shows.
SHOWN = (
    *("condition", "baseline", "num_valid_runs", "a_ns", "b_ns", "ratio_a", "ratio_a_low", "ratio_a_high", "ratio_b"),
    *("channels", "verdict", "padding_ratio", "num_reused", "num_rearrivals"),
)


@dataclass(frozen=True, slots=True)
class BucketChange:
    """How another bucket set changed the padding at the same h(n) (paper S5).

    removed_slots: D_n; padding_shares: Shapley share of each n in p_old - p_new.
    """

    removed_slots: Mapping[int, int]
    padding_shares: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class ConditionFigures:
    """One condition: its runs, and sums over the valid ones. Times in model ns.

    comparison: None for a baseline, or when no replicate is valid in both. bucket_change: only where the bucket set is
    all that changed h(n)'s padding, that is, where h(n) equals the baseline's.
    """

    name: str
    treatment: str
    baseline: str
    buckets: tuple[int, ...]
    runs: tuple[RunFigures, ...]
    comparison: Comparison | None = None
    bucket_change: BucketChange | None = None
    factors: Factors = field(default_factory=dict[str, Factor])

    @property
    def valid_runs(self) -> tuple[RunFigures, ...]:
        return tuple(run for run in self.runs if run.is_valid)

    @property
    def is_baseline(self) -> bool:
        return self.name == self.baseline

    @property
    def is_compared(self) -> bool:
        """Whether it names another condition as its baseline, which may have no valid run."""
        return self.baseline not in ("", self.name)

    @property
    def a_ns(self) -> int | None:
        return _sum_or_none(self.valid_runs, lambda run: run.a_ns)

    @property
    def decode_ns(self) -> int | None:
        return _sum_or_none(self.valid_runs, lambda run: None if run.a is None else run.a.decode_ns)

    @property
    def prefill_ns(self) -> int | None:
        return _sum_or_none(self.valid_runs, lambda run: None if run.a is None else run.a.prefill_ns)

    @property
    def b_ns(self) -> int | None:
        return _sum_or_none(self.valid_runs, lambda run: run.b_ns)

    @property
    def r_ns(self) -> int | None:
        return _sum_or_none(self.valid_runs, lambda run: run.r_ns)

    @property
    def waiting_session_ns(self) -> int | None:
        return _sum_or_none(self.valid_runs, lambda run: run.waiting_session_ns)

    @property
    def padding(self) -> Padding:
        """Numerators and denominators summed before dividing."""
        runs = self.valid_runs
        return Padding(sum(run.padding.padded_slots for run in runs), sum(run.padding.bucket_slots for run in runs))

    @property
    def steps_by_n_b(self) -> dict[tuple[int, int], int]:
        total: Counter[tuple[int, int]] = Counter()
        for run in self.valid_runs:
            total.update(run.steps_by_n_b)
        return dict(sorted(total.items()))

    @property
    def histogram(self) -> dict[int, int]:
        """h(n) over all valid runs."""
        total: Counter[int] = Counter()
        for run in self.valid_runs:
            total.update(run.histogram)
        return dict(sorted(total.items()))

    @property
    def num_steps(self) -> int | None:
        return _sum_or_none(self.valid_runs, lambda run: run.num_steps)

    @property
    def mean_n(self) -> float | None:
        """Requests per decode step."""
        slots = self.padding
        return (slots.bucket_slots - slots.padded_slots) / self.num_steps if self.num_steps else None

    @property
    def mean_b(self) -> float | None:
        """Bucket positions per decode step."""
        return self.padding.bucket_slots / self.num_steps if self.num_steps else None

    @property
    def mean_step_ns(self) -> float | None:
        """Mean duration of a decode step in channel A."""
        return None if self.decode_ns is None or not self.num_steps else self.decode_ns / self.num_steps

    @property
    def reuse(self) -> ReuseFigures:
        return ReuseFigures(tuple(rearrival for run in self.valid_runs for rearrival in run.reuse.rearrivals))

    @property
    def ceilings(self) -> Ceilings | None:
        """Sums over the valid runs; None where the plan of a run cannot be read."""
        known = [run.ceilings for run in self.valid_runs if run.ceilings is not None]
        return total_ceilings(known) if known and len(known) == len(self.valid_runs) else None

    @property
    def evictions(self) -> Counter[str] | None:
        """By who caused them; None where a run has no KV log."""
        known = [Counter(run.evictions) for run in self.valid_runs if run.evictions is not None]
        return sum(known, Counter[str]()) if known and len(known) == len(self.valid_runs) else None

    @property
    def computed_prefill_tokens(self) -> int | None:
        return _sum_or_none(self.valid_runs, lambda run: run.computed_prefill_tokens)

    @property
    def rearrival_p50_ms(self) -> float | None:
        """The worst of the runs' medians, wall ms."""
        return _worst(self.valid_runs, lambda run: run.lateness.rearrival_p50_ms)

    @property
    def rearrival_p99_ms(self) -> float | None:
        return _worst(self.valid_runs, lambda run: run.lateness.rearrival_p99_ms)

    @property
    def start_spread_ms(self) -> float | None:
        return _worst(self.valid_runs, lambda run: run.lateness.start_spread_ms)


@dataclass(frozen=True, slots=True, repr=False)
class ExperimentSummary:
    """All conditions of an experiment, in the order of their first run. time_scale: model time per wall time.

    speeds: of its devices; None where fewer than two made it. window: in words, which requests the serving figures
    count.
    """

    experiment: str
    title: str
    time_scale: float
    conditions: tuple[ConditionFigures, ...]
    findings: tuple[Finding, ...]
    backend: str = ""
    serving: tuple[ServingFigures, ...] = ()
    speeds: Speeds | None = None
    window: str = ""
    served: str = ""
    declared: str = ""

    @property
    def origin(self) -> str:
        """What must stand beside the figures: what stood in for a device, the stack that served, and what was declared
        and not verified."""
        return " ".join(filter(None, (origin_note(self.backend), self.served, self.declared)))

    @property
    def runs(self) -> tuple[RunFigures, ...]:
        return tuple(run for condition in self.conditions for run in condition.runs)

    @property
    def unknowns(self) -> str:
        """Why dashes stand where figures of reuse should be; empty where every server stated its reuse."""
        silent = [one.name for one in self.conditions if one.reuse.num_rearrivals and one.reuse.num_reused is None]
        if not silent:
            return ""
        return (
            f"reuse and channel A of {', '.join(silent)} are unknown: the server did not state the cached tokens of "
            "its answers (--enable-prompt-tokens-details)"
        )

    @property
    def place_of(self) -> dict[str, int]:
        """Place of each condition in that order, from 0."""
        return {condition.name: place for place, condition in enumerate(self.conditions)}

    def condition(self, name: str) -> ConditionFigures:
        """The condition of that name; KeyError when there is none."""
        return {condition.name: condition for condition in self.conditions}[name]

    def to_arrow(self) -> pa.Table:
        """One row per condition."""
        main = main_answers(self.answers)
        rows = ({**_condition_row(each), **_answer_cells(main.get(each.name))} for each in self.conditions)
        return self._with_origin(list(rows))

    def to_pandas(self) -> object:
        """One row per condition as a pandas DataFrame; SpecError where pandas is not installed."""
        try:
            return self.to_arrow().to_pandas()
        except ImportError as error:
            raise SpecError("pandas is not installed", hint="pip install pandas, or use to_arrow()") from error

    def __repr__(self) -> str:
        """What was run, and a line for each comparison."""
        first = f"ExperimentSummary {self.experiment!r}: {len(self.conditions)} conditions, {len(self.runs)} runs"
        lines = [f"  {name}: {_in_words(answer)}" for name, answer in main_answers(self.answers).items()]
        return "\n".join([f"{first}. {self.origin}".rstrip(), *lines])

    def _repr_html_(self) -> str:
        """What a notebook shows: costs in seconds of the run's clock, ratios, and where they are from."""
        shown = [{name: row[name] for name in SHOWN} for row in self.to_arrow().to_pylist()]
        rows = [{name.replace("_ns", "_s"): _in_seconds(name, value) for name, value in row.items()} for row in shown]
        return to_html(table_of(self.title, "", rows, self.origin))

    @property
    def device_tables(self) -> list[Table]:
        """How fast each device was, and every comparison on each of them; empty where fewer than two made it."""
        return device_tables(self.speeds, _comparisons(self.conditions))

    @property
    def answers(self) -> tuple[Answer, ...]:
        """The answer to each comparison, on its main channel first."""
        return answers(_comparisons(self.conditions), self.backend)

    def serving_of(self, condition: str) -> ServingFigures | None:
        """Serving figures of a condition; None where none of its valid runs answered anything."""
        return next((figures for figures in self.serving if figures.condition == condition), None)

    def serving_to_arrow(self) -> pa.Table:
        """One row per condition, group of requests and metric, in ms, and one per rate."""
        return self._with_origin(serving_rows(self.serving))

    def _with_origin(self, rows: Sequence[dict[str, Any]]) -> pa.Table:
        """Rows for other programs, each with the kind of server that it is from."""
        declared = {"declared": self.declared} if self.declared else {}
        return pa.Table.from_pylist([{**row, "backend": self.backend, **declared} for row in rows])

    def runs_to_arrow(self) -> pa.Table:
        """One row per run, invalid ones included."""
        return pa.Table.from_pylist([_run_row(run) for run in self.runs])


def summarise(runs: Sequence[SealedRun], cost_model: StepCost | None = None) -> ExperimentSummary:
    """Figures of an experiment from its sealed runs.

    runs: of one experiment, in any order. cost_model: prices channel A of every run; default: each run's own.
    Raises ValueError when the runs belong to several experiments or there are none.
    """
    names = {run.experiment for run in runs}
    if len(names) != 1:
        raise ValueError(f"runs of exactly one experiment are needed, got {sorted(names)}")
    ordered = sorted(runs, key=lambda run: (run.replicate, run.manifest.order_index))
    figures = [run_figures(run) if cost_model is None else figures_at(run, cost_model) for run in ordered]
    grouped: dict[str, list[RunFigures]] = {}
    for run in figures:
        grouped.setdefault(run.condition, []).append(run)
    buckets = {run.condition: run.manifest.decode_buckets for run in ordered}
    factors = {run.condition: run.manifest.factors for run in ordered}
    plain = {
        name: ConditionFigures(
            name, group[0].treatment, group[0].baseline, buckets[name], tuple(group), factors=factors[name]
        )
        for name, group in grouped.items()
    }
    backend = ordered[0].manifest.backend
    is_predicted = kind_of_run(backend).is_virtual
    conditions = tuple(
        _compared(condition, plain.get(condition.baseline), is_predicted=is_predicted) for condition in plain.values()
    )
    by_device = speeds(figures)
    return ExperimentSummary(
        experiment=names.pop(),
        title=ordered[0].manifest.title,
        time_scale=ordered[0].manifest.clock.scale,
        conditions=conditions,
        findings=(
            *check_experiment(runs),
            *check_channels(figures),
            *device_findings(runs, figures, by_device, _comparisons(conditions)),
        ),
        backend=backend,
        served=served_by(ordered),
        declared=declared_by(ordered),
        serving=_serving(ordered),
        speeds=by_device,
        window=window_of(ordered[0]).in_words("model s" if ordered[0].manifest.clock.scale != 1 else "s"),
    )


def _comparisons(conditions: Sequence[ConditionFigures]) -> dict[str, Comparison | None]:
    return {condition.name: condition.comparison for condition in conditions}


def _serving(runs: Sequence[SealedRun]) -> tuple[ServingFigures, ...]:
    grouped: dict[str, list[SealedRun]] = {}
    for run in runs:
        if run.is_valid:
            grouped.setdefault(run.condition, []).append(run)
    figures = (serving_figures(name, group) for name, group in grouped.items())
    return tuple(each for each in figures if each is not None)


def _compared(
    condition: ConditionFigures, baseline: ConditionFigures | None, *, is_predicted: bool
) -> ConditionFigures:
    if baseline is None or condition.is_baseline:
        return condition
    return replace(
        condition,
        comparison=compare(baseline.name, condition.valid_runs, baseline.valid_runs, is_predicted=is_predicted),
        bucket_change=_bucket_change(condition, baseline),
    )


def _bucket_change(condition: ConditionFigures, baseline: ConditionFigures) -> BucketChange | None:
    histogram = condition.histogram
    is_comparable = histogram and histogram == baseline.histogram and condition.buckets and baseline.buckets
    if not is_comparable or condition.buckets == baseline.buckets:
        return None
    old, new = _rule(baseline.buckets, histogram), _rule(condition.buckets, histogram)
    return BucketChange(removed_slots(histogram, old, new), shapley_split(histogram, old, new))


def _rule(buckets: tuple[int, ...], histogram: Mapping[int, int]) -> dict[int, int]:
    """The size that a step of n requests is run with; above the largest captured size it is not padded."""
    return {n: next((bucket for bucket in buckets if bucket >= n), n) for n in histogram}


def _sum_or_none(runs: Sequence[RunFigures], of: Callable[[RunFigures], int | None]) -> int | None:
    values = [of(run) for run in runs]
    known = [value for value in values if value is not None]
    return sum(known) if known and len(known) == len(values) else None


def _worst(runs: Sequence[RunFigures], of: Callable[[RunFigures], float | None]) -> float | None:
    return max((value for run in runs if (value := of(run)) is not None), default=None)


def _condition_row(condition: ConditionFigures) -> dict[str, Any]:
    compared = condition.comparison
    return {
        "condition": condition.name,
        "factors": json.dumps(dict(condition.factors)),
        "treatment": condition.treatment,
        "baseline": condition.baseline,
        "buckets": list(condition.buckets),
        "num_runs": len(condition.runs),
        "num_valid_runs": len(condition.valid_runs),
        "a_ns": condition.a_ns,
        "decode_ns": condition.decode_ns,
        "prefill_ns": condition.prefill_ns,
        "b_ns": condition.b_ns,
        "r_ns": condition.r_ns,
        "waiting_session_ns": condition.waiting_session_ns,
        "ratio_a": None if compared is None else compared.ratio_a,
        "ratio_b": None if compared is None else compared.ratio_b,
        **_interval_cells("ratio_a", None if compared is None else compared.interval_a),
        **_interval_cells("ratio_b", None if compared is None else compared.interval_b),
        "ratio_of": None if compared is None else "total" if compared.is_same_work else "generated token",
        "tau": None if compared is None else compared.tau,
        "channels": None if compared is None else compared.verdict.value,
        "is_agreed": None if compared is None else compared.is_agreed,
        "padding_ratio": condition.padding.ratio,
        "num_steps": condition.num_steps,
        "num_rearrivals": condition.reuse.num_rearrivals,
        "num_reused": condition.reuse.num_reused,
        "reused_tokens": condition.reuse.reused_tokens,
        "computed_prefill_tokens": condition.computed_prefill_tokens,
        "rearrival_p50_ms": condition.rearrival_p50_ms,
        "rearrival_p99_ms": condition.rearrival_p99_ms,
        "start_spread_ms": condition.start_spread_ms,
    }


def _in_words(answer: Answer) -> str:
    """ "0.9744 of base (0.9610 to 0.9880), cheaper": the cost ratio, its interval and what it shows."""
    interval = "" if answer.interval is None else f" ({answer.interval.low:.4f} to {answer.interval.high:.4f})"
    channels = answer.comparison.verdict
    is_withheld = channels in (Verdict.DIFFER, Verdict.CANNOT_TELL)
    shown = f"withheld (channels: {channels.value})" if is_withheld else answer.verdict.value
    return f"{answer.ratio:.4f} of {answer.baseline}{interval}, {shown}"


def _answer_cells(answer: Answer | None) -> dict[str, Cell]:
    """The answer's source, adjusted p and verdict; None for a baseline."""
    return {
        "source": None if answer is None else answer.source.value,
        "p_holm": None if answer is None else answer.p_adjusted,
        "family": None if answer is None else answer.family_size,
        "verdict": None if answer is None else answer.verdict.value,
    }


def _in_seconds(name: str, value: Cell) -> Cell:
    return value / NS_PER_S if name.endswith("_ns") and isinstance(value, int) else value


def _interval_cells(name: str, interval: Interval | None) -> dict[str, float | None]:
    """Ends of an interval as columns; None below three replicates."""
    ends = (None, None) if interval is None else (interval.low, interval.high)
    return dict(zip((f"{name}_low", f"{name}_high"), ends, strict=True))


def _run_row(run: RunFigures) -> dict[str, Any]:
    return {
        "condition": run.condition,
        "replicate": run.replicate,
        "is_valid": run.is_valid,
        "a_ns": run.a_ns,
        "decode_ns": None if run.a is None else run.a.decode_ns,
        "prefill_ns": None if run.a is None else run.a.prefill_ns,
        "b_ns": run.b_ns,
        "r_ns": run.r_ns,
        "waiting_session_ns": run.waiting_session_ns,
        "padding_ratio": run.padding.ratio,
        "num_steps": run.num_steps,
        "num_rearrivals": run.reuse.num_rearrivals,
        "num_reused": run.reuse.num_reused,
        "reused_tokens": run.reuse.reused_tokens,
        "computed_prefill_tokens": run.computed_prefill_tokens,
        "evictions": run.num_evictions,
        "evictions_dummy": None if run.evictions is None else run.evictions.get("dummy", 0),
        "rearrival_p50_ms": run.lateness.rearrival_p50_ms,
        "rearrival_p99_ms": run.lateness.rearrival_p99_ms,
        "start_spread_ms": run.lateness.start_spread_ms,
        "num_failed": run.num_failed,
        "num_aborted": run.num_aborted,
    }
