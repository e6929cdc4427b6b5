"""Searches a space: the figures of every candidate go into a ledger on disk, in chunks that survive any interruption.

Progress is the set of chunk files, and resuming computes the missing ones. When the budget is too short for all
candidates, the search halves them successively, and the result states what was not evaluated.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.clock import NS_PER_S, Clock, MonotonicClock
from harness.engine.config import EngineConfig
from harness.engine.cost import load_cost_model
from harness.errors import RecordsError, SpecError
from harness.outputs import write_atomic
from harness.records.disk import disk_errors, write_parquet
from harness.sim.search.chunks import (
    LEDGER_SCHEMA,
    Chunk,
    ChunkRunner,
    Job,
    Rung,
    candidate_row,
    chunk_size,
    chunks_of,
    compute_here,
    digest_of,
    figures_by_role,
    job_of,
    row_without_figures,
)
from harness.sim.search.rank import Baseline, Scores, score_rows, spearman
from harness.sim.search.space import SpaceSpec
from harness.spec import ServerShape

FORMAT = 1
PROBES = 24
AUDITED = 200
HALVING = 4


class Progress(NamedTuple):
    """left_s is None until there is something to extrapolate from."""

    rung: int
    rungs: int
    done: int
    total: int
    left_s: float | None


@dataclass(frozen=True)
class Halving:
    """What a search that was not exhaustive left out, and the evidence for the candidates that it kept.

    not_simulated: candidates excluded at random before the first rung. partial: for each rung, (plans, candidates that
    were dropped after them). rank_correlations: of a rung's score with that of the next rung, among the candidates
    kept. audited: candidates left out that were drawn at random and judged on all plans; better: how many of them beat
    the selected one. better_share_at_most: upper bound of that share among all left out, with 95 % confidence.
    """

    not_simulated: int
    partial: tuple[tuple[int, int], ...]
    rank_correlations: tuple[float, ...]
    audited: int
    better: int
    better_share_at_most: float


@dataclass(frozen=True)
class SearchResult:
    """A finished search. ``ledger``: one row per candidate, in enumeration order. ``judged``: rows with all plans.

    num_simulations: those of this process, which are all where it works alone.
    """

    space: SpaceSpec
    folder: Path
    ledger: pa.Table
    judged: pa.Table
    baseline: Baseline
    num_simulations: int
    halving: Halving | None

    @property
    def scores(self) -> Scores:
        """Scores on the search inputs, all N; what selects."""
        return score_rows(self.judged, "search", self.baseline.search, self.space.inputs.users, self.space)

    @property
    def evaluation(self) -> Scores | None:
        """Scores on the evaluation inputs; they select nothing."""
        if not self.baseline.evaluation or self.judged.num_rows == 0:
            return None
        return score_rows(self.judged, "evaluation", self.baseline.evaluation, self.space.inputs.users, self.space)

    @property
    def ranked(self) -> list[int]:
        """Indices of the fully judged candidates, best first, by the space's own score."""
        return self.scores.ranked(self.space.score).tolist()

    def candidate(self, index: int) -> ServerShape:
        row = self.ledger.slice(index, 1).to_pylist()[0]
        shape = ServerShape(**{name: row[name] for name in ServerShape._fields})
        return shape._replace(decode_buckets=tuple(shape.decode_buckets))


