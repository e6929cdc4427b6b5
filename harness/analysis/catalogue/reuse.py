"""Tables of KV reuse: re-arrivals against formula C, prefill by kind of request, ceilings of reuse.

From responses and plans of sealed runs.
Definitions: docs/method.md, "Reuse", "Ceilings of reuse"; Table III.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from harness.analysis.catalogue import Rows, table
from harness.analysis.decisions.verdicts import ExperimentRuns
from harness.analysis.figures import ReuseFigures, cells, total_of
from harness.analysis.reuse import Rearrival, extra_prefill_ns, rearrivals, reuse_rule, total_ceilings
from harness.analysis.stats import sum_or_none, when_known
from harness.clock import NS_PER_MS
from harness.records import SealedRun, once_per_run
from harness.table import Cell, Table, table_of


@once_per_run
def reuse_checks(run: SealedRun) -> tuple[Rearrival, ...]:
    """Every re-arrival of a run: what formula C and the wider formula predict, and what was measured."""
    return tuple(rearrivals(run.table("requests"), run.plan, reuse_rule(run)))


def checks_of(runs: Sequence[SealedRun]) -> ReuseFigures:
    """The re-arrivals of several runs."""
    return ReuseFigures(tuple(check for run in runs for check in reuse_checks(run)))


def formula_table(experiment: ExperimentRuns) -> Table:
    """How often formula C, and the one that counts generated text, equal the measured reuse of reused re-arrivals."""
    rows: list[dict[str, Cell]] = []
    for condition, runs in experiment.runs.items():
        checks = checks_of(runs)
        reused = [check for check in checks.rearrivals if check.is_reused]
        diverging = [check for check in reused if check.reusable_tokens != check.with_answer_tokens]
        lost = sum(check.reusable_tokens for check in checks.rearrivals if not check.is_reused)
        rows.append(
            {
                "condition": condition,
                "rearrivals": checks.num_rearrivals,
                "reused": checks.num_reused,
                "formula_C_matches": sum(check.cached_tokens == check.reusable_tokens for check in reused),
                "wider_formula_matches": sum(check.cached_tokens == check.with_answer_tokens for check in reused),
                "formulas_differ": len(diverging),
                "C_matches_where_they_differ": sum(check.cached_tokens == check.reusable_tokens for check in diverging),
                "partial": checks.num_partial,
                "lost_tokens": None if checks.num_reused is None else lost,
            }
        )
    blocks = {reuse_rule(run).block_tokens for runs in experiment.runs.values() for run in runs}
    size = blocks.pop() if len(blocks) == 1 else "B"
    caption = f"Measured reuse against C = {size} floor(min(p0, p1 - 1) / {size}), and against counting generated text"
    return table_of("formula", caption, rows)


EXCEPTION = {
    "session": "session",
    "request": "request",
    "previous_prompt": "previous_prompt_tokens",
    "previous_generated": "previous_generated_tokens",
    "prompt": "prompt_tokens",
    "cached_tokens": "cached_tokens",
    "formula_C": "reusable_tokens",
    "wider_formula": "with_answer_tokens",
}


@table("formula exceptions", "Re-arrivals with another reuse than nothing or formula C")
def exceptions_table(experiment: ExperimentRuns) -> Rows:
    """Every re-arrival whose reuse is neither 0 nor what formula C gives: none, where the formula holds."""
    for condition, runs in experiment.runs.items():
        for run in runs:
            for check in reuse_checks(run):
                if check.cached_tokens not in (None, 0, check.reusable_tokens):
                    yield {"condition": condition, "replicate": run.replicate, **cells(check, EXCEPTION)}


@table("lost reuse", "Extra prefill of re-arrivals that found nothing, by the cost model")
def lost_reuse_table(experiment: ExperimentRuns) -> Rows:
    """What losing the reuse costs, T(L) - T(L - C), summed over the re-arrivals that lost it; ms."""
    for condition, runs in experiment.runs.items():
        checks = checks_of(runs)
        if checks.num_reused is None:
            continue
        extra_ms = [
            extra_prefill_ns(runs[0].cost_model, check.prompt_tokens, check.reusable_tokens) / NS_PER_MS
            for check in checks.rearrivals
            if not check.is_reused and check.reusable_tokens
        ]
        yield {
            "condition": condition,
            "lost": len(extra_ms),
            "extra_prefill_ms": sum(extra_ms),
            "smallest_ms": min(extra_ms, default=None),
            "largest_ms": max(extra_ms, default=None),
        }


@table("prefill by kind", "Prompt tokens that were computed, by the kind of request (Table III)")
def prefill_kinds_table(experiment: ExperimentRuns) -> Rows:
    """Tokens really computed by first requests and by re-arrivals, and what reuse saved of the latter."""
    for condition, runs in experiment.runs.items():
        checks, total = checks_of(runs), total_of(experiment.figures(condition))
        known = [when_known(operator.sub, check.prompt_tokens, check.cached_tokens) for check in checks.rearrivals]
        again = sum_or_none(known)
        yield {
            "condition": condition,
            "reused": None if checks.num_reused is None else checks.share_text,
            "reused_tokens": checks.reused_tokens,
            "computed_all": total.computed_prefill_tokens,
            "computed_first": when_known(operator.sub, total.computed_prefill_tokens, again),
            "computed_rearrivals": again,
            "largest_batch": max((n for n, _ in total.steps_by_n_b), default=0),
            "decode_steps": total.num_steps,
            "max_bucket": max((b for _, b in total.steps_by_n_b), default=0),
        }


def ceilings_table(experiment: ExperimentRuns) -> Table:
    """Reused share and its three ceilings per condition, then the tokens lost by cause; none without a plan."""
    found = {
        condition: total_ceilings(one.ceilings for one in experiment.figures(condition) if one.ceilings is not None)
        for condition in experiment.runs
    }
    causes = sorted({cause for one in found.values() for cause in one.lost})
    columns = {cause: "_".join(cause.replace(":", "").replace(",", "").split()) for cause in causes}
    rows = [
        {
            "condition": condition,
            "prompt_tokens": one.prompt,
            "reused_share": one.reused / one.prompt,
            "ceiling_blocks_share": one.blocks / one.prompt,
            "ceiling_turn_before_share": one.by_turn / one.prompt,
            "ceiling_endless_share": one.endless / one.prompt,
            **{f"lost_{column}_tokens": one.lost.get(cause, 0) for cause, column in columns.items()},
            "false_sharing_tokens": one.beyond,
        }
        for condition, one in found.items()
        if one.prompt
    ]
    caption = "Reuse beside its ceilings, shares of all prompt tokens; lost: what an endless cache would have hit"
    return table_of("reuse_ceilings", caption, rows)
