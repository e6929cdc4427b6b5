"""A finished search: scores, ranking, Pareto front, sensitivity, and all of it as tables.

Ties keep the order of enumeration. Sums stay integers until the one division that makes a score. Nothing is judged here
that the ledger does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from harness.analysis.stats import FloatArray
from harness.extras.search.evaluate import Evaluator, Row
from harness.extras.search.intervals import SpacePredictor
from harness.extras.search.space import Score, SpaceSpec
from harness.model.spec import ServerShape
from harness.processes import parallel_map
from harness.table import Cell, Table, interval_text, with_error

IndexArray = npt.NDArray[np.int64]

TOP = 20
MOST_FRONT = 15
# Column of the ledger and unit of each objective; device seconds are the score.
OBJECTIVES = {
    "waiting": ("wait_ns", 1e-9),
    "p99-completion": ("p99_completion_ns", 1e-9),
    "memory": ("memory_gib", 1.0),
    "compile-seconds": ("compile_s", 1.0),
    "artifact-size": ("artifact_gib", 1.0),
}


@dataclass(frozen=True)
class Scores:
    """One candidate per place. ``indices``: their places in the enumeration."""

    indices: IndexArray
    sum_seconds: FloatArray
    per_n: FloatArray

    def of(self, score: Score) -> FloatArray:
        return self.sum_seconds if score == "sum-seconds" else self.per_n

    def ranked(self, score: Score) -> IndexArray:
        """Candidates from best to worst; equal scores stay in enumeration order."""
        return self.indices[np.argsort(self.of(score), kind="stable")]


@dataclass(frozen=True)
class SearchResult:
    """A finished search. Candidates are ranked by the space's own score on the search plans, all N."""

    space: SpaceSpec
    ledger: pa.Table
    """A row for each candidate, in enumeration order."""
    baseline: Row
    """The baseline's figures on the same plans."""

    @cached_property
    def rows(self) -> pa.Table:
        """The rows of candidates that have figures."""
        return self.ledger.filter(self.ledger["search_device_ns"].is_valid())

    @cached_property
    def scores(self) -> Scores:
        """Scores on the search inputs, all N; what selects."""
        return self.scores_on("search")

    @cached_property
    def evaluation(self) -> Scores | None:
        """Scores on the evaluation inputs; they select nothing."""
        return self.scores_on("evaluation") if self.has_evaluation else None

    @cached_property
    def ranked(self) -> list[int]:
        """Indices of the candidates that have figures, best first."""
        return self.scores.ranked(self.space.score).tolist()

    @property
    def has_evaluation(self) -> bool:
        return "evaluation_device_ns" in self.baseline and self.rows["evaluation_device_ns"].null_count == 0

    def scores_on(self, role: str, users: Sequence[int] = ()) -> Scores:
        """Scores on the plans of ``role``, over the set of N ``users``; default: all of them.

        sum-seconds: device seconds summed over all plans, over the baseline's; per-n: the mean of that ratio per N.
        With a window both use device seconds per completed request, because a better configuration completes more in
        the window.
        """
        inputs = self.space.inputs
        places = [inputs.users.index(count) for count in users or inputs.users]
        device, base = self._figures(f"{role}_device_ns", places)
        indices = self.rows["index"].to_numpy().astype(np.int64)
        if self.space.window is None:
            return Scores(indices, device.sum(axis=1) / base.sum(), (device / base).mean(axis=1))
        completed, base_completed = self._figures(f"{role}_completed", places)
        summed = (device.sum(axis=1) / completed.sum(axis=1)) / (base.sum() / base_completed.sum())
        return Scores(indices, summed, ((device / completed) / (base / base_completed)).mean(axis=1))

    def _figures(self, column: str, places: Sequence[int]) -> tuple[IndexArray, IndexArray]:
        """A column per N, shape (rows, places), and the baseline's figures, shape (places,)."""
        flat = self.rows[column].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        figures = np.asarray(flat, dtype=np.int64).reshape(-1, len(self.space.inputs.users))
        return figures[:, places], np.array(self.baseline[column], dtype=np.int64)[places]

    def candidate(self, index: int) -> ServerShape:
        row = self.ledger.slice(index, 1).to_pylist()[0]
        shape = ServerShape(**{name: row[name] for name in ServerShape._fields})
        return shape._replace(decode_buckets=tuple(shape.decode_buckets))


@dataclass(frozen=True)
class SensitivityRow:
    """The selection for one score and set of N (Tables S10 and S11)."""

    score: Score
    users: tuple[int, ...]
    selected: int
    search_sum: float
    search_per_n: float
    evaluation_sum: float | None
    evaluation_per_n: float | None
    is_reference_choice: bool
    reference_rank: int
    common_top: int
    size_top: int


