"""An experiment's conditions: sums over replicates, cost ratios on both channels, and whether the channels agree.

Sums, counts and percentiles are over the replicates in which every condition has a valid run; a ratio is of sums over
those that its two conditions have. Nothing is averaged over ratios and nothing is decided.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pyarrow as pa

from harness.analysis.compare.answer import Answer, Compared, answer_on, answers, main_answers, one_plan
from harness.analysis.compare.channels import BASES, Comparison, check_channels, check_independence, compare
from harness.analysis.compare.measures import MEASURES, OF_SERVERS, OF_SIMULATIONS, bound_over, value_over
from harness.analysis.compare.pairs import Prices, counted_runs, num_plans, prices_by_condition, without_a
from harness.analysis.compare.ratio import Family
from harness.analysis.compare.stopping import SequentialStatus, status_until_decided
from harness.analysis.cost.step_parts import BETWEEN
from harness.analysis.figures import Figures, RunFigures, cells, figure_at, same, sums_over, total_of
from harness.analysis.reuse_by_wait import ReuseByWait, reuse_by_wait, reuse_by_wait_rows
from harness.analysis.run_tables import COUNT_COLUMNS, count_cells
from harness.analysis.serving import ServingFigures, serving_figures, serving_rows, window_of
from harness.analysis.sessions import SessionFigures, overloads, session_figures, session_rows
from harness.analysis.speeds import Speeds, device_findings, device_tables, speeds
from harness.analysis.stats import grouped, most_missed, seconds
from harness.analysis.validity.invariants import check_experiment
from harness.clock import NS_PER_S
from harness.errors import SpecError, unknown_name
from harness.kinds import kind_of_run, origin_note
from harness.measure.records.manifest import Finding
from harness.measure.records.run import SealedRun, declared_by, kind_of, served_by
from harness.model.engine import CostModel
from harness.model.spec import Factor, Factors
from harness.model.spec.sections import Basis
from harness.table import Table, interval_text, table_of, to_html

Shown = TypeVar("Shown")
# Columns of ``to_arrow`` that a notebook shows.
SHOWN = (
    *("condition", "baseline", "num_counted_runs", "a_ns", "b_ns", "ratio_a", "ratio_a_low", "ratio_a_high", "ratio_b"),
    *("channels", "verdict", "padding_ratio", "num_reused", "num_rearrivals"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConditionFigures(Figures):
    """One condition: its runs, and sums over ``counted``, the valid ones of replicates that every condition has.

    measures: by column, see ``MEASURES``. comparison: None for a baseline, or when no replicate is valid in both.
    """

    name: str
    treatment: str
    baseline: str
    buckets: tuple[int, ...]
    runs: tuple[RunFigures, ...]
    counted: tuple[RunFigures, ...]
    measures: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"], repr=False)
    comparison: Comparison | None = None
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
    def rearrival_p50_ms(self) -> float | None:
        """The worst of the counted runs' medians, wall ms."""
        return self._worst("rearrival_p50_ms")

    @property
    def rearrival_p99_ms(self) -> float | None:
        return self._worst("rearrival_p99_ms")

    @property
    def start_spread_ms(self) -> float | None:
        return self._worst("start_spread_ms")

    def over(self, replicates: Collection[int]) -> Figures:
        """The sums over its valid runs of these replicates."""
        return total_of([run for run in self.valid_runs if run.replicate in replicates])

    def _worst(self, name: str) -> float | None:
        values = (getattr(run.lateness, name) for run in self.counted)
        return max((value for value in values if value is not None), default=None)


