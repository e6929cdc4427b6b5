"""A Dask cluster gives the ledger of one process, byte for byte, also when a worker is killed in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness.errors import SpecError
from harness.extras.search.run import Chunk, cluster_runner, runner_of, search
from harness.extras.search.space import SpaceSpec, parse_space

distributed = pytest.importorskip("distributed")

# Dask's own teardown leaves sockets to the collector; what this project opens is watched by every other test.
pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore")]


def space() -> SpaceSpec:
    return parse_space(
        {
            "name": "cluster",
            "max_num_seqs": [6, 8, 9],
            "kv_slots": ["max_num_seqs", 16],
            "buckets": {"most": 6},
            "inputs": {"users": [3, 5], "search_seeds": [1], "evaluation_seeds": [2], "replicates": 2},
        },
        where="test",
    )


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        yield cluster


def ledger_bytes(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.parquet")}


def test_a_cluster_that_loses_a_worker_writes_the_ledger_of_one_process(cluster: Any, tmp_path: Path) -> None:
    search(space(), tmp_path / "alone")
    with distributed.Client(cluster) as client:
        pids: dict[str, int] = client.run(os.getpid)
        assert len(set(pids.values())) == 2
        run_chunks = runner_of(client)
        received: list[int] = []

        def killing(space_json: str, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, bytes]]:
            assert len(chunks) > 4
            for chunk, data in run_chunks(space_json, chunks):
                received.append(chunk.number)
                if len(received) == 1:
                    os.kill(next(iter(pids.values())), signal.SIGKILL)
                yield chunk, data

        result = search(space(), tmp_path / "cluster", run_chunks=killing)
    assert sorted(received) == list(range(len(received)))
    assert ledger_bytes(tmp_path / "cluster") == ledger_bytes(tmp_path / "alone")
    assert result.ranked == search(space(), tmp_path / "alone").ranked


def test_a_scheduler_given_by_address_does_the_same(cluster: Any, tmp_path: Path) -> None:
    search(space(), tmp_path / "alone")
    with cluster_runner(cluster.scheduler_address) as run_chunks:
        search(space(), tmp_path / "cluster", run_chunks=run_chunks)
    assert ledger_bytes(tmp_path / "cluster") == ledger_bytes(tmp_path / "alone")


def test_stopping_a_cluster_search_keeps_what_has_arrived(cluster: Any, tmp_path: Path) -> None:
    with distributed.Client(cluster) as client:
        run_chunks = runner_of(client)

        def stopped(space_json: str, chunks: Sequence[Chunk]) -> Iterator[tuple[Chunk, bytes]]:
            for number, (chunk, data) in enumerate(run_chunks(space_json, chunks)):
                if number == 2:
                    raise KeyboardInterrupt
                yield chunk, data

        with pytest.raises(KeyboardInterrupt):
            search(space(), tmp_path / "cluster", run_chunks=stopped)
        assert len(list((tmp_path / "cluster").glob("rung-*.parquet"))) == 2
        search(space(), tmp_path / "cluster", run_chunks=run_chunks)
    search(space(), tmp_path / "alone")
    assert ledger_bytes(tmp_path / "cluster") == ledger_bytes(tmp_path / "alone")


def test_a_scheduler_that_does_not_answer_is_a_plain_error() -> None:
    with pytest.raises(SpecError, match="no scheduler"), cluster_runner("tcp://127.0.0.1:9", connect_timeout_s=0.5):
        pass
