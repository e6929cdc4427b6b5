"""The Dask worker of one device: it makes one block at a time there and returns the block's sealed runs as an archive.

Runs stay in a folder of this host until the next block, so that a block which is asked for again is sent, not made
again. The driver's records are never touched here.
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
from harness.records import RunStore, layout
from harness.records.transfer import Archive, packed
from harness.runner.fleet.local import perform_side_by_side
from harness.runner.lane import Began, Made
from harness.runner.progress import ProgressEvent, StopFlag
from harness.runner.run import Invocation
from harness.server.provenance import SOURCE_ROOT, source_sha256
from harness.spec import Place

_BLOCK_IN_HAND = threading.Lock()


@dataclass(frozen=True, slots=True)
class HostedBlock:
    """What is left of one block, for another host. fleet_id: of this experiment in the driver's records.

    costs: content of the cost file of each run. source: SHA-256 of the driver's harness, which must be the worker's.
    """

    fleet_id: str
    runs: tuple[PlannedRun, ...]
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
        asyncio.run(_serve(scheduler, place, port, "127.0.0.1" if is_on_loopback else None))
    except (OSError, ValueError, RuntimeError) as error:
        raise ServerError(
            f"cannot join as {place} ({error})", where=scheduler, hint="See docs/fleet.md: its scheduler, TLS, name"
        ) from error


async def _serve(scheduler: str, place: Place, port: int, host: str | None) -> None:
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
        # A path that was cut for a while costs nothing: the block in hand is sealed, and sent when asked for again.
        _BLOCK_IN_HAND.acquire()
        os._exit(0)


def block_archive(block: HostedBlock) -> Archive | HarnessError:
    """Make what is left of a block on this worker's device and return all of it; an error comes back as a value."""
    relay = _Relay(block.fleet_id)
    try:
        if block.source != own_source():
            raise SpecError(
                "its harness is another one than the driver's", where=relay.place, hint="Install the same on both"
            )
        with _BLOCK_IN_HAND:
            return _archive(block, relay)
    except HarnessError as error:
        return error


def own_source() -> str:
    """SHA-256 of this process's harness."""
    return source_sha256(SOURCE_ROOT / "harness")


def topic_name(fleet_id: str) -> str:
    """Where workers publish progress."""
    return f"harness-fleet-{fleet_id}"


def _archive(block: HostedBlock, relay: _Relay) -> Archive:
    root = scratch_folder(block.fleet_id)
    store, runs = RunStore(root), _with_cost_files(block, root)
    _forget_earlier_blocks(store, runs[0])
    left = [run for run in runs if not layout.run_folder(root, *run.key).exists()]
    perform_side_by_side(left, Invocation(root, block.spec_source, None, relay.publish, StopFlag()), {}, relay)
    # Never all that is sealed there: the host's other workers remove what is theirs meanwhile.
    return packed(store.run(*run.key) for run in runs if layout.run_folder(root, *run.key).exists())


def scratch_folder(fleet_id: str) -> Path:
    """Where this host keeps the runs of a fleet until they are sent; the workers of one host share it."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "rbln-harness" / "fleet" / fleet_id
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _with_cost_files(block: HostedBlock, root: Path) -> list[PlannedRun]:
    """The runs of a block with their cost files as they are on the driver's host."""
    folder = root / "costs"
    folder.mkdir(exist_ok=True)
    runs: list[PlannedRun] = []
    for place, (run, content) in enumerate(zip(block.runs, block.costs, strict=True)):
        path = folder / f"{run.replicate}-{place}.toml"
        path.write_bytes(content)
        runs.append(replace(run, cost_file=path))
    return runs


def _forget_earlier_blocks(store: RunStore, run: PlannedRun) -> None:
    """Remove what this device made for other blocks: the driver has it, or it would not ask for this one."""
    fleet = run.spec.fleet
    assert fleet is not None
    for old in store.root.glob(f"{run.spec.name}/*/*"):
        is_earlier = layout.is_replicate_name(old.name) and int(old.name) != run.replicate
        if (is_earlier and fleet.place_of(int(old.name)) == run.place) or layout.ABORTED in old.name:
            shutil.rmtree(old, ignore_errors=True)


class _Relay:
    """Publishes progress for the driver; a lost message costs a line of its display and nothing else."""

    def __init__(self, fleet_id: str) -> None:
        self._worker, self._topic = distributed("fleet.hosts").get_worker(), topic_name(fleet_id)
        self.place = str(self._worker.name)

    def add(self, event: Began | Made, /) -> None:
        """A run that is sealed here counts when it has arrived."""
        if isinstance(event, Began):
            self.publish(event)

    def publish(self, event: Began | ProgressEvent) -> None:
        with suppress(OSError):
            self._worker.log_event(self._topic, pickle.dumps(event))
