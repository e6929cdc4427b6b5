"""The same search on a Dask cluster: chunks go out, Parquet bytes come back, this process writes the ledger.

Workers share no disk and keep nothing; one that dies costs only the chunk it held. The bytes are those of one process.
Needs the optional extra: pip install 'rbln-harness[cluster]'.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from harness.dask import distributed
from harness.errors import SpecError
from harness.sim.search.chunks import Chunk, ChunkRunner, compute_chunk

ALLOWED_DEATHS = 5
"""A chunk whose worker died so often is given up: it, not the worker, is then the likely cause."""


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
            # No dashboard: a search must not open a port that nobody asked for.
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
    """A runner on a Dask client the user already has (dask-jobqueue, Kubernetes, ...)."""

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
            # Ctrl-C or a full disk here: what nobody will fetch need not be computed.
            client.cancel(list(chunk_of))

    return run
