"""The place of a process in a fleet (its device, its cores, busy devices beside it), and the state of all devices.

Each unfinished run's folder names its device and process, so that busy neighbours and killed processes can be seen.
The state is read from files that the runs write anyway. Nothing is locked or decided here.
"""

from __future__ import annotations

import json
import os
import socket
from collections import Counter
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.analysis.logs.glance import glance
from harness.errors import SpecError
from harness.inputs import open_regular
from harness.measure.records import layout
from harness.measure.records.manifest import FleetRecord
from harness.measure.records.store import RunStore
from harness.model.experiment import PlannedRun
from harness.model.spec import DeviceSlot
from harness.stacks.rbln.launch.devices import parse_devices

MAX_MARK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class WorkerSlot:
    """The device of a fleet that a process works for. cores: of its client; empty: any."""

    place: DeviceSlot
    cores: tuple[int, ...] = ()

    @property
    def host(self) -> str:
        return self.place.host or socket.gethostname()

    def note(self, folder: Path, run: PlannedRun) -> None:
        """Write the device, block and process of a run into its folder, before the run starts."""
        process, fleet = psutil.Process(), run.spec.fleet
        mark = {
            "device": self.place.device,
            "host": self.host,
            "block": run.replicate,
            "blocks": run.spec.replicates,
            "conditions": len(run.spec.condition),
            "places": [] if fleet is None else list(map(str, fleet.places)),
            "pid": process.pid,
            "process_started_s": process.create_time(),
        }
        (folder / layout.FLEET).write_text(json.dumps(mark) + "\n", encoding="utf-8")

    def neighbours(self, runs_root: Path) -> set[int]:
        """Other devices of this host on which a run is being made now."""
        marks = [mark for folder in runs_root.glob(f"*/*/*{layout.PARTIAL}") if (mark := living_mark(folder))]
        return {mark["device"] for mark in marks if mark["host"] == self.host} - {self.place.device}

    @contextmanager
    def held(self, runs_root: Path) -> Generator[set[int]]:
        """Keep this thread and its children on the client's cores; yields the busy neighbours, updated at the end."""
        before, seen = os.sched_getaffinity(0), self.neighbours(runs_root)
        os.sched_setaffinity(0, self.cores or before)
        try:
            yield seen
            seen |= self.neighbours(runs_root)
        finally:
            # Servers may use all cores.
            os.sched_setaffinity(0, before)

    def record(self, folder: Path, npus: Iterable[int], neighbours: Iterable[int]) -> FleetRecord:
        """The manifest's record. npus: of the server, to find its device in the driver's reports."""
        known = FleetRecord(
            device=self.place.device, host=self.host, neighbours=tuple(sorted(neighbours)), client_cores=self.cores
        )
        return known.model_copy(update=_driver_facts(folder / layout.DEVICES, set(npus)))


def living_mark(folder: Path) -> dict[str, Any] | None:
    """The mark in an unfinished run's folder, while the process that makes the run is alive on this host; else None."""
    with suppress(OSError, ValueError, KeyError, psutil.Error):
        with open_regular(folder / layout.FLEET) as file:
            mark: dict[str, Any] = json.loads(file.read(MAX_MARK_BYTES))
        if psutil.Process(mark["pid"]).create_time() == mark["process_started_s"]:
            return mark
    return None


def _driver_facts(path: Path, npus: set[int]) -> dict[str, Any]:
    """Serials and temperatures of a server's NPUs, from the driver's reports during this run."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    warm = [
        row["temperature_c"]
        for line in lines
        for row in line.get("readings", ())
        if row["npu"] in npus and row["temperature_c"] is not None
    ]
    raw = next((line["raw"] for line in lines if line.get("raw")), None)
    devices = () if raw is None else parse_devices(json.dumps(raw)).devices
    used = [device for device in devices if device.npu in npus]
    return {
        "uuid": " ".join(device.uuid for device in used if device.uuid),
        "card": " ".join(sorted({device.card for device in used if device.card})),
        "temperature_c": (min(warm), max(warm)) if warm else None,
    }


@dataclass(frozen=True, slots=True)
class DeviceState:
    """One device. making: label of its current run, "" for none; now: the state of that run, in words.

    blocks_behind: whole blocks fewer than the device that has most. warmest_c: highest temperature during its latest
    run for which the driver reported temperatures.
    """

    place: str
    making: str
    now: str
    blocks_done: int
    blocks_left: int
    blocks_behind: int
    num_invalid: int
    warmest_c: float | None


def device_states(runs_root: Path, experiment: str) -> list[DeviceState]:
    """The devices of an experiment's fleet in order; SpecError when no fleet has made runs of it."""
    store = RunStore(runs_root)
    sealed = [run for run in store.sealed(experiment) if run.manifest.fleet is not None]
    marks = {
        f"{folder.parent.name}/{folder.name.removesuffix(layout.PARTIAL)}": (mark, folder)
        for folder in store.unsealed()
        if folder.parent.parent.name == experiment and (mark := living_mark(folder))
    }
    if sealed and (fleet := sealed[-1].fleet_spec) is not None:
        spec = sealed[-1].spec
        places, num_blocks, num_conditions = list(map(str, fleet.places)), spec.replicates, len(spec.condition)
    elif marks:
        mark, _ = next(iter(marks.values()))
        places, num_blocks, num_conditions = mark["places"], mark["blocks"], mark["conditions"]
    else:
        raise SpecError(
            f"no run of a fleet is or was made for {experiment!r}",
            where=str(runs_root),
            hint="Start one: harness run FILE.toml --devices 0,1,2,3",
        )
    # Block i goes to places[i % len(places)].
    making = {places[mark["block"] % len(places)]: label for label, (mark, _) in marks.items()}
    runs_of = {
        place: [run for run in sealed if run.replicate % len(places) == number] for number, place in enumerate(places)
    }
    per_block = {place: Counter(run.replicate for run in runs) for place, runs in runs_of.items()}
    done = {place: sum(num == num_conditions for num in blocks.values()) for place, blocks in per_block.items()}
    heat_c = {
        place: [record.temperature_c[1] for run in runs if (record := run.manifest.fleet) and record.temperature_c]
        for place, runs in runs_of.items()
    }
    return [
        DeviceState(
            place=place,
            making=making.get(place, ""),
            now=glance(marks[making[place]][1]).in_words() if place in making else "nothing",
            blocks_done=done[place],
            blocks_left=num_blocks // len(places) - done[place],
            blocks_behind=max(done.values()) - done[place],
            num_invalid=sum(not run.is_valid for run in runs),
            warmest_c=heat_c[place][-1] if heat_c[place] else None,
        )
        for place, runs in runs_of.items()
    ]
