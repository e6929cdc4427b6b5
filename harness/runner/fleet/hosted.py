"""What a Dask worker does for the driver: one block on its own device, and the sealed runs of it as one archive.

Runs stay in a folder of this host until the next block, so that a block which is asked for again is sent, not made
again. The driver's records are never touched here. Next: ``hosts`` receives what is returned.
"""

from __future__ import annotations

import os
import pickle
import shutil
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.dask import distributed
from harness.errors import HarnessError, SpecError
from harness.experiment import PlannedRun
from harness.live.provenance import SOURCE_ROOT, source_sha256
from harness.records import RunStore, layout
from harness.records.transfer import Archive, packed
from harness.runner.fleet.local import perform_side_by_side
from harness.runner.fleet.work import Block
from harness.runner.lane import Began, Made
from harness.runner.progress import ProgressEvent, StopFlag
from harness.runner.run import Invocation


@dataclass(frozen=True, slots=True)
class HostedBlock:
    """One block for another host. fleet_id: of this experiment in the driver's records.

    costs: content of the cost file of each run. source: SHA-256 of the driver's harness, which must be the worker's.
    """

    fleet_id: str
    block: Block
    costs: tuple[bytes, ...]
    spec_source: str
    source: str


def block_archive(hosted: HostedBlock) -> Archive | HarnessError:
    """Make what is left of a block on this worker's device and return all of it; an error comes back as a value."""
    try:
        return _archived(hosted)
    except HarnessError as error:
        return error


def own_source() -> str:
    """SHA-256 of this process's harness."""
    return source_sha256(SOURCE_ROOT / "harness")


def topic_name(fleet_id: str) -> str:
    """Where workers tell what happens, as it happens."""
    return f"harness-fleet-{fleet_id}"


def _archived(hosted: HostedBlock) -> Archive:
    line = _Line(hosted.fleet_id)
    if hosted.source != own_source():
        raise SpecError(
            "its harness is another one than the driver's", where=line.name, hint="Install the same on both"
        )
    root = scratch_folder(hosted.fleet_id)
    store, keys = RunStore(root), {run.key for run in hosted.block.runs}
    _forget_earlier_blocks(store, hosted.block.runs[0])
    made = {run.key for run in store.sealed() if run.key in keys}
    left = [run for run in _with_cost_files(hosted, root) if run.key not in made]
    perform_side_by_side(left, Invocation(root, hosted.spec_source, None, line.tell, StopFlag()), {}, line)
    return packed(run for run in store.sealed() if run.key in keys)


def scratch_folder(fleet_id: str) -> Path:
    """Where this host keeps the runs of a fleet until they are sent; the workers of one host share it."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "rbln-harness" / "fleet" / fleet_id
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _with_cost_files(hosted: HostedBlock, root: Path) -> list[PlannedRun]:
    """The runs of a block with their cost files as they are on the driver's host."""
    folder = root / "costs"
    folder.mkdir(exist_ok=True)
    found: list[PlannedRun] = []
    for place, (run, content) in enumerate(zip(hosted.block.runs, hosted.costs, strict=True)):
        path = folder / f"{hosted.block.number}-{place}.toml"
        path.write_bytes(content)
        found.append(replace(run, cost_file=path))
    return found


def _forget_earlier_blocks(store: RunStore, run: PlannedRun) -> None:
    """Remove what this device made for other blocks: the driver has it, or it would not ask for this one."""
    assert run.place is not None
    for old in store.sealed():
        if old.device == run.place.device and old.replicate != run.replicate:
            shutil.rmtree(old.path)
    for folder in store.unsealed():
        if layout.ABORTED in folder.name:
            shutil.rmtree(folder, ignore_errors=True)


class _Line:
    """Tells the driver what happens; a message that is lost costs a line of its display and nothing else."""

    def __init__(self, fleet_id: str) -> None:
        self._worker, self._topic = distributed("fleet.hosts").get_worker(), topic_name(fleet_id)
        self.name = str(self._worker.name)

    def add(self, said: Began | Made) -> None:
        """A run begins; one that is sealed here counts when it has arrived."""
        if isinstance(said, Began):
            self.tell(said)

    def tell(self, said: Began | ProgressEvent) -> None:
        with suppress(OSError):
            self._worker.log_event(self._topic, pickle.dumps(said))
