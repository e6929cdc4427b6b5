"""A fleet over several hosts: a Dask worker for each device makes a block at a time and returns it as an archive.

A block goes only to the worker with its device's name, and only the driver writes the records. A worker keeps its runs
until the next block, so that a block that is requested again is sent, not made again. On its host it makes a block as a
fleet of one device. Needs the extra: rbln-harness[cluster].
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
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from harness.clock import NS_PER_S, MonotonicClock
from harness.errors import HarnessError, ServerError, SpecError
from harness.measure.records import layout
from harness.measure.records.run import SealedRun
from harness.measure.records.store import Archive, RunStore, packed
from harness.measure.server.provenance import SOURCE_ROOT, source_sha256
from harness.model.experiment import PlannedRun
from harness.model.spec import DeviceSlot, FleetSpec
from harness.outputs import user_cache
from harness.processes import distributed
from harness.run_key import RunKey
from harness.runner.fleet.driver import (
    POLL_S,
    BlockCommand,
    BlockEnded,
    Driver,
    Message,
    RemainingBlock,
    Worker,
    perform_on_devices,
    runs_by_place,
)
from harness.runner.progress import Began, Made, ProgressEvent, StopFlag
from harness.runner.run import RunContext

CONNECT_TIMEOUT_S = 15.0
# A scheduler that is restarted within this time costs nothing: driver and workers reconnect.
LOST_TIMEOUT_S = 30.0
_BLOCK_IN_HAND = threading.Lock()


def serve(scheduler: str, place: DeviceSlot, port: int, *, is_on_loopback: bool) -> None:
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
            f"cannot join as {place} ({error})",
            where=scheduler,
            hint="See docs/guides/fleet.md: its scheduler, TLS, name",
        ) from error


async def _serve(scheduler: str, place: DeviceSlot, port: int, host: str | None) -> None:
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


def block_archive(
    fleet_id: str, source: str, spec_source: str, runs: Sequence[PlannedRun], costs: Sequence[bytes]
) -> Archive | HarnessError:
    """Make the remaining runs of a block on this worker's device and return the whole block; errors are returned.

    fleet_id: of this experiment in the driver's records. source: SHA-256 of the driver's harness; the worker's must be
    the same. costs: content of the cost file of each run.
    """
    worker = distributed("fleet.hosts").get_worker()

    def publish(event: Began | Made | ProgressEvent) -> None:
        # A lost message does no harm. A run that is sealed here counts when it arrives at the driver.
        if not isinstance(event, Made):
            with suppress(OSError):
                worker.log_event(topic_name(fleet_id, worker.name), pickle.dumps(event))

    try:
        if source != own_source():
            raise SpecError(
                "its harness differs from the driver's", where=worker.name, hint="Install the same version on both"
            )
        with _BLOCK_IN_HAND:
            root = scratch_folder(fleet_id)
            store, runs = RunStore(root), _with_cost_files(runs, costs, root)
            _forget_earlier_blocks(store, runs[0])
            left = [run for run in runs if not layout.run_folder(root, *run.key).exists()]
            perform_on_devices(left, RunContext(root, spec_source, None, publish, StopFlag()), {}, publish)
            # Only the runs of this block: the host's other workers remove their own runs meanwhile.
            return packed(store.run(*run.key) for run in runs if layout.run_folder(root, *run.key).exists())
    except HarnessError as error:
        return error


def own_source() -> str:
    """SHA-256 of this process's harness."""
    return source_sha256(SOURCE_ROOT / "harness")


def topic_name(fleet_id: str, place: str) -> str:
    """The Dask topic on which the worker of a device publishes progress."""
    return f"harness-fleet-{fleet_id}-{place}"


def scratch_folder(fleet_id: str) -> Path:
    """The folder in which this host keeps the runs of a fleet until they are sent; its workers share it."""
    folder = user_cache() / "fleet" / fleet_id
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _with_cost_files(runs: Sequence[PlannedRun], costs: Sequence[bytes], root: Path) -> list[PlannedRun]:
    """The runs of a block, with the driver's cost files written to this host."""
    (root / "costs").mkdir(exist_ok=True)
    paths = [root / "costs" / f"{run.replicate}-{place}.toml" for place, run in enumerate(runs)]
    for path, content in zip(paths, costs, strict=True):
        path.write_bytes(content)
    return [replace(run, cost_file=path) for run, path in zip(runs, paths, strict=True)]


def _forget_earlier_blocks(store: RunStore, run: PlannedRun) -> None:
    """Remove this device's runs of other blocks: the driver asks for a new block only when it has the earlier ones."""
    fleet = run.spec.fleet
    assert fleet is not None
    for old in store.root.glob(f"{run.spec.name}/*/*"):
        is_earlier = layout.is_replicate_name(old.name) and int(old.name) != run.replicate
        if (is_earlier and fleet.place_of(int(old.name)) == run.place) or layout.ABORTED in old.name:
            shutil.rmtree(old, ignore_errors=True)


