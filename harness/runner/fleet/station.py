"""Where in a fleet a process makes its runs: its device, its cores, and who is busy beside it.

Each unfinished run's folder says whose it is, so that neighbours are found by looking, and a killed one is found dead.
Nothing is locked or decided here.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from harness.experiment import PlannedRun
from harness.inputs import open_regular
from harness.records import FleetRecord, layout
from harness.spec import Place
from harness.stack.rbln.devices import parse_devices

MAX_MARK_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Station:
    """One device of a fleet, as the process that works for it sees it. cores: of its client; empty: any."""

    place: Place
    cores: tuple[int, ...] = ()

    @property
    def host(self) -> str:
        return self.place.host or socket.gethostname()

    def note(self, folder: Path, run: PlannedRun) -> None:
        """Say in a run's folder whose run it is and of how many, before anything of it starts."""
        own, fleet = psutil.Process(), run.spec.fleet
        mark = {
            "device": self.place.device,
            "host": self.host,
            "block": run.replicate,
            "blocks": run.spec.replicates,
            "conditions": len(run.spec.condition),
            "places": [] if fleet is None else list(map(str, fleet.places)),
            "pid": own.pid,
            "process_started_s": own.create_time(),
        }
        (folder / layout.FLEET).write_text(json.dumps(mark) + "\n", encoding="utf-8")

    def neighbours(self, runs_root: Path) -> set[int]:
        """Other devices of this host on which a run is being made now."""
        marks = [mark for folder in runs_root.glob(f"*/*/*{layout.PARTIAL}") if (mark := living_mark(folder))]
        return {mark["device"] for mark in marks if mark["host"] == self.host} - {self.place.device}

    @contextmanager
    def held(self, runs_root: Path) -> Generator[set[int]]:
        """This thread, and what it starts, on the client's cores alone; gives the neighbours before and after."""
        before, seen = os.sched_getaffinity(0), self.neighbours(runs_root)
        os.sched_setaffinity(0, self.cores or before)
        try:
            yield seen
            seen |= self.neighbours(runs_root)
        finally:
            # Elsewhere a server has them all.
            os.sched_setaffinity(0, before)

    def record(self, folder: Path, npus: Iterable[int], neighbours: Iterable[int]) -> FleetRecord:
        """What the manifest says. npus: of the server, to find its device in what the driver told."""
        known = FleetRecord(
            device=self.place.device,
            host=self.host,
            neighbours=tuple(sorted(neighbours)),
            client_cores=self.cores,
        )
        return known.model_copy(update=_driver_facts(folder / layout.DEVICES, set(npus)))


def living_mark(folder: Path) -> dict[str, Any] | None:
    """What an unfinished run says of its device, while the process that makes it lives on this host; None otherwise."""
    with suppress(OSError, ValueError, KeyError, psutil.Error):
        with open_regular(folder / layout.FLEET) as file:
            mark: dict[str, Any] = json.loads(file.read(MAX_MARK_BYTES))
        if psutil.Process(mark["pid"]).create_time() == mark["process_started_s"]:
            return mark
    return None


def _driver_facts(path: Path, npus: set[int]) -> dict[str, Any]:
    """Serials and temperatures of a server's NPUs, by the driver's reports of this run; empty without any."""
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    warm = [
        row["temperature_c"]
        for line in lines
        for row in line.get("readings", ())
        if row["npu"] in npus and row["temperature_c"] is not None
    ]
    raw = next((line["raw"] for line in lines if line.get("raw")), None)
    own = [] if raw is None else [one for one in parse_devices(json.dumps(raw)).devices if one.npu in npus]
    return {
        "uuid": " ".join(one.uuid for one in own if one.uuid),
        "card": " ".join(sorted({one.card for one in own if one.card})),
        "temperature_c": (min(warm), max(warm)) if warm else None,
    }
