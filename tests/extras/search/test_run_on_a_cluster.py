"""A Dask cluster writes the ledger of one process, byte for byte, also when a worker is killed in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from harness import processes
from harness.errors import SpecError
from harness.extras.search.run import search
from harness.extras.search.space import SpaceSpec, parse_space

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
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, host="127.0.0.1"
    ) as cluster:
        yield cluster


def ledger_bytes(folder: Path) -> bytes:
    return (folder / "ledger.parquet").read_bytes()


def test_a_cluster_that_loses_a_worker_writes_the_ledger_of_one_process(cluster: Any, tmp_path: Path) -> None:
    alone = search(space(), tmp_path / "alone")
    with cluster.get_client() as client:
        pids: dict[str, int] = client.run(os.getpid)
    assert len(set(pids.values())) == 2
    progress: list[float] = []

    def kill_one(share: float) -> None:
        progress.append(share)
        if len(progress) == 1:
            os.kill(next(iter(pids.values())), signal.SIGKILL)

    result = search(space(), tmp_path / "cluster", workers=cluster.scheduler_address, on_progress=kill_one)
    assert len(progress) > 4
    assert ledger_bytes(tmp_path / "cluster") == ledger_bytes(tmp_path / "alone")
    assert result.ranked == alone.ranked


def test_a_scheduler_that_does_not_answer_is_a_plain_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(processes, "CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(SpecError, match="no scheduler"):
        search(space(), tmp_path, workers="tcp://127.0.0.1:9")
