"""Conditions against their baselines across experiments, folders and dates, in cost and in what users felt.

Runs of the same drawn plan are paired; where there are none, the sides count as independent samples and the row says
so. Nothing is decided and no run is left out but invalid ones.
Definitions: docs/reference/method-comparisons.md, "Comparing any conditions".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.analysis.compare.answer import Result, result_of, source_of
from harness.analysis.compare.channels import compare, why_apart
from harness.analysis.compare.measures import (
    COST_WORDS,
    MEASURES,
    OF_SERVERS,
    OF_SIMULATIONS,
    Measure,
    Value,
    mean_of,
    per_token,
)
from harness.analysis.compare.pairs import Prices, are_repeats, num_plans, prices_of, without_a
from harness.analysis.compare.rare import shape_in_words
from harness.analysis.compare.ratio import (
    Family,
    Ratio,
    Verdict,
    blocks_of,
    paired_ratio,
    ran_until_decided,
    unpaired_ratio,
)
from harness.analysis.compare.stopping import ComparisonLooks, status_until_decided
from harness.analysis.cost.cost_errors import NO_ERROR, UNKNOWN, CostSide, cost_error
from harness.analysis.figures import RunFigures, cells, run_figures, same
from harness.analysis.stats import GIVEN_COSTS, grouped, paired
from harness.errors import SpecError
from harness.measure.records.run import SealedRun, origin_of
from harness.model.engine.cost import CostError
from harness.table import Cell, Table, table_of


@dataclass(frozen=True, slots=True)
class Side:
    """Runs that are compared together: a condition of an experiment in a folder.

    runs: the valid ones. sealed: all of its experiment there, which its stopping rule looked at; default: ``runs``.
    """

    name: str
    runs: tuple[SealedRun, ...]
    sealed: tuple[SealedRun, ...] = ()

    @property
    def place(self) -> str:
        """Folder and experiment."""
        return self.name.rpartition("/")[0]

    @property
    def condition(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def backends(self) -> str:
        """The backends of the runs, each once."""
        return "+".join(dict.fromkeys(run.manifest.kind.name for run in self.runs))

    @property
    def source(self) -> str:
        """The sources of the runs' costs, each once."""
        return "+".join(dict.fromkeys(source_of(run.manifest.kind.name).value for run in self.runs))

    @property
    def is_simulated(self) -> bool:
        return all(run.manifest.kind.is_virtual for run in self.runs)

    @property
    def figures(self) -> list[RunFigures]:
        return [run_figures(run) for run in self.runs]


def pairs_of(sides: Sequence[Side], baselines: Sequence[Side] = ()) -> list[tuple[Side, Side]]:
    """(side, its baseline): the condition that its experiment names, or one of ``baselines``.

    baselines: one for all sides, or several, each for the conditions of its name. Raises SpecError for a side that has
    none, and where nothing is left to compare.
    """
    pairs = [(side, base) for side in sides if (base := _baseline_of(side, sides, baselines)) is not side]
    if not pairs:
        raise SpecError(
            "nothing to compare: every condition there is a baseline",
            where="harness compare",
            hint="Name the condition or folder to compare with: --baseline PLACE",
        )
    return pairs


def _baseline_of(side: Side, sides: Sequence[Side], baselines: Sequence[Side]) -> Side:
    if any(base.name == side.name for base in baselines):
        return side
    named = side.runs[0].manifest.baseline
    if baselines:
        same_name = [base for base in baselines if base.condition == side.condition]
        fitting = baselines if len(baselines) == 1 else same_name
    elif named in ("", side.condition):
        return side
    else:
        fitting = [other for other in sides if (other.place, other.condition) == (side.place, named)]
    if not fitting:
        raise SpecError(
            f"its baseline {named!r} is not among what is compared",
            where=side.name,
            hint="Name its experiment, or what to compare with: --baseline PLACE",
        )
    return fitting[0]


