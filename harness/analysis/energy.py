"""Energy of a run: power samples of its devices, integrated over the time in flight.

Between two samples power is taken to go straight from one to the other. What it did between them is not known. Where it
moved one way only, it was at most as far from that line as the line is from the further sample: that is the error. Over
the whole time between two samples it is half of what their difference makes. Fewer than one sample a second say
nothing, and give no energy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from harness.clock import NS_PER_S
from harness.measure.records import layout
from harness.measure.records.run import SealedRun, once_per_run
from harness.stacks.rbln.launch.device_watch import total_power_w

MOST_BETWEEN_NS = NS_PER_S
"""Longest time between two samples during which requests are in flight."""
Interval = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Energy:
    """Joules while requests were in flight, and how far sampling can have moved them either way.

    is_emulated: no device was measured: the power is that of a model, or of a host whose devices did not serve.
    """

    joules: float = 0.0
    error_joules: float = 0.0
    num_samples: int = 0
    is_emulated: bool = False

    def __add__(self, other: Energy) -> Energy:
        return Energy(
            self.joules + other.joules,
            self.error_joules + other.error_joules,
            self.num_samples + other.num_samples,
            self.is_emulated or other.is_emulated,
        )


def energy_of(samples: Sequence[tuple[int, float]], flights: Sequence[Interval]) -> Energy | None:
    """The energy of samples (instant in ns, W), in order, over the union of ``flights`` in ns.

    None where no request was in flight, or the samples do not cover that time at least once a second.
    """
    union = np.array(_union(flights), dtype=np.int64).reshape(-1, 2)
    at_ns = np.array([at_ns for at_ns, _watts in samples], dtype=np.int64)
    watts = np.array([watts for _at_ns, watts in samples], dtype=np.float64)
    # Pieces of time in flight, each between two samples.
    cuts = np.unique(np.concatenate((at_ns, union.ravel())))
    flight = np.searchsorted(union[:, 0], cuts[:-1], side="right") - 1
    is_in_flight = (flight >= 0) & (cuts[:-1] < union[flight, 1]) if len(union) else np.zeros(len(flight), np.bool_)
    first_ns, last_ns = cuts[:-1][is_in_flight], cuts[1:][is_in_flight]
    before = np.searchsorted(at_ns, first_ns, side="right") - 1
    if not len(first_ns) or before.min() < 0 or before.max() > len(samples) - 2:
        return None
    if (np.diff(at_ns)[before] > MOST_BETWEEN_NS).any():
        return None
    seconds = (last_ns - first_ns) / NS_PER_S
    moves = np.diff(watts)[before]
    passed = ((first_ns - at_ns[before]) + (last_ns - at_ns[before])) / 2 / np.diff(at_ns)[before]
    num_samples = np.searchsorted(at_ns, union[:, 1], side="right") - np.searchsorted(at_ns, union[:, 0])
    joules = ((watts[before] + moves * passed) * seconds).sum()
    # A piece may lie near one sample while power was that of the other all the time.
    error = (np.abs(moves) * np.maximum(passed, 1 - passed) * seconds).sum()
    return Energy(float(joules), float(error), int(num_samples.sum()))


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    union: list[Interval] = []
    for start_ns, end_ns in sorted(intervals):
        if union and start_ns <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end_ns))
        else:
            union.append((start_ns, end_ns))
    return union


def power_samples(path: Path) -> list[tuple[int, float]]:
    """(instant in ns, W of all cards) of each report in a file of a run's devices.

    Reports without power are left out, and those that lack a card which another has: the rest is no power of all.
    """
    if not path.is_file():
        return []
    samples: list[tuple[int, float, set[str]]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        report = json.loads(line)
        readings = report.get("readings", [])
        watts = total_power_w(readings)
        if watts is not None:
            cards = {row["card"] for row in readings if row.get("card_power_w") is not None}
            samples.append((int(report["at_ns"]), watts, cards))
    every_card = set[str]().union(*(cards for _, _, cards in samples))
    return sorted((at_ns, watts) for at_ns, watts, cards in samples if cards == every_card)


@once_per_run
def run_energy(run: SealedRun) -> Energy | None:
    """The energy of a run's devices while requests were in flight; None where nothing sampled it once a second."""
    requests = run.table("requests").select(["sent_ns", "done_ns"]).to_pylist()
    flights = [(row["sent_ns"], row["done_ns"]) for row in requests if None not in row.values()]
    for name in (layout.DEVICE_METRICS, layout.DEVICES):
        samples = power_samples(run.file(name))
        if samples and (energy := energy_of(samples, flights)) is not None:
            return replace(energy, is_emulated=run.manifest.kind.has_device is False)
    return None
