"""Which runs of a fleet are made at once: periods, for experiments that ask who runs beside whom.

A period's runs start together, and the next one when all of them are sealed. Most fleets have none: there each device
goes on by itself. Nothing is started here.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.experiment.orders import order_of_block
from harness.spec import ExperimentSpec


class Period(NamedTuple):
    """number: from 0, in the order of time. devices: those of each host that are busy in it."""

    number: int
    devices: tuple[int, ...]


def period_of(spec: ExperimentSpec, replicate: int, order_index: int) -> Period | None:
    """The period of a run; None where the fleet keeps no step.

    A round is a block on every device. Its runs of equal place in the order are one period, or, where their condition
    limits the neighbours, as many groups of devices one after another.
    """
    fleet = spec.fleet
    if fleet is None or not spec.keeps_step:
        return None
    order = order_of_block(spec.order, len(spec.condition), spec.turn_of(replicate))
    sizes = [spec.num_at_once(spec.condition[place]) for place in order]
    groups = [-(-len(fleet.devices) // size) for size in sizes]
    group = fleet.devices.index(fleet.place_of(replicate).device) // sizes[order_index]
    number = replicate // len(fleet.places) * sum(groups) + sum(groups[:order_index]) + group
    first = group * sizes[order_index]
    return Period(number, fleet.devices[first : first + sizes[order_index]])
