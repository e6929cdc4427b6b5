"""``harness fleet replicas``: what routing did to sealed runs."""

from __future__ import annotations

from pathlib import Path

from harness.cli.addresses import RunsOption, SealedArgument, TableFormsOption
from harness.cli.terminal import print_tables
from harness.errors import SpecError
from harness.table import Table, TableForm, with_four_digits

SHORT = (
    *("device_s", "ratio", "session_p90_s", "ttft_p50_ms", "busiest", "busy"),
    *("share", "in_flight_s", "n", "b", "padding"),
)


def measured(
    experiment: SealedArgument, runs: RunsOption = Path("runs"), form: TableFormsOption = TableForm.text
) -> None:
    """Show what routing did to runs of several replicas: cost of each condition, reuse kept and lost, work of each.

    Compares the replicates that every condition has; the first condition is the baseline.

    Example: `harness fleet replicas does-affinity-pay`
    """
    from harness.extras.replicas.figures import compare_policies, figures_by_condition, of_each_replica
    from harness.measure.records.run import origin_of
    from harness.measure.records.store import sealed_runs

    sealed = [run for run in sealed_runs(runs, experiment) if run.is_valid]
    if not sealed:
        raise SpecError("it has no valid run", where=experiment, hint="`harness runs` lists them")
    played, origin = figures_by_condition(sealed), origin_of(sealed)
    costs, reuse = compare_policies(played, origin)
    each = of_each_replica(played, origin)
    print_tables([_short(costs, form), reuse, _short(each, form)], form)


def _short(table: Table, form: TableForm) -> Table:
    """With four digits, where people read it."""
    columns = [name for name in SHORT if name in table.columns]
    return table if form in (TableForm.csv, TableForm.json) else with_four_digits(table, columns)
