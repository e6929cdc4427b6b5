"""Tables I to XV of the paper, from the experiments of the catalogue.

Layout only: which column of which analysis stands where, and with how many digits.
Source: the paper, sections 3 to 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from harness.analysis.method.decide import Decision, Outcome
from harness.analysis.method.tabular import Cell
from harness.runner.calibrate import fit_runs
from harness.study.paper_tables.artifacts import SATURATION_SLOTS, compile_cost, memory, who_compiled
from harness.study.paper_tables.cells import NONE, decimals, percent, text, whole
from harness.study.paper_tables.source import NotRunError, Source, cost_rules
from harness.study.paper_tables.table import Rows, TableSpec
from harness.study.variants import VariantRatio, fixed_arrival_ratio, predicted_ratio

CONFIGURATIONS = {
    "base": "Baseline",
    "slots16": "More KV slots",
    "selected": "More KV slots and changed bucket grid",
}
FIT_SEED = 20261208


def alignment(source: Source) -> Rows:
    return [
        (
            text(row["grid"]),
            text(row["N"]),
            decimals(row["p_A"], 3),
            decimals(row["p_C"], 3),
            decimals(row["delta_p"], 3, sign=True),
            decimals(row["decode_time_ratio"], 2),
        )
        for row in source.rows("alignment", "alignment")
    ]


def bucket_six(source: Source) -> Rows:
    return [
        (
            text(row["grid"]),
            decimals(row["p_A"], 3),
            decimals(row["p_C"], 3),
            decimals(row["delta_p"], 3, sign=True),
        )
        for row in source.rows("bucket-intervention", "grids")
        if row["N"] == 6
    ]


def slot_intervention(source: Source) -> Rows:
    found = {row["condition"]: row for row in source.rows("slot-intervention", "prefill by kind")}
    sides = [found.get(name, {}) for name in ("slots8", "batch16")]
    metrics = {
        "Re-arrival requests reused": "reused",
        "Total reused tokens": "reused_tokens",
        "Actual prefill computation of all requests (tokens)": "computed_all",
        "Actual prefill computation of re-arrival requests (tokens)": "computed_rearrivals",
        "Maximum actual batch size": "largest_batch",
        "Total decode steps": "decode_steps",
    }
    return [(label, *(_count_or_text(side.get(key)) for side in sides)) for label, key in metrics.items()]


def _count_or_text(value: Any) -> str:
    return whole(value) if isinstance(value, int) else text(value)


def injection(source: Source) -> Rows:
    return [
        (
            _count_or_text(row["injected_tokens"]),
            decimals(row["elapsed_ms"], 1),
            decimals(row["spike_ms"], 1),
            decimals(row["spike_over_elapsed"], 3),
        )
        for row in source.rows("prefill-injection", "injection")
    ]


MECHANISMS = {
    "Discrete batch alignment": (("bucket-intervention",), ("alignment",), ("step-cost",)),
    "KV cache survival": (("slot-intervention",), ("sequential-survival", "dummy-lifecycle"), ("configuration",)),
    "Prefill interference": (("prefill-injection",), ("joined",), ("step-cost",)),
}


def confirmed_range(source: Source) -> Rows:
    """What of each mechanism these runs can confirm: by experiment, whether it was run and on what."""
    if not any(source.has(name) for columns in MECHANISMS.values() for names in columns for name in names):
        raise NotRunError("harness run plans/experiments/bucket-intervention.toml")
    return [
        (mechanism, *("; ".join(_standing(source, name) for name in names) for names in columns))
        for mechanism, columns in MECHANISMS.items()
    ]


def _standing(source: Source, experiment: str) -> str:
    if not source.has(experiment):
        return f"{experiment}: not run"
    runs = source.runs(experiment)
    backends = ", ".join(sorted({run.manifest.backend for run in runs}))
    return f"{experiment}: {len(runs)} {runs[0].manifest.label} runs ({backends})"


def conflict(source: Source) -> Rows:
    costs = {row["condition"]: row for row in source.rows("bucket-intervention", "costs")}
    sides = [costs.get(name, {}) for name in ("n6-nowaits", "n6-waits")]
    return [
        ("Padding ratio", *(decimals(side.get("p"), 3) for side in sides)),
        (
            "Re-arrival requests reused",
            *(f"{side.get('reused', NONE)}/{side.get('rearrivals', NONE)}" for side in sides),
        ),
    ]


def coefficients(source: Source) -> Rows:
    fit = fit_runs(source.runs("step-cost"), seed=FIT_SEED).decode
    return [
        *((f"f({bucket})", f"{f_ms:.3f} ms") for bucket, f_ms in fit.f_ms.items()),
        ("Fixed additional time alpha", f"{fit.alpha_ms:.3f} ms"),
        ("Additional time per request beta", f"{fit.beta_ms_per_request:.4f} ms/request"),
    ]


def configurations(source: Source) -> Rows:
    found: dict[str, tuple[str, str]] = {}
    for run in source.runs("configuration"):
        server, name = run.server, source.factor("configuration", run.condition, "configuration")
        slots = "" if server.num_kv_slots == server.max_num_seqs else f" ({server.num_kv_slots} slots)"
        found[name] = (f"{server.max_num_seqs}{slots}", "{" + ", ".join(map(str, server.decode_buckets)) + "}")
    return [(label, *found[name]) for name, label in CONFIGURATIONS.items() if name in found]


def _changed(source: Source) -> Iterator[tuple[str, str, str, str]]:
    """(condition, its baseline, N, what was changed) of the validation, in the paper's order."""
    for condition, baseline in source.experiment("configuration").compared():
        name = source.factor("configuration", condition, "configuration")
        yield condition, baseline, source.factor("configuration", condition, "N"), CONFIGURATIONS.get(name, name)