@dataclass(frozen=True, slots=True)
class PeerSide:
    """Results of another benchmark that are compared together: its figures only, no sealed run.

    tool: what made them. runs: of each result file, the measures that its records hold. origin: what was simulated or
    emulated, where the files say so.
    """

    name: str
    tool: str
    runs: tuple[Mapping[str, Value], ...]
    origin: str = ""

    @property
    def backends(self) -> str:
        return self.tool

    @property
    def source(self) -> str:
        return self.tool


def compare_all(pairs: Sequence[tuple[Side, Side]]) -> Table:
    """Every pair in every measure: ratio to the baseline, interval, p-value and verdict over the pairs.

    Paired by plan wherever both sides replayed a plan (t test), else as independent samples (Welch). The rows of one
    measure are a family. Rows with fewer than three replicates have no interval.
    """
    prices = [prices_of({side.name: side.runs, base.name: base.runs}, base.runs) for side, base in pairs]
    rows = [
        row
        for (side, base), alike in zip(pairs, prices, strict=True)
        for measure in _measures(side, base)
        for row in _rows(side, base, measure, alike)
    ]
    missing = dict.fromkeys(
        f"{side.name} ({reason})" for pair in pairs for side in pair if (reason := without_a(side.figures))
    )
    lacking = f"Channel A was not there in {', '.join(missing)}: B alone answers." if missing else ""
    origin = origin_of(run for side, base in pairs for run in (*base.runs, *side.runs))
    return _table(
        "Conditions against their baselines",
        "of sums for costs, of means over runs else",
        "paired: by drawn plans, runs of other plans left out; unpaired: the two sides replayed different inputs."
        + "".join(f" {note}" for note in (lacking, *dict.fromkeys(alike.note for alike in prices)) if note),
        rows,
        origin,
    )


def compare_with_peer(sides: Sequence[Side], peer: PeerSide, *, is_baseline: bool) -> Table:
    """Each side and results of another benchmark, in what users felt; never paired, since no plan is known.

    is_baseline: whether the other benchmark's results are the baseline. Raises SpecError where no measure is shared.
    """
    pairs = [(side, peer) if is_baseline else (peer, side) for side in sides]
    rows = [row for pair in pairs for measure in MEASURES.values() for row in _rows(*pair, measure, Prices())]
    if not rows:
        raise SpecError(
            "its records share no figure with the runs", where=peer.name, hint="Compare runs that stream their answers"
        )
    unpaired = (
        f"Not paired: {peer.name} has figures of {peer.tool} and no plan, so the sides replayed different inputs."
    )
    origins = dict.fromkeys((origin_of(run for side in sides for run in side.runs), peer.origin))
    return _table(
        "Conditions against another benchmark",
        "of means over runs (a result file is one run)",
        unpaired,
        rows,
        " ".join(filter(None, origins)),
    )


def _table(name: str, of: str, pairing: str, rows: Sequence[_Row], origin: str) -> Table:
    """The rows with their intervals, p-values and verdicts, adjusted measure by measure."""
    families = {column: len(group) for column, group in grouped(rows, lambda row: row.measure.column).items()}
    most = max(families.values(), default=1)
    together = "" if most < 2 else f" over the {most} comparisons of a measure together, as is p_adjusted (Bonferroni)"
    caption = (
        f"ratio: condition over baseline, below 1 is less; {of}; low, high: 95 % interval{together}; the verdict is "
        f"whether it leaves 1 out; a dash: fewer than three runs a side. {pairing}"
    )
    return table_of(name, caption, [row.cells(families[row.measure.column]) for row in rows], origin)


def _measures(side: Side, base: Side) -> list[Measure]:
    """A and B of a simulation are the same cost, and compared once."""
    left_out = OF_SERVERS if _is_simulated(side, base) else OF_SIMULATIONS
    return [measure for name, measure in MEASURES.items() if name not in left_out]


