"""``harness compare``: conditions of any experiments, folders and dates against their baselines.

Reads sealed runs, and result files of other benchmarks as one side.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.addresses import RunsOption, TableFormOption
from harness.cli.terminal import print_tables, terminal
from harness.errors import SpecError
from harness.table import Table, TableForm, table_of, with_four_digits

if TYPE_CHECKING:
    from harness.analysis.decisions.across import Side
    from harness.records import SealedRun


def compare(
    places: Annotated[
        list[str],
        typer.Argument(
            help="FOLDER, FOLDER/EXPERIMENT or FOLDER/EXPERIMENT/CONDITION; a name below --runs; an experiment's file; "
            "or result files of vLLM bench, AIPerf or GuideLLM."
        ),
    ],
    baseline: Annotated[
        str | None,
        typer.Option(help="Compare with this place instead: a condition, or conditions of the same names."),
    ] = None,
    runs: RunsOption = Path("runs"),
    form: TableFormOption = TableForm.text,
) -> None:
    """Compare conditions across experiments, folders and dates.

    Below 1 is less.

    A ratio is always condition over baseline, by the baselines that the experiment names. Runs of the same drawn plan
    are paired; where the inputs differ, "paired" says no. p-values are adjusted over the comparisons of one measure
    (Holm). Invalid runs are left out.

    One side may be result files of another benchmark with per-request records, or a folder of them: its figures only,
    never paired (docs/export.md).

    Example: `harness compare runs/tuesday/demo --baseline runs/monday/demo --format csv`
    """
    table = compared(list(dict.fromkeys(places)), baseline, runs)
    if form in (TableForm.csv, TableForm.json):
        print_tables([table], form)
        return
    rounded = with_four_digits(table, ("mean", "baseline_mean"))
    if form is TableForm.text:
        print_tables(_by_pair(rounded), form, remarks=[""])
        terminal().print(table.explanation, markup=False, highlight=False)
    else:
        print_tables([rounded], form)


def compared(places: Sequence[str], baseline: str | None, runs: Path) -> Table:
    """The places against their baselines; SpecError where both sides are of other benchmarks."""
    from harness.analysis.decisions.across import compare_all, compare_with_peer, pairs_of
    from harness.export import peer_side

    peer = peer_side([Path(place) for place in places])
    base = None if baseline is None else peer_side([Path(baseline)])
    if peer is None and base is None:
        sides = [side for place in places for side in sides_at(place, runs)]
        return compare_all(pairs_of(sides, [] if baseline is None else sides_at(baseline, runs)))
    if peer is not None and (baseline is None or base is not None):
        raise SpecError(
            "only other benchmarks' results to compare",
            where="harness compare",
            hint="Name sealed runs as the other side: --baseline FOLDER/EXPERIMENT/CONDITION",
        )
    ours = [baseline] if peer is not None and baseline is not None else places
    sides = [side for place in ours for side in sides_at(place, runs)]
    theirs = peer or base
    assert theirs is not None
    return compare_with_peer(sides, theirs, is_baseline=peer is None)


def _by_pair(table: Table) -> list[Table]:
    """A table per pair, which fits a narrow terminal: a row per measure."""
    from itertools import groupby

    shown = ("measure", "mean", "baseline_mean", "ratio", "low", "high", "p_holm", "verdict")
    named = ("condition", "baseline", "paired", "runs", "source")
    pairs: list[Table] = []
    for (condition, base, paired, runs, source), rows in groupby(
        table.records(), lambda row: tuple(row[name] for name in named)
    ):
        how = "paired by plan" if paired else "not paired: other inputs"
        name = f"{condition} against {base} ({how}, {runs} runs, {source})"
        pairs.append(table_of(name, "", ({name: row[name] for name in shown} for row in rows)))
    return pairs


def sides_at(address: str, runs: Path) -> list[Side]:
    """The conditions with valid runs at an address; SpecError that says what was looked for when there are none."""
    from harness.analysis.decisions.across import Side
    from harness.records import RunStore
    from harness.records.addresses import sealed_runs

    place = Path(address)
    if address.endswith(".toml"):
        place = sealed_runs(runs, address)[0].path.parents[1]
    elif not place.exists():
        place = runs / address
    choices = ((place, "", ""), (place.parent, place.name, ""), (place.parent.parent, place.parent.name, place.name))
    for root, experiment, condition in choices:
        found: dict[tuple[str, str], list[SealedRun]] = {}
        for run in RunStore(root).sealed(experiment or None):
            if run.is_valid and condition in ("", run.condition):
                found.setdefault((run.experiment, run.condition), []).append(run)
        if found:
            return [Side(f"{root}/{named}/{name}", tuple(runs)) for (named, name), runs in found.items()]
    raise SpecError(
        "no valid sealed runs there",
        where=str(place),
        hint="Name FOLDER, FOLDER/EXPERIMENT or FOLDER/EXPERIMENT/CONDITION",
    )
