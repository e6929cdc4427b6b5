"""Cells and rows of the paper's tables that no single row of an analysis holds.

Layout, sums and counts only. A total of shares is the share of the total.
Source: the paper, sections 3 to 5 and 5-5; its supplement, S1 to S9.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from harness.analysis.method.decide import Decision, Outcome
from harness.analysis.method.figures import ReuseFigures
from harness.analysis.method.verdicts import decide_experiment
from harness.paper.layout import Row, Rows, decimals, percent, text, whole
from harness.paper.source import NotRunError, Source, VariantRatio, cost_rules, fixed_arrival_ratio, predicted_ratio
from harness.records import SealedRun, layout
from harness.runner.calibrate import fit_runs
from harness.sim.search.rank import SensitivityRow, sensitivity
from harness.sim.search.run import SearchResult, search
from harness.sim.search.space import DeviceSpec, SpaceSpec
from harness.spec import ServerShape
from harness.spec.rules import load_rule
from harness.stack.rbln.compile import list_artifacts
from harness.table import ABSENT, Cell

CONFIGURATIONS = {
    "base": "Baseline",
    "slots16": "More KV slots",
    "selected": "More KV slots and changed bucket grid",
}
FIT_SEED = 20261208
SATURATION_SLOTS = (16, 24, 32)
GIB = 1 << 30
# A device serves when it holds more than this share of what the fullest one holds: the model lies evenly on them.
SERVING_SHARE = 0.5
# Only a host that can compile for the NPU has this package; the twin's stand-in has not.
COMPILER = "rebel-compiler"
SEARCH_COMMAND = (
    "harness search paper -o runs/search-paper --set rules=paper, then harness paper tables --search FOLDER"
)
ARTIFACT_PAIRS = {
    "a1 vs a3": "A1 vs. A3 (recompilation)",
    "a1 vs a2": "A1 vs. A2 (grid change)",
    "a2 vs a3": "A2 vs. A3",
}


def factor(experiment: str, name: str) -> Callable[[Source, Row], Cell]:
    """A factor of the row's condition."""
    return lambda source, row: source.factor(experiment, str(row["condition"]), name)


def measurement(source: Source, experiment: str = "configuration") -> str:
    """Whether the runs were preregistered."""
    return "Confirmatory" if source.is_confirmatory(experiment) else "Exploratory"


def measurement_of(experiment: str) -> Callable[[Source, Row], Cell]:
    """The same for a cell."""
    return lambda source, _row: measurement(source, experiment)


def changed_configuration(source: Source, row: Row) -> Cell:
    """What the row's condition changes, in the paper's words."""
    name = source.factor("configuration", str(row["condition"]), "configuration")
    return CONFIGURATIONS.get(name, name)


def measured_users(source: Source, row: Row) -> Cell:
    return f"N={row['N']}, {measurement(source).lower()}"


def block(_source: Source, row: Row) -> Cell:
    """The number of a replicate as the paper counts them, from 1."""
    return "Sum" if row["replicate"] == "sum" else int(str(row["replicate"])) + 1


def reused_of_rearrivals(_source: Source, row: Row) -> Cell:
    return f"{text(row.get('reused'))}/{text(row.get('rearrivals'))}"


def decision(source: Source, row: Row) -> Cell:
    """What the first cost rule of the validation says of the row's condition."""
    decisions = {
        decided.subject: decided
        for rule in cost_rules(source, "configuration")
        for decided in source.decisions("configuration", rule)
    }
    return _outcome(decisions.get(str(row["condition"])))


def _outcome(decision: Decision | None) -> str:
    if decision is None:
        return ABSENT
    words = {
        Outcome.PASS: "Passed confirmatory criteria",
        Outcome.FAIL: "Failed confirmatory criteria",
        Outcome.WITHHELD: "Withheld: " + decision.reason.partition(" (")[0],
        Outcome.NOT_SUBJECT: "Not subject to decision",
    }
    would_be = "" if decision.would_be is None else f" (would be {decision.would_be.value})"
    return words[decision.outcome] + would_be


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


def saturation(source: Source) -> Rows:
    by_n: dict[str, dict[str, Mapping[str, Cell]]] = {}
    for row in source.rows("saturation", "costs"):
        n, slots = (source.factor("saturation", str(row["condition"]), name) for name in ("N", "slots"))
        by_n.setdefault(n, {})[slots] = row
    found: list[tuple[str, ...]] = []
    for n, by_slots in by_n.items():
        levels: list[Mapping[str, Cell]] = [by_slots.get(str(slots), {}) for slots in SATURATION_SLOTS]
        reuse = " -> ".join(f"{text(level.get('reused'))}/{text(level.get('rearrivals'))}" for level in levels)
        found.append((n, *(decimals(level.get("ratio_A"), 4) for level in levels), reuse))
    return found


