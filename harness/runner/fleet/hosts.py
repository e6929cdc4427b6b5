"""Runs a fleet over several hosts: a Dask worker for each device makes a block at a time and returns it as an archive.

A block goes only to the worker with its device's name, and only the driver writes the records. A worker keeps its runs
until the next block, so that a block that is requested again is sent, not made again. Dask carries blocks between
hosts; on its host each worker makes them as a fleet of one device. Needs the extra: rbln-harness[cluster].
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import pickle
import shutil
import signal
import socket
import threading
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from queue import Empty, Queue
from typing import Any

from harness.clock import NS_PER_S, MonotonicClock
from harness.dask import distributed
from harness.errors import HarnessError, ServerError, SpecError
from harness.experiment import PlannedRun
from harness.records import RunKey, RunStore, SealedRun, layout
from harness.records.store import Archive, packed, received
from harness.runner.fleet.local import Counter, perform_side_by_side
from harness.runner.progress import Began, Made, ProgressEvent, StopFlag
from harness.runner.run import RunContext
from harness.server.provenance import SOURCE_ROOT, source_sha256
from harness.spec import FleetSpec, Place

_BLOCK_IN_HAND = threading.Lock()


@dataclass(frozen=True, slots=True)
class HostedBlock:
    """The remaining runs of one block, for another host. fleet_id: of this experiment in the driver's records.

    costs: content of the cost file of each run. source: SHA-256 of the driver's harness; the worker's must be the same.
    """

    fleet_id: str
    runs: tuple[PlannedRun, ...]
    costs: tuple[bytes, ...]
    spec_source: str
    source: str


def serve(scheduler: str, place: Place, port: int, *, is_on_loopback: bool) -> None:
    """Run the worker of a device until its scheduler is gone and its current block is made; never returns.

    A signal ends it at once: Dask's handlers wait for ever when scheduler and worker end together.
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
        # A broken connection costs nothing: the current block is sealed, and sent when it is requested again.
        _BLOCK_IN_HAND.acquire()
        os._exit(0)


def block_archive(block: HostedBlock) -> Archive | HarnessError:
    """Make the remaining runs of a block on this worker's device and return the whole block; errors are returned."""
    relay = _Relay(block.fleet_id)
    try:
        if block.source != own_source():
            raise SpecError(
                "its harness differs from the driver's", where=relay.place, hint="Install the same version on both"
            )
        with _BLOCK_IN_HAND:
            return _archive(block, relay)
    except HarnessError as error:
        return error


def own_source() -> str:
    """SHA-256 of this process's harness."""
    return source_sha256(SOURCE_ROOT / "harness")


def topic_name(fleet_id: str) -> str:
    """The Dask topic on which workers publish progress."""
    return f"harness-fleet-{fleet_id}"


def _archive(block: HostedBlock, relay: _Relay) -> Archive:
    root = scratch_folder(block.fleet_id)
    store, runs = RunStore(root), _with_cost_files(block, root)
    _forget_earlier_blocks(store, runs[0])
    left = [run for run in runs if not layout.run_folder(root, *run.key).exists()]
    perform_side_by_side(left, RunContext(root, block.spec_source, None, relay.publish, StopFlag()), {}, relay)
    # Only the runs of this block: the host's other workers remove their own runs meanwhile.
    return packed(store.run(*run.key) for run in runs if layout.run_folder(root, *run.key).exists())


def scratch_folder(fleet_id: str) -> Path:
    """The folder in which this host keeps the runs of a fleet until they are sent; its workers share it."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "rbln-harness" / "fleet" / fleet_id
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _with_cost_files(block: HostedBlock, root: Path) -> list[PlannedRun]:
    """The runs of a block, with the driver's cost files written to this host."""
    folder = root / "costs"
    folder.mkdir(exist_ok=True)
    runs: list[PlannedRun] = []
    for place, (run, content) in enumerate(zip(block.runs, block.costs, strict=True)):
        path = folder / f"{run.replicate}-{place}.toml"
        path.write_bytes(content)
        runs.append(replace(run, cost_file=path))
    return runs


