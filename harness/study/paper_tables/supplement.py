"""Tables S1 to S12 of the paper's supplement, from the experiments of the catalogue and the configuration search.

Layout only: which column of which analysis stands where, and with how many digits.
Source: the paper's supplementary material, S1 to S9.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from harness.analysis.method.figures import ReuseFigures
from harness.analysis.method.tabular import Cell
from harness.analysis.method.verdicts import decide_experiment
from harness.sim.search.rank import SensitivityRow, sensitivity
from harness.sim.search.run import SearchResult, search
from harness.sim.search.space import SpaceSpec
from harness.spec.rules import load_rule
from harness.study.paper_sums import contributions
from harness.study.paper_tables.artifacts import SATURATION_SLOTS
from harness.study.paper_tables.cells import NONE, decimals, percent, text, whole
from harness.study.paper_tables.main import CONFIGURATIONS, measurement
from harness.study.paper_tables.source import NotRunError, Source
from harness.study.paper_tables.table import Rows, TableSpec
from harness.study.variants import VariantRatio, predicted_ratio

SEARCH_COMMAND = "harness search paper -o runs/search-paper --set rules=paper, then harness tables --search FOLDER"
ARTIFACT_PAIRS = {
    "a1 vs a3": "A1 vs. A3 (recompilation)",
    "a1 vs a2": "A1 vs. A2 (grid change)",
    "a2 vs a3": "A2 vs. A3",
}


def repeats(source: Source) -> Rows:
    rows = source.rows("no-treatment", "repeats")
    return [
        (
            str(row["unit"]).capitalize(),
            text(row["N"]),
            *(decimals(row[key], 4) for key in ("median", "q95", "max")),
        )
        for unit in dict.fromkeys(row["unit"] for row in rows)
        for row in rows
        if row["unit"] == unit
    ]


def sessions(source: Source) -> Rows:
    return [
        (
            text(row["bucket"]),
            str(row["artifact"]).upper(),
            text(row["ms_per_session"]),
            decimals(row["median_ms"], 2),
            text(row["null_pairs"]),
            *(decimals(row[key], 2) for key in ("null_median_ms", "null_q95_ms", "null_max_ms")),
        )
        for row in source.rows("recompilation", "sessions")
    ]


def _place(pair: str) -> int:
    """Where the paper has a pair; behind all of its own where it has none."""
    order = list(ARTIFACT_PAIRS)
    return order.index(pair) if pair in order else len(order)


def whose_times(source: Source) -> str:
    """Which of the two figures Tables S2 and S3 show for these runs."""
    names = {str(row["source"]) for row in source.rows("recompilation", "sessions")}
    if names == {"reported"}:
        return "Model p50 of the server's own report with the bucket exactly full, as in the paper."
    return (
        "Whole step periods with the bucket exactly full, sampler and host included: not every session has a report of "
        "the server's own (VLLM_RBLN_METRICS), whose model p50 the paper prints."
    )


def recompilation(source: Source) -> Rows:
    decisions = decide_experiment(
        [load_rule("recompilation")], source.experiment("recompilation"), is_confirmatory=True
    )
    found: list[tuple[str, ...]] = []
    for decision in sorted(decisions, key=lambda one: _place(one.subject.partition(",")[0])):
        pair, _, bucket = decision.subject.partition(", bucket ")
        numbers = decision.numbers
        keys = ("median_x_ms", "median_y_ms", "difference_ms", "threshold_ms")
        values = (decimals(numbers.get(key), 2) for key in keys)
        found.append(
            (ARTIFACT_PAIRS.get(pair, pair.upper()), bucket, *values, decision.label or decision.outcome.value)
        )
    return found


def lifecycle(source: Source) -> Rows:
    return [
        (
            text(row["run"]),
            text(row["decode_steps"]),
            text(row["partial_steps"]),
            text(row["dummy_requests"]),
            text(row["steps_at_limit"]),
            text(row["evictions"]),
            text(row["callers"]) or NONE,
            text(row["never_reallocated"]),
        )
        for row in source.rows("dummy-lifecycle", "dummy lifecycle")
    ]


def who_counted(source: Source) -> str:
    """Whether the dummy requests of Table S4 were seen or derived."""
    cells = [str(row["dummy_requests"]) for row in source.rows("dummy-lifecycle", "dummy lifecycle")]
    if any("derived" in cell for cell in cells):
        return (
            "Derived: by the scheduler's source there is one dummy request in every decode step with 0 < n < limit. "
            "One that evicts nothing is in no log; the observer inside a real stack counts them."
        )
    return "Dummy requests as the observer inside the server counted them."


def blocks_at_seven(source: Source) -> Rows:
    return [
        (
            measurement(source, "alignment"),
            str(int(str(row["replicate"])) + 1),
            decimals(row["R"], 4),
            text(row["direction"]).capitalize(),
            decimals(row["p_A"], 4),
            decimals(row["p_C"], 4),
            decimals(row["delta_p"], 4, sign=True),
        )
        for row in source.rows("alignment", "blocks")
        if row["N"] == 7
    ]


def sums_at_seven(source: Source) -> Rows:
    return [
        (f"All {row['replicates']} blocks", decimals(row["R"], 4), decimals(row["delta_p"], 4, sign=True))
        for row in source.rows("alignment", "alignment")
        if row["N"] == 7
    ]


def padding_contributions(source: Source) -> Rows:
    condition = "n6-nowaits-bucket6"
    rows = [row for row in source.rows("bucket-intervention", "contributions") if row["condition"] == condition]
    histograms = {row["condition"]: row for row in source.rows("bucket-intervention", "histogram")}
    steps = histograms.get(condition, {}).get("steps")
    return [
        (
            one.n,
            whole(one.num_steps),
            one.bucket_change,
            whole(one.slots_removed),
            percent(one.share_of_slots, 1),
            decimals(one.drop_of_p, 7),
            percent(one.share_of_drop, 1),
        )
        for one in contributions(rows, steps if isinstance(steps, int) else 0)
    ]


def decomposition(source: Source) -> Rows:
    return [
        (
            measurement(source),
            text(row["N"]),
            CONFIGURATIONS.get(
                source.factor("configuration", str(row["condition"]), "configuration"), text(row["condition"])
            ),
            "Sum" if row["replicate"] == "sum" else str(int(str(row["replicate"])) + 1),
            decimals(row["baseline_A_s"], 3),
            decimals(row["changed_A_s"], 3),
            *(decimals(row[key], 4) for key in ("ratio_A", "ratio_B", "difference")),
            percent(row["saving_A"], sign=True),
            percent(row["saving_B"], sign=True),
        )
        for row in source.rows("configuration", "decomposition")
    ]


def saturation_by_replicate(source: Source) -> Rows:
    found: dict[tuple[str, int], dict[str, Mapping[str, Cell]]] = {}
    for row in source.rows("saturation", "saturation by replicate"):
        n, slots = (source.factor("saturation", str(row["condition"]), name) for name in ("N", "slots"))
        found.setdefault((n, int(str(row["replicate"]))), {})[slots] = row
    rows: list[tuple[str, ...]] = []
    for (n, replicate), by_slots in found.items():
        levels: list[Mapping[str, Cell]] = [by_slots.get(str(slots), {}) for slots in SATURATION_SLOTS]
        ratios = (decimals(level.get(key), 4) for level in levels for key in ("ratio_A", "ratio_B"))
        reuse = " / ".join(text(level.get("reused")) for level in levels)
        rows.append((n, str(replicate + 1), *ratios, reuse))
    return rows


def _search(source: Source) -> SearchResult:
    folder = source.search
    if folder is None or not (folder / "ledger.parquet").is_file():
        raise NotRunError(SEARCH_COMMAND)
    return search(_space(folder), folder)


def _space(folder: Path) -> SpaceSpec:
    return SpaceSpec.model_validate(json.loads((folder / "search.json").read_text(encoding="utf-8"))["space"])


def _sensitivity(source: Source) -> tuple[SearchResult, list[SensitivityRow]]:
    result = _search(source)
    return result, sensitivity(result.judged, result.baseline, result.space)


def selections(source: Source) -> Rows:
    result, rows = _sensitivity(source)
    return [
        (
            row.score,
            ", ".join(map(str, row.users)),
            "{" + ", ".join(map(str, result.candidate(row.selected).buckets)) + "}",
            text(result.candidate(row.selected).limit),
            *(
                decimals(value, 4)
                for value in (row.search_sum, row.search_per_n, row.evaluation_sum, row.evaluation_per_n)
            ),
            "Yes" if row.is_reference_choice else "No",
            text(row.reference_rank),
        )
        for row in rows
    ]


def top_sets(source: Source) -> Rows:
    _result, rows = _sensitivity(source)
    return [
        (
            row.score,
            ", ".join(map(str, row.users)),
            text(row.common_top),
            *[text(row.size_top - row.common_top)] * 2,
        )
        for row in rows
    ]


def dummy_rule(source: Source) -> Rows:
    experiment = source.experiment("configuration")
    found: list[tuple[str, ...]] = []
    for condition in experiment.runs:
        baseline = experiment.baselines[condition]
        plain = predicted_ratio(experiment, condition, baseline, "paper")
        dummy = predicted_ratio(experiment, condition, baseline, "paper+dummy")
        if plain is None or dummy is None:
            continue
        name = source.factor("configuration", condition, "configuration")
        figures = experiment.figures(condition)
        measured = ReuseFigures(tuple(one for run in figures for one in run.reuse.rearrivals)).share_text
        is_baseline = condition == baseline
        found.append(
            (
                measurement(source),
                source.factor("configuration", condition, "N"),
                CONFIGURATIONS.get(name, name),
                decimals(plain.observed_ratio, 4),
                *_ratio_and_error(plain, is_baseline),
                *_ratio_and_error(dummy, is_baseline),
                f"{plain.num_reused} -> {dummy.num_reused} / {plain.num_rearrivals}",
                measured,
            )
        )
    return found


def _ratio_and_error(variant: VariantRatio, is_baseline: bool) -> tuple[str, str]:
    return decimals(variant.ratio, 4), NONE if is_baseline else decimals(variant.error, 4)


COMPARED = ("Measurement", "N", "Configuration")
SELECTION = ("Score", "Set of N")
SUPPLEMENT_TABLES = (
    TableSpec(
        "S1",
        "Channel ratio differences in no-treatment repeated measurements",
        ("Aggregation unit", "N", "Median", "95th percentile", "Maximum"),
        repeats,
        ("no-treatment",),
        ("Pairs share runs: they are not independent samples.",),
    ),
    TableSpec(
        "S2",
        "Per-artifact, per-bucket measurements in the recompilation variance recheck",
        (
            "Bucket",
            "Artifact",
            "Time per session (ms)",
            "Median (ms)",
            "Null pairs",
            "Null median (ms)",
            "Null q95 (ms)",
            "Null max (ms)",
        ),
        sessions,
        ("recompilation",),
        remark=whose_times,
    ),
    TableSpec(
        "S3",
        "Per-bucket median differences across artifacts and their classification",
        ("Comparison", "Bucket", "Median x (ms)", "Median y (ms)", "Difference (ms)", "q95 (ms)", "Classification"),
        recompilation,
        ("recompilation",),
        remark=whose_times,
    ),
    TableSpec(
        "S4",
        "Event counts of the direct-observation runs for the dummy block",
        (
            "Run",
            "Decode steps",
            "Partial steps",
            "Dummy requests",
            "Steps at limit",
            "Evictions",
            "Eviction label",
            "Never-reallocated evictions",
        ),
        lifecycle,
        ("dummy-lifecycle",),
        remark=who_counted,
    ),
    TableSpec(
        "S5",
        "Per-block results at N=7",
        ("Measurement batch", "Block", "R", "Direction band", "p_A", "p_C", "delta p"),
        blocks_at_seven,
        ("alignment",),
    ),
    TableSpec("S6", "Summed results at N=7", ("Aggregate", "R", "delta p"), sums_at_seven, ("alignment",)),
    TableSpec(
        "S7",
        "Contribution to padding reduction by active request count",
        (
            "Actual requests n",
            "h(n)",
            "Bucket change",
            "Padding slots reduced",
            "Share of slot reduction",
            "Contribution to p drop",
            "Share of drop",
        ),
        padding_contributions,
        ("bucket-intervention",),
        ("Shown only where h(n) is the same on both grids.",),
    ),
    TableSpec(
        "S8",
        "Per-replicate decomposition of the validation comparisons and savings rates",
        (
            "Measurement",
            "N",
            "Changed configuration",
            "Replicate",
            "Baseline A (s)",
            "Changed A (s)",
            "A ratio",
            "B ratio",
            "Channel diff.",
            "X(A)",
            "X(B)",
        ),
        decomposition,
        ("configuration",),
        ("The sum decides; a replicate shows its composition, it is no uncertainty interval.",),
    ),
    TableSpec(
        "S9",
        "N x replicate decomposition of the additional-slot saturation",
        (
            "N",
            "Replicate",
            *(f"Slot {slots} {channel} ratio" for slots in SATURATION_SLOTS for channel in "AB"),
            "Reuse (16 / 24 / 32)",
        ),
        saturation_by_replicate,
        ("saturation",),
    ),
    TableSpec(
        "S10",
        "Selected configuration by set of N and score definition",
        (
            *SELECTION,
            "Selected configuration",
            "batch_size",
            "Search sum ratio",
            "Search per-N mean",
            "Eval. sum ratio",
            "Eval. per-N mean",
            "Matches reference",
            "Rank of reference config.",
        ),
        selections,
        (),
        ("Simulated, not measured. The reference is the space's own score on all its N.",),
    ),
    TableSpec(
        "S11",
        "Top-20 sets by condition compared with the reference condition",
        (*SELECTION, "Common with reference", "Reference only", "This condition only"),
        top_sets,
        (),
        ("Simulated, not measured.",),
    ),
    TableSpec(
        "S12",
        "Predicted ratios and simulated reuse before and after including the dummy block rule",
        (
            *COMPARED,
            "Observed ratio",
            "Not included: ratio",
            "Not included: |e|",
            "Included: ratio",
            "Included: |e|",
            "Simulated reuse (not incl. -> incl.)",
            "Measured reuse",
        ),
        dummy_rule,
        ("configuration",),
        ("Both simulations follow the paper's own rules, `paper` and `paper+dummy`, on the plans of these runs.",),
    ),
)
