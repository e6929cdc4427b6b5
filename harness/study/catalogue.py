"""The analyses of the shipped experiments, by name: sealed runs in, a few small tables out.

An experiment names its analysis; any other experiment gets the general one. Nothing is decided here. Next:
``harness analyse`` prints the result; ``decide`` is separate.
Definitions: docs/method.md, "Experiments".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.analysis.method import stats
from harness.analysis.method.compare import compare
from harness.analysis.method.device_tables import device_tables
from harness.analysis.method.devices import mean_interval
from harness.analysis.method.figures import run_figures
from harness.analysis.method.interference import Injection, injections
from harness.analysis.method.predictions import Predictions
from harness.analysis.method.speeds import speeds
from harness.analysis.method.stats import Interval
from harness.analysis.method.tabular import AnalysisResult, Cell, ResultTable, table_of
from harness.analysis.method.verdicts import ExperimentRuns
from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.kinds import origin_note
from harness.records import SealedRun, paired
from harness.spec import AnalysisName
from harness.spec.rules import InterferenceRule
from harness.study import alignment, effects, fleet, recompilation, repeats, survival
from harness.study.ceilings import ceilings_table
from harness.study.waiting import measured_waiting, waiting_table

Tables = tuple[ResultTable, ...]
AnalysisOutput = tuple[Tables, dict[str, Interval], tuple[str, ...]]
INTERFERENCE = InterferenceRule(name="interference", kind="interference")


def analyse(runs: Sequence[SealedRun], predictions: Predictions | None = None, name: str = "") -> AnalysisResult:
    """The analysis that an experiment names (or ``name``), over its valid runs.

    predictions: needed only by tables that compare with them. Raises SpecError for an unknown name or no valid run.
    """
    if not any(run.is_valid for run in runs):
        raise SpecError("no valid run to analyse", where="runs", hint="See `harness runs` for why they are invalid")
    asked = name or runs[0].spec.analysis or "general"
    compute = next((function for known, function in ANALYSES.items() if known == asked), None)
    if compute is None:
        raise SpecError(
            f"unknown analysis {asked!r}", where="analysis", hint=f"Use one of {', '.join(sorted(ANALYSES))}"
        )
    experiment = ExperimentRuns(runs, predictions)
    tables, intervals, notes = compute(experiment)
    fewest = min(len({run.replicate for run in group}) for group in experiment.runs.values())
    if fewest < stats.MIN_REPLICATES:
        notes = (*notes, f"{fewest} valid replicates of a condition: too few for an interval of a ratio or a mean")
    invalid = sum(not run.is_valid for run in runs)
    if invalid:
        notes = (*notes, f"{invalid} invalid runs are left out")
    kept = tuple(table for table in (*tables, *_by_device(experiment)) if table.rows)
    return AnalysisResult(runs[0].experiment, asked, kept, notes, intervals, origin_note(runs[0].manifest.backend))


Table = Callable[[ExperimentRuns], ResultTable]


def _by_device(experiment: ExperimentRuns) -> list[ResultTable]:
    """Devices and comparisons on each of them; nothing where fewer than two made the runs."""
    found = speeds([figures for condition in experiment.runs for figures in experiment.figures(condition)])
    compared = {
        name: compare(baseline, experiment.figures(name), experiment.figures(baseline))
        for name, baseline in experiment.compared()
    }
    return device_tables(found, compared) if found is not None else []


FORMULAS: tuple[Table, ...] = (survival.formula_table, survival.exceptions_table)


def _show(
    *tables: Table, notes: tuple[str, ...] = (), with_ratios: bool = False
) -> Callable[[ExperimentRuns], AnalysisOutput]:
    """An analysis that is its tables in order. with_ratios: intervals of the ratios over replicates too."""

    def found(experiment: ExperimentRuns) -> AnalysisOutput:
        intervals = repeats.ratio_intervals(experiment) if with_ratios else {}
        return tuple(table(experiment) for table in tables), intervals, notes

    return found


def _sequential_survival(experiment: ExperimentRuns) -> AnalysisOutput:
    critical = survival.critical_count(experiment)
    count = "none" if critical is None else critical
    note = f"critical request count: {count}; of this order of requests, no threshold on N"
    tables = (
        survival.survival_table(experiment),
        survival.formula_table(experiment),
        survival.exceptions_table(experiment),
    )
    return tables, {}, (note,)


def _prefill_injection(experiment: ExperimentRuns) -> AnalysisOutput:
    runs = [run for group in experiment.runs.values() for run in group]
    found = injections(runs, INTERFERENCE)
    return (
        (_by_length(found), _by_run(found)),
        {},
        (
            "elapsed is the server's prefill metric: scheduling and host time included",
            "intervals are between received chunks, which need not be tokens",
        ),
    )


def _by_length(found: dict[str, list[Injection]]) -> ResultTable:
    rows: list[dict[str, Cell]] = []
    for group in found.values():
        if not group[0].spikes:
            continue
        elapsed = [one.prefill_ms for one in group if one.prefill_ms is not None]
        spike_ms = stats.median(one.spike_ms for one in group)
        elapsed_ms = stats.median(elapsed) if elapsed else None
        rows.append(
            {
                "injected_tokens": group[0].prompt_tokens,
                "elapsed_ms": elapsed_ms,
                "baseline_ms": stats.median(one.baseline_ms for one in group),
                "spike_ms": spike_ms,
                "spike_over_elapsed": None if not elapsed_ms else spike_ms / elapsed_ms,
                "simultaneous": sum(one.is_simultaneous for one in group),
                "waiting_session_s": stats.median(one.waiting_session_s for one in group),
                "runs": len(group),
            }
        )
    caption = "Medians over runs; a run's spike is the median over its background sessions (Table IV)"
    return table_of("injection", caption, sorted(rows, key=lambda row: int(row["injected_tokens"] or 0)))


def _by_run(found: dict[str, list[Injection]]) -> ResultTable:
    rows: list[dict[str, Cell]] = [
        {
            "condition": one.condition,
            "replicate": one.replicate,
            "cached_tokens": one.cached_tokens,
            "elapsed_ms": one.prefill_ms,
            "smallest_ratio": min((spike.ratio for spike in one.spikes), default=None),
            "start_spread_ms": one.start_spread_ms if one.spikes else None,
            "end_spread_ms": one.end_spread_ms if one.spikes else None,
            "other_crossings": len(one.crossings),
            "last_crossing_s": max((crossing.end_s for crossing in one.crossings), default=None),
        }
        for group in found.values()
        for one in group
    ]
    return table_of(
        "injection by run", "Ratios are spike / baseline interval; crossings lie outside the injection", rows
    )


def _joined(experiment: ExperimentRuns) -> AnalysisOutput:
    rows: list[dict[str, Cell]] = []
    intervals: dict[str, Interval] = {}
    for condition, baseline in experiment.compared():
        pairs = paired(experiment.runs.get(condition, []), experiment.runs.get(baseline, []))
        for own, base in pairs:
            rows.append({"condition": condition, "replicate": own.replicate, **_joint(experiment, own, base)})
        own_rows = [row for row in rows if row["condition"] == condition]
        for name in (
            "reuse_gained_tokens",
            "prefill_saved_s",
            "waiting_saved_session_s",
            "waiting_saved_measured_session_s",
        ):
            known = [(value, run_figures(own)) for row, (own, _) in zip(own_rows, pairs, strict=True)
                     if isinstance(value := row[name], (int, float))]  # fmt: skip
            values, of = [float(value) for value, _ in known], [run for _, run in known]
            if (interval := mean_interval(values, of, unit="replicates")) is not None:
                intervals[f"{condition}: mean {name}"] = interval
    caption = "Per replicate, against the baseline: reuse restored, prefill saved, waiting of other sessions saved"
    tables = (
        table_of("joined", caption, rows),
        waiting_table(experiment),
        survival.prefill_kinds_table(experiment),
        alignment.cost_table(experiment),
    )
    notes = (
        "waiting is modelled (T of each prefill times the requests held back) and measured (by the observer inside the "
        "server, else from log stamps and streams)",
        "waiting is session time: it is never added to device time",
    )
    return tables, intervals, notes


def _joint(experiment: ExperimentRuns, own: SealedRun, base: SealedRun) -> dict[str, Cell]:
    figures = [
        next(one for one in experiment.figures(run.condition) if one.replicate == run.replicate) for run in (own, base)
    ]
    modelled = [one.waiting_session_ns for one in figures]
    seen = [measured_waiting(run) for run in (own, base)]
    measured = [None if one is None else one.session_ns for one in seen]
    prefill_ns = [0 if one.a is None else one.a.prefill_ns for one in figures]
    return {
        "reused": f"{figures[1].reuse.num_reused} -> {figures[0].reuse.num_reused}",
        "reuse_gained_tokens": figures[0].reuse.reused_tokens - figures[1].reuse.reused_tokens,
        "computed_saved_tokens": figures[1].computed_prefill_tokens - figures[0].computed_prefill_tokens,
        "prefill_saved_s": (prefill_ns[1] - prefill_ns[0]) / NS_PER_S,
        "waiting_saved_session_s": _difference_s(modelled[1], modelled[0]),
        "waiting_saved_measured_session_s": _difference_s(measured[1], measured[0]),
        "ratio_A": _ratio_a(figures),
    }


def _ratio_a(figures: Sequence[object]) -> float | None:
    a_ns = [getattr(getattr(one, "a", None), "total_ns", None) for one in figures]
    return a_ns[0] / a_ns[1] if a_ns[0] is not None and a_ns[1] else None


def _difference_s(left: int | None, right: int | None) -> float | None:
    return None if left is None or right is None else (left - right) / NS_PER_S


def _step_cost(experiment: ExperimentRuns) -> AnalysisOutput:
    decode, prefill = recompilation.step_table(experiment), recompilation.prefill_table(experiment)
    errors = {
        "decode": recompilation.largest_model_error_ms(decode, "median_ms"),
        "prefill": recompilation.largest_model_error_ms(prefill, "elapsed_ms"),
    }
    notes = [
        f"largest distance to the cost model, {kind}: {error:.3f} ms"
        for kind, error in errors.items()
        if error is not None
    ]
    return (decode, prefill), {}, tuple(notes)


def _saturation(experiment: ExperimentRuns) -> AnalysisOutput:
    adjacent, intervals = repeats.adjacent_table(experiment)
    tables = (adjacent, repeats.saturation_table(experiment), alignment.cost_table(experiment))
    return tables, intervals, ("an operational classification, no equivalence test",)


AT_ONCE = "the blocks of a round ran at once by plan: a round is one datum, whatever the number of its devices"
ANALYSES: dict[AnalysisName, Callable[[ExperimentRuns], AnalysisOutput]] = {
    "general": _show(
        alignment.cost_table,
        repeats.decomposition_table,
        ceilings_table,
        *FORMULAS,
        with_ratios=True,
    ),
    "alignment": _show(
        alignment.alignment_table,
        alignment.block_table,
        alignment.histogram_table,
        alignment.cost_table,
        notes=("decode_time_ratio is channel A's decode part: it depends on the cost model",),
    ),
    "bucket-intervention": _show(
        alignment.grid_table,
        alignment.contribution_table,
        alignment.histogram_table,
        alignment.cost_table,
        notes=("contributions are shown only where h(n) is the same on both grids",),
    ),
    "sequential-survival": _sequential_survival,
    "slot-intervention": _show(
        survival.prefill_kinds_table,
        alignment.cost_table,
        ceilings_table,
        *FORMULAS,
        survival.lost_reuse_table,
        waiting_table,
        alignment.histogram_table,
        notes=("batch_size changes slots and limit together; kv_slots alone holds the limit",),
        with_ratios=True,
    ),
    "prefill-injection": _prefill_injection,
    "joined": _joined,
    "dummy-lifecycle": _show(
        survival.lifecycle_table,
        survival.survival_table,
        notes=(
            "a dummy request that finds a free slot leaves no line: without an observer the requests are derived, one "
            "in every decode step with 0 < n < limit",
        ),
    ),
    "step-cost": _step_cost,
    "recompilation": _show(recompilation.session_table, recompilation.step_table),
    "no-treatment": _show(
        repeats.repeats_table,
        repeats.repeat_sensitivity_table,
        repeats.survival_variation_table,
        notes=("pairs share runs: they are not counted as independent samples",),
    ),
    "configuration": _show(
        repeats.prediction_table,
        repeats.decomposition_table,
        alignment.cost_table,
        survival.prefill_kinds_table,
        repeats.sensitivity_table,
        with_ratios=True,
    ),
    "saturation": _saturation,
    "dispersion": _show(
        survival.prefill_kinds_table,
        repeats.decomposition_table,
        alignment.cost_table,
        alignment.histogram_table,
        notes=("the total wait is the same in both conditions, to the ns",),
        with_ratios=True,
    ),
    "effects": _show(
        effects.effects_table,
        survival.prefill_kinds_table,
        alignment.cost_table,
        notes=("an interval that holds 0 (a cost ratio: 1) shows no effect",),
        with_ratios=True,
    ),
    "neighbours": _show(fleet.neighbours_table, alignment.cost_table, notes=(AT_ONCE,)),
    "duet": _show(fleet.duet_table, alignment.cost_table, notes=(AT_ONCE,)),
}