def compile_cost(source: Source) -> Rows:
    made = list_artifacts(source.artifacts) if source.artifacts is not None else []
    if not made:
        raise NotRunError(
            "harness server compile (on a host with the NPU's compiler), then harness paper tables --artifacts FOLDER"
        )
    return [
        (
            _compiled_as(folder.name, record.get("spec", {})),
            text(len(record.get("spec", {}).get("decoder_batch_sizes", ()))),
            f"{decimals(record.get('seconds'), 0)} s",
            f"{decimals(int(record.get('size_bytes', 0)) / GIB, 3)} GiB",
        )
        for folder, record in made
    ]


def _compiled_as(name: str, spec: Mapping[str, Any]) -> str:
    buckets = ",".join(str(bucket) for bucket in sorted(spec.get("decoder_batch_sizes", ())))
    return f"Slot {spec.get('kvcache_num_blocks') or spec.get('batch_size')}, {{{buckets}}} ({name})"


def who_compiled(source: Source) -> str:
    """Whether the NPU's compiler made the artifacts of Table XIV."""
    made = [] if source.artifacts is None else list_artifacts(source.artifacts)
    records = [record for _folder, record in made]
    num_stand_ins = sum(COMPILER not in record.get("versions", {}) for record in records)
    if num_stand_ins:
        return (
            f"No NPU compiler was run for {num_stand_ins} of {len(records)} artifacts: stand-ins of the twin, whose "
            "time and size say nothing of a device."
        )
    return "As the artifacts' own records say."


@cache
def _device() -> DeviceSpec:
    return DeviceSpec()


def memory(source: Source) -> Rows:
    found: list[tuple[str, ...]] = []
    for slots in SATURATION_SLOTS:
        candidate = ServerShape(slots, (1, 4, 6, 8, 10, slots), slots, 8192)
        kv_gib = _device().memory_gib(candidate) - _device().overhead_gib
        found.append((str(slots), f"{kv_gib:.2f} GiB", _loaded(source, slots)))
    return found


def _loaded(source: Source, slots: int) -> str:
    runs = source.runs("saturation") if source.has("saturation") else []
    spans = [loaded_memory_gib(run) for run in runs if run.server.num_kv_slots == slots]
    known = [span for span in spans if span is not None]
    return f"{min(low for low, _ in known):.1f}-{max(high for _, high in known):.1f} GiB" if known else ABSENT


def loaded_memory_gib(run: SealedRun) -> tuple[float, float] | None:
    """Least and most memory in use on a device that served the run, at its fullest; None without reports."""
    path = run.file(layout.DEVICES)
    if not path.exists():
        return None
    reports = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # The first report is older than the server, the last one younger.
    fullest = max(([_used(one) for one in report.get("readings", ())] for report in reports), key=sum, default=[])
    used = [one for one in fullest if one]
    serving = [one for one in used if one > SERVING_SHARE * max(used)]
    return (min(serving) / GIB, max(serving) / GIB) if serving else None


def _used(reading: Mapping[str, Any]) -> int:
    return int(reading.get("memory_used_bytes") or 0)


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


def who_counted(source: Source) -> str:
    """Whether the dummy requests of Table S4 were seen or derived."""
    cells = [str(row["dummy_requests"]) for row in source.rows("dummy-lifecycle", "dummy lifecycle")]
    if any("derived" in cell for cell in cells):
        return (
            "Derived: by the scheduler's source there is one dummy request in every decode step with 0 < n < limit. "
            "One that evicts nothing is in no log; the observer inside a real stack counts them."
        )
    return "Dummy requests as the observer inside the server counted them."


class Contribution(NamedTuple):
    """One row of Table S7. n: a request count, "Other" or "Total"; shares of the total of their column."""

    n: str
    num_steps: int
    bucket_change: str
    slots_removed: int
    share_of_slots: float
    drop_of_p: float
    share_of_drop: float


def contributions(rows: Sequence[Mapping[str, Cell]], num_steps: int) -> list[Contribution]:
    """Rows of changed n, then all other steps, then the total. num_steps: decode steps over all n."""
    found = [
        Contribution(
            str(row["n"]),
            _int(row["h(n)"]),
            str(row["bucket_change"]),
            _int(row["slots_removed"]),
            _float(row["share_of_slots"]),
            _float(row["drop_of_p"]),
            _float(row["share_of_drop"]),
        )
        for row in rows
    ]
    if not found:
        return []
    changed = sum(one.num_steps for one in found)
    other = Contribution("Other", num_steps - changed, "No change", 0, 0.0, 0.0, 0.0)
    total = Contribution(
        "Total",
        num_steps,
        "-",
        sum(one.slots_removed for one in found),
        sum(one.share_of_slots for one in found),
        sum(one.drop_of_p for one in found),
        sum(one.share_of_drop for one in found),
    )
    return [*found, other, total]


def _int(cell: Cell) -> int:
    return int(cell) if isinstance(cell, int | float) else 0


def _float(cell: Cell) -> float:
    return float(cell) if isinstance(cell, int | float) else 0.0


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
            "{" + ", ".join(map(str, result.candidate(row.selected).decode_buckets)) + "}",
            text(result.candidate(row.selected).max_num_seqs),
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
    return decimals(variant.ratio, 4), ABSENT if is_baseline else decimals(variant.error, 4)
