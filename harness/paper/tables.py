"""The paper's tables I to XV and S1 to S12 as data: which figure of which analysis stands where, with which digits.

Every figure is computed by ``harness.analysis`` and its neighbours. Source: the paper and its supplement.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.errors import SpecError
from harness.paper import rows
from harness.paper.layout import (
    FOUR,
    ONE,
    SIGNED_FOUR,
    SIGNED_PERCENT,
    SIGNED_THREE,
    THREE,
    TWO,
    Column,
    TableSpec,
    by_condition,
    by_row,
    capitalised,
    make_table,
    percent,
    seconds,
    upper,
    whole,
)
from harness.paper.source import Source
from harness.table import Table

# Columns that several tables of the configurations begin with.
MEASUREMENT = Column("Measurement", rows.measurement_of("configuration"))
USERS = Column("N", rows.factor("configuration", "N"))
CHANGED = Column("Changed configuration", rows.changed_configuration)

MAIN_TABLES = (
    by_row(
        "I",
        "Padding and decode device time with and without tool waiting",
        ("alignment", "alignment"),
        (
            Column("Grid", "grid"),
            Column("N", "N"),
            Column("p_A", "p_A", THREE),
            Column("p_C", "p_C", THREE),
            Column("delta p", "delta_p", SIGNED_THREE),
            Column("Decode device time ratio (with / without tool waiting)", "decode_time_ratio", TWO),
        ),
        notes=("The ratio is channel A's decode part: it depends on the cost model.",),
    ),
    by_row(
        "II",
        "Change in padding at N=6 when bucket 6 is added",
        ("bucket-intervention", "grids"),
        (
            Column("Decode bucket set", "grid"),
            Column("With tool waiting: p_A", "p_A", THREE),
            Column("Without tool waiting: p_C", "p_C", THREE),
            Column("delta p = p_C - p_A", "delta_p", SIGNED_THREE),
        ),
        where=lambda row: row["N"] == 6,
    ),
    by_condition(
        "III",
        "Changes in reuse and computation with more KV slots",
        ("slot-intervention", "prefill by kind"),
        {"8 KV slots": "slots8", "16 KV slots": "batch16"},
        (
            Column("Re-arrival requests reused", "reused"),
            Column("Total reused tokens", "reused_tokens", whole),
            Column("Actual prefill computation of all requests (tokens)", "computed_all", whole),
            Column("Actual prefill computation of re-arrival requests (tokens)", "computed_rearrivals", whole),
            Column("Maximum actual batch size", "largest_batch", whole),
            Column("Total decode steps", "decode_steps", whole),
        ),
        notes=("batch_size changes the number of slots and the limit together.",),
    ),
    by_row(
        "IV",
        "Elapsed time and background session delay by injected prefill length",
        ("prefill-injection", "injection"),
        (
            Column("Injected prompt length (tokens)", "injected_tokens", whole),
            Column("Server-side prefill elapsed time (ms)", "elapsed_ms", ONE),
            Column("Background session delay spike (ms)", "spike_ms", ONE),
            Column("Spike / prefill elapsed time", "spike_over_elapsed", THREE),
        ),
    ),
    TableSpec(
        "V",
        "Confirmed range of the three mechanisms",
        (
            "Mechanism",
            "Range confirmed by intervention",
            "Range confirmed by observation",
            "Computed or derived values",
        ),
        rows.confirmed_range,
        ("bucket-intervention", "slot-intervention", "prefill-injection"),
        ("Cells name the experiments behind each claim, not the claim: that is for `harness decide` and for you.",),
    ),
    by_condition(
        "VI",
        "Conflict between padding and KV reuse observed at N=6",
        ("bucket-intervention", "costs"),
        {"Without tool waiting": "n6-nowaits", "With tool waiting": "n6-waits"},
        (Column("Padding ratio", "p", THREE), Column("Re-arrival requests reused", rows.reused_of_rearrivals)),
    ),
    TableSpec(
        "VII",
        "Coefficients of the decode step cost model",
        ("Item", "Value"),
        rows.coefficients,
        ("step-cost",),
        ("Without the server's own report alpha is inside f; docs/calibration.md says why.",),
    ),
    TableSpec(
        "VIII",
        "Configurations used for cost prediction validation and configuration selection evaluation",
        ("Configuration", "batch_size (= KV slots)", "Decode bucket set"),
        rows.configurations,
        ("configuration",),
    ),
    by_row(
        "IX",
        "Prediction results for cost ratios between configurations",
        ("configuration", "predictions"),
        (
            MEASUREMENT,
            USERS,
            CHANGED,
            Column("Predicted ratio", "predicted_ratio", FOUR),
            Column("Observation-based ratio", "observed_ratio_A", FOUR),
            Column("Error e", "error", SIGNED_FOUR),
            Column("Decision", rows.decision),
        ),
    ),
    by_row(
        "X",
        "Time by cost channel for the baseline configuration",
        ("configuration", "costs"),
        (
            MEASUREMENT,
            USERS,
            Column("Channel A", "A_s", seconds),
            Column("Channel B", "B_s", seconds),
            Column("r = B - A", "r_s", seconds),
        ),
        where=lambda row: row["condition"] == row["baseline"],
    ),
    TableSpec(
        "XI",
        "Prediction error with and without recomputation of re-arrival times",
        (
            "Measurement",
            "N",
            "Changed configuration",
            "Observation-based ratio",
            "Full simulator ratio",
            "|e| full",
            "Fixed-arrival ratio",
            "|e| fixed",
        ),
        rows.fixed_arrivals,
        ("configuration",),
        ("Fixed arrivals: each re-arrival comes when it came in the baseline's run of the same replicate.",),
    ),
    by_row(
        "XII",
        "Cost savings rates by configuration under confirmatory conditions",
        ("configuration", "decomposition"),
        (
            Column("Measurement condition", rows.measured_users),
            CHANGED,
            Column("Channel A cost ratio", "ratio_A", FOUR),
            Column("Channel A savings", "saving_A", percent),
            Column("Channel B cost ratio", "ratio_B", FOUR),
            Column("Channel B savings", "saving_B", percent),
        ),
        where=lambda row: row["replicate"] == "sum" and row["N"] in (6, 8),
        first=lambda row: row["N"] == 8,
    ),
    TableSpec(
        "XIII",
        "Cost and reuse changes with additional KV slots",
        (
            "N",
            *(f"Slot {slots} cost ratio" for slots in rows.SATURATION_SLOTS),
            "Reuse counts: 16 -> 24 -> 32",
        ),
        rows.saturation,
        ("saturation",),
    ),
    TableSpec(
        "XIV",
        "Compile cost of changed configurations",
        ("Configuration", "Buckets", "Compile time", "Compiled artifact size"),
        rows.compile_cost,
        remark=rows.who_compiled,
    ),
    TableSpec(
        "XV",
        "Memory usage with additional KV slots",
        ("KV slots", "KV capacity per device (arithmetic)", "Total memory per device after model loading"),
        rows.memory,
        ("saturation",),
        ("Arithmetic for Qwen3-4B on 4 devices: 144 KiB per token, 8,192 tokens per slot. Loaded: fullest report.",),
    ),
)
SUPPLEMENT_TABLES = (
    by_row(
        "S1",
        "Channel ratio differences in no-treatment repeated measurements",
        ("no-treatment", "repeats"),
        (
            Column("Aggregation unit", "unit", capitalised),
            Column("N", "N"),
            Column("Median", "median", FOUR),
            Column("95th percentile", "q95", FOUR),
            Column("Maximum", "max", FOUR),
        ),
        first=lambda row: str(row["unit"]).startswith("single"),
        notes=("Pairs share runs: they are not independent samples.",),
    ),
    by_row(
        "S2",
        "Per-artifact, per-bucket measurements in the recompilation variance recheck",
        ("recompilation", "sessions"),
        (
            Column("Bucket", "bucket"),
            Column("Artifact", "artifact", upper),
            Column("Time per session (ms)", "ms_per_session"),
            Column("Median (ms)", "median_ms", TWO),
            Column("Null pairs", "null_pairs"),
            Column("Null median (ms)", "null_median_ms", TWO),
            Column("Null q95 (ms)", "null_q95_ms", TWO),
            Column("Null max (ms)", "null_max_ms", TWO),
        ),
        remark=rows.whose_times,
    ),
    TableSpec(
        "S3",
        "Per-bucket median differences across artifacts and their classification",
        ("Comparison", "Bucket", "Median x (ms)", "Median y (ms)", "Difference (ms)", "q95 (ms)", "Classification"),
        rows.recompilation,
        ("recompilation",),
        remark=rows.whose_times,
    ),
    by_row(
        "S4",
        "Event counts of the direct-observation runs for the dummy block",
        ("dummy-lifecycle", "dummy lifecycle"),
        (
            Column("Run", "run"),
            Column("Decode steps", "decode_steps"),
            Column("Partial steps", "partial_steps"),
            Column("Dummy requests", "dummy_requests"),
            Column("Steps at limit", "steps_at_limit"),
            Column("Evictions", "evictions"),
            Column("Eviction label", "callers"),
            Column("Never-reallocated evictions", "never_reallocated"),
        ),
        remark=rows.who_counted,
    ),
    by_row(
        "S5",
        "Per-block results at N=7",
        ("alignment", "blocks"),
        (
            Column("Measurement batch", rows.measurement_of("alignment")),
            Column("Block", rows.block),
            Column("R", "R", FOUR),
            Column("Direction band", "direction", capitalised),
            Column("p_A", "p_A", FOUR),
            Column("p_C", "p_C", FOUR),
            Column("delta p", "delta_p", SIGNED_FOUR),
        ),
        where=lambda row: row["N"] == 7,
    ),
    by_row(
        "S6",
        "Summed results at N=7",
        ("alignment", "alignment"),
        (
            Column("Aggregate", "replicates", "All {} blocks".format),
            Column("R", "R", FOUR),
            Column("delta p", "delta_p", SIGNED_FOUR),
        ),
        where=lambda row: row["N"] == 7,
    ),
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
        rows.padding_contributions,
        ("bucket-intervention",),
        ("Shown only where h(n) is the same on both grids.",),
    ),
    by_row(
        "S8",
        "Per-replicate decomposition of the validation comparisons and savings rates",
        ("configuration", "decomposition"),
        (
            MEASUREMENT,
            Column("N", "N"),
            CHANGED,
            Column("Replicate", rows.block),
            Column("Baseline A (s)", "baseline_A_s", THREE),
            Column("Changed A (s)", "changed_A_s", THREE),
            Column("A ratio", "ratio_A", FOUR),
            Column("B ratio", "ratio_B", FOUR),
            Column("Channel diff.", "difference", FOUR),
            Column("X(A)", "saving_A", SIGNED_PERCENT),
            Column("X(B)", "saving_B", SIGNED_PERCENT),
        ),
        notes=("The sum decides; a replicate shows its composition, it is no uncertainty interval.",),
    ),
    TableSpec(
        "S9",
        "N x replicate decomposition of the additional-slot saturation",
        (
            "N",
            "Replicate",
            *(f"Slot {slots} {channel} ratio" for slots in rows.SATURATION_SLOTS for channel in "AB"),
            "Reuse (16 / 24 / 32)",
        ),
        rows.saturation_by_replicate,
        ("saturation",),
    ),
    TableSpec(
        "S10",
        "Selected configuration by set of N and score definition",
        (
            "Score",
            "Set of N",
            "Selected configuration",
            "batch_size",
            "Search sum ratio",
            "Search per-N mean",
            "Eval. sum ratio",
            "Eval. per-N mean",
            "Matches reference",
            "Rank of reference config.",
        ),
        rows.selections,
        notes=("Simulated, not measured. The reference is the space's own score on all its N.",),
    ),
    TableSpec(
        "S11",
        "Top-20 sets by condition compared with the reference condition",
        ("Score", "Set of N", "Common with reference", "Reference only", "This condition only"),
        rows.top_sets,
        notes=("Simulated, not measured.",),
    ),
    TableSpec(
        "S12",
        "Predicted ratios and simulated reuse before and after including the dummy block rule",
        (
            "Measurement",
            "N",
            "Configuration",
            "Observed ratio",
            "Not included: ratio",
            "Not included: |e|",
            "Included: ratio",
            "Included: |e|",
            "Simulated reuse (not incl. -> incl.)",
            "Measured reuse",
        ),
        rows.dummy_rule,
        ("configuration",),
        ("Both simulations follow the paper's own rules, `paper` and `paper+dummy`, on the plans of these runs.",),
    ),
)


def paper_tables(source: Source, numbers: Sequence[str] = ()) -> list[Table]:
    """The named tables, or all 27, in the paper's order. SpecError for a number that the paper does not have."""
    known = {spec.number: spec for spec in (*MAIN_TABLES, *SUPPLEMENT_TABLES)}
    asked = [number.upper() for number in numbers]
    if unknown := [number for number in asked if number not in known]:
        raise SpecError(f"the paper has no table {unknown[0]!r}", where="--table", hint=f"Tables: {', '.join(known)}")
    return [make_table(spec, source) for number, spec in known.items() if not asked or number in asked]