def perform_over_hosts(
    todo: Sequence[PlannedRun],
    context: RunContext,
    again: Mapping[RunKey, SealedRun],
    count: Callable[[Began | Made], None],
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
    name = f"{socket.gethostname()}:{context.runs_root.resolve()}:{todo[0].spec.name}"
    fleet_id = hashlib.sha256(name.encode()).hexdigest()[:16]
    with _connected(fleet) as client:
        runs = runs_by_place(todo)
        _require_workers(client, fleet, set(map(str, runs)))
        submit = partial(client.submit, block_archive, fleet_id, own_source(), context.spec_source)
        workers: list[DaskWorker] = []
        for place in runs:
            workers.append(DaskWorker(place, runs[place], submit))
            client.subscribe_topic(topic_name(fleet_id, str(place)), workers[-1].published)
        Driver(context, again, count, _scheduler_check(client, fleet.scheduler)).run(workers)


@contextmanager
def _connected(fleet: FleetSpec) -> Generator[Any]:
    if not fleet.scheduler:
        raise SpecError("is missing", where="fleet.scheduler", hint="Name the Dask scheduler (docs/guides/fleet.md)")
    dask = distributed("fleet.scheduler")
    try:
        client = dask.Client(fleet.scheduler, timeout=CONNECT_TIMEOUT_S, set_as_default=False)
    except (OSError, ValueError) as error:
        raise SpecError(
            f"no scheduler answers ({error})", where=fleet.scheduler, hint="Start it: docs/guides/fleet.md"
        ) from error
    try:
        yield client
    finally:
        client.close(timeout=CONNECT_TIMEOUT_S)


def _require_workers(client: Any, fleet: FleetSpec, wanted: set[str]) -> None:
    """Wait for a worker with the name of each device that has runs left; SpecError when one is missing."""
    clock = MonotonicClock()
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


def _scheduler_check(client: Any, scheduler: str) -> Callable[[], None]:
    """A function that raises ServerError when the scheduler has been gone for too long."""
    clock = MonotonicClock()
    seen_ns = clock.now_ns()

    def check() -> None:
        nonlocal seen_ns
        if client.status == "running":
            seen_ns = clock.now_ns()
        elif clock.now_ns() - seen_ns > LOST_TIMEOUT_S * NS_PER_S or client.status == "closed":
            raise _lost("the scheduler is gone", scheduler)

    return check


class DaskWorker(Worker):
    """The Dask worker of one device. Dask's threads write into a pipe what it publishes and returns.

    submit: has ``block_archive`` called for given runs and costs.
    """

    def __init__(self, place: DeviceSlot, runs: Sequence[PlannedRun], submit: Callable[..., Any]) -> None:
        super().__init__(place, runs)
        self._submit, self._lock = submit, threading.Lock()
        self._future: Any = None
        self.connection, self._theirs = Pipe(duplex=False)

    def send(self, message: RemainingBlock | BlockCommand) -> None:
        """A block of another host is always made to its end; on ABORT nobody waits for it.

        A block is submitted by resource: Dask resolves ``workers=[name]`` to the present address, and a worker
        restarted at another port would never get the block.
        """
        if message is BlockCommand.ABORT:
            self._report(BlockEnded())
        if not isinstance(message, RemainingBlock):
            return
        costs = tuple(run.cost_file.read_bytes() for run in message.runs)
        # Kept: Dask cancels what nobody waits for.
        self._future = self._submit(message.runs, costs, resources={str(self.place): 1}, pure=False, retries=0)
        self._future.add_done_callback(partial(self._returned, message.runs))

    def end(self) -> int:
        self.connection.close()
        return 0

    def published(self, event: tuple[float, bytes]) -> None:
        """Take an event of this worker's topic."""
        self._report(pickle.loads(event[1]))

    def _returned(self, runs: Sequence[PlannedRun], future: Any) -> None:
        block = f"block {runs[0].replicate}"
        try:
            archive: Archive | HarnessError = future.result()
        except Exception as error:
            # Whatever Dask raises for a worker or scheduler that is gone.
            archive = _lost(f"{block} did not come back ({type(error).__name__})", str(self.place))
        if isinstance(archive, HarnessError):
            self._report(BlockEnded(archive))
        elif {run.key for run in runs} != set(archive.keys):
            what = f"{block} came back with {len(archive.keys)} of {len(runs)} runs"
            self._report(BlockEnded(_lost(what, str(self.place))))
        else:
            self._report(archive, BlockEnded())

    def _report(self, *messages: Message) -> None:
        with self._lock, suppress(OSError):
            for message in messages:
                self._theirs.send(message)


def _lost(what: str, where: str) -> ServerError:
    return ServerError(
        what, where=where, hint="Continue with --resume: what its host has sealed is sent, not made again"
    )
