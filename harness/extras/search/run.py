"""Searches a space: the figures of every candidate go into a ledger on disk, in chunks that survive any interruption.

Progress is the set of chunk files, and resuming computes the missing ones. The same chunk has the same bytes wherever
it is computed: in this process, in others of this machine, or on a Dask cluster (extra ``rbln-harness[cluster]``). When
the budget is too short for all candidates, the search halves them successively, and the result states what was not
evaluated.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from harness.clock import NS_PER_S, Clock, MonotonicClock
from harness.errors import RecordsError, SpecError
from harness.extras.search.evaluate import LEDGER_SCHEMA, Evaluator
from harness.extras.search.result import Halving, Judged, SearchResult, spearman
from harness.extras.search.space import SpaceSpec
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import load_cost_model
from harness.outputs import write_atomic
from harness.processes import distributed, parallel_map

FORMAT = 1
PROBES = 24
AUDITED = 200
HALVING = 4
ALLOWED_DEATHS = 5
"""A chunk is given up when its workers died more often: then the chunk is the likely cause."""


class Progress(NamedTuple):
    """left_s is None until there is something to extrapolate from."""

    rung: int
    rungs: int
    done: int
    total: int
    left_s: float | None


class Rung(NamedTuple):
    """One pass over candidates. plans: search plans per N (-1: all). keep: how many go on (0: the last rung)."""

    number: int
    plans: int
    keep: int
    is_last: bool


class Chunk(NamedTuple):
    """Candidates (by index) of one rung; ``number`` names its file."""

    rung: Rung
    number: int
    indices: tuple[int, ...]

    @property
    def file_name(self) -> str:
        return f"rung-{self.rung.number}-chunk-{self.number:05d}.parquet"


@lru_cache(maxsize=2)
def evaluator_of(space_json: str) -> Evaluator:
    """The evaluator of a search space, one per process."""
    return Evaluator(SpaceSpec.model_validate_json(space_json))


def compute_chunk(space_json: str, chunk: Chunk) -> bytes:
    """A chunk's rows, in the order of its indices, as the bytes of a Parquet file. Runs on the workers of a cluster."""
    evaluator = evaluator_of(space_json)
    rows = evaluator.rows(chunk.indices, chunk.rung.number, evaluator.groups_of(chunk.rung.plans))
    return _parquet(pa.Table.from_pylist(rows, schema=LEDGER_SCHEMA))


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression="zstd", write_page_checksum=True)
    return buffer.getvalue()


ChunkRunner = Callable[[str, Sequence[Chunk]], Iterator[tuple[Chunk, bytes]]]
"""Computes chunks of a space (its JSON) and gives them back in any order."""


def compute_here(
    space_json: str, chunks: Sequence[Chunk], processes: int | None = None
) -> Iterator[tuple[Chunk, bytes]]:
    """The runner of one machine: by ``processes``, default all its cores, where there is enough to do."""
    for place, data in parallel_map(
        lambda chunk, _progress: compute_chunk(space_json, chunk), chunks, processes=processes
    ):
        yield chunks[place], data


@contextmanager
def cluster_runner(
    address: str, workers: int | None = None, *, connect_timeout_s: float = 10.0
) -> Generator[ChunkRunner]:
    """A runner of chunks on a cluster.

    address: "local" (worker processes on this machine, ``workers`` of them) or a scheduler, e.g. "tcp://host:8786".
    Raises SpecError when Dask is missing or the scheduler does not answer.
    """
    dask = distributed("--cluster")
    try:
        if address == "local":
            # No dashboard: a search opens no port unasked.
            cluster = dask.LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None)
            client = dask.Client(cluster)
        else:
            cluster = None
            client = dask.Client(address, timeout=connect_timeout_s)
    except OSError as error:
        raise SpecError(f"no scheduler answers ({error})", where=address, hint="Check the address") from error
    try:
        yield runner_of(client)
    finally:
        client.close()
        if cluster is not None:
            cluster.close()


def runner_of(client: Any) -> ChunkRunner:
    """A runner on an existing Dask client (dask-jobqueue, Kubernetes, ...)."""

    def run(space_json: str, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, bytes]]:
        as_completed = distributed("--cluster").as_completed
        chunk_of = {
            client.submit(compute_chunk, space_json, chunk, pure=False, retries=ALLOWED_DEATHS): chunk
            for chunk in chunks
        }
        waiting = as_completed(list(chunk_of))
        try:
            for future in waiting:
                chunk = chunk_of.pop(future)
                yield chunk, future.result()
        finally:
            # After Ctrl-C or a full disk nothing fetches the remaining chunks.
            client.cancel(list(chunk_of))

    return run


