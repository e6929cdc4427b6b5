"""The devices of several hosts side by side, through the Dask workers that stand for them, one per device.

A block goes to the worker that bears its device's name and to no other. Its sealed runs come back as one archive, and
this process alone writes the records. Needs the extra: rbln-harness[cluster].
"""

from __future__ import annotations

import hashlib
import pickle
import socket
from collections import deque
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from queue import Empty, Queue
from typing import Any

from harness.clock import NS_PER_S, MonotonicClock
from harness.dask import distributed
from harness.errors import HarnessError, ServerError, SpecError
from harness.experiment import PlannedRun
from harness.records import RunKey, SealedRun
from harness.records.transfer import Archive, received
from harness.runner.fleet.hosted import HostedBlock, block_archive, own_source, topic_name
from harness.runner.fleet.local import Counter
from harness.runner.lane import Began, Made
from harness.runner.run import Invocation
from harness.spec import FleetSpec, Place

POLL_S = 0.2
CONNECT_TIMEOUT_S = 15.0
# A scheduler that is restarted within this time costs nothing: driver and workers reconnect.
LOST_TIMEOUT_S = 30.0


def perform_over_hosts(
    todo: Sequence[PlannedRun], invocation: Invocation, again: Mapping[RunKey, SealedRun], counter: Counter
) -> None:
    """Make the runs of a fleet of several hosts; ends after the blocks in flight, or at once, as the person wishes.

    A block whose host cannot be reached any more is sent by it when it is asked for again (--resume). Raises SpecError
    when a worker is missing, ServerError when the scheduler is gone, and the first error of a block.
    """
    if not todo:
        return
    fleet = todo[0].spec.fleet
    assert fleet is not None
    if invocation.ticket is not None or again:
        raise SpecError(
            "frozen and repeated runs are noted where they are made, and only this host has the notes",
            where="fleet.hosts",
            hint="Use a fleet of this host: leave hosts and scheduler out",
        )
    with _connected(fleet) as client:
        _require_workers(client, fleet, todo)
        _Driver(client, todo, invocation, counter).run()


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
    """SpecError unless every device that has something to do has a worker, which offers the device's name, soon."""
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
    """Devices whose workers are there now."""
    return {name for one in client.scheduler_info(n_workers=-1)["workers"].values() for name in one["resources"]}


class _Driver:
    """Hands each worker the block that is next for its device, and receives what comes back."""

    def __init__(self, client: Any, todo: Sequence[PlannedRun], invocation: Invocation, counter: Counter) -> None:
        self._client, self._invocation, self._counter = client, invocation, counter
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
        own = f"{socket.gethostname()}:{invocation.runs_root.resolve()}:{todo[0].spec.name}"
        self._fleet_id = hashlib.sha256(own.encode()).hexdigest()[:16]

    def run(self) -> None:
        self._client.subscribe_topic(topic_name(self._fleet_id), self._hear)
        for place in self._blocks:
            self._submit(place)
        seen_ns = self._clock.now_ns()
        while self._in_flight and not self._invocation.stop.now.is_set():
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
        """The next block of a device, to the worker that bears its name: also to one that is started again later.

        Dask turns ``workers=[name]`` into the address of now: one at another port would never be given the block.
        """
        if not self._blocks[place]:
            return
        block = self._blocks[place].popleft()
        costs = tuple(run.cost_file.read_bytes() for run in block)
        hosted = HostedBlock(self._fleet_id, block, costs, self._invocation.spec_source, self._source)
        future = self._client.submit(block_archive, hosted, resources={str(place): 1}, pure=False, retries=0)
        self._in_flight[future] = place, block
        future.add_done_callback(self._inbox.put)

    def _take(self, message: Any) -> None:
        """A published event, or a block's future that is done."""
        if isinstance(message, bytes):
            event = pickle.loads(message)
            if isinstance(event, Began):
                self._begin(event.key)
            else:
                self._invocation.on_progress(event)
            return
        place, block = self._in_flight.pop(message)
        self._error = self._error or self._received(message, place, block)
        if self._error is None and not self._invocation.stop.after_run:
            self._submit(place)

    def _received(self, future: Any, place: Place, block: Sequence[PlannedRun]) -> HarnessError | None:
        """Write what a block brought. An error is returned, not raised: the other blocks in flight still count."""
        name = f"block {block[0].replicate}"
        try:
            archive: Archive | HarnessError = future.result()
            if isinstance(archive, HarnessError):
                return archive
            wanted = {run.key for run in block}
            if set(archive.keys) != wanted:
                return _lost(f"{name} came back with {len(archive.keys)} of {len(wanted)} runs", str(place))
            for run in received(self._invocation.runs_root, archive):
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
