"""The analyses of the shipped experiments: which tables each one shows, its notes and its intervals."""

from __future__ import annotations

from harness.analysis.catalogue import Analysis
from harness.analysis.catalogue.alignment import (
    alignment_table,
    block_table,
    contribution_table,
    grid_table,
    histogram_table,
)
from harness.analysis.catalogue.costs import (
    adjacent_intervals,
    adjacent_table,
    cost_table,
    decomposition_table,
    effects_table,
    prediction_table,
    ratio_intervals,
    saturation_table,
    sensitivity_table,
)
from harness.analysis.catalogue.interference import (
    duet_table,
    injection_run_table,
    injection_table,
    joined_table,
    neighbours_table,
    saving_intervals,
    waiting_table,
)
from harness.analysis.catalogue.repeats import (
    model_distances,
    prefill_table,
    repeat_sensitivity_table,
    repeats_table,
    session_table,
    step_table,
    survival_variation_table,
)
from harness.analysis.catalogue.reuse import (
    ceilings_table,
    critical_count_note,
    exceptions_table,
    formula_table,
    lifecycle_table,
    lost_reuse_table,
    prefill_kinds_table,
    survival_table,
)

AT_ONCE = "the blocks of a round ran at once by plan: a round is one datum, whatever the number of its devices"

ANALYSES = (
    Analysis(
        "general",
        "cost on both channels, ceilings of reuse, formula C against measurement",
        (cost_table, decomposition_table, ceilings_table, formula_table, exceptions_table),
        intervals=ratio_intervals,
    ),
    Analysis(
        "configuration",
        "predicted and measured cost ratios of configurations, and how far the channels agree",
        (prediction_table, decomposition_table, cost_table, prefill_kinds_table, sensitivity_table),
        intervals=ratio_intervals,
    ),
    Analysis(
        "effects",
        "what each condition changes against its baseline, pair by pair",
        (effects_table, prefill_kinds_table, cost_table),
        ("an interval that holds 0 (a cost ratio: 1) shows no effect",),
        intervals=ratio_intervals,
    ),
    Analysis(
        "saturation",
        "from which number of slots on more of them change nothing (Table S9)",
        (adjacent_table, saturation_table, cost_table),
        ("an operational classification, no equivalence test",),
        intervals=adjacent_intervals,
    ),
    Analysis(
        "alignment",
        "padding and occupancy with and without tool waits (Table I)",
        (alignment_table, block_table, histogram_table, cost_table),
        ("decode_time_ratio is channel A's decode part: it depends on the cost model",),
    ),
    Analysis(
        "bucket-intervention",
        "padding under another bucket set, and which request counts it changes (Tables II and S7)",
        (grid_table, contribution_table, histogram_table, cost_table),
        ("contributions are shown only where h(n) is the same on both grids",),
    ),
    Analysis(
        "dispersion",
        "the same total wait, spread otherwise over the requests",
        (prefill_kinds_table, decomposition_table, cost_table, histogram_table),
        ("the total wait is the same in both conditions, to the ns",),
        intervals=ratio_intervals,
    ),
    Analysis(
        "prefill-injection",
        "what an injected prompt does to running sessions (Table IV)",
        (injection_table, injection_run_table),
        (
            "elapsed is the server's prefill metric: scheduling and host time included",
            "intervals are between received chunks, which need not be tokens",
        ),
    ),
    Analysis(
        "joined",
        "what restored reuse saves of prefill and of other sessions' waiting",
        (joined_table, waiting_table, prefill_kinds_table, cost_table),
        (
            "waiting is modelled (T of each prefill times the requests held back) and measured (by the observer inside "
            "the server, else from log stamps and streams)",
            "waiting is session time: it is never added to device time",
        ),
        intervals=saving_intervals,
    ),
    Analysis(
        "neighbours",
        "what busy devices of the same host cost a device",
        (neighbours_table, cost_table),
        (AT_ONCE,),
    ),
    Analysis(
        "duet",
        "two conditions at once on two devices that then change places",
        (duet_table, cost_table),
        (AT_ONCE,),
    ),
    Analysis(
        "no-treatment",
        "how far both channels move between runs of the same input (Table S1)",
        (repeats_table, repeat_sensitivity_table, survival_variation_table),
        ("pairs share runs: they are not counted as independent samples",),
    ),
    Analysis(
        "recompilation",
        "step times of artifacts that were compiled apart (Table S2)",
        (session_table, step_table),
    ),
    Analysis(
        "step-cost",
        "step and prefill times beside the cost model's (Table S3)",
        (step_table, prefill_table),
        computed_notes=model_distances,
    ),
    Analysis(
        "sequential-survival",
        "how many requests between two of a session still leave its KV in place (Table III)",
        (survival_table, formula_table, exceptions_table),
        computed_notes=critical_count_note,
    ),
    Analysis(
        "slot-intervention",
        "reuse, waiting and cost with more or fewer KV slots",
        (
            prefill_kinds_table,
            cost_table,
            ceilings_table,
            formula_table,
            exceptions_table,
            lost_reuse_table,
            waiting_table,
            histogram_table,
        ),
        ("batch_size changes slots and limit together; kv_slots alone holds the limit",),
        intervals=ratio_intervals,
    ),
    Analysis(
        "dummy-lifecycle",
        "when the dummy block is asked for, and whom it evicts (Table S4)",
        (lifecycle_table, survival_table),
        (
            "a dummy request that finds a free slot leaves no line: without an observer the requests are derived, one "
            "in every decode step with 0 < n < limit",
        ),
    ),
)