def measurement(source: Source, experiment: str = "configuration") -> str:
    return "Confirmatory" if source.is_confirmatory(experiment) else "Exploratory"


def predictions(source: Source) -> Rows:
    rows = {row["condition"]: row for row in source.rows("configuration", "predictions")}
    decisions = {
        one.subject: one
        for rule in cost_rules(source, "configuration")
        for one in source.decisions("configuration", rule)
    }
    return [
        (
            measurement(source),
            n,
            changed,
            decimals(rows[condition]["predicted_ratio"], 4),
            decimals(rows[condition]["observed_ratio_A"], 4),
            decimals(rows[condition]["error"], 4, sign=True),
            _outcome(decisions.get(condition)),
        )
        for condition, _baseline, n, changed in _changed(source)
        if condition in rows
    ]


def _outcome(decision: Decision | None) -> str:
    if decision is None:
        return NONE
    words = {
        Outcome.PASS: "Passed confirmatory criteria",
        Outcome.FAIL: "Failed confirmatory criteria",
        Outcome.WITHHELD: "Withheld: " + decision.reason.partition(" (")[0],
        Outcome.NOT_SUBJECT: "Not subject to decision",
    }
    would_be = "" if decision.would_be is None else f" (would be {decision.would_be.value})"
    return words[decision.outcome] + would_be


def channels(source: Source) -> Rows:
    return [
        (
            measurement(source),
            source.factor("configuration", str(row["condition"]), "N"),
            *(f"{decimals(row[key], 3)} s" for key in ("A_s", "B_s", "r_s")),
        )
        for row in source.rows("configuration", "costs")
        if row["condition"] == row["baseline"]
    ]


def fixed_arrivals(source: Source) -> Rows:
    experiment = source.experiment("configuration")
    found: list[tuple[str, ...]] = []
    for condition, baseline, n, changed in _changed(source):
        full = predicted_ratio(experiment, condition, baseline)
        fixed = fixed_arrival_ratio(experiment, condition, baseline)
        if full is None or fixed is None:
            continue
        observed = decimals(full.observed_ratio, 4)
        found.append((measurement(source), n, changed, observed, *_with_error(full), *_with_error(fixed)))
    return found


def _with_error(variant: VariantRatio) -> tuple[str, str]:
    return decimals(variant.ratio, 4), decimals(variant.error, 4)


def savings(source: Source) -> Rows:
    sums = {row["condition"]: row for row in source.rows("configuration", "decomposition") if row["replicate"] == "sum"}
    return [
        (
            f"N={n}, {measurement(source).lower()}",
            changed,
            decimals(sums[condition]["ratio_A"], 4),
            percent(sums[condition]["saving_A"]),
            decimals(sums[condition]["ratio_B"], 4),
            percent(sums[condition]["saving_B"]),
        )
        for condition, _baseline, n, changed in sorted(_changed(source), key=lambda one: one[2] != "8")
        if condition in sums and n in ("6", "8")
    ]