@dataclass(frozen=True, slots=True, repr=False)
class ExperimentSummary:
    """All conditions of an experiment, in the order of their first run. time_scale: model time per wall time.

    answers: to each comparison, on its main channel and on the other one. status: under the stopping rule that was to
    end it; None where none was. speeds: of its devices; None if fewer than two devices ran it. window: in words, which
    requests the serving figures count. prices: that other costs priced its runs than now; empty where none did.
    overloads: factors by condition, see ``sessions.overload``. given_costs: whose costs price every run, not its own.
    """

    experiment: str
    title: str
    time_scale: float
    conditions: tuple[ConditionFigures, ...]
    findings: tuple[Finding, ...]
    answers: tuple[Answer, ...] = ()
    status: SequentialStatus | None = None
    backend: str = ""
    serving: tuple[ServingFigures, ...] = ()
    sessions: tuple[SessionFigures, ...] = ()
    speeds: Speeds | None = None
    window: str = ""
    prices: str = ""
    served: str = ""
    is_on_cpu: bool = False
    declared: str = ""
    overloads: Mapping[str, float] = field(default_factory=dict[str, float])
    given_costs: str = ""

    @property
    def origin(self) -> str:
        """Where the figures are from, the stack that served, what was declared and not verified, and drafts."""
        origin = origin_note(self.backend, is_on_cpu=self.is_on_cpu)
        return " ".join(filter(None, (origin, self.served, self.declared, self.drafts)))

    @property
    def drafts(self) -> str:
        """What to know of figures under speculative decoding; "" without."""
        kinds = sorted({run.drafts for run in self.runs if run.drafts})
        if not kinds:
            return ""
        words = {"synthetic": "synthetic acceptance, by given rates", "real": "a real drafter on random tokens"}
        acceptance = ", ".join(words[kind] for kind in kinds)
        return f"Speculative decoding: sizes, n and padding count tokens; {acceptance}."

    @property
    def runs(self) -> tuple[RunFigures, ...]:
        return tuple(run for condition in self.conditions for run in condition.runs)

    @property
    def replicates(self) -> tuple[int, ...]:
        """The replicates that sums and percentiles count: those in which every condition has a valid run."""
        return tuple(sorted({run.replicate for condition in self.conditions for run in condition.counted}))

    @property
    def one_plan(self) -> str:
        """That all counted runs replayed one plan each time; empty where plans differ."""
        groups = [condition.counted for condition in self.conditions if len(condition.counted) > 1]
        if not groups or any(num_plans(group) > 1 for group in groups):
            return ""
        return one_plan(len(self.replicates))

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
        """The condition of that name; SpecError that lists them when there is none."""
        by_name = {condition.name: condition for condition in self.conditions}
        if name not in by_name:
            raise unknown_name("condition", name, by_name)
        return by_name[name]

    def to_arrow(self) -> pa.Table:
        """One row per condition."""
        rows = [_condition_row(each, self.answers) for each in self.conditions]
        if self.overloads:
            rows = [
                {**row, "overload": self.overloads.get(each.name)}
                for row, each in zip(rows, self.conditions, strict=True)
            ]
        return self._with_origin(self._without_unknown(rows))

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
        rows = [
            {
                name.replace("_ns", "_s"): seconds(value) if name.endswith("_ns") else value
                for name, value in row.items()
            }
            for row in shown
        ]
        return to_html(table_of(self.title, "", rows, self.origin))

    @property
    def device_tables(self) -> list[Table]:
        """How fast each device was, and every comparison on each of them; empty if fewer than two devices ran it."""
        return device_tables(self.speeds, _comparisons(self.conditions))

    def answer_on(self, condition: str, channel: Basis) -> Answer | None:
        """The answer to a comparison on one channel; None where there is none."""
        return answer_on(self.answers, condition, channel)

    def serving_of(self, condition: str) -> ServingFigures | None:
        """Serving figures of a condition; None where none of its valid runs answered anything."""
        return next((figures for figures in self.serving if figures.condition == condition), None)

    def serving_to_arrow(self) -> pa.Table:
        """One row per condition, group of requests and metric, in ms, and one per rate; then the same of sessions."""
        return self._with_origin([*serving_rows(self.serving), *session_rows(self.sessions)])

    @property
    def reuse_by_wait(self) -> tuple[ReuseByWait, ...]:
        """Reuse by the wait before each return, of each condition with returns."""
        found = (reuse_by_wait(condition.name, condition.counted) for condition in self.conditions)
        return tuple(each for each in found if each is not None)

    def reuse_by_wait_to_arrow(self) -> pa.Table:
        """One row per condition and bin of waits: shares of returns and of reusable tokens, with intervals."""
        return self._with_origin(reuse_by_wait_rows(self.reuse_by_wait))

    def _with_origin(self, rows: Sequence[dict[str, Any]]) -> pa.Table:
        """Rows for other programs, each with the kind of server that it is from."""
        declared = {"declared": self.declared} if self.declared else {}
        return _arrow([{**row, "backend": self.backend, **declared} for row in rows])

    def runs_to_arrow(self) -> pa.Table:
        """One row per run, invalid ones included."""
        rows = [_run_row(run) for run in self.runs]
        return _arrow(self._without_unknown(rows))

    def _without_unknown(self, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Rows without the columns of what no run has: time in steps, a second memory, counts, energy."""
        steps = {*OF_STEPS, *OF_SPEED, *RATIO_OF_STEPS} if self.parts is None else set[str]()
        memory = set[str]() if any(run.second_memory for run in self.runs) else {*OF_MEMORY}
        others = {name for name in (*COUNT_COLUMNS, *OF_ENERGY) if all(row.get(name) is None for row in rows)}
        unknown = steps | memory | others
        return [{name: cell for name, cell in row.items() if name not in unknown} for row in rows]

    @property
    def parts(self) -> Table | None:
        """What lies between A and B of each condition, in s of the run's clock; None where no step was stamped."""
        rows = [row for condition in self.conditions for row in _part_rows(condition)]
        if not rows:
            return None
        return table_of(
            "Time in steps (S), and what lies between A and B",
            "Sums over the runs of a condition. Measured: the times of steps while requests were in flight, S in all. "
            "Error: measured less modelled. The errors and the time between steps sum to B \u2212 A.",
            rows,
            self.origin,
        )

    @property
    def energy(self) -> Table | None:
        """Joules of each condition's counted runs, and their error from sampling; None where no run has any."""
        known = [
            (one.name, one.energy, sum(run.generated_tokens for run in one.counted))
            for one in self.conditions
            if one.energy is not None
        ]
        if not known:
            return None
        is_emulated = any(energy.is_emulated for _, energy, _ in known)
        return table_of(
            f"Energy in flight ({'emulated power' if is_emulated else 'measured power'})",
            "Power between two samples is taken to go straight; the error is what sampling can have hidden where power "
            "moved one way only between two samples: half of what they differ by, and up to all of it where requests "
            "were in flight in a part of that time. It says nothing of pulses between two samples: so many samples can "
            "all miss (5 % of the time) a state as rare as the last column."
            + (" The power is emulated: no device that served was measured." if is_emulated else ""),
            [
                {
                    "condition": name,
                    "samples": energy.num_samples,
                    "J": energy.joules,
                    "sampling error, J": energy.error_joules,
                    "J/token": energy.joules / tokens if tokens else None,
                    "sampling error, %": 100 * energy.error_joules / energy.joules if energy.joules else None,
                    "may miss, % of time": 100 * most_missed(energy.num_samples),
                }
                for name, energy, tokens in known
            ],
            self.origin,
        )


def _arrow(rows: Sequence[Mapping[str, Any]]) -> pa.Table:
    """A column for each key of any row; null where a row has none."""
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: [row.get(name) for row in rows] for name in names})


