"""Cells and rows of the paper's tables that no single row of an analysis holds, by their names in ``tables.toml``.

Sums and counts only. A total of shares is the share of the total. A cell is made from (source, experiment, row).
Source: the paper, sections 3 to 5 and 5-5; its supplement, S1 to S9.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from harness.analysis.calibration.cost_file import DECODE, fit_runs
from harness.analysis.figures import total_of
from harness.extras.paper.source import NotRunError, PaperRuns, Row, Rows, fixed_arrival_ratio, predicted_ratio
from harness.extras.search.result import sensitivity
from harness.extras.search.run import search
from harness.extras.search.space import SpaceSpec
from harness.judge.decisions.decide import Outcome
from harness.judge.decisions.verdicts import decide_experiment
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.model.engine.cost import GIB, DeviceSpec
from harness.model.spec import ServerShape
from harness.model.spec.rules import load_rule
from harness.stacks.rbln.launch.compile import list_artifacts
from harness.table import ABSENT, Cell

CONFIGURATIONS = {"base": "Baseline", "slots16": "More KV slots", "selected": "More KV slots and changed bucket grid"}
FIT_SEED = 20261208
SATURATION_SLOTS = (16, 24, 32)
# A device serves when it holds more than this share of what the fullest one holds: the model lies evenly on them.
SERVING_SHARE = 0.5
# Only a host that can compile for the NPU has this package; the twin's stand-in has not.
COMPILER = "rebel-compiler"
ARTIFACT_PAIRS = {
    "a1 vs a3": "A1 vs. A3 (recompilation)",
    "a1 vs a2": "A1 vs. A2 (grid change)",
    "a2 vs a3": "A2 vs. A3",
}
MECHANISMS = {
    "Discrete batch alignment": (("bucket-intervention",), ("alignment",), ("step-cost",)),
    "KV cache survival": (("slot-intervention",), ("sequential-survival", "dummy-lifecycle"), ("configuration",)),
    "Prefill interference": (("prefill-injection",), ("joined",), ("step-cost",)),
}


def measurement(source: PaperRuns, experiment: str, _row: Row) -> Cell:
    """Whether the runs were preregistered."""
    return "Confirmatory" if source.is_confirmatory(experiment) else "Exploratory"


def measured_users(source: PaperRuns, experiment: str, row: Row) -> Cell:
    return f"N={row['N']}, {str(measurement(source, experiment, row)).lower()}"


def changed_configuration(source: PaperRuns, experiment: str, row: Row) -> Cell:
    """The configuration of the row's condition, in the paper's words."""
    name = source.factor(experiment, str(row["condition"]), "configuration")
    return CONFIGURATIONS.get(name, name)


def block(_source: PaperRuns, _experiment: str, row: Row) -> Cell:
    """The number of a replicate as the paper counts them, from 1."""
    return "Sum" if row["replicate"] == "sum" else int(str(row["replicate"])) + 1


def reused_of_rearrivals(_source: PaperRuns, _experiment: str, row: Row) -> Cell:
    return f"{_text(row.get('reused'))}/{_text(row.get('rearrivals'))}"


def is_baseline(_source: PaperRuns, _experiment: str, row: Row) -> Cell:
    return row["condition"] == row["baseline"]


def decision(source: PaperRuns, experiment: str, row: Row) -> Cell:
    """The decision on the row's condition by the first cost rule that the experiment names."""
    names = source.runs(experiment)[0].spec.rules
    rule = next((name for name in names if load_rule(name).kind == "cost-validation"), None)
    decisions = [] if rule is None else source.decisions(experiment, rule)
    made = {decision.subject: decision for decision in decisions}.get(str(row["condition"]))
    if made is None:
        return None
    words = {
        Outcome.PASS: "Passed confirmatory criteria",
        Outcome.FAIL: "Failed confirmatory criteria",
        Outcome.WITHHELD: "Withheld: " + made.reason.partition(" (")[0],
        Outcome.NOT_SUBJECT: "Not subject to decision",
    }
    return words[made.outcome] + ("" if made.would_be is None else f" (would be {made.would_be.value})")


