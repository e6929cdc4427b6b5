"""The unit of work of a search: the figures of some candidates, as the bytes of a Parquet file.

The same job and chunk give the same bytes wherever they are computed: in this process, in others of this machine, or
on a Dask cluster (optional extra ``rbln-harness[cluster]``). Nothing is written to disk here.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from itertools import islice
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from harness.errors import PlanError, SpecError
from harness.processes import distributed, parallel_map
from harness.sim.search.evaluate import Evaluator, Group, GroupFigures, build_inputs
from harness.sim.search.space import SpaceSpec
from harness.spec import ServerShape

Seconds = pa.float64()
PerUsers = pa.list_(pa.int64())

LEDGER_SCHEMA = pa.schema(
    [
        pa.field("index", pa.int32(), nullable=False),
        pa.field("max_num_seqs", pa.int32(), nullable=False),
        pa.field("decode_buckets", pa.list_(pa.int32()), nullable=False),
        pa.field("kv_slots", pa.int32(), nullable=False),
        pa.field("slot_tokens", pa.int32(), nullable=False),
        # Null where admission goes to max_num_seqs.
        pa.field("max_active_seqs", pa.int32()),
        # Null under rules with KV slots.
        pa.field("num_gpu_blocks", pa.int32()),
        pa.field("memory_gib", Seconds, nullable=False),
        pa.field("compile_s", Seconds, nullable=False),
        pa.field("artifact_gib", Seconds, nullable=False),
        pa.field("excluded", pa.string(), nullable=False),
        pa.field("rung", pa.int32(), nullable=False),
        pa.field("num_plans", pa.int32(), nullable=False),
        # Per N, in the order of inputs.users; null where nothing was simulated.
        pa.field("search_device_ns", PerUsers),
        pa.field("search_completed", PerUsers),
        pa.field("evaluation_device_ns", PerUsers),
        pa.field("evaluation_completed", PerUsers),
        pa.field("wait_ns", pa.int64()),
        pa.field("p99_completion_ns", pa.int64()),
        pa.field("cached_tokens", pa.int64()),
        pa.field("evictions", pa.int64()),
    ]
)


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


class Job:
    """Everything a process needs to compute chunks of one search; built once per process."""

    def __init__(self, space: SpaceSpec) -> None:
        self.space = space
        self.inputs = build_inputs(space.inputs)
        self.evaluator = Evaluator(space, self.inputs)

    @cached_property
    def candidates(self) -> list[ServerShape]:
        return list(self.space.candidates())

    def groups(self, rung: Rung) -> list[Group]:
        """The plans of a rung: the first of every N; the last rung adds those of the evaluation."""
        wanted: list[Group] = []
        for group in self.inputs.groups:
            if group.role == "search" and rung.plans >= 0:
                wanted.append(group._replace(last=min(group.last, group.first + rung.plans)))
            elif group.first < group.last and (group.role == "search" or rung.is_last):
                wanted.append(group)
        return wanted


@lru_cache(maxsize=2)
def job_of(space_json: str) -> Job:
    """The job of a search space, one per process."""
    return Job(SpaceSpec.model_validate_json(space_json))


def compute_chunk(space_json: str, chunk: Chunk) -> bytes:
    """A chunk's rows, in the order of its indices, as the bytes of a Parquet file. Runs on the workers of a cluster."""
    job = job_of(space_json)
    groups = job.groups(chunk.rung)
    num_plans = sum(group.last - group.first for group in groups if group.role == "search")
    rows = [candidate_row(job, index, chunk.rung, groups, num_plans) for index in chunk.indices]
    buffer = io.BytesIO()
    pq.write_table(
        pa.Table.from_pylist(rows, schema=LEDGER_SCHEMA), buffer, compression="zstd", write_page_checksum=True
    )
    return buffer.getvalue()


def row_without_figures(space: SpaceSpec, index: int, candidate: ServerShape, rung: int) -> dict[str, Any]:
    """One row of the ledger before anything is simulated; rung -1: never simulated."""
    return {
        "index": index,
        **candidate._asdict(),
        "memory_gib": space.device.memory_gib(candidate),
        "compile_s": space.device.compile_s(candidate),
        "artifact_gib": space.device.artifact_gib(candidate),
        "excluded": space.constraints.violated(space.device, candidate),
        "rung": rung,
        "num_plans": 0,
    }


def figures_by_role(job: Job, candidate: ServerShape, groups: Sequence[Group]) -> dict[str, list[GroupFigures]]:
    """Figures on the search and the evaluation plans; raises PlanError when a request does not fit."""
    by_role: dict[str, list[GroupFigures]] = {"search": [], "evaluation": []}
    for group, figures in zip(groups, job.evaluator.evaluate(candidate, groups), strict=True):
        by_role[group.role].append(figures)
    return by_role


def candidate_row(job: Job, index: int, rung: Rung, groups: Sequence[Group], num_plans: int) -> dict[str, Any]:
    """One row of the ledger."""
    candidate = job.candidates[index]
    row = row_without_figures(job.space, index, candidate, rung.number)
    if row["excluded"]:
        return row
    try:
        by_role = figures_by_role(job, candidate, groups)
    except PlanError as error:
        return {**row, "excluded": str(error)}
    search = by_role["search"]
    row |= {
        "num_plans": num_plans,
        "wait_ns": sum(figures.wait_ns for figures in search),
        "p99_completion_ns": max(figures.p99_ns for figures in search),
        "cached_tokens": sum(figures.cached_tokens for figures in search),
        "evictions": sum(figures.evictions for figures in search),
    }
    for role, groups_of_role in by_role.items():
        if groups_of_role:
            row[f"{role}_device_ns"] = [figures.device_ns for figures in groups_of_role]
            row[f"{role}_completed"] = [figures.completed for figures in groups_of_role]
    return row


def chunk_size(num_candidates: int) -> int:
    """Candidates per chunk: a function of their number alone, so that a resumed search cuts the same chunks."""
    return min(max(-(-num_candidates // 256), 64), 4096)


def chunks_of(rung: Rung, indices: Iterable[int], size: int) -> Iterator[Chunk]:
    """A rung's candidates in chunks of ``size``."""
    remaining = iter(indices)
    number = 0
    while part := tuple(islice(remaining, size)):
        yield Chunk(rung, number, part)
        number += 1


ChunkRunner = Callable[[str, Sequence[Chunk]], Iterator[tuple[Chunk, bytes]]]
"""Computes chunks of a space (its JSON) and gives them back in any order."""


def compute_here(
    space_json: str, chunks: Sequence[Chunk], processes: int | None = None
) -> Iterator[tuple[Chunk, bytes]]:
    """The runner of one machine: by ``processes``, default all its cores, where there is enough to do."""
    for place, data in parallel_map(lambda chunk, _tell: compute_chunk(space_json, chunk), chunks, processes=processes):
        yield chunks[place], data


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


ALLOWED_DEATHS = 5
"""A chunk is given up when its workers died more often: then the chunk is the likely cause."""


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