@dataclass
class Searcher:
    """The search of a space, with its ledger in ``folder``."""

    space: SpaceSpec
    folder: Path
    run_chunks: ChunkRunner = compute_here
    on_progress: Callable[[Progress], None] | None = None
    clock: Clock = field(default_factory=MonotonicClock)
    job: Job = field(init=False)
    space_json: str = field(init=False)

    def __post_init__(self) -> None:
        self.space_json = self.space.model_dump_json()
        self.job = job_of(self.space_json)

    def search(self, budget_s: float | None) -> SearchResult:
        """See ``search``."""
        space, folder = self.space, self.folder
        schedule = _open_folder(self, budget_s)
        rungs = [Rung(*rung) for rung in schedule["rungs"]]
        indices = _first_indices(self, schedule["first"])
        passed: list[pa.Table] = []
        for rung in rungs:
            rows = self.run_rung(rung, len(rungs), indices)
            passed.append(rows)
            if not rung.is_last:
                baseline = _baseline(self.job, rung).search
                scores = score_rows(judged_rows(rows), "search", baseline, space.inputs.users, space)
                indices = sorted(scores.ranked(space.score)[: rung.keep].tolist())
        ledger = _merge(self, passed)
        write_parquet(ledger, folder / "ledger.parquet")
        judged = judged_rows(passed[-1])
        if judged.num_rows == 0:
            raise SpecError(
                "no candidate meets the constraints",
                where=space.name,
                hint="See the column `excluded` of ledger.parquet",
            )
        baseline, evaluator = _baseline(self.job, rungs[-1]), self.job.evaluator
        result = SearchResult(space, folder, ledger, judged, baseline, evaluator.num_simulated, None)
        if len(rungs) == 1 and schedule["first"] is None:
            return result
        halving = _halving(self, rungs, passed, result)
        return replace(result, num_simulations=evaluator.num_simulated, halving=halving)

    def run_rung(self, rung: Rung, rungs: int, indices: Sequence[int]) -> pa.Table:
        """Every chunk of a rung: chunks on disk are read, the others are computed and written."""
        chunks = list(chunks_of(rung, indices, chunk_size(len(self.job.candidates))))
        missing = [chunk for chunk in chunks if not (self.folder / chunk.file_name).is_file()]
        done = len(indices) - sum(len(chunk.indices) for chunk in missing)
        began_ns, already = self.clock.now_ns(), done
        self._report(Progress(rung.number, rungs, done, len(indices), None))
        for chunk, data in self.run_chunks(self.space_json, missing) if missing else ():
            write_atomic(self.folder / chunk.file_name, [data], what="the ledger")
            done += len(chunk.indices)
            spent_s = (self.clock.now_ns() - began_ns) / NS_PER_S
            left_s = spent_s / (done - already) * (len(indices) - done)
            self._report(Progress(rung.number, rungs, done, len(indices), left_s))
        return pa.concat_tables([read_chunk(self.folder / chunk.file_name, chunk) for chunk in chunks])

    def _report(self, progress: Progress) -> None:
        if self.on_progress is not None:
            self.on_progress(progress)

    def feasible(self) -> list[int]:
        """Candidates that no constraint excludes."""
        space = self.space
        return [
            index
            for index, candidate in enumerate(self.job.candidates)
            if not space.constraints.violated(space.device, candidate)
        ]


def search(
    space: SpaceSpec,
    folder: Path,
    *,
    budget_s: float | None = None,
    run_chunks: ChunkRunner = compute_here,
    on_progress: Callable[[Progress], None] | None = None,
) -> SearchResult:
    """Judge every candidate of a space and leave the ledger in ``folder``; an earlier search there is continued.

    budget_s: exhaustive when that fits, else successive halving; decided once, and kept when the search is resumed.
    Raises SpecError when the folder holds another search, RecordsError when a chunk was damaged.
    """
    return Searcher(space, folder, run_chunks, on_progress).search(budget_s)


def judged_rows(rows: pa.Table) -> pa.Table:
    """The rows that have figures."""
    return rows.filter(rows["search_device_ns"].is_valid())


def read_chunk(path: Path, chunk: Chunk) -> pa.Table:
    """A chunk from disk; raises RecordsError when it is not what its name says."""
    try:
        # read_table would load what datasets of many files need.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            rows = file.read()
    except (OSError, ValueError, LookupError, pa.ArrowException) as error:
        raise RecordsError(
            "is damaged", where=str(path), hint="Delete it and search again; only it is redone"
        ) from error
    if rows.schema != LEDGER_SCHEMA or tuple(rows["index"].to_pylist()) != chunk.indices:
        raise RecordsError("holds other candidates", where=str(path), hint="Delete it and search again")
    return rows