def _text(value: Cell) -> str:
    return ABSENT if value in (None, "") else str(value)


def _braces(buckets: Sequence[int]) -> str:
    return "{" + ", ".join(map(str, buckets)) + "}"


def confirmed_range(source: PaperRuns) -> Rows:
    """What of each mechanism these runs can confirm: by experiment, whether it was run and on what."""
    if not any(source.has(name) for columns in MECHANISMS.values() for names in columns for name in names):
        raise NotRunError("harness run plans/experiments/bucket-intervention.toml")

    def state(experiment: str) -> str:
        if not source.has(experiment):
            return f"{experiment}: not run"
        runs = source.runs(experiment)
        backends = ", ".join(sorted({run.manifest.kind.name for run in runs}))
        return f"{experiment}: {len(runs)} {runs[0].manifest.label} runs ({backends})"

    rows: list[Row] = []
    for mechanism, columns in MECHANISMS.items():
        intervention, observation, computed = ("; ".join(map(state, names)) for names in columns)
        cells = {"intervention": intervention, "observation": observation, "computed": computed}
        rows.append({"mechanism": mechanism, **cells})
    return rows


def coefficients(source: PaperRuns) -> Rows:
    fit = fit_runs(source.runs("step-cost"), seed=FIT_SEED).fits[DECODE]
    cells = {f"f({bucket})": f"{f_ms:.3f} ms" for bucket, f_ms in fit.f_ms.items()}
    cells["Fixed additional time alpha"] = f"{fit['alpha_ms']:.3f} ms"
    cells["Additional time per request beta"] = f"{fit['beta_ms_per_request']:.4f} ms/request"
    return [{"item": item, "value": value} for item, value in cells.items()]


def configurations(source: PaperRuns) -> Rows:
    rows: dict[str, Row] = {}
    for run in source.runs("configuration"):
        server, name = run.server, source.factor("configuration", run.condition, "configuration")
        slots = "" if server.num_kv_slots == server.max_num_seqs else f" ({server.num_kv_slots} slots)"
        limit, buckets = f"{server.max_num_seqs}{slots}", _braces(server.decode_buckets)
        rows[name] = {"label": CONFIGURATIONS.get(name), "limit": limit, "buckets": buckets}
    return [rows[name] for name in CONFIGURATIONS if name in rows]


def fixed_arrivals(source: PaperRuns) -> Rows:
    experiment = source.experiment("configuration")
    rows: list[Row] = []
    for condition, baseline in experiment.compared():
        full = predicted_ratio(experiment, condition, baseline)
        if full is not None:
            row = {"observed": full.observed_ratio, "full": full.ratio, "full_error": full.error}
            fixed = full._replace(ratio=fixed_arrival_ratio(experiment, condition, baseline))
            rows.append({"condition": condition, **row, "fixed": fixed.ratio, "fixed_error": fixed.error})
    return rows


def dummy_rule(source: PaperRuns) -> Rows:
    experiment = source.experiment("configuration")
    rows: list[Row] = []
    for condition in experiment.runs:
        baseline = experiment.baselines[condition]
        plain = predicted_ratio(experiment, condition, baseline, "paper")
        dummy = predicted_ratio(experiment, condition, baseline, "paper+dummy")
        if plain is None or dummy is None:
            continue
        errors = (None, None) if condition == baseline else (plain.error, dummy.error)
        rows.append(
            {
                "condition": condition,
                "observed": plain.observed_ratio,
                "ratio": plain.ratio,
                "error": errors[0],
                "dummy_ratio": dummy.ratio,
                "dummy_error": errors[1],
                "simulated_reuse": f"{plain.num_reused} -> {dummy.num_reused} / {plain.num_rearrivals}",
                "measured_reuse": total_of(experiment.counted(condition)).reuse.share_text,
            }
        )
    return rows