def summarise(runs: Sequence[SealedRun], cost_model: CostModel | None = None, basis: Basis = "a") -> ExperimentSummary:
    """Figures of an experiment from its sealed runs.

    runs: of one experiment, in any order. cost_model: prices channel A of every run; default: each run's own. basis:
    see ``compare``.
    Raises ValueError when the runs belong to several experiments or there are none.
    """
    names = {run.experiment for run in runs}
    if len(names) != 1:
        raise ValueError(f"runs of exactly one experiment are needed, got {sorted(names)}")
    ordered = sorted(runs, key=lambda run: (run.replicate, run.manifest.order_index))
    prices = prices_by_condition(ordered)
    if cost_model is not None:
        given = f"by the costs of {cost_model.name}"
        note = f"A of every run is {given}, which need not be those that the run was made with."
        prices = dict.fromkeys(prices, Prices(cost_model, note, f"A {given}"))
    figures = [prices[run.condition].figures(run) for run in ordered]
    family, status = Family.of(ordered), status_until_decided(runs)
    counted = counted_runs(figures if status is None else status.seen_by_all(figures))
    buckets = {run.condition: run.manifest.decode_buckets for run in ordered}
    factors = {run.condition: run.manifest.factors for run in ordered}
    plain = {
        name: ConditionFigures(
            name=name,
            treatment=group[0].treatment,
            baseline=group[0].baseline,
            buckets=buckets[name],
            runs=tuple(group),
            counted=(summed := tuple(run for run in counted if run.condition == name)),
            measures=_measures([run for run in ordered if run.key in {one.key for one in summed}]),
            factors=factors[name],
            **sums_over(summed),
        )
        for name, group in grouped(figures, lambda run: run.condition).items()
    }
    backend = kind_of(ordered).name
    # Other prices than those that the runs were simulated with are a channel A of their own.
    is_predicted = kind_of_run(backend).is_virtual and cost_model is None
    basis = basis if status is None else status.stop.channel
    conditions = tuple(
        _compared(condition, plain.get(condition.baseline), family, basis, status, is_predicted=is_predicted)
        for condition in plain.values()
    )
    by_device = speeds(figures)
    of_counted = [run for run in ordered if run.key in {one.key for one in counted}]
    return ExperimentSummary(
        experiment=names.pop(),
        title=ordered[0].manifest.title,
        time_scale=ordered[0].manifest.clock.scale,
        conditions=conditions,
        findings=(
            *check_experiment(runs),
            *check_channels(figures),
            *check_independence(_comparisons(conditions)),
            *device_findings(runs, figures, by_device, _comparisons(conditions)),
        ),
        answers=answers(_pairs(conditions, prices), backend, family, status),
        prices=" ".join(dict.fromkeys(alike.note for alike in prices.values() if alike.note)),
        status=status,
        backend=backend,
        served=served_by(ordered),
        is_on_cpu=all(run.manifest.is_on_cpu for run in ordered),
        declared=declared_by(ordered),
        # By other costs than those of its server nothing is known of its load.
        overloads=overloads(ordered, figures) if cost_model is None else {},
        given_costs="" if cost_model is None else cost_model.name,
        serving=_of_each(serving_figures, of_counted),
        sessions=_of_each(session_figures, of_counted),
        speeds=by_device,
        window=window_of(ordered[0]).in_words("model s" if ordered[0].manifest.clock.scale != 1 else "s"),
    )


