"""Ranks the candidates of a ledger: both scores, the Pareto front, the sensitivity to score and set of N.

Ties keep the order of enumeration. Sums stay integers until the one division that makes a score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from harness.sim.search.evaluate import GroupFigures
from harness.sim.search.space import Objective, Score, SpaceSpec

FloatArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.int64]

TOP = 20


@dataclass(frozen=True)
class Baseline:
    """Figures of the baseline per N, in the order of inputs.users."""

    search: tuple[GroupFigures, ...]
    evaluation: tuple[GroupFigures, ...]


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


def column_matrix(rows: pa.Table, column: str, width: int) -> npt.NDArray[np.int64]:
    """A list column without nulls as a matrix (rows, width)."""
    values = rows[column].combine_chunks().flatten().to_numpy(zero_copy_only=False)
    return np.asarray(values, dtype=np.int64).reshape(-1, width)


def score_rows(
    rows: pa.Table, role: str, baseline: Sequence[GroupFigures], users: Sequence[int], space: SpaceSpec
) -> Scores:
    """Scores of rows that have figures of ``role``, over the set of N ``users``.

    sum-seconds: device seconds summed over all plans, over the baseline's; per-n: the mean of that ratio per N. With a
    window both use device seconds per completed request, because a better configuration completes more in the window.
    """
    width = len(space.inputs.users)
    places = [space.inputs.users.index(count) for count in users]
    device = column_matrix(rows, f"{role}_device_ns", width)[:, places]
    base = np.array([baseline[place].device_ns for place in places], dtype=np.int64)
    indices = rows["index"].to_numpy().astype(np.int64)
    if space.window is None:
        return Scores(indices, device.sum(axis=1) / base.sum(), (device / base).mean(axis=1))
    completed = column_matrix(rows, f"{role}_completed", width)[:, places]
    base_completed = np.array([baseline[place].completed for place in places], dtype=np.int64)
    summed = (device.sum(axis=1) / completed.sum(axis=1)) / (base.sum() / base_completed.sum())
    return Scores(indices, summed, ((device / completed) / (base / base_completed)).mean(axis=1))


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


def sensitivity(rows: pa.Table, baseline: Baseline, space: SpaceSpec) -> list[SensitivityRow]:
    """The selection for every score and set of N beside the reference: the space's own score on all N."""
    reference = score_rows(rows, "search", baseline.search, space.inputs.users, space).ranked(space.score)
    chosen, top = int(reference[0]), set(reference[:TOP].tolist())
    table: list[SensitivityRow] = []
    scores: tuple[Score, ...] = ("sum-seconds", "per-n")
    for score in scores:
        for users in space.sets_of_users():
            search = score_rows(rows, "search", baseline.search, users, space)
            ranked = search.ranked(score)
            best = int(ranked[0])
            place = int(np.flatnonzero(search.indices == best)[0])
            evaluation = None
            if baseline.evaluation and rows["evaluation_device_ns"].null_count == 0:
                evaluation = score_rows(rows, "evaluation", baseline.evaluation, users, space)
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


def objective_values(rows: pa.Table, scores: Scores, objectives: Sequence[Objective]) -> FloatArray:
    """Shape (rows, objectives), all to be made small."""
    columns = {
        "waiting": "wait_ns",
        "p99-completion": "p99_completion_ns",
        "memory": "memory_gib",
        "compile-seconds": "compile_s",
        "artifact-size": "artifact_gib",
    }
    values = [
        scores.sum_seconds if name == "device-seconds" else rows[columns[name]].to_numpy().astype(np.float64)
        for name in objectives
    ]
    return np.stack(values, axis=1)


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


def spearman(left: FloatArray, right: FloatArray) -> float:
    """Rank correlation; nan for fewer than two values."""
    if len(left) < 2:
        return float("nan")
    ranks = [
        np.argsort(np.argsort(values, kind="stable"), kind="stable").astype(np.float64) for values in (left, right)
    ]
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])
