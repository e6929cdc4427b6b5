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
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.analysis.cost.reconstruct import Span, union_of
from harness.clock import NS_PER_S
from harness.measure.records import layout
from harness.measure.records.run import SealedRun, once_per_run
from harness.stacks.rbln.launch.device_watch import total_power_w

MOST_BETWEEN_NS = NS_PER_S
"""Longest time between two samples during which requests are in flight."""
Samples = Sequence[tuple[int, float]]


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


def energy_of(samples: Samples, flights: Sequence[Span]) -> Energy | None:
    """The energy of samples (instant in ns, W), in order, over the union of ``flights`` in ns.

    None where no request was in flight, or the samples do not cover that time at least once a second.
    """
    union = np.array(union_of(flights), dtype=np.int64).reshape(-1, 2)
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


def power_samples(path: Path) -> Samples:
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


class _Flight(NamedTuple):
    session: int
    sent_ns: int
    done_ns: int


def _share_of(samples: Samples, flights: Sequence[_Flight], is_counted: NDArray[np.bool_]) -> float:
    """The share of the joules that the counted requests have; at each instant all in flight have equal parts."""
    at_ns, watts = np.array(samples, dtype=np.float64).T
    _, starts, ends = np.array(flights, dtype=np.int64).T
    cuts = np.unique(np.concatenate((at_ns.astype(np.int64), starts, ends)))

    def num_open(which: NDArray[np.bool_]) -> NDArray[np.int64]:
        begun, over = (np.searchsorted(np.sort(times[which]), cuts[:-1], side="right") for times in (starts, ends))
        return begun - over

    every = num_open(np.ones_like(is_counted))
    middle_ns = (cuts[:-1] + cuts[1:]) / 2
    joules = np.where(every > 0, np.interp(middle_ns, at_ns, watts) * np.diff(cuts), 0.0)
    return float((joules * num_open(is_counted) / np.maximum(every, 1)).sum() / max(joules.sum(), 1e-300))


def energy_of_sessions(run: SealedRun, is_counted: NDArray[np.bool_]) -> Energy | None:
    """The part of a run's energy that these sessions of its plan have; None where nothing sampled it once a second."""
    energy, measured = run_energy(run), _measured(run)
    if energy is None or measured is None:
        return None
    _, samples, flights = measured
    of_flights = is_counted[[each.session for each in flights]]
    share = 1.0 if of_flights.all() else _share_of(samples, flights, of_flights)
    return replace(energy, joules=energy.joules * share, error_joules=energy.error_joules * share)


@once_per_run
def run_energy(run: SealedRun) -> Energy | None:
    """The energy of a run's devices while requests were in flight; None where nothing sampled it once a second."""
    measured = _measured(run)
    return None if measured is None else replace(measured[0], is_emulated=run.manifest.kind.has_device is False)


def _measured(run: SealedRun) -> tuple[Energy, Samples, list[_Flight]] | None:
    """The first of a run's files of samples that gives an energy, its samples, and the requests in flight."""
    requests = run.table("requests").select(_Flight._fields).to_pylist()
    flights = [_Flight(**row) for row in requests if None not in row.values()]
    for name in (layout.DEVICE_METRICS, layout.DEVICES):
        samples = power_samples(run.file(name))
        if samples and (energy := energy_of(samples, [(each.sent_ns, each.done_ns) for each in flights])) is not None:
            return energy, samples, flights
    return None
