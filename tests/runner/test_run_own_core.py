"""A client with a core of its own: nothing else that the harness starts runs there."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil
import pytest

from harness.runner import run_experiment
from harness.runner.progress import ProgressEvent, ServerReady
from tests.support.experiments import small_experiment
from tests.support.forked_children import started_anew

pytestmark = pytest.mark.live


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core: none is left for a server")
def test_a_client_with_a_core_of_its_own_shares_it_with_no_server(tmp_path: Path) -> None:
    usable = os.sched_getaffinity(0)
    own, beside = {max(usable)}, list[set[int]]()
    # Fewer than usable where the machine is shown as a larger one.
    there = set(psutil.Process().cpu_affinity())

    def look(event: ProgressEvent) -> None:
        if isinstance(event, ServerReady):
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.NoSuchProcess):
                    beside.append(set(child.cpu_affinity()))

    spec = small_experiment(client={"own_core": True}, condition=[{"name": "base"}])
    with started_anew():
        runs = run_experiment(spec, runs_root=tmp_path, on_progress=look).runs
    assert [run.manifest.client_audit["cores"] for run in runs] == [sorted(own)] * len(runs)
    assert len(beside) >= len(runs)
    assert there & usable - own in beside
    assert os.sched_getaffinity(0) == usable
