"""How much of their prompts the runs of a condition could have reused, how much they did, and what took the rest.

Sums over replicates; shares are of all prompt tokens. Nothing is compared here. Next: ``catalogue`` shows it.
Definition: docs/method.md, "Ceilings of reuse".
"""

from __future__ import annotations

from harness.analysis.method.ceilings import total
from harness.analysis.method.tabular import Cell, ResultTable, table_of
from harness.analysis.method.verdicts import ExperimentRuns


def ceilings_table(experiment: ExperimentRuns) -> ResultTable:
    """Reused share and its three ceilings per condition, then the tokens lost by cause; none without a plan."""
    found = {
        condition: total(one.ceilings for one in experiment.figures(condition) if one.ceilings is not None)
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