def _comparisons(conditions: Sequence[ConditionFigures]) -> dict[str, Comparison | None]:
    return {condition.name: condition.comparison for condition in conditions}


def _pairs(conditions: Sequence[ConditionFigures], prices: Mapping[str, Prices]) -> dict[str, Compared]:
    """Every comparison with what its blocks are of."""
    by_name = {condition.name: condition for condition in conditions}
    pairs: dict[str, Compared] = {}
    for condition in conditions:
        if (comparison := condition.comparison) is not None:
            sides = [
                [run for run in each.valid_runs if run.replicate in comparison.replicates]
                for each in (condition, by_name[condition.baseline])
            ]
            missing = without_a([run for side in sides for run in side]) if comparison.a is None else ""
            pairs[condition.name] = Compared(comparison, num_plans(sides[0]), missing, prices[condition.name].short)
    return pairs


def _measures(runs: Sequence[SealedRun]) -> dict[str, float | None]:
    """Every measure over these runs, but the costs, which have columns of their own."""
    own = (*OF_SERVERS, *OF_SIMULATIONS)
    figures: dict[str, float | None] = {}
    for measure in (measure for name, measure in MEASURES.items() if name not in own):
        figures[measure.column] = value_over(measure, runs)
        figures |= {measure.bound_column(end): bound_over(measure, runs, end) for end in measure.ends}
    return figures


