"""KV survival: the critical request count, evictions and who caused them, the life of the dummy block.

From responses, the reuse log and the step log of sealed runs. An eviction is attributed in the order of the log.
Definitions: docs/method.md, "Reuse"; Tables III and S4.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.analysis.catalogue import Analysis, AnalysisOutput, of_tables
from harness.analysis.catalogue.alignment import histogram_table
from harness.analysis.catalogue.costs import cost_table, ratio_intervals
from harness.analysis.catalogue.interference import waiting_table
from harness.analysis.catalogue.reuse import (
    ceilings_table,
    exceptions_table,
    formula_table,
    lost_reuse_table,
    prefill_kinds_table,
    reuse_checks,
)
from harness.analysis.logs.observer import load_observer
from harness.analysis.method.reuse import critical_request_count, sum_or_none
from harness.analysis.method.verdicts import ExperimentRuns
from harness.records import SealedRun, layout
from harness.table import Cell, Table, table_of


def survival_table(experiment: ExperimentRuns) -> Table:
    """Sequential runs by number of background requests m: reuse, evictions by caller, against max(0, m - 5)."""
    rows: list[dict[str, Cell]] = []
    for condition, runs in experiment.runs.items():
        workload = runs[0].workload
        if workload.source != "sequential":
            continue
        m = workload.num_background
        slots = runs[0].server.num_kv_slots
        checks = [check for run in runs for check in reuse_checks(run)]
        evictions = [run.num_evictions for run in experiment.figures(condition)]
        rows.append(
            {
                "condition": condition,
                "m": m,
                "runs": len(runs),
                "reused": sum_or_none(check.is_reused for check in checks),
                "cached_tokens": ", ".join("?" if check.cached is None else str(check.cached) for check in checks),
                "formula_C": checks[0].by_formula if checks else None,
                "evictions": ", ".join("?" if count is None else str(count) for count in evictions),
                "requests_alone": max(0, m + 2 - slots),
                "with_dummy": max(0, m + 3 - slots),
            }
        )
    caption = "One request at a time: target, m others, the target again; evictions as logged, and as two rules expect"
    return table_of("survival", caption, sorted(rows, key=lambda row: int(row["m"] or 0)))


def critical_count(experiment: ExperimentRuns) -> int | None:
    """The critical request count over all sequential conditions; None when reuse is lost at the smallest m."""
    by_count: dict[int, list[bool]] = {}
    for runs in experiment.runs.values():
        workload = runs[0].workload
        if workload.source == "sequential":
            checks = [check for run in runs for check in reuse_checks(run)]
            found = [check.is_reused for check in checks if check.is_reused is not None]
            by_count.setdefault(workload.num_background, []).extend(found)
    return critical_request_count(by_count)


class DummyRequests(NamedTuple):
    """How often a dummy block was asked for. is_derived: counted by the scheduler's rule, not seen."""

    num_requests: int
    is_derived: bool

    def __str__(self) -> str:
        return f"{self.num_requests} (derived)" if self.is_derived else str(self.num_requests)


def dummy_requests(run: SealedRun) -> DummyRequests | None:
    """Steps that asked for a dummy block: as the observer inside the server saw them, else by the vendor's rule.

    The rule: with prefix caching, one in every decode step with 0 < n < limit, none in any other step (vllm-rbln 0.11.1
    and 0.11.2, optimum_scheduler.py). A request that finds a free slot leaves no line in the log, so without an
    observer the rule is all there is. None where it does not apply: no prefix caching, the paper's own rules, no steps.
    """
    path = run.file(layout.OBSERVER)
    if path.exists():
        slots = load_observer(path).steps.column("dummy_slot").to_pylist()
        return DummyRequests(sum(slot is not None and slot >= 0 for slot in slots), is_derived=False)
    server = run.server
    n = run.table("steps").column("n").to_pylist()
    if not n or not server.prefix_caching or not server.rule_set().has_inner_blocks:
        return None
    return DummyRequests(sum(0 < seqs < server.max_num_seqs for seqs in n), is_derived=True)


class Lifecycle(NamedTuple):
    """Table S4 of one run. dummy_requests: seen by an observer or derived; None where neither is possible."""

    decode_steps: int
    partial_steps: int
    dummy_requests: DummyRequests | None
    steps_at_limit: int
    evictions: dict[str, int]
    never_reallocated: int


def lifecycle(run: SealedRun) -> Lifecycle:
    """Partial steps (0 < n < limit), evictions by caller, and evicted slots that nobody got afterwards."""
    limit = run.server.max_num_seqs
    n = run.table("steps").column("n").to_pylist()
    events = run.table("kv_events").select(["kind", "caller", "slots"]).to_pylist()
    callers: dict[str, int] = {}
    never = 0
    for place, event in enumerate(events):
        if event["kind"] != "eviction":
            continue
        callers[event["caller"] or "unknown"] = callers.get(event["caller"] or "unknown", 0) + 1
        slot = event["slots"][0]
        later = (other for other in events[place + 1 :] if other["kind"] == "alloc")
        never += not any(slot in other["slots"] for other in later)
    partial = sum(0 < seqs < limit for seqs in n)
    return Lifecycle(len(n), partial, dummy_requests(run), len(n) - partial, callers, never)


def lifecycle_table(experiment: ExperimentRuns) -> Table:
    """Table S4: one row per run."""
    rows: list[dict[str, Cell]] = []
    for condition, runs in experiment.runs.items():
        for run in runs:
            one = lifecycle(run)
            rows.append(
                {
                    "run": f"{condition}/{run.replicate}",
                    "decode_steps": one.decode_steps,
                    "partial_steps": one.partial_steps,
                    "dummy_requests": None if one.dummy_requests is None else str(one.dummy_requests),
                    "steps_at_limit": one.steps_at_limit,
                    "evictions": sum(one.evictions.values()),
                    "callers": ", ".join(f"{caller} {count}" for caller, count in sorted(one.evictions.items())),
                    "never_reallocated": one.never_reallocated,
                }
            )
    return table_of("dummy lifecycle", "The dummy block is asked for in every partial step (0 < n < limit)", rows)


def _sequential_survival(experiment: ExperimentRuns) -> AnalysisOutput:
    critical = critical_count(experiment)
    count = "none" if critical is None else critical
    note = f"critical request count: {count}; of this order of requests, no threshold on N"
    tables = (survival_table(experiment), formula_table(experiment), exceptions_table(experiment))
    return AnalysisOutput(tables, notes=(note,))


ANALYSES = (
    Analysis(
        "sequential-survival",
        "how many requests between two of a session still leave its KV in place (Table III)",
        _sequential_survival,
    ),
    Analysis(
        "slot-intervention",
        "reuse, waiting and cost with more or fewer KV slots",
        of_tables(
            prefill_kinds_table,
            cost_table,
            ceilings_table,
            formula_table,
            exceptions_table,
            lost_reuse_table,
            waiting_table,
            histogram_table,
            notes=("batch_size changes slots and limit together; kv_slots alone holds the limit",),
            intervals=ratio_intervals,
        ),
    ),
    Analysis(
        "dummy-lifecycle",
        "when the dummy block is asked for, and whom it evicts (Table S4)",
        of_tables(
            lifecycle_table,
            survival_table,
            notes=(
                "a dummy request that finds a free slot leaves no line: without an observer the requests are derived, "
                "one in every decode step with 0 < n < limit",
            ),
        ),
    ),
)