@dataclass(frozen=True, slots=True)
class _Row:
    """One pair in one measure, before its family is known. ratio: None where a side counts none.

    costs, replicates: of paired runs, in a cost that the channels may contradict, and in any cost; empty of others.
    is_repeated: the replicates sent the same sessions.
    """

    measure: Measure
    names: Mapping[str, Cell]
    means: tuple[float, float]
    ratio: Ratio | None
    num_plans: int
    is_checked: bool
    looks: ComparisonLooks | None
    why_not: str
    costs: tuple[Sequence[RunFigures], Sequence[RunFigures]] | None = None
    replicates: Sequence[int] = ()
    is_repeated: bool = False

    def cells(self, size: int) -> dict[str, Cell]:
        """Its row. size: of the family."""
        family, shape = Family(size, is_checked=self.is_checked), ""
        if self.why_not or self.ratio is None:
            ratio = math.nan if self.ratio is None else self.ratio.ratio
            result = Result(ratio, None, None, None, Verdict.TOO_FEW, size)
        else:
            result = result_of(self.ratio, self.num_plans, family, self.looks)
        if result.interval is not None and self.replicates and self.ratio is not None:
            shape = shape_in_words(self.ratio.of_blocks, self.replicates, is_repeated=self.is_repeated)
        compared = None if self.costs is None else compare("", *self.costs, family=family)
        apart = "" if compared is None else why_apart(compared)
        given = GIVEN_COSTS.removeprefix(", ") if result.interval and result.interval.is_given_costs else ""
        return {
            **self.names,
            "mean": self.means[0],
            "baseline_mean": self.means[1],
            "ratio": None if self.ratio is None else result.ratio,
            **cells(result.interval, same("low", "high")),
            **cells(result, same("p", "p_adjusted", "family")),
            "verdict": self.why_not or (Verdict.WITHHELD if apart else result.verdict).label(self.measure.words),
            "note": "; ".join(filter(None, (apart, result.note, given, shape))),
        }


def _rows(side: Side | PeerSide, base: Side | PeerSide, measure: Measure, prices: Prices) -> Iterator[_Row]:
    """The comparison in one measure; nothing where a side has no value of it."""
    pairs = paired_runs(side, base) if isinstance(side, Side) and isinstance(base, Side) else []
    looks = _looks(side, base, measure)
    if looks is not None:
        pairs = [pair for pair in pairs if pair[0].key.replicate not in looks.replicates[looks.num_seen :]]
    runs = list(zip(*pairs, strict=True)) if pairs else [side.runs, base.runs]
    values = [[_value(run, measure, prices) for run in group] for group in runs]
    known = [[value for value in group if value is not None and measure.has_ratio(value)] for group in values]
    if not all(known):
        return
    if pairs and list(map(len, known)) != list(map(len, values)):
        return
    sealed = [[run for run in group if isinstance(run, SealedRun)] for group in runs]
    figures = [[prices.figures(run) for run in group] for group in sealed]
    is_predicted = _is_simulated(side, base)
    is_modelled = measure.name == "A" or (measure.name == "cost" and is_predicted)
    costs = _cost_error(figures) if is_modelled else NO_ERROR
    own, other = known
    plans = min(map(num_plans, figures)) if all(figures) else 0
    none_of = _none_of(measure, known, sealed)
    why_not = none_of or (_why_not(measure, sealed) if all(sealed) else "")
    ratio = None
    if not none_of:
        ratio = paired_ratio(blocks_of(own, other), figures[0], costs) if pairs else unpaired_ratio(own, other, costs)
    yield _Row(
        measure=measure,
        names={
            "condition": side.name,
            "baseline": base.name,
            "measure": measure.column,
            "paired": bool(pairs),
            **(_same_devices(figures, is_paired=bool(pairs)) if all(figures) else {}),
            "runs": f"{len(own)}:{len(other)}",
            "backends": f"{side.backends}:{base.backends}",
            "source": " : ".join(dict.fromkeys((side.source, base.source))),
        },
        means=(mean_of(own), mean_of(other)),
        ratio=ratio,
        num_plans=plans,
        is_checked=any(ran_until_decided(run) for group in sealed for run in group),
        looks=looks,
        replicates=[run.replicate for run in figures[0]] if pairs and measure.words == COST_WORDS else (),
        is_repeated=are_repeats(figures[0]),
        why_not=why_not,
        costs=(figures[0], figures[1]) if pairs and measure.words == COST_WORDS and not is_predicted else None,
    )