def _forget_earlier_blocks(store: RunStore, run: PlannedRun) -> None:
    """Remove this device's runs of other blocks: the driver asks for a new block only when it has the earlier ones."""
    fleet = run.spec.fleet
    assert fleet is not None
    for old in store.root.glob(f"{run.spec.name}/*/*"):
        is_earlier = layout.is_replicate_name(old.name) and int(old.name) != run.replicate
        if (is_earlier and fleet.place_of(int(old.name)) == run.place) or layout.ABORTED in old.name:
            shutil.rmtree(old, ignore_errors=True)


class _Relay:
    """Publishes progress for the driver's display; a lost message does no harm."""

    def __init__(self, fleet_id: str) -> None:
        self._worker, self._topic = distributed("fleet.hosts").get_worker(), topic_name(fleet_id)
        self.place = str(self._worker.name)

    def add(self, event: Began | Made, /) -> None:
        """Publish only beginnings: a run that is sealed here counts when it arrives at the driver."""
        if isinstance(event, Began):
            self.publish(event)

    def publish(self, event: Began | ProgressEvent) -> None:
        with suppress(OSError):
            self._worker.log_event(self._topic, pickle.dumps(event))


POLL_S = 0.2
CONNECT_TIMEOUT_S = 15.0
# A scheduler that is restarted within this time costs nothing: driver and workers reconnect.
LOST_TIMEOUT_S = 30.0


def perform_over_hosts(
    todo: Sequence[PlannedRun], context: RunContext, again: Mapping[RunKey, SealedRun], counter: Counter
) -> None:
    """Make the runs of a fleet of several hosts; a stop request ends it after the current blocks, or at once.

    A host that can no longer be reached sends its block when the block is requested again (--resume). Raises SpecError
    when a worker is missing, ServerError when the scheduler is gone, and the first error of a block.
    """
    if not todo:
        return
    fleet = todo[0].spec.fleet
    assert fleet is not None
    if context.authorization is not None or again:
        raise SpecError(
            "frozen and repeated runs are recorded in a ledger on the driver's host, which other hosts cannot reach",
            where="fleet.hosts",
            hint="Use a fleet of this host: leave hosts and scheduler out",
        )
    with _connected(fleet) as client:
        _require_workers(client, fleet, todo)
        _Driver(client, todo, context, counter).run()


@contextmanager
def _connected(fleet: FleetSpec) -> Generator[Any]:
    if not fleet.scheduler:
        raise SpecError("is missing", where="fleet.scheduler", hint="Name the Dask scheduler (docs/fleet.md)")
    dask = distributed("fleet.scheduler")
    try:
        client = dask.Client(fleet.scheduler, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"no scheduler answers ({error})", where=fleet.scheduler, hint="Start it: docs/fleet.md"
        ) from error
    try:
        yield client
    finally:
        client.close(timeout=CONNECT_TIMEOUT_S)


def _require_workers(client: Any, fleet: FleetSpec, todo: Sequence[PlannedRun]) -> None:
    """Wait for a worker with the name of each device that has runs left; SpecError when one is missing."""
    clock, wanted = MonotonicClock(), {str(run.place) for run in todo}
    give_up_ns = clock.now_ns() + int(CONNECT_TIMEOUT_S * NS_PER_S)
    while (missing := sorted(wanted - _offered(client))) and clock.now_ns() < give_up_ns:
        clock.sleep_until_ns(clock.now_ns() + int(POLL_S * NS_PER_S))
    if missing:
        host, device = missing[0].rsplit("/dev", 1)
        raise SpecError(
            f"no worker is called {', '.join(missing)}",
            where=fleet.scheduler,
            hint=f"On {host}: harness fleet worker {fleet.scheduler} --host {host} --device {device}",
        )


def _offered(client: Any) -> set[str]:
    """Devices whose workers are connected now."""
    workers = client.scheduler_info(n_workers=-1)["workers"].values()
    return {name for worker in workers for name in worker["resources"]}


