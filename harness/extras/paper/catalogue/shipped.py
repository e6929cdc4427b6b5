"""The analyses of the shipped experiments: which tables each one shows, its notes and its intervals."""

from __future__ import annotations

from harness.extras.paper.catalogue import alignment, costs, interference, repeats, reuse
from harness.judge.catalogue import Analysis, prediction_table

AT_ONCE = "the blocks of a round ran at once by plan: a round is one datum, whatever the number of its devices"

GENERAL = Analysis(
    "general",
    "cost on both channels, ceilings of reuse, formula C against measurement",
    (costs.cost_table, costs.decomposition_table, reuse.ceilings_table, reuse.formula_table, reuse.exceptions_table),
    intervals=costs.ratio_intervals,
)
CONFIGURATION = Analysis(
    "configuration",
    "predicted and measured cost ratios of configurations, and how far the channels agree",
    (prediction_table, costs.decomposition_table, costs.cost_table, reuse.prefill_kinds_table, costs.sensitivity_table),
    intervals=costs.ratio_intervals,
)
EFFECTS = Analysis(
    "effects",
    "what each condition changes against its baseline, pair by pair",
    (costs.effects_table, reuse.prefill_kinds_table, costs.cost_table),
    ("an interval that holds 0 (a cost ratio: 1) shows no effect",),
    intervals=costs.ratio_intervals,
)
SATURATION = Analysis(
    "saturation",
    "from which number of slots on more of them change nothing (Table S9)",
    (costs.adjacent_table, costs.saturation_table, costs.cost_table),
    ("an operational classification, no equivalence test",),
    intervals=costs.adjacent_intervals,
)
ALIGNMENT = Analysis(
    "alignment",
    "padding and occupancy with and without tool waits (Table I)",
    (alignment.alignment_table, alignment.block_table, alignment.histogram_table, costs.cost_table),
    ("decode_time_ratio is channel A's decode part: it depends on the cost model",),
)
BUCKET_INTERVENTION = Analysis(
    "bucket-intervention",
    "padding under another bucket set, and which request counts it changes (Tables II and S7)",
    (alignment.grid_table, alignment.contribution_table, alignment.histogram_table, costs.cost_table),
    ("contributions are shown only where h(n) is the same on both grids",),
)
DISPERSION = Analysis(
    "dispersion",
    "the same total wait, spread otherwise over the requests",
    (reuse.prefill_kinds_table, costs.decomposition_table, costs.cost_table, alignment.histogram_table),
    ("the total wait is the same in both conditions, to the ns",),
    intervals=costs.ratio_intervals,
)
PREFILL_INJECTION = Analysis(
    "prefill-injection",
    "what an injected prompt does to running sessions (Table IV)",
    (interference.injection_table, interference.injection_run_table),
    (
        "elapsed is the server's prefill metric: scheduling and host time included",
        "intervals are between received chunks, which need not be tokens",
    ),
)
JOINED = Analysis(
    "joined",
    "what restored reuse saves of prefill and of other sessions' waiting",
    (interference.joined_table, interference.waiting_table, reuse.prefill_kinds_table, costs.cost_table),
    (
        "waiting is modelled (T of each prefill times the requests held back) and measured (by the observer inside "
        "the server, else from log stamps and streams)",
        "waiting is session time: it is never added to device time",
    ),
    intervals=interference.saving_intervals,
)
NEIGHBOURS = Analysis(
    "neighbours",
    "what busy devices of the same host cost a device",
    (interference.neighbours_table, costs.cost_table),
    (AT_ONCE,),
)
DUET = Analysis(
    "duet",
    "two conditions at once on two devices that then change places",
    (interference.duet_table, costs.cost_table),
    (AT_ONCE,),
)
NO_TREATMENT = Analysis(
    "no-treatment",
    "how far both channels move between runs of the same input (Table S1)",
    (repeats.repeats_table, repeats.repeat_sensitivity_table, repeats.survival_variation_table),
    ("pairs share runs: they are not counted as independent samples",),
)
RECOMPILATION = Analysis(
    "recompilation",
    "step times of artifacts that were compiled apart (Table S2)",
    (repeats.session_table, repeats.step_table),
)
STEP_COST = Analysis(
    "step-cost",
    "step and prefill times beside the cost model's (Table S3)",
    (repeats.step_table, repeats.prefill_table),
    computed_notes=repeats.model_distances,
)
SEQUENTIAL_SURVIVAL = Analysis(
    "sequential-survival",
    "how many requests between two of a session still leave its KV in place (Table III)",
    (reuse.survival_table, reuse.formula_table, reuse.exceptions_table),
    computed_notes=reuse.critical_count_note,
)
SLOT_INTERVENTION = Analysis(
    "slot-intervention",
    "reuse, waiting and cost with more or fewer KV slots",
    (
        reuse.prefill_kinds_table,
        costs.cost_table,
        reuse.ceilings_table,
        reuse.formula_table,
        reuse.exceptions_table,
        reuse.lost_reuse_table,
        interference.waiting_table,
        alignment.histogram_table,
    ),
    ("batch_size changes slots and limit together; kv_slots alone holds the limit",),
    intervals=costs.ratio_intervals,
)
DUMMY_LIFECYCLE = Analysis(
    "dummy-lifecycle",
    "when the dummy block is asked for, and whom it evicts (Table S4)",
    (reuse.lifecycle_table, reuse.survival_table),
    (
        "a dummy request that finds a free slot leaves no line: without an observer the requests are derived, one "
        "in every decode step with 0 < n < limit",
    ),
)
