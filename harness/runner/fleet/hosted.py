"""The Dask worker of one device: it makes one block at a time there, and gives the sealed runs of it as one archive.

Runs stay in a folder of this host until the next block, so that a block which is asked for again is sent, not made
again. The driver's records are never touched here. Next: ``hosts`` receives what is returned.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import shutil
import signal
import threading
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from harness.dask import distributed
from harness.errors import HarnessError, ServerError, SpecError
from harness.experiment import PlannedRun
from harness.live.provenance import SOURCE_ROOT, source_sha256
from harness.records import RunStore, layout
from harness.records.transfer import Archive, packed
from harness.runner.fleet.local import perform_side_by_side
from harness.runner.fleet.work import Block
from harness.runner.lane import Began, Made
from harness.runner.progress import ProgressEvent, StopFlag
from harness.runner.run import Invocation
from harness.spec import Place

_BLOCK_IN_HAND = threading.Lock()


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


def serve(scheduler: str, place: Place, port: int, *, is_on_loopback: bool) -> None:
    """Be the worker of a device until its scheduler is gone and the block in hand is made; never returns.

    A signal ends it at once: Dask's own handlers wait for ever where scheduler and worker end together.
    Raises ServerError when it cannot join.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    try:
        asyncio.run(_served(scheduler, place, port, "127.0.0.1" if is_on_loopback else None))
    except (OSError, ValueError, RuntimeError) as error:
        raise ServerError(
            f"cannot join as {place} ({error})", where=scheduler, hint="See docs/fleet.md: its scheduler, TLS, name"
        ) from error


async def _served(scheduler: str, place: Place, port: int, host: str | None) -> None:
    worker = distributed("harness fleet worker").Worker(
        scheduler,
        name=str(place),
        nthreads=1,
        resources={str(place): 1},
        memory_limit=0,
        dashboard=False,
        host=host,
        port=port,
    )
    async with worker:
        await worker.finished()
        # A path that was cut for a while costs nothing: what is in hand is sealed, and sent when it is asked for again.
        _BLOCK_IN_HAND.acquire()
        os._exit(0)


def block_archive(hosted: HostedBlock) -> Archive | HarnessError:
    """Make what is left of a block on this worker's device and return all of it; an error comes back as a value."""
    try:
        with _BLOCK_IN_HAND:
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
    store, runs = RunStore(root), hosted.block.runs
    _forget_earlier_blocks(store, runs[0])
    left = [run for run in _with_cost_files(hosted, root) if not layout.run_folder(root, *run.key).exists()]
    perform_side_by_side(left, Invocation(root, hosted.spec_source, None, line.tell, StopFlag()), {}, line)
    # Never all that is sealed there: the host's other workers remove what is theirs meanwhile.
    return packed(store.run(*run.key) for run in runs if layout.run_folder(root, *run.key).exists())


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
    fleet = run.spec.fleet
    assert fleet is not None
    for old in store.root.glob(f"{run.spec.name}/*/*"):
        is_earlier = layout.is_replicate_name(old.name) and int(old.name) != run.replicate
        if (is_earlier and fleet.place_of(int(old.name)) == run.place) or layout.ABORTED in old.name:
            shutil.rmtree(old, ignore_errors=True)


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