def saturation(source: PaperRuns, analysis: str = "costs") -> Rows:
    """A row per N, and where the analysis has them per replicate, with ``ratio_A_24`` and so on by KV slots."""
    rows: dict[tuple[str, Cell], dict[str, Cell]] = {}
    for row in source.rows("saturation", analysis):
        n, slots = (source.factor("saturation", str(row["condition"]), name) for name in ("N", "slots"))
        cells = rows.setdefault((n, row.get("replicate")), {"N": n, "replicate": row.get("replicate")})
        cells |= {f"{name}_{slots}": row.get(name) for name in ("ratio_A", "ratio_B", "reused", "rearrivals")}
    for cells in rows.values():
        reused = [_text(cells.get(f"reused_{slots}")) for slots in SATURATION_SLOTS]
        rearrivals = [_text(cells.get(f"rearrivals_{slots}")) for slots in SATURATION_SLOTS]
        cells["reused"] = " / ".join(reused)
        cells["reuse"] = " -> ".join(map("/".join, zip(reused, rearrivals, strict=True)))
    return list(rows.values())


def saturation_by_replicate(source: PaperRuns) -> Rows:
    return saturation(source, "saturation by replicate")


def compile_cost(source: PaperRuns) -> Rows:
    made = list_artifacts(source.artifacts) if source.artifacts is not None else []
    if not made:
        raise NotRunError(
            "harness server compile (on a host with the NPU's compiler), then harness paper tables --artifacts FOLDER"
        )
    rows: list[Row] = []
    for folder, record in made:
        spec = record.get("spec", {})
        buckets = sorted(spec.get("decoder_batch_sizes", ()))
        slots, listed = spec.get("kvcache_num_blocks") or spec.get("batch_size"), ",".join(map(str, buckets))
        size_gib = int(record.get("size_bytes", 0)) / GIB
        label = f"Slot {slots}, {{{listed}}} ({folder.name})"
        rows.append({"label": label, "buckets": len(buckets), "seconds": record.get("seconds"), "size_gib": size_gib})
    return rows


def who_compiled(source: PaperRuns) -> str:
    """Whether the NPU's compiler made the artifacts of Table XIV."""
    made = [] if source.artifacts is None else list_artifacts(source.artifacts)
    num_stand_ins = sum(COMPILER not in record.get("versions", {}) for _folder, record in made)
    if num_stand_ins:
        return (
            f"No NPU compiler was run for {num_stand_ins} of {len(made)} artifacts: stand-ins of the twin, whose "
            "time and size say nothing of a device."
        )
    return "As the artifacts' own records say."


def memory(source: PaperRuns) -> Rows:
    device, rows = DeviceSpec(), list[Row]()
    runs = source.runs("saturation") if source.has("saturation") else []
    for slots in SATURATION_SLOTS:
        shape = ServerShape(slots, (1, 4, 6, 8, 10, slots), slots, 8192)
        spans = [loaded_memory_gib(run) for run in runs if run.server.num_kv_slots == slots]
        known = [span for span in spans if span is not None]
        loaded = f"{min(low for low, _ in known):.1f}-{max(high for _, high in known):.1f} GiB" if known else None
        rows.append({"slots": slots, "kv_gib": device.memory_gib(shape) - device.overhead_gib, "loaded": loaded})
    return rows


def loaded_memory_gib(run: SealedRun) -> tuple[float, float] | None:
    """Least and most memory in use on a device that served the run, at its fullest; None without reports."""
    path = run.file(layout.DEVICES)
    if not path.exists():
        return None

    def used(reading: Mapping[str, Any]) -> int:
        return int(reading.get("memory_used_bytes") or 0)

    reports = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    # The first report is older than the server, the last one younger.
    fullest = max(
        ([used(reading) for reading in report.get("readings", ())] for report in reports), key=sum, default=[]
    )
    serving = [used_bytes for used_bytes in fullest if used_bytes > SERVING_SHARE * max(fullest)]
    return (min(serving) / GIB, max(serving) / GIB) if serving else None


