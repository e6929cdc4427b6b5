"""A finished search as tables: the best candidates with intervals, the Pareto front, the sensitivity.

What was not evaluated comes first. Nothing is judged here that the ledger does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from harness.processes import parallel_map
from harness.sim.predict.intervals import Prediction, predict
from harness.sim.search.rank import objective_values, pareto_front, sensitivity
from harness.sim.search.run import Halving, SearchResult
from harness.table import Cell, Table

MOST_FRONT = 15
# Objectives that are counted in nanoseconds.
IN_SECONDS = {"waiting": 1e-9, "p99-completion": 1e-9}


def search_tables(
    result: SearchResult,
    top: int,
    *,
    with_intervals: bool = True,
    on_progress: Callable[[float], None] = lambda _share: None,
) -> Iterator[Table | str]:
    """The results of a search, in reading order. on_progress: receives the share of intervals that are computed."""
    space = result.space
    num_excluded = sum(row != "" for row in result.ledger["excluded"].to_pylist())
    yield (
        f"{space.name}: {result.ledger.num_rows:,} candidates, {num_excluded:,} left out by constraints, "
        f"{len(result.ranked):,} judged on all plans; rules {space.rules}, costs {space.cost_model}"
    )
    if result.halving is not None:
        yield from halving_lines(result.halving)
    # Intervals are drawn by the compiled simulator, which does not know paged rules.
    yield best_table(result, top, with_intervals=with_intervals and not space.is_paged, on_progress=on_progress)
    yield front_table(result)
    if len(space.inputs.users) > 1:
        yield sensitivity_table(result)


def halving_lines(halving: Halving) -> Iterator[str]:
    """What was not evaluated, and how good the kept candidates are."""
    yield "The time given was too short for all candidates:"
    if halving.not_simulated:
        yield f"  {halving.not_simulated:,} candidates were excluded at random, unseen"
    for plans, count in halving.partial:
        yield f"  {count:,} were dropped after {plans} plan(s) per N"
    for place, correlation in enumerate(halving.rank_correlations):
        yield f"  rank correlation of pass {place + 1} with the next, among candidates kept: {correlation:.2f}"
    yield (
        f"  {halving.audited} candidates left out were drawn and judged in full: {halving.better} beat the selected, "
        f"so at most {halving.better_share_at_most:.1%} of all left out do (95 % confidence)"
    )


def best_table(result: SearchResult, top: int, *, with_intervals: bool, on_progress: Callable[[float], None]) -> Table:
    """The best candidates; each beside the first, with an interval."""
    space, scores, evaluation = result.space, result.scores, result.evaluation
    place_of = {index: place for place, index in enumerate(scores.indices.tolist())}
    judged = result.judged.to_pylist()
    best = result.candidate(result.ranked[0])
    others = [result.candidate(index) for index in result.ranked[1:top]] if with_intervals else []
    beside = [""] * (len(others) + 1)
    shared = parallel_map(lambda each, _tell: predict(space, each, space.inputs.users, reference=best), others)
    for num_done, (place, prediction) in enumerate(shared, 1):
        beside[place + 1] = interval_text(prediction)
        on_progress(num_done / len(others))
    rows: list[tuple[Cell, ...]] = []
    for rank, index in enumerate(result.ranked[:top], 1):
        place = place_of[index]
        cells = (
            result.candidate(index).label,
            rank,
            f"{scores.sum_seconds[place]:.4f}",
            f"{scores.per_n[place]:.4f}",
            "" if evaluation is None else f"{evaluation.sum_seconds[place]:.4f}",
            f"{judged[place]['memory_gib']:.2f}",
            f"{judged[place]['compile_s']:.0f}",
        )
        rows.append((*cells, beside[rank - 1]) if with_intervals else cells)
    return Table(
        f"best by {space.score}, search inputs" + ("; =: no difference from the first shown" if with_intervals else ""),
        "",
        (
            *("configuration", "rank", "sum", "per-n", "evaluation", "GiB/device", "compile s"),
            *(("beside the first",) if with_intervals else ()),
        ),
        tuple(rows),
    )


def interval_text(prediction: Prediction) -> str:
    """ "0.9980-1.0040 =" where the interval contains 1, "0.9700-0.9900  " where it does not."""
    return f"{prediction.low:.4f}-{prediction.high:.4f} {' ' if prediction.shows_difference else '='}"


def front_table(result: SearchResult) -> Table:
    """The Pareto front over the space's objectives."""
    objectives = result.space.objectives
    values = objective_values(result.judged, result.scores, objectives)
    front = pareto_front(values)
    indices = result.judged["index"].to_pylist()
    scale = [IN_SECONDS.get(objective, 1.0) for objective in objectives]
    rows = tuple(
        (result.candidate(indices[place]).label, *(f"{value:.4g}" for value in values[place] * scale))
        for place in front[:MOST_FRONT].tolist()
    )
    shown = f", first {MOST_FRONT}" if len(front) > MOST_FRONT else ""
    return Table(f"Pareto front: {len(front)} candidates{shown}", "", ("configuration", *objectives), rows)


def sensitivity_table(result: SearchResult) -> Table:
    """The candidate that each score and set of N selects."""
    rows: list[tuple[str, ...]] = []
    for row in sensitivity(result.judged, result.baseline, result.space):
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
