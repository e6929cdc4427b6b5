"""Conditions against their baselines across experiments, folders and dates, in cost and in what users felt.

Runs of the same drawn plan are paired; where there are none, the sides count as independent samples and the row says
so. Nothing is decided and no run is left out but invalid ones.
Definitions: docs/method.md, "Comparing any conditions".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.analysis.cost.devices import estimate_of
from harness.analysis.figures import RunFigures, cells, run_figures, same
from harness.analysis.stats import (
    MIN_REPLICATES,
    Estimate,
    FloatArray,
    contrast,
    grouped,
    holm,
    paired,
)
from harness.errors import SpecError
from harness.judge.compare.measures import MEASURES, OF_SERVERS, OF_SIMULATIONS, Measure, Value, log_values
from harness.judge.decisions.answer import AnswerVerdict, source_of, verdict_of
from harness.records import SealedRun, origin_of
from harness.table import Cell, Table, table_of


@dataclass(frozen=True, slots=True)
class Side:
    """Runs that are compared together: a condition of an experiment in a folder."""

    name: str
    runs: tuple[SealedRun, ...]

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


BY_COLUMN = {measure.column: measure for measure in MEASURES.values()}


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
    """Every pair in every measure: ratio to the baseline, its interval, and a p-value adjusted over the pairs.

    Paired by drawn plan where each side replayed those of the other (t test), else as independent samples (Welch).
    p_holm: Holm's step-down over the rows of one measure. Rows with fewer than three replicates have no p.
    """
    rows = [row for side, base in pairs for measure in _measures(side, base) for row in _row(side, base, measure)]
    missing = [side.name for pair in pairs for side in pair if all(run_figures(run).a is None for run in side.runs)]
    without_a = f" Channel A was not there in {', '.join(dict.fromkeys(missing))}: B alone answers." if missing else ""
    origin = origin_of(run for side, base in pairs for run in (*base.runs, *side.runs))
    return _table(
        "Conditions against their baselines",
        "of sums for costs, of means over runs else",
        "paired: by drawn plans, runs of other plans left out; unpaired: the two sides replayed different inputs."
        + without_a,
        rows,
        origin,
    )


def compare_with_peer(sides: Sequence[Side], peer: PeerSide, *, is_baseline: bool) -> Table:
    """Each side and results of another benchmark, in what users felt; never paired, since no plan is known.

    is_baseline: whether the other benchmark's results are the baseline. Raises SpecError where no measure is shared.
    """
    pairs = [(side, peer) if is_baseline else (peer, side) for side in sides]
    rows = [row for pair in pairs for measure in MEASURES.values() for row in _row(*pair, measure)]
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


def _table(name: str, of: str, pairing: str, rows: Sequence[dict[str, Any]], origin: str) -> Table:
    """The rows with their p-values adjusted measure by measure, and the verdicts by them."""
    for measure, of_measure in grouped(rows, lambda row: str(row["measure"])).items():
        adjusted = holm([row["p"] for row in of_measure])
        family = sum(p is not None for p in adjusted)
        for row, p in zip(of_measure, adjusted, strict=True):
            if p is not None:
                row |= {"p_holm": p, "family": family, "verdict": _verdict(measure, row["ratio"], p)}
    caption = (
        f"ratio: condition over baseline, below 1 is less; {of}; interval: 95 %, of this row "
        "alone; p_holm: adjusted over the comparisons of the same measure (Holm; family: how many), the verdict is "
        f"by it; a dash: fewer than three runs a side. {pairing}"
    )
    return table_of(name, caption, rows, origin)


def _measures(side: Side, base: Side) -> list[Measure]:
    """A and B of a simulation are the same cost, and compared once."""
    left_out = OF_SERVERS if side.is_simulated and base.is_simulated else OF_SIMULATIONS
    return [measure for name, measure in MEASURES.items() if name not in left_out]


def _verdict(column: str, ratio: float, p: float) -> str:
    verdict = verdict_of(ratio, p)
    if verdict is AnswerVerdict.NO_DIFFERENCE:
        return verdict.value
    return BY_COLUMN[column].words[ratio > 1]


def _row(side: Side | PeerSide, base: Side | PeerSide, measure: Measure) -> Iterator[dict[str, Any]]:
    """The comparison in one measure; nothing where a side has no value of it."""
    pairs = _paired_runs(side, base) if isinstance(side, Side) and isinstance(base, Side) else []
    is_paired = len(pairs) == min(len(side.runs), len(base.runs))
    runs = list(zip(*pairs, strict=True)) if is_paired else [side.runs, base.runs]
    values = [[_value(run, measure) for run in group] for group in runs]
    known = [[value for value in group if value is not None and measure.has_ratio(value)] for group in values]
    if not known[0] or not known[1] or (is_paired and list(map(len, known)) != list(map(len, values))):
        return
    logs = [log_values(group) for group in known]
    figures = [[run_figures(run) for run in group if isinstance(run, SealedRun)] for group in runs]
    estimate = estimate_of((logs[0] - logs[1]).tolist(), figures[0]) if is_paired else _welch(*logs)
    interval = None if estimate is None else estimate.interval()
    means = [float(np.exp(group.mean())) for group in logs]
    # p-values are adjusted, and the verdict is given, when all rows are there.
    yield {
        "condition": side.name,
        "baseline": base.name,
        "measure": measure.column,
        "paired": is_paired,
        **(_same_devices(figures, is_paired=is_paired) if all(figures) else {}),
        "runs": f"{len(logs[0])}:{len(logs[1])}",
        "backends": f"{side.backends}:{base.backends}",
        "source": " : ".join(dict.fromkeys((side.source, base.source))),
        "mean": means[0],
        "baseline_mean": means[1],
        "ratio": means[0] / means[1] if interval is None else interval.estimate,
        **cells(interval, same("low", "high")),
        "p": None if estimate is None else estimate.p,
        "p_holm": None,
        "family": None,
        "verdict": AnswerVerdict.TOO_FEW.value,
    }


def _value(run: SealedRun | Mapping[str, Value], measure: Measure) -> Value | None:
    return measure.of(run) if isinstance(run, SealedRun) else run.get(measure.column)


def _paired_runs(side: Side, base: Side) -> list[tuple[SealedRun, SealedRun]]:
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


def _welch(one: FloatArray, other: FloatArray) -> Estimate | None:
    """The difference of the means of independent samples."""
    return None if min(len(one), len(other)) < MIN_REPLICATES else contrast([(1, one), (-1, other)])