def _of_each(
    figures_of: Callable[[str, Sequence[SealedRun]], Shown | None], runs: Sequence[SealedRun]
) -> tuple[Shown, ...]:
    """Figures of the runs of each condition that has any."""
    figures = (figures_of(name, group) for name, group in grouped(runs, lambda run: run.condition).items())
    return tuple(each for each in figures if each is not None)


def _compared(  # noqa: PLR0913  # an option each
    condition: ConditionFigures,
    baseline: ConditionFigures | None,
    family: Family,
    basis: Basis,
    status: SequentialStatus | None,
    *,
    is_predicted: bool,
) -> ConditionFigures:
    if baseline is None or condition.is_baseline:
        return condition
    runs = [condition.valid_runs, baseline.valid_runs]
    if status is not None:
        runs = [tuple(status.seen(condition.name, side)) for side in runs]
        basis = status.basis_of(condition.name)
    comparison = compare(baseline.name, *runs, is_predicted=is_predicted, family=family, basis=basis)
    if comparison is None:
        return condition
    comparison = comparison if status is None else status.applied_to(condition.name, comparison)
    return replace(condition, comparison=comparison)


def _part_rows(condition: ConditionFigures) -> list[dict[str, Any]]:
    """A row for each kind of step, and one for the time between steps."""
    parts = condition.parts
    if parts is None:
        return []

    def row(part: str, **figures: float | None) -> dict[str, Any]:
        columns = dict.fromkeys(("steps", "measured_s", "modelled_s", "error_s", "share_of_B"))
        return {"condition": condition.name, "part": part, **columns, **figures}

    return [
        *(
            row(
                name,
                steps=group.num_steps,
                measured_s=group.measured_ns / NS_PER_S,
                modelled_s=seconds(group.modelled_ns),
                error_s=seconds(group.error_ns),
                share_of_B=None if group.error_ns is None or not parts.b_ns else group.error_ns / parts.b_ns,
            )
            for name, group in parts.groups.items()
        ),
        row(BETWEEN, error_s=parts.between_ns / NS_PER_S, share_of_B=parts.between_ns / (parts.b_ns or 1)),
        row(
            "all: S, A, B \u2212 A",
            steps=sum(group.num_steps for group in parts.groups.values()),
            measured_s=parts.in_steps_ns / NS_PER_S,
            modelled_s=seconds(condition.a_ns),
            error_s=seconds(condition.r_ns),
            share_of_B=None if condition.r_ns is None or not parts.b_ns else condition.r_ns / parts.b_ns,
        ),
    ]


# Columns of runs and of conditions alike, and where in their figures the cells are.
COSTS = same("a_ns", "decode_ns", "prefill_ns", "b_ns", "r_ns", "waiting_session_ns")
OF_STEPS = {"steps_ns": "steps_ns", "between_steps_ns": "parts.between_ns"}
# Of a run alone.
OF_SPEED = {"decode_measured_over_modelled": "parts.decode.speed", "decode_drift": "parts.drift"}
RATIO_OF_STEPS = ("ratio_s", "ratio_s_low", "ratio_s_high")
OF_MEMORY = {
    f"second_memory_{name}": f"second_memory.{name}"
    for name in ("asked_tokens", "loaded_tokens", "loaded_bytes", "stored_bytes")
}

