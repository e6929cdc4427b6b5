"""Tables of KV reuse: re-arrivals against formula C, prefill by kind of request, ceilings of reuse.

From responses and plans of sealed runs.
Definitions: docs/method.md, "Reuse", "Ceilings of reuse"; Table III.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.analysis.method.reuse import (
    extra_prefill_ns,
    rearrivals,
    reusable_tokens,
    reuse_rule,
    sum_or_none,
    total_ceilings,
)
from harness.analysis.method.verdicts import ExperimentRuns
from harness.clock import NS_PER_MS
from harness.records import SealedRun
from harness.table import Cell, Table, table_of


class ReuseCheck(NamedTuple):
    """One re-arrival. Tokens. by_formula: C; by_wider_formula: as if generated text counted too; cached: measured,
    None where the server did not report it.
    """

    condition: str
    replicate: int
    session: int
    request: int
    previous_prompt: int
    previous_generated: int
    prompt: int
    by_formula: int
    by_wider_formula: int
    cached: int | None

    @property
    def is_reused(self) -> bool | None:
        return None if self.cached is None else self.cached > 0

    @property
    def is_partial(self) -> bool | None:
        return None if self.cached is None else 0 < self.cached < self.by_formula


def reuse_checks(run: SealedRun) -> list[ReuseCheck]:
    """Every re-arrival of a run: what formula C and the wider formula predict, and what was measured."""
    plan, requests = run.plan, run.table("requests")
    generated = {
        (row["session"], row["request"]): row["completion_tokens"] or 0
        for row in requests.select(["session", "request", "completion_tokens"]).to_pylist()
    }
    checks: list[ReuseCheck] = []
    rule = reuse_rule(run)
    for one in rearrivals(requests, plan, rule):
        parent = plan.sessions[one.session].continues
        if one.request or parent is None:
            previous = (one.session, one.request - 1)
        else:
            previous = (parent, len(plan.sessions[parent].requests) - 1)
        answer = generated[previous]
        # A prompt that leaves the previous answer out cannot share it.
        kept = plan.request(one.session, one.request).keep_tokens
        wider = reusable_tokens(min(one.previous_prompt_tokens + answer, kept), one.prompt_tokens, rule.block_tokens)
        checks.append(
            ReuseCheck(
                run.condition,
                run.replicate,
                one.session,
                one.request,
                one.previous_prompt_tokens,
                answer,
                one.prompt_tokens,
                one.reusable_tokens,
                wider,
                one.cached_tokens,
            )
        )
    return checks


def formula_table(experiment: ExperimentRuns) -> Table:
    """How often formula C, and the one that counts generated text, equal the measured reuse of reused re-arrivals."""
    rows: list[dict[str, Cell]] = []
    for condition, runs in experiment.runs.items():
        checks = [check for run in runs for check in reuse_checks(run)]
        reused = [check for check in checks if check.is_reused]
        is_known = all(check.cached is not None for check in checks)
        diverging = [check for check in reused if check.by_formula != check.by_wider_formula]
        rows.append(
            {
                "condition": condition,
                "rearrivals": len(checks),
                "reused": sum_or_none(check.is_reused for check in checks),
                "formula_C_matches": sum(check.cached == check.by_formula for check in reused),
                "wider_formula_matches": sum(check.cached == check.by_wider_formula for check in reused),
                "formulas_differ": len(diverging),
                "C_matches_where_they_differ": sum(check.cached == check.by_formula for check in diverging),
                "partial": sum_or_none(check.is_partial for check in checks),
                "lost_tokens": sum(check.by_formula for check in checks if not check.is_reused) if is_known else None,
            }
        )
    blocks = {reuse_rule(run).block_tokens for runs in experiment.runs.values() for run in runs}
    size = blocks.pop() if len(blocks) == 1 else "B"
    caption = f"Measured reuse against C = {size} floor(min(p0, p1 - 1) / {size}), and against counting generated text"
    return table_of("formula", caption, rows)


def exceptions_table(experiment: ExperimentRuns) -> Table:
    """Every re-arrival whose reuse is neither 0 nor what formula C gives: none, where the formula holds."""
    rows: list[dict[str, Cell]] = [
        {
            "condition": check.condition,
            "replicate": check.replicate,
            "session": check.session,
            "request": check.request,
            "previous_prompt": check.previous_prompt,
            "previous_generated": check.previous_generated,
            "prompt": check.prompt,
            "cached_tokens": check.cached,
            "formula_C": check.by_formula,
            "wider_formula": check.by_wider_formula,
        }
        for runs in experiment.runs.values()
        for run in runs
        for check in reuse_checks(run)
        if check.cached not in (None, 0, check.by_formula)
    ]
    return table_of("formula exceptions", "Re-arrivals with another reuse than nothing or formula C", rows)


def lost_reuse_table(experiment: ExperimentRuns) -> Table:
    """What losing the reuse costs, T(L) - T(L - C), summed over the re-arrivals that lost it; ms."""
    rows: list[dict[str, Cell]] = []
    for condition, runs in experiment.runs.items():
        model = runs[0].cost_model
        checks = [check for run in runs for check in reuse_checks(run)]
        if any(check.cached is None for check in checks):
            continue
        lost = [check for check in checks if not check.is_reused and check.by_formula]
        extra_ms = [extra_prefill_ns(model, check.prompt, check.by_formula) / NS_PER_MS for check in lost]
        rows.append(
            {
                "condition": condition,
                "lost": len(lost),
                "extra_prefill_ms": sum(extra_ms),
                "smallest_ms": min(extra_ms, default=None),
                "largest_ms": max(extra_ms, default=None),
            }
        )
    return table_of("lost reuse", "Extra prefill of re-arrivals that found nothing, by the cost model", rows)


def prefill_kinds_table(experiment: ExperimentRuns) -> Table:
    """Tokens really computed by first requests and by re-arrivals, and what reuse saved of the latter."""
    rows: list[dict[str, Cell]] = []
    for condition, runs in experiment.runs.items():
        checks = [check for run in runs for check in reuse_checks(run)]
        total = sum_or_none(figures.computed_prefill_tokens for figures in experiment.figures(condition))
        reused = sum_or_none(check.is_reused for check in checks)
        again = sum_or_none(None if check.cached is None else check.prompt - check.cached for check in checks)
        rows.append(
            {
                "condition": condition,
                "reused": None if reused is None else f"{reused}/{len(checks)}",
                "reused_tokens": sum_or_none(check.cached for check in checks),
                "computed_all": total,
                "computed_first": None if total is None or again is None else total - again,
                "computed_rearrivals": again,
                "largest_batch": _largest_batch(runs),
                "decode_steps": sum_or_none(figures.num_steps for figures in experiment.figures(condition)),
                "max_bucket": _largest_bucket(runs),
            }
        )
    return table_of("prefill by kind", "Prompt tokens that were computed, by the kind of request (Table III)", rows)


def _largest_batch(runs: Sequence[SealedRun]) -> int:
    return max((max(run.table("steps").column("n").to_pylist(), default=0) for run in runs), default=0)


def _largest_bucket(runs: Sequence[SealedRun]) -> int:
    return max((max(run.table("steps").column("b").to_pylist(), default=0) for run in runs), default=0)


def ceilings_table(experiment: ExperimentRuns) -> Table:
    """Reused share and its three ceilings per condition, then the tokens lost by cause; none without a plan."""
    found = {
        condition: total_ceilings(one.ceilings for one in experiment.figures(condition) if one.ceilings is not None)
        for condition in experiment.runs
    }
    causes = sorted({cause for one in found.values() for cause in one.lost})
    rows: list[dict[str, Cell]] = []
    for condition, one in found.items():
        if not one.prompt:
            continue
        shares: dict[str, Cell] = {
            "reused_share": one.reused / one.prompt,
            "ceiling_blocks_share": one.blocks / one.prompt,
            "ceiling_turn_before_share": one.by_turn / one.prompt,
            "ceiling_endless_share": one.endless / one.prompt,
        }
        lost: dict[str, Cell] = {f"lost_{_as_column(cause)}_tokens": one.lost.get(cause, 0) for cause in causes}
        rows.append(
            {"condition": condition, "prompt_tokens": one.prompt, **shares, **lost, "false_sharing_tokens": one.beyond}
        )
    caption = "Reuse beside its ceilings, shares of all prompt tokens; lost: what an endless cache would have hit"
    return table_of("reuse_ceilings", caption, rows)


def _as_column(cause: str) -> str:
    return "_".join(cause.replace(":", "").replace(",", "").split())