def whose_times(source: PaperRuns) -> str:
    """Which of the two figures Tables S2 and S3 show for these runs."""
    names = {str(row["source"]) for row in source.rows("recompilation", "sessions")}
    if names == {"reported"}:
        return "Model p50 of the server's own report with the bucket exactly full, as in the paper."
    return (
        "Whole step periods with the bucket exactly full, sampler and host included: not every session has a report of "
        "the server's own (VLLM_RBLN_METRICS), whose model p50 the paper prints."
    )


def recompilation(source: PaperRuns) -> Rows:
    """A row per pair of artifacts and bucket: the paper's pairs in its order, then others."""
    decisions = decide_experiment(
        [load_rule("recompilation")], source.experiment("recompilation"), is_confirmatory=True
    )
    by_pair: dict[str, list[Row]] = {pair: [] for pair in ARTIFACT_PAIRS}
    for made in decisions:
        pair, _, bucket = made.subject.partition(", bucket ")
        label = ARTIFACT_PAIRS.get(pair, pair.upper())
        row = {**made.numbers, "pair": label, "bucket": bucket, "outcome": made.label or made.outcome.value}
        by_pair.setdefault(pair, []).append(row)
    return [row for rows in by_pair.values() for row in rows]


def who_counted(source: PaperRuns) -> str:
    """Whether the dummy requests of Table S4 were seen or derived."""
    cells = [str(row["dummy_requests"]) for row in source.rows("dummy-lifecycle", "dummy lifecycle")]
    if any("derived" in cell for cell in cells):
        return (
            "Derived: by the scheduler's source there is one dummy request in every decode step with 0 < n < limit. "
            "One that evicts nothing is in no log; the observer inside a real stack counts them."
        )
    return "Dummy requests as the observer inside the server counted them."


def padding_contributions(source: PaperRuns) -> Rows:
    condition = "n6-nowaits-bucket6"
    rows = [row for row in source.rows("bucket-intervention", "contributions") if row["condition"] == condition]
    histograms = {row["condition"]: row for row in source.rows("bucket-intervention", "histogram")}
    steps = histograms.get(condition, {}).get("steps")
    return contributions(rows, steps if isinstance(steps, int) else 0)


def contributions(rows: Sequence[Row], num_steps: int) -> Rows:
    """Rows of changed n, then all other steps, then the total. num_steps: decode steps over all n."""
    if not rows:
        return []
    names = ("h(n)", "slots_removed", "share_of_slots", "drop_of_p", "share_of_drop")
    numbers = {name: [row[name] for row in rows] for name in names}
    total = {name: sum(cell for cell in cells if isinstance(cell, int | float)) for name, cells in numbers.items()}
    other = {**dict.fromkeys(names, 0), "n": "Other", "h(n)": num_steps - total["h(n)"], "bucket_change": "No change"}
    return [*rows, other, {**total, "n": "Total", "h(n)": num_steps, "bucket_change": ABSENT}]


def selections(source: PaperRuns) -> Rows:
    """The selection by score and set of N, from the ledger of a search."""
    folder = source.search
    if folder is None or not (folder / "ledger.parquet").is_file():
        raise NotRunError(
            "harness search paper -o runs/search-paper --set rules=paper, then harness paper tables --search FOLDER"
        )
    space = json.loads((folder / "search.json").read_text(encoding="utf-8"))["space"]
    result = search(SpaceSpec.model_validate(space), folder)
    rows: list[Row] = []
    for row in sensitivity(result):
        shape = result.candidate(row.selected)
        rows.append(
            {
                **{name: value for name, value in vars(row).items() if name != "users"},
                "users": ", ".join(map(str, row.users)),
                "buckets": _braces(shape.decode_buckets),
                "limit": shape.max_num_seqs,
                "is_reference": "Yes" if row.is_reference_choice else "No",
                "other_top": row.size_top - row.common_top,
            }
        )
    return rows
