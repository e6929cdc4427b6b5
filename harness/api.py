"""What ``import harness`` offers beside the classes: what the commands do, as functions for Python and notebooks.

Each returns a value that shows itself. Nothing is printed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.errors import SpecError
from harness.table import Table, table_of

if TYPE_CHECKING:
    from harness.analysis.compare.across import PeerSide, Side
    from harness.measure.records.run import SealedRun
    from harness.model.spec import ExperimentSpec


def open_runs(address: str | Path, runs_root: str | Path = "runs") -> list[SealedRun]:
    """The sealed runs of an experiment, invalid ones included.

    address: its name below ``runs_root``, its file, a folder of runs, or a published archive ("a.zip"). Raises
    SpecError where there are none.
    """
    from harness.measure.records.store import sealed_runs

    return sealed_runs(Path(runs_root), address)


def compare(
    *addresses: str | Path,
    baseline: str | Path | None = None,
    runs_root: str | Path = "runs",
    targets: Mapping[str, float] | None = None,
) -> Table:
    """Conditions against their baselines, a row for each measure, as ``harness compare``; below 1 is less.

    addresses: folders of runs, or names and files of experiments. baseline: compare with the conditions there instead.
    targets: keys of [slo] that differ from those of the experiments. Raises SpecError where both sides are of other
    benchmarks.
    """
    from harness.analysis.compare.across import compare_all, compare_with_peer, pairs_of

    def sides_of(places: Sequence[str | Path]) -> list[Side]:
        return [side for place in places for side in sides_at(str(place), Path(runs_root), targets)]

    peer = _peer_side(list(map(Path, addresses)))
    base = None if baseline is None else _peer_side([Path(baseline)])
    others = [] if baseline is None else [baseline]
    if peer is None and base is None:
        return compare_all(pairs_of(sides_of(addresses), sides_of(others)))
    if peer is not None and (baseline is None or base is not None):
        raise SpecError(
            "only other benchmarks' results to compare",
            where="harness compare",
            hint="Name sealed runs as the other side: --baseline FOLDER/EXPERIMENT/CONDITION",
        )
    theirs = peer or base
    assert theirs is not None
    return compare_with_peer(sides_of(addresses if peer is None else others), theirs, is_baseline=peer is None)


def sweep(experiment: str | Path, over: str, **changes: Any) -> ExperimentSpec:
    """The experiment with a condition for each value of one key, for ``run_experiment``.

    over: "workload.num_sessions=2,4,8"; the first value is the baseline. changes: keys of the experiment itself, such
    as replicates=3 or backend="sim".
    """
    from harness.measure.records.store import experiment_at
    from harness.model.spec import parse_experiment
    from harness.model.spec.changes import swept_table

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
    from harness.judge.planning.needed import Goal, measured_components, needed_together, simulated_components
    from harness.measure.records.run import origin_of
    from harness.measure.records.store import experiment_at
    from harness.model.spec import parse_experiment

    source, table, _ = experiment_at(experiment)
    spec, valid = parse_experiment(table, where=str(source)), [run for run in runs if run.is_valid]
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
    caption = f"Replicates for a half width of {100 * precision:.1f} % and a margin of {100 * margin:.1f} %{together}."
    return table_of("Power", caption, rows, origin_of(valid) if valid else f"Simulated: {num_blocks} plan draws.")


def _peer_side(places: Sequence[Path]) -> PeerSide | None:
    """The places as results of another benchmark, by the first plug-in that reads them; None where none does."""
    from harness.plugins import part_at, plugged

    sides = (part_at(place)(places) for place in plugged("result_files").values())
    return next((side for side in sides if side is not None), None)


def sides_at(address: str, runs: Path, targets: Mapping[str, float] | None = None) -> list[Side]:
    """The conditions with valid runs at an address; SpecError that says what was looked for when there are none.

    targets: keys of [slo] that differ from those of the experiments.
    """
    from harness.analysis.compare.across import Side
    from harness.analysis.stats import grouped
    from harness.measure.records.archive import runs_folder
    from harness.measure.records.store import RunStore, sealed_runs

    place, runs = runs_folder(Path(address)), runs_folder(runs)
    if address.endswith(".toml"):
        place = sealed_runs(runs, address)[0].path.parents[1]
    elif not place.exists():
        place = runs / address
    choices = ((place, "", ""), (place.parent, place.name, ""), (place.parent.parent, place.parent.name, place.name))
    for root, experiment, condition in choices:
        there = RunStore(root).sealed(experiment or None)
        there = [run.with_targets(**targets) for run in there] if targets else there
        sealed = grouped(there, lambda run: run.experiment)
        found = [
            Side(f"{root}/{named}/{name}", tuple(valid), tuple(every))
            for named, every in sealed.items()
            for name, valid in grouped((run for run in every if run.is_valid), lambda run: run.condition).items()
            if condition in ("", name)
        ]
        if found:
            return found
    raise SpecError(
        "no valid sealed runs there",
        where=str(place),
        hint="Name FOLDER, FOLDER/EXPERIMENT or FOLDER/EXPERIMENT/CONDITION",
    )