def _open_folder(searcher: Searcher, budget_s: float | None) -> dict[str, Any]:
    """The schedule of the search in a folder: as decided when the search began, or a new schedule."""
    path = searcher.folder / "search.json"
    identity = {
        "format": FORMAT,
        "space": json.loads(searcher.space_json),
        "plans": digest_of("\n".join(plan.hash for plan in searcher.job.inputs.plans)),
        "cost_model": digest_of(repr(load_cost_model(searcher.space.cost_model))),
    }
    if path.is_file():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise RecordsError("is damaged", where=str(path), hint="Give another folder") from error
        if {key: kept.get(key) for key in identity} != identity:
            raise SpecError(
                "this folder holds the ledger of another search", where=str(searcher.folder), hint="Give another folder"
            )
        return kept["schedule"]
    with disk_errors(searcher.folder):
        searcher.folder.mkdir(parents=True, exist_ok=True)
        schedule = _plan_rungs(searcher, budget_s)
        write_atomic(path, [json.dumps({**identity, "schedule": schedule}, indent=1).encode()], what="the ledger")
    return schedule


def _plan_rungs(searcher: Searcher, budget_s: float | None) -> dict[str, Any]:
    """{"rungs": [...], "first": None for every candidate, else how many are drawn}."""
    whole = Rung(0, -1, 0, True)
    if budget_s is None:
        return {"rungs": [whole], "first": None}
    feasible = searcher.feasible()
    each_s = _probe_s(searcher, whole, feasible)
    if each_s * _distinct(searcher, feasible, budget_s / each_s) <= budget_s:
        return {"rungs": [whole], "first": None}
    inputs = searcher.space.inputs
    plans = inputs.replicates * len(inputs.search_seeds)
    parts: list[int] = []
    part = plans
    while part > 1:
        part = max(part // HALVING, 1)
        parts.insert(0, part)
    all_plans = plans + inputs.replicates * len(inputs.evaluation_seeds)
    # Every rung gets an equal share of the time.
    share_s = budget_s / (len(parts) + 1)
    room = [max(int(share_s / (each_s * part / all_plans)), 1) for part in parts] + [max(int(share_s / each_s), 1)]
    first = min(room[0], len(feasible))
    rungs: list[Rung] = []
    for number, part in enumerate(parts):
        rungs.append(Rung(number, part, min(room[number + 1], first), False))
    rungs.append(Rung(len(parts), -1, 0, True))
    return {"rungs": rungs, "first": first if first < len(feasible) else None}


def _probe_s(searcher: Searcher, rung: Rung, feasible: Sequence[int]) -> float:
    """Seconds that one candidate takes with nothing shared, from a few spread over the space."""
    job = searcher.job
    groups = job.groups(rung)
    probes = feasible[:: max(len(feasible) // PROBES, 1)][:PROBES]
    candidate_row(job, probes[0], rung, groups, 0)
    simulated = job.evaluator.num_simulated
    began_ns = searcher.clock.now_ns()
    for index in probes[1:]:
        candidate_row(job, index, rung, groups, 0)
    spent_s = (searcher.clock.now_ns() - began_ns) / NS_PER_S
    per_plan_s = spent_s / max(job.evaluator.num_simulated - simulated, 1)
    return max(per_plan_s * sum(group.last - group.first for group in groups), 1e-6)


def _distinct(searcher: Searcher, feasible: Sequence[int], enough: float) -> float:
    """How many whole candidates' worth of simulations differ; stops counting at ``enough``."""
    job, rules = searcher.job, searcher.space.rules
    groups = [group for group in job.inputs.groups if group.role == "search"]
    seen: set[tuple[object, ...]] = set()
    for index in feasible:
        seen.update(job.evaluator.share_keys(EngineConfig.of_shape(job.candidates[index], rules), groups))
        if len(seen) > enough * len(groups):
            return float("inf")
    return len(seen) / len(groups)


def _first_indices(searcher: Searcher, first: int | None) -> list[int]:
    """The candidates of the first rung, in enumeration order: all (those left out give their reason), or a draw."""
    if first is None:
        return list(range(len(searcher.job.candidates)))
    feasible = searcher.feasible()
    return sorted(random.Random(digest_of(searcher.space_json)).sample(feasible, first))


def _baseline(job: Job, rung: Rung) -> Baseline:
    by_role = figures_by_role(job, job.space.baseline.shape, job.groups(rung))
    return Baseline(tuple(by_role["search"]), tuple(by_role["evaluation"]))


def _merge(searcher: Searcher, passed: Sequence[pa.Table]) -> pa.Table:
    """One row per candidate, from the last rung it reached; never simulated: rung -1."""
    num_candidates = len(searcher.job.candidates)
    if len(passed) == 1 and passed[0].num_rows == num_candidates:
        return passed[0].combine_chunks()
    everything = pa.concat_tables(passed).combine_chunks()
    last = np.full(num_candidates, -1, dtype=np.int64)
    last[everything["index"].to_numpy()] = np.arange(everything.num_rows)
    missing = [
        row_without_figures(searcher.space, index, candidate, -1)
        for index, candidate in enumerate(searcher.job.candidates)
        if last[index] < 0
    ]
    rows = pa.concat_tables([everything.take(last[last >= 0]), pa.Table.from_pylist(missing, schema=LEDGER_SCHEMA)])
    return rows.sort_by("index").combine_chunks()


def _halving(searcher: Searcher, rungs: Sequence[Rung], passed: Sequence[pa.Table], result: SearchResult) -> Halving:
    """What the halving left out, checked on a random sample of it."""
    job, space = searcher.job, searcher.space
    users = space.inputs.users
    partial: list[tuple[int, int]] = []
    correlations: list[float] = []
    for rung, rows, after in zip(rungs, passed, passed[1:], strict=False):
        partial.append((rung.plans, judged_rows(rows).num_rows - after.num_rows))
        kept = judged_rows(rows)
        kept = kept.filter(pa.array(np.isin(kept["index"].to_numpy(), after["index"].to_numpy())))
        scores = [
            score_rows(part, "search", _baseline(job, of).search, users, space).of(space.score)
            for part, of in ((kept, rung), (judged_rows(after), rungs[rungs.index(rung) + 1]))
        ]
        correlations.append(spearman(scores[0], scores[1]))
    judged = set(result.judged["index"].to_pylist())
    left_out = [index for index in searcher.feasible() if index not in judged]
    drawn = random.Random(f"audit {searcher.space_json}").sample(left_out, min(AUDITED, len(left_out)))
    audit = Rung(len(rungs), -1, 0, True)
    better = 0
    if drawn:
        rows = judged_rows(searcher.run_rung(audit, len(rungs) + 1, sorted(drawn)))
        best = result.scores.of(space.score).min()
        better = int((score_rows(rows, "search", result.baseline.search, users, space).of(space.score) < best).sum())
    return Halving(
        not_simulated=len(searcher.feasible()) - judged_rows(passed[0]).num_rows,
        partial=tuple(partial),
        rank_correlations=tuple(correlations),
        audited=len(drawn),
        better=better,
        better_share_at_most=share_at_most(better, len(drawn)),
    )


def share_at_most(hits: int, drawn: int, confidence: float = 0.95) -> float:
    """Clopper-Pearson upper bound of a share that had ``hits`` in ``drawn`` tries (0 of n: about 3 / n)."""
    from scipy.special import betaincinv

    return 1.0 if hits >= drawn else float(betaincinv(hits + 1, drawn - hits, confidence))
