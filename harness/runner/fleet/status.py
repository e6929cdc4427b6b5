"""The state of a fleet, read from the folders of its runs: blocks finished and left, delayed devices, temperatures.

It only reads files that the runs write anyway, so looking disturbs nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from harness.analysis.logs.glance import glance
from harness.errors import SpecError
from harness.records import RunStore, SealedRun, layout
from harness.runner.fleet.slot import living_mark


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


class _Shape(NamedTuple):
    """Size of a fleet's experiment. Block i goes to ``places[i % len(places)]``."""

    places: tuple[str, ...]
    num_blocks: int
    num_conditions: int


def device_states(runs_root: Path, experiment: str) -> list[DeviceState]:
    """The devices of an experiment's fleet in order; SpecError when no fleet has made runs of it."""
    store = RunStore(runs_root)
    sealed = [run for run in store.sealed(experiment) if run.manifest.fleet is not None]
    marks = {
        f"{folder.parent.name}/{folder.name.removesuffix(layout.PARTIAL)}": (mark, folder)
        for folder in store.unsealed()
        if folder.parent.parent.name == experiment and (mark := living_mark(folder))
    }
    shape = _shape(sealed, [mark for mark, _ in marks.values()])
    if shape is None:
        raise SpecError(
            f"no run of a fleet is or was made for {experiment!r}",
            where=str(runs_root),
            hint="Start one: harness run FILE.toml --devices 0,1,2,3",
        )
    making = {shape.places[mark["block"] % len(shape.places)]: label for label, (mark, _) in marks.items()}
    done = _whole_blocks(sealed, shape)
    most = max(done.values(), default=0)
    return [
        DeviceState(
            place=place,
            making=making.get(place, ""),
            now=glance(marks[making[place]][1]).in_words() if place in making else "nothing",
            blocks_done=done[place],
            blocks_left=shape.num_blocks // len(shape.places) - done[place],
            blocks_behind=most - done[place],
            num_invalid=sum(not run.is_valid for run in _of(sealed, place, shape)),
            warmest_c=_warmest_c(_of(sealed, place, shape)),
        )
        for place in shape.places
    ]


def _shape(sealed: Sequence[SealedRun], marks: Sequence[dict[str, Any]]) -> _Shape | None:
    if sealed and (fleet := sealed[-1].fleet_spec) is not None:
        spec = sealed[-1].spec
        return _Shape(tuple(map(str, fleet.places)), spec.replicates, len(spec.condition))
    return _Shape(tuple(marks[0]["places"]), marks[0]["blocks"], marks[0]["conditions"]) if marks else None


def _of(sealed: Iterable[SealedRun], place: str, shape: _Shape) -> list[SealedRun]:
    return [run for run in sealed if shape.places[run.replicate % len(shape.places)] == place]


def _whole_blocks(sealed: Sequence[SealedRun], shape: _Shape) -> Counter[str]:
    per_block = Counter(run.replicate for run in sealed)
    whole = [block for block, num_runs in per_block.items() if num_runs == shape.num_conditions]
    return Counter(shape.places[block % len(shape.places)] for block in whole)


def _warmest_c(runs: Sequence[SealedRun]) -> float | None:
    highest_c = [record.temperature_c[1] for run in runs if (record := run.manifest.fleet) and record.temperature_c]
    return highest_c[-1] if highest_c else None