def score_interval(space: SpaceSpec, candidate: ServerShape) -> tuple[float, float, int] | None:
    """95 % interval of a candidate's score over plans like those of the search, and their number; None below three.

    A datum is a plan of every N, one seed and replicate. By the delta method on the log scale; the costs are given.
    """
    from scipy.special import stdtrit

    evaluator, count = Evaluator(space), len(space.inputs.users)
    shape = (count, -1) if space.score == "per-n" else (1, count, -1)
    of_sides: list[FloatArray] = []
    log_score = np.zeros(count if space.score == "per-n" else 1)
    for sign, each in ((1, candidate), (-1, space.baseline.shape)):
        figures = evaluator.evaluate(each, evaluator.single_plans())
        costs, completed = (
            np.array([getattr(one, name) for one in figures], dtype=np.float64).reshape(shape)
            for name in ("device_ns", "completed")
        )
        if costs.ndim == 3:
            costs, completed = costs.sum(axis=1), completed.sum(axis=1)
        work = np.ones_like(completed) if space.window is None else completed
        of_sides.append(sign * (costs / costs.mean(axis=1, keepdims=True) - work / work.mean(axis=1, keepdims=True)))
        log_score += sign * (np.log(costs.mean(axis=1)) - np.log(work.mean(axis=1)))
    ratios = np.exp(log_score)
    score, num_plans = float(ratios.mean()), of_sides[0].shape[1]
    if num_plans < 3:
        return None
    errors = (ratios @ (of_sides[0] + of_sides[1])) / ratios.sum()
    half = float(stdtrit(num_plans - 1, 0.975)) * float(errors.std(ddof=1)) / math.sqrt(num_plans)
    return score * math.exp(-half), score * math.exp(half), num_plans


def sensitivity(result: SearchResult) -> list[SensitivityRow]:
    """The selection for every score and set of N beside the reference: the space's own score on all N."""
    space, reference = result.space, result.ranked
    chosen, top = reference[0], set(reference[:TOP])
    table: list[SensitivityRow] = []
    scores: tuple[Score, ...] = ("sum-seconds", "per-n")
    for score in scores:
        for users in space.sets_of_users():
            search = result.scores_on("search", users)
            ranked = search.ranked(score)
            best = int(ranked[0])
            place = int(np.flatnonzero(search.indices == best)[0])
            evaluation = result.scores_on("evaluation", users) if result.has_evaluation else None
            table.append(
                SensitivityRow(
                    score,
                    users,
                    best,
                    float(search.sum_seconds[place]),
                    float(search.per_n[place]),
                    None if evaluation is None else float(evaluation.sum_seconds[place]),
                    None if evaluation is None else float(evaluation.per_n[place]),
                    best == chosen,
                    int(np.flatnonzero(ranked == chosen)[0]) + 1,
                    len(top & set(ranked[:TOP].tolist())),
                    len(top),
                )
            )
    return table


def pareto_front(values: FloatArray) -> IndexArray:
    """Places of the rows that no other row dominates; of equal rows the first.

    values: shape (rows, objectives), small is good. The front is in the order of the first objective.
    """
    _, first = np.unique(values, axis=0, return_index=True)
    order = first[np.lexsort((first, *values[first].T[::-1]))]
    front = np.empty((0, values.shape[1]))
    places: list[int] = []
    for place in order.tolist():
        # A row that could dominate it comes before it in this order.
        if not len(front) or not bool(np.any(np.all(front <= values[place], axis=1))):
            places.append(place)
            front = np.concatenate([front, values[place : place + 1]])
    return np.array(places, dtype=np.int64)


def search_tables(
    result: SearchResult, top: int, on_progress: Callable[[float], None] = lambda _share: None
) -> Iterator[Table | str]:
    """The results of a search, in reading order; on_progress receives the share of intervals that are computed."""
    space = result.space
    num_excluded = sum(row != "" for row in result.ledger["excluded"].to_pylist())
    yield (
        f"{space.name}: {result.ledger.num_rows:,} candidates, {num_excluded:,} left out by constraints, "
        f"{len(result.ranked):,} judged on all plans; rules {space.rules}, costs {space.cost_model}"
    )
    yield _best_table(result, top, on_progress)
    yield _best_sentence(result)
    yield _front_table(result)
    if len(space.inputs.users) > 1:
        yield _sensitivity_table(result)