def search(
    space: SpaceSpec,
    folder: Path,
    *,
    budget_s: float | None = None,
    run_chunks: ChunkRunner = compute_here,
    on_progress: Callable[[Progress], None] = lambda _progress: None,
) -> SearchResult:
    """Judge every candidate of a space and leave the ledger in ``folder``; an earlier search there is continued.

    budget_s: exhaustive when that fits, else successive halving; decided once, and kept when the search is resumed.
    Raises SpecError when the folder holds another search, RecordsError when a chunk was damaged.
    """
    return Search(space, folder, run_chunks, on_progress, MonotonicClock()).run(budget_s)


class Search:
    """``search`` by any clock, which says what a candidate costs and how much time is left."""

    def __init__(
        self,
        space: SpaceSpec,
        folder: Path,
        run_chunks: ChunkRunner,
        on_progress: Callable[[Progress], None],
        clock: Clock,
    ) -> None:
        self._space, self._folder, self._clock = space, folder, clock
        self._run_chunks, self._on_progress = run_chunks, on_progress
        self._space_json = space.model_dump_json()
        self._evaluator = evaluator_of(self._space_json)
        self._num_candidates = len(self._evaluator.candidates)
        # A function of the number of candidates alone, so that a resumed search cuts the same chunks.
        self._chunk_size = min(max(-(-self._num_candidates // 256), 64), 4096)

    @cached_property
    def _feasible(self) -> list[int]:
        """The candidates that no constraint excludes."""
        constraints, device = self._space.constraints, self._space.device
        candidates = enumerate(self._evaluator.candidates)
        return [index for index, candidate in candidates if not constraints.violated(device, candidate)]

    def run(self, budget_s: float | None) -> SearchResult:
        schedule = self._open_folder(budget_s)
        rungs = [Rung(*rung) for rung in schedule["rungs"]]
        if schedule["first"] is None:
            # Those that a constraint excludes are in the ledger too, with the reason.
            indices = list(range(self._num_candidates))
        else:
            chosen = random.Random(_digest(self._space_json)).sample(self._feasible, schedule["first"])
            indices = sorted(chosen)
        passed: list[pa.Table] = []
        judged: list[Judged] = []
        for rung in rungs:
            rows = self._run_rung(rung, len(rungs), indices)
            passed.append(rows)
            baseline = self._evaluator.figures_row(self._space.baseline.shape, self._evaluator.groups_of(rung.plans))
            judged.append(Judged(self._space, _with_figures(rows), baseline))
            if not rung.is_last:
                indices = sorted(judged[-1].ranked()[: rung.keep])
        ledger = self._merged(passed)
        write_atomic(self._folder / "ledger.parquet", [_parquet(ledger)], what="the ledger")
        if judged[-1].rows.num_rows == 0:
            raise SpecError(
                "no candidate meets the constraints",
                where=self._space.name,
                hint="See the column `excluded` of ledger.parquet",
            )
        is_exhaustive = len(rungs) == 1 and schedule["first"] is None
        halving = None if is_exhaustive else self._halving(rungs, passed, judged)
        return SearchResult(self._space, self._folder, ledger, judged[-1], self._evaluator.num_simulated, halving)

    def _open_folder(self, budget_s: float | None) -> dict[str, Any]:
        """The schedule of the search in a folder: as decided when the search began, or a new schedule."""
        path = self._folder / "search.json"
        identity = {
            "format": FORMAT,
            "space": json.loads(self._space_json),
            "plans": _digest("\n".join(plan.hash for plan in self._evaluator.plans)),
            "cost_model": _digest(repr(load_cost_model(self._space.cost_model))),
        }
        if path.is_file():
            try:
                kept = json.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise RecordsError("is damaged", where=str(path), hint="Give another folder") from error
            if {key: kept.get(key) for key in identity} != identity:
                raise SpecError(
                    "this folder holds the ledger of another search",
                    where=str(self._folder),
                    hint="Give another folder",
                )
            return kept["schedule"]
        schedule = self._scheduled(budget_s)
        write_atomic(path, [json.dumps({**identity, "schedule": schedule}, indent=1).encode()], what="the ledger")
        return schedule

    def _scheduled(self, budget_s: float | None) -> dict[str, Any]:
        """{"rungs": [...], "first": None for every candidate, else how many are drawn}."""
        exhaustive = {"rungs": [Rung(0, -1, 0, True)], "first": None}
        if budget_s is None:
            return exhaustive
        each_s = self._probe_s()
        if each_s * self._num_distinct(budget_s / each_s) <= budget_s:
            return exhaustive
        inputs = self._space.inputs
        plans = inputs.replicates * len(inputs.search_seeds)
        parts: list[int] = []
        part = plans
        while part > 1:
            part = max(part // HALVING, 1)
            parts.insert(0, part)
        all_plans = plans + inputs.replicates * len(inputs.evaluation_seeds)
        # Every rung gets an equal share of the time.
        share_s = budget_s / (len(parts) + 1)
        room = [max(int(share_s / (each_s * part / all_plans)), 1) for part in (*parts, all_plans)]
        first = min(room[0], len(self._feasible))
        rungs = [Rung(number, part, min(room[number + 1], first), False) for number, part in enumerate(parts)]
        rungs.append(Rung(len(parts), -1, 0, True))
        return {"rungs": rungs, "first": first if first < len(self._feasible) else None}

    def _probe_s(self) -> float:
        """Seconds that one candidate takes with nothing shared, from a few spread over the space."""
        evaluator, groups = self._evaluator, self._evaluator.groups
        probes = self._feasible[:: max(len(self._feasible) // PROBES, 1)][:PROBES]
        evaluator.rows(probes[:1], 0, groups)
        simulated, began_ns = evaluator.num_simulated, self._clock.now_ns()
        evaluator.rows(probes[1:], 0, groups)
        spent_s = (self._clock.now_ns() - began_ns) / NS_PER_S
        per_plan_s = spent_s / max(evaluator.num_simulated - simulated, 1)
        return max(per_plan_s * len(evaluator.plans), 1e-6)

    def _num_distinct(self, enough: float) -> float:
        """How many whole candidates' worth of simulations differ; stops counting at ``enough``."""
        evaluator = self._evaluator
        groups = [group for group in evaluator.groups if group.role == "search"]
        seen: set[tuple[object, ...]] = set()
        for index in self._feasible:
            config = EngineConfig.of_shape(evaluator.candidates[index], self._space.rules)
            seen.update(evaluator.share_keys(config, groups))
            if len(seen) > enough * len(groups):
                return float("inf")
        return len(seen) / len(groups)

    def _run_rung(self, rung: Rung, rungs: int, indices: Sequence[int]) -> pa.Table:
        """Every chunk of a rung: chunks on disk are read, the others are computed and written."""
        size = self._chunk_size
        chunks = [
            Chunk(rung, number, tuple(indices[first : first + size]))
            for number, first in enumerate(range(0, len(indices), size))
        ]
        missing = [chunk for chunk in chunks if not (self._folder / chunk.file_name).is_file()]
        done = len(indices) - sum(len(chunk.indices) for chunk in missing)
        began_ns, already = self._clock.now_ns(), done
        self._on_progress(Progress(rung.number, rungs, done, len(indices), None))
        for chunk, data in self._run_chunks(self._space_json, missing) if missing else ():
            write_atomic(self._folder / chunk.file_name, [data], what="the ledger")
            done += len(chunk.indices)
            spent_s = (self._clock.now_ns() - began_ns) / NS_PER_S
            left_s = spent_s / (done - already) * (len(indices) - done)
            self._on_progress(Progress(rung.number, rungs, done, len(indices), left_s))
        return pa.concat_tables([_read_chunk(self._folder / chunk.file_name, chunk) for chunk in chunks])

    def _merged(self, passed: Sequence[pa.Table]) -> pa.Table:
        """One row per candidate, from the last rung it reached; never simulated: rung -1."""
        if len(passed) == 1 and passed[0].num_rows == self._num_candidates:
            return passed[0].combine_chunks()
        everything = pa.concat_tables(passed).combine_chunks()
        last = np.full(self._num_candidates, -1, dtype=np.int64)
        last[everything["index"].to_numpy()] = np.arange(everything.num_rows)
        missing = [self._evaluator.row_without_figures(index) for index in np.flatnonzero(last < 0).tolist()]
        rows = pa.concat_tables([everything.take(last[last >= 0]), pa.Table.from_pylist(missing, schema=LEDGER_SCHEMA)])
        return rows.sort_by("index").combine_chunks()

    def _halving(self, rungs: Sequence[Rung], passed: Sequence[pa.Table], judged: Sequence[Judged]) -> Halving:
        """What the halving left out, checked on a random sample of it."""
        partial: list[tuple[int, int]] = []
        correlations: list[float] = []
        score = self._space.score
        for place, rung in enumerate(rungs[:-1]):
            before, after, kept = judged[place], judged[place + 1], passed[place + 1]
            partial.append((rung.plans, before.rows.num_rows - kept.num_rows))
            before = before.only(kept["index"].to_numpy())
            correlations.append(spearman(before.scores().of(score), after.scores().of(score)))
        full = judged[-1]
        done = set(full.rows["index"].to_pylist())
        left_out = [index for index in self._feasible if index not in done]
        drawn = random.Random(f"audit {self._space_json}").sample(left_out, min(AUDITED, len(left_out)))
        better = 0
        if drawn:
            rows = self._run_rung(Rung(len(rungs), -1, 0, True), len(rungs) + 1, sorted(drawn))
            audited = Judged(self._space, _with_figures(rows), full.baseline).scores().of(score)
            better = int((audited < full.scores().of(score).min()).sum())
        not_simulated = len(self._feasible) - judged[0].rows.num_rows
        return Halving(not_simulated, tuple(partial), tuple(correlations), len(drawn), better)


def _with_figures(rows: pa.Table) -> pa.Table:
    return rows.filter(rows["search_device_ns"].is_valid())


def _read_chunk(path: Path, chunk: Chunk) -> pa.Table:
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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