class _Driver:
    """Submits the next block of each device to its worker, and receives the archives."""

    def __init__(self, client: Any, todo: Sequence[PlannedRun], context: RunContext, counter: Counter) -> None:
        self._client, self._context, self._counter = client, context, counter
        self._scheduler = "" if todo[0].spec.fleet is None else todo[0].spec.fleet.scheduler
        self._blocks: dict[Place, deque[tuple[PlannedRun, ...]]] = {}
        for _, runs in groupby(todo, key=lambda run: run.replicate):
            block = tuple(runs)
            assert block[0].place is not None, "only runs of a fleet are shared out"
            self._blocks.setdefault(block[0].place, deque()).append(block)
        self._in_flight: dict[Any, tuple[Place, tuple[PlannedRun, ...]]] = {}
        self._inbox: Queue[Any] = Queue()
        self._begun: set[RunKey] = set()
        self._error: HarnessError | None = None
        self._source, self._clock = own_source(), MonotonicClock()
        name = f"{socket.gethostname()}:{context.runs_root.resolve()}:{todo[0].spec.name}"
        self._fleet_id = hashlib.sha256(name.encode()).hexdigest()[:16]

    def run(self) -> None:
        self._client.subscribe_topic(topic_name(self._fleet_id), self._hear)
        for place in self._blocks:
            self._submit(place)
        seen_ns = self._clock.now_ns()
        while self._in_flight and not self._context.stop.now.is_set():
            with suppress(Empty):
                self._take(self._inbox.get(timeout=POLL_S))
            if self._client.status == "running":
                seen_ns = self._clock.now_ns()
            elif self._clock.now_ns() - seen_ns > LOST_TIMEOUT_S * NS_PER_S or self._client.status == "closed":
                raise _lost("the scheduler is gone", self._scheduler)
        if self._error is not None:
            raise self._error

    def _hear(self, event: tuple[float, Any]) -> None:
        self._inbox.put(event[1])

    def _submit(self, place: Place) -> None:
        """Submit the next block of a device to the worker with its name, also when that worker is restarted later.

        By resource: Dask resolves ``workers=[name]`` to the present address, and a worker restarted at another port
        would never get the block.
        """
        if not self._blocks[place]:
            return
        block = self._blocks[place].popleft()
        costs = tuple(run.cost_file.read_bytes() for run in block)
        hosted = HostedBlock(self._fleet_id, block, costs, self._context.spec_source, self._source)
        future = self._client.submit(block_archive, hosted, resources={str(place): 1}, pure=False, retries=0)
        self._in_flight[future] = place, block
        future.add_done_callback(self._inbox.put)

    def _take(self, message: Any) -> None:
        """Process a published event or the finished future of a block."""
        if isinstance(message, bytes):
            event = pickle.loads(message)
            if isinstance(event, Began):
                self._begin(event.key)
            else:
                self._context.on_progress(event)
            return
        place, block = self._in_flight.pop(message)
        self._error = self._error or self._received(message, place, block)
        if self._error is None and not self._context.stop.after_run:
            self._submit(place)

    def _received(self, future: Any, place: Place, block: Sequence[PlannedRun]) -> HarnessError | None:
        """Write the runs of a block. An error is returned, not raised: the other current blocks still count."""
        name = f"block {block[0].replicate}"
        try:
            archive: Archive | HarnessError = future.result()
            if isinstance(archive, HarnessError):
                return archive
            wanted = {run.key for run in block}
            if set(archive.keys) != wanted:
                return _lost(f"{name} came back with {len(archive.keys)} of {len(wanted)} runs", str(place))
            for run in received(self._context.runs_root, archive):
                self._begin(run.key)
                self._counter.add(Made(run))
        except HarnessError as error:
            return error
        except Exception as error:
            # Whatever Dask raises for a worker or scheduler that is gone.
            return _lost(f"{name} did not come back ({type(error).__name__})", str(place))
        return None

    def _begin(self, key: RunKey) -> None:
        if key not in self._begun:
            self._begun.add(key)
            self._counter.add(Began(key))


def _lost(what: str, where: str) -> ServerError:
    return ServerError(
        what, where=where, hint="Continue with --resume: what its host has sealed is sent, not made again"
    )