OF_ENERGY = {
    "energy_J": "energy.joules",
    "energy_sampling_error_J": "energy.error_joules",
    "energy_is_emulated": "energy.is_emulated",
}


WORK = {
    "padding_ratio": "padding.ratio",
    "num_steps": "num_steps",
    **{name: f"reuse.{name}" for name in ("num_rearrivals", "num_reused", "reused_tokens")},
    "computed_prefill_tokens": "computed_prefill_tokens",
}
LATENESS = same("rearrival_p50_ms", "rearrival_p99_ms", "start_spread_ms")
GAP_ENDS = {"": "estimate", "_low": "low", "_high": "high"}
COMPARED = {
    **same("ratio_of", "tau"),
    "is_given_costs": "a.interval.is_given_costs",
    **{f"ratio_a_over_b{of}": f"channels.gap.{end}" for of, end in GAP_ENDS.items()},
    "channels": "agreement.value",
    "is_agreed": "is_agreed",
}
ANSWERED = {
    "source": "source.value",
    "p_adjusted": "result.p_adjusted",
    "family": "result.family",
    "verdict": "label",
    "note": "note",
}


def _condition_row(condition: ConditionFigures, every: Sequence[Answer]) -> dict[str, Any]:
    on: dict[Basis, Answer | None] = {channel: answer_on(every, condition.name, channel) for channel in BASES}
    ends = {
        f"ratio_{channel}_{end}": figure_at(answer, f"interval.{end}")
        for channel, answer in on.items()
        for end in ("low", "high")
    }
    return {
        "condition": condition.name,
        "factors": json.dumps(dict(condition.factors)),
        "treatment": condition.treatment,
        "baseline": condition.baseline,
        "buckets": list(condition.buckets),
        "num_runs": len(condition.runs),
        "num_valid_runs": len(condition.valid_runs),
        "num_counted_runs": len(condition.counted),
        **cells(condition, COSTS),
        **cells(condition, OF_STEPS),
        **{f"ratio_{channel}": _ratio(condition.comparison, channel, answer) for channel, answer in on.items()},
        **ends,
        **cells(condition.comparison, COMPARED),
        **cells(condition if condition.counted else None, {**WORK, **OF_MEMORY}),
        **count_cells(condition.counts),
        **cells(condition, OF_ENERGY),
        **cells(condition, LATENESS),
        **cells(main_answers(every).get(condition.name), ANSWERED),
        **condition.measures,
    }


def _ratio(comparison: Comparison | None, channel: Basis, answer: Answer | None) -> float | None:
    """The ratio of a channel, also of B where a simulation has one cost."""
    if answer is not None:
        return answer.ratio
    return figure_at(comparison, f"{channel}.ratio")


def _run_row(run: RunFigures) -> dict[str, Any]:
    return {
        "condition": run.condition,
        "replicate": run.replicate,
        "is_valid": run.is_valid,
        **cells(run, COSTS),
        **cells(run, {**OF_STEPS, **OF_SPEED}),
        **cells(run, {**WORK, **OF_MEMORY}),
        **count_cells(run.counts),
        **cells(run, OF_ENERGY),
        "evictions": run.num_evictions,
        "evictions_dummy": None if run.evictions is None else run.evictions["dummy"],
        **cells(run.lateness, LATENESS),
        "num_failed": run.num_failed,
        "num_aborted": run.num_aborted,
    }


def _in_words(answer: Answer) -> str:
    """ "0.9744 of base (0.9610 to 0.9880), cheaper": the cost ratio, its interval and what it shows."""
    interval = "" if answer.interval is None else f" ({interval_text(answer.interval.low, answer.interval.high)})"
    channels = answer.comparison.agreement
    shown = f"{answer.label} (channels: {channels.value})" if channels.is_missing else answer.label
    return f"{answer.ratio:.4f} of {answer.baseline}{interval}, {shown}"