def _best_table(result: SearchResult, top: int, on_progress: Callable[[float], None]) -> Table:
    """The best candidates; each beside the first with an interval, which no paged rules have."""
    space, scores, evaluation = result.space, result.scores, result.evaluation
    place_of = {index: place for place, index in enumerate(scores.indices.tolist())}
    judged = result.rows.to_pylist()
    best = [result.candidate(index) for index in result.ranked[:top]]
    others = [] if space.is_paged else best[1:]
    beside = [""] * (len(others) + 1)
    predictor = SpacePredictor(space)
    shared = parallel_map(lambda each, _: predictor.predict(each, space.inputs.users, reference=best[0]), others)
    for num_done, (place, prediction) in enumerate(shared, 1):
        ends = interval_text(prediction.low, prediction.high, between="-")
        beside[place + 1] = f"{ends} {' ' if prediction.shows_difference else '='}"
        on_progress(num_done / len(others))
    rows: list[tuple[Cell, ...]] = []
    for rank, (index, candidate) in enumerate(zip(result.ranked, best, strict=False), 1):
        place = place_of[index]
        cells = (
            candidate.label,
            rank,
            f"{scores.sum_seconds[place]:.4f}",
            f"{scores.per_n[place]:.4f}",
            "" if evaluation is None else f"{evaluation.sum_seconds[place]:.4f}",
            f"{judged[place]['memory_gib']:.2f}",
            f"{judged[place]['compile_s']:.0f}",
        )
        rows.append(cells if space.is_paged else (*cells, beside[rank - 1]))
    headings = ("configuration", "rank", "sum", "per-n", "evaluation", "GiB/device", "compile s")
    return Table(
        f"best by {space.score}, search inputs" + ("" if space.is_paged else "; =: no difference from the first shown"),
        "",
        (*headings, *(() if space.is_paged else ("beside the first",))),
        tuple(rows),
    )


def _best_sentence(result: SearchResult) -> str:
    """The best against the baseline on new draws, how sure that is, and given which costs."""
    space, best = result.space, result.candidate(result.ranked[0])
    base, predictor = space.baseline.shape, SpacePredictor(space)
    unmeasured = predictor.unmeasured(best, base)
    given = f"; {unmeasured}" if unmeasured else ""
    if best == base:
        return f"best: {best.label}{given}"
    over = score_interval(space, best)
    of_score = f"; {space.score} over its {over[2]} plans {interval_text(*over[:2])} (95 %)" if over else ""
    if space.is_paged:
        return f"best: {best.label}{of_score}{given}"
    found = predictor.predict(best, space.inputs.users)
    turns = f"; {predictor.break_even(best, space.inputs.users)}" if found.shows_difference else ""
    return (
        f"best: {best.label} costs {with_error(found.mean, found.error, 4)} of {base.label} on new draws "
        f"({100 * found.level:.0f} % of outcomes {interval_text(found.low, found.high)}){of_score}{given}{turns}"
    )


def _front_table(result: SearchResult) -> Table:
    """The Pareto front over the space's objectives."""
    objectives, judged = result.space.objectives, result.rows
    names, units = zip(*(OBJECTIVES.get(objective, ("", 1.0)) for objective in objectives), strict=True)
    columns = [judged[name].to_numpy() if name else result.scores.sum_seconds for name in names]
    values = np.stack(columns, axis=1).astype(np.float64)
    front = pareto_front(values)
    rows = tuple(
        (result.candidate(judged["index"][place].as_py()).label, *(f"{value:.4g}" for value in values[place] * units))
        for place in front[:MOST_FRONT].tolist()
    )
    shown = f", first {MOST_FRONT}" if len(front) > MOST_FRONT else ""
    return Table(f"Pareto front: {len(front)} candidates{shown}", "", ("configuration", *objectives), rows)


def _sensitivity_table(result: SearchResult) -> Table:
    """The candidate that each score and set of N selects."""
    rows: list[tuple[str, ...]] = []
    for row in sensitivity(result):
        numbers = (row.search_sum, row.search_per_n, row.evaluation_sum, row.evaluation_per_n)
        rows.append(
            (
                row.score,
                ",".join(map(str, row.users)),
                result.candidate(row.selected).label,
                *("" if value is None else f"{value:.4f}" for value in numbers),
                str(row.reference_rank),
                f"{row.common_top}/{row.size_top}",
            )
        )
    return Table(
        "sensitivity to the score and the set of N; reference: the first above",
        "",
        ("score", "N", "selected", "search", "per-N", "eval.", "per-N", "ref. rank", "top 20"),
        tuple(rows),
    )