def _none_of(measure: Measure, known: Sequence[Sequence[Value]], sides: Sequence[Sequence[SealedRun]]) -> str:
    """Of how many each side counts none, which has no ratio; empty where both count some."""
    sizes = [
        sum(map(measure.counted.number, runs))
        for values, runs in zip(known, sides, strict=True)
        if not any(value.amount for value in values)
    ]
    none_of = " and ".join(f"0 of {size:,}" for size in sizes)
    return f"no ratio: {none_of} {measure.counted.value} within [slo] {measure.target}" if sizes else ""


def _why_not(measure: Measure, sides: Sequence[Sequence[SealedRun]]) -> str:
    """Why these runs have a ratio and no interval; empty where they have both."""
    if len({measure.target_of(run.manifest) for side in sides for run in side}) > 1:
        return f"other targets ([slo] {measure.target})"
    needed = measure.num_needed
    if needed > 1 and min(sum(map(measure.counted.number, side)) for side in sides) < needed:
        return f"too few {measure.counted.value} ({needed} are needed)"
    return ""


def _is_simulated(side: Side | PeerSide, base: Side | PeerSide) -> bool:
    return isinstance(side, Side) and isinstance(base, Side) and side.is_simulated and base.is_simulated


def _cost_error(figures: Sequence[Sequence[RunFigures]]) -> CostError:
    """What the costs leave unknown of the log ratio of modelled times; every cost, where a run has no step log."""
    own, base = ([run.a for run in group if run.a is not None] for group in figures)
    return cost_error(CostSide(own, 1.0), CostSide(base, -1.0)) if own and base else UNKNOWN


def _looks(side: Side | PeerSide, base: Side | PeerSide, measure: Measure) -> ComparisonLooks | None:
    """The looks of the stopping rule that both sides were made under, at the channel that this measure is."""
    if not (isinstance(side, Side) and isinstance(base, Side)) or side.place != base.place:
        return None
    if side.runs[0].manifest.baseline != base.condition:
        return None
    status = status_until_decided(side.sealed or (*base.runs, *side.runs))
    if status is None:
        return None
    looks = next((one for one in status.comparisons if one.condition == side.condition), None)
    channel = {"A": "a", "S": "s", "B": "b", "cost": "a" if side.is_simulated else "b"}.get(measure.name)
    return looks if looks is not None and looks.channel == channel else None


def _value(run: SealedRun | Mapping[str, Value], measure: Measure, prices: Prices) -> Value | None:
    """The measure of a run of either side; A at the prices of both."""
    if not isinstance(run, SealedRun):
        return run.get(measure.column)
    return per_token(run, prices.figures(run).a_ns) if measure.name == "A" else measure.of(run)


def paired_runs(side: Side, base: Side) -> list[tuple[SealedRun, SealedRun]]:
    """Runs of the same block: by replicate within an experiment, else by drawn plan, where no plan was repeated."""
    is_one_experiment = side.place == base.place

    def block(run: SealedRun) -> object:
        return (run.replicate, run_figures(run).device) if is_one_experiment else run.manifest.drawn_hash

    if any(most > 1 for runs in (side.runs, base.runs) for most in Counter(map(block, runs)).values()):
        return []
    return paired(side.runs, base.runs, block)


def _same_devices(sides: Sequence[Sequence[RunFigures]], *, is_paired: bool) -> dict[str, Cell]:
    """Whether what is compared was made on the same devices; no column outside fleets."""
    places = [[run.device for run in runs] if is_paired else sorted({run.device for run in runs}) for runs in sides]
    return {"same_device": places[0] == places[1]} if any(map(any, places)) else {}