def saturation(source: Source) -> Rows:
    by_n: dict[str, dict[str, Mapping[str, Cell]]] = {}
    for row in source.rows("saturation", "costs"):
        n, slots = (source.factor("saturation", str(row["condition"]), name) for name in ("N", "slots"))
        by_n.setdefault(n, {})[slots] = row
    found: list[tuple[str, ...]] = []
    for n, by_slots in by_n.items():
        levels: list[Mapping[str, Cell]] = [by_slots.get(str(slots), {}) for slots in SATURATION_SLOTS]
        reuse = " -> ".join(f"{level.get('reused', NONE)}/{level.get('rearrivals', NONE)}" for level in levels)
        found.append((n, *(decimals(level.get("ratio_A"), 4) for level in levels), reuse))
    return found


MAIN_TABLES = (
    TableSpec(
        "I",
        "Padding and decode device time with and without tool waiting",
        ("Grid", "N", "p_A", "p_C", "delta p", "Decode device time ratio (with / without tool waiting)"),
        alignment,
        ("alignment",),
        ("The ratio is channel A's decode part: it depends on the cost model.",),
    ),
    TableSpec(
        "II",
        "Change in padding at N=6 when bucket 6 is added",
        ("Decode bucket set", "With tool waiting: p_A", "Without tool waiting: p_C", "delta p = p_C - p_A"),
        bucket_six,
        ("bucket-intervention",),
    ),
    TableSpec(
        "III",
        "Changes in reuse and computation with more KV slots",
        ("Metric", "8 KV slots", "16 KV slots"),
        slot_intervention,
        ("slot-intervention",),
        ("batch_size changes the number of slots and the limit together.",),
    ),
    TableSpec(
        "IV",
        "Elapsed time and background session delay by injected prefill length",
        (
            "Injected prompt length (tokens)",
            "Server-side prefill elapsed time (ms)",
            "Background session delay spike (ms)",
            "Spike / prefill elapsed time",
        ),
        injection,
        ("prefill-injection",),
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
        confirmed_range,
        ("bucket-intervention", "slot-intervention", "prefill-injection"),
        ("Cells name the experiments behind each claim, not the claim: that is for `harness decide` and for you.",),
    ),
    TableSpec(
        "VI",
        "Conflict between padding and KV reuse observed at N=6",
        ("Metric", "Without tool waiting", "With tool waiting"),
        conflict,
        ("bucket-intervention",),
    ),
    TableSpec(
        "VII",
        "Coefficients of the decode step cost model",
        ("Item", "Value"),
        coefficients,
        ("step-cost",),
        ("Without the server's own report alpha is inside f; docs/calibration.md says why.",),
    ),
    TableSpec(
        "VIII",
        "Configurations used for cost prediction validation and configuration selection evaluation",
        ("Configuration", "batch_size (= KV slots)", "Decode bucket set"),
        configurations,
        ("configuration",),
    ),
    TableSpec(
        "IX",
        "Prediction results for cost ratios between configurations",
        (
            "Measurement",
            "N",
            "Changed configuration",
            "Predicted ratio",
            "Observation-based ratio",
            "Error e",
            "Decision",
        ),
        predictions,
        ("configuration",),
    ),
    TableSpec(
        "X",
        "Time by cost channel for the baseline configuration",
        ("Measurement", "N", "Channel A", "Channel B", "r = B - A"),
        channels,
        ("configuration",),
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
        fixed_arrivals,
        ("configuration",),
        ("Fixed arrivals: each re-arrival comes when it came in the baseline's run of the same replicate.",),
    ),
    TableSpec(
        "XII",
        "Cost savings rates by configuration under confirmatory conditions",
        (
            "Measurement condition",
            "Changed configuration",
            "Channel A cost ratio",
            "Channel A savings",
            "Channel B cost ratio",
            "Channel B savings",
        ),
        savings,
        ("configuration",),
    ),
    TableSpec(
        "XIII",
        "Cost and reuse changes with additional KV slots",
        (
            "N",
            "Slot 16 cost ratio",
            "Slot 24 cost ratio",
            "Slot 32 cost ratio",
            "Reuse counts: 16 -> 24 -> 32",
        ),
        saturation,
        ("saturation",),
    ),
    TableSpec(
        "XIV",
        "Compile cost of changed configurations",
        ("Configuration", "Buckets", "Compile time", "Compiled artifact size"),
        compile_cost,
        remark=who_compiled,
    ),
    TableSpec(
        "XV",
        "Memory usage with additional KV slots",
        ("KV slots", "KV capacity per device (arithmetic)", "Total memory per device after model loading"),
        memory,
        ("saturation",),
        ("Arithmetic for Qwen3-4B on 4 devices: 144 KiB per token, 8,192 tokens per slot. Loaded: fullest report.",),
    ),
)
