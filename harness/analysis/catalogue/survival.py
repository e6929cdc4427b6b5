"""KV survival: the critical request count, evictions and who caused them, the life of the dummy block.

From responses, the reuse log and the step log of sealed runs. An eviction is attributed in the order of the log.
Definitions: docs/method.md, "Reuse"; Tables III and S4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from harness.analysis.catalogue import Analysis, AnalysisOutput, Rows, of_tables, table
from harness.analysis.catalogue.alignment import histogram_table
from harness.analysis.catalogue.costs import cost_table, ratio_intervals
from harness.analysis.catalogue.interference import waiting_table
from harness.analysis.catalogue.reuse import (
    ceilings_table,
    checks_of,
    exceptions_table,
    formula_table,
    lost_reuse_table,
    prefill_kinds_table,
)
from harness.analysis.decisions.verdicts import ExperimentRuns
from harness.analysis.figures import ReuseFigures
from harness.analysis.logs.observer import load_observer
from harness.analysis.reuse import critical_request_count
from harness.records import SealedRun, layout
from harness.records.schema import values_of


def _by_background(experiment: ExperimentRuns) -> dict[str, tuple[int, ReuseFigures]]:
    """The number m of background requests of each sequential condition, and its re-arrivals; ascending m."""
    sequential = {
        condition: (runs[0].workload.num_background, checks_of(runs))
        for condition, runs in experiment.runs.items()
        if runs[0].workload.source == "sequential"
    }
    return dict(sorted(sequential.items(), key=lambda item: item[1][0]))


@table(
    "survival",
    "One request at a time: target, m others, the target again; evictions as logged, and as two rules expect",
)
def survival_table(experiment: ExperimentRuns) -> Rows:
    """Sequential runs by number of background requests m: reuse, evictions by caller, against max(0, m - 5)."""
    for condition, (m, checks) in _by_background(experiment).items():
        runs = experiment.runs[condition]
        slots = runs[0].server.num_kv_slots
        yield {
            "condition": condition,
            "m": m,
            "runs": len(runs),
            "reused": checks.num_reused,
            "cached_tokens": _listed(check.cached_tokens for check in checks.rearrivals),
            "formula_C": checks.rearrivals[0].reusable_tokens if checks.rearrivals else None,
            "evictions": _listed(run.num_evictions for run in experiment.figures(condition)),
            "requests_alone": max(0, m + 2 - slots),
            "with_dummy": max(0, m + 3 - slots),
        }


def _listed(counts: Iterable[int | None]) -> str:
    return ", ".join("?" if count is None else str(count) for count in counts)


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


@table("dummy lifecycle", "The dummy block is asked for in every partial step (0 < n < limit)")
def lifecycle_table(experiment: ExperimentRuns) -> Rows:
    """Table S4, one row per run: partial steps, evictions by caller, and evicted slots that nobody got afterwards."""
    for run in experiment.valid_runs:
        limit, n = run.server.max_num_seqs, run.table("steps").column("n").to_pylist()
        partial = sum(0 < seqs < limit for seqs in n)
        dummies = dummy_requests(run)
        callers, never = _evictions(run)
        yield {
            "run": f"{run.condition}/{run.replicate}",
            "decode_steps": len(n),
            "partial_steps": partial,
            "dummy_requests": None if dummies is None else str(dummies),
            "steps_at_limit": len(n) - partial,
            "evictions": callers.total(),
            "callers": ", ".join(f"{caller} {count}" for caller, count in sorted(callers.items())),
            "never_reallocated": never,
        }


def _evictions(run: SealedRun) -> tuple[Counter[str], int]:
    """Evictions by caller, and how many of the slots nobody got afterwards."""
    callers: Counter[str] = Counter()
    allocated, never = set[int](), 0
    for kind, caller, slots in reversed(list(values_of(run.table("kv_events"), "kind", "caller", "slots"))):
        if kind == "alloc":
            allocated.update(slots)
        elif kind == "eviction":
            callers[caller or "unknown"] += 1
            never += slots[0] not in allocated
    return callers, never


def _sequential_survival(experiment: ExperimentRuns) -> AnalysisOutput:
    is_reused: dict[int, list[bool]] = {}
    for m, checks in _by_background(experiment).values():
        is_reused.setdefault(m, []).extend(
            bool(check.is_reused) for check in checks.rearrivals if check.is_reused is not None
        )
    critical = critical_request_count(is_reused)
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
