"""What the commands do, as functions for Python and notebooks; each returns a value that shows itself.

Nothing is printed here.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.cli.addresses import experiment_with
from harness.table import Table, table_of

if TYPE_CHECKING:
    from harness.records import SealedRun
    from harness.spec import ExperimentSpec


def open_runs(address: str | Path, runs_root: str | Path = "runs") -> list[SealedRun]:
    """The sealed runs of an experiment, invalid ones included.

    address: its name below ``runs_root``, its file, a folder of runs, or a published archive ("a.zip"). Raises
    SpecError where there are none.
    """
    from harness.records.store import sealed_runs

    return sealed_runs(Path(runs_root), address)


def compare(*addresses: str | Path, baseline: str | Path | None = None, runs_root: str | Path = "runs") -> Table:
    """Conditions against their baselines, a row for each measure, as ``harness compare``; below 1 is less.

    addresses: folders of runs, or names and files of experiments. baseline: compare with the conditions there instead.
    """
    from harness.cli.compare import compared

    return compared(list(map(str, addresses)), None if baseline is None else str(baseline), Path(runs_root))


def sweep(experiment: str | Path, over: str, **changes: Any) -> ExperimentSpec:
    """The experiment with a condition for each value of one key, for ``run_experiment``.

    over: "workload.num_sessions=2,4,8"; the first value is the baseline. changes: keys of the experiment itself, such
    as replicates=3 or backend="sim".
    """
    from harness.cli.run import swept_table
    from harness.records.store import experiment_at
    from harness.spec import parse_experiment

    source, table, _ = experiment_at(experiment)
    return parse_experiment(swept_table({**table, **changes}, over), where=f"{source}, {over}")


def power(
    experiment: str | Path,
    *,
    margin: float = 0.02,
    precision: float = 0.01,
    runs: Sequence[SealedRun] = (),
    num_blocks: int = 60,
) -> Table:
    """Replicates that each comparison needs at power 0.9, alpha 0.05 over all, as ``harness power``; None: above 1,000.

    margin: what counts as equal. precision: half width of an interval. runs: sealed runs to take the spread from;
    without any, ``num_blocks`` plan draws are simulated.
    """
    from harness.advise.power import Goal, measured_components, needed_together, simulated_components
    from harness.records import origin_of

    spec, valid = experiment_with(experiment)[0], [run for run in runs if run.is_valid]
    components = measured_components(spec, valid) if valid else simulated_components(spec, num_blocks)[0]
    needs = needed_together(components, Goal(margin=margin, precision=precision))
    rows = [
        {
            "condition": need.components.condition,
            "baseline": need.components.baseline,
            "log_ratio": need.components.mean,
            "sd_of_log_ratio": need.components.sd,
            "for_precision": need.precision,
            "for_equivalence": need.equivalence,
            "for_difference": need.difference,
            "as_found": need.as_predicted,
        }
        for need in needs
    ]
    together = f", adjusted over {len(needs)} comparisons" if len(needs) > 1 else ""
    caption = f"Replicates for a half width of {precision:.1%} and a margin of {margin:.1%}{together}."
    return table_of("Power", caption, rows, origin_of(valid) if valid else f"Simulated: {num_blocks} plan draws.")
