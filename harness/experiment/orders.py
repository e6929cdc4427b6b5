"""When each run is made: the order of conditions in a block, and which runs of a fleet are simultaneous.

Every order has each condition once in each block. Nothing is drawn: an experiment always has the same order.
"""

from __future__ import annotations

from typing import NamedTuple

from harness.spec import ExperimentSpec, OrderName


def order_of_block(order: OrderName, num_conditions: int, block: int) -> list[int]:
    """Indices of the experiment's conditions in the order in which ``block`` runs them.

    rotation: over as many blocks as there are conditions, each condition has every position once. abba: every second
    block runs backwards, so that a linear drift cancels in each pair of blocks; pairs rotate. latin: Williams' square,
    in which each condition also follows each other one equally often; two squares for an odd number of conditions.
    Source: Williams (1949), Experimental designs balanced for the estimation of residual effects of treatments.
    """
    if order == "abba":
        forward = _rotated(list(range(num_conditions)), block // 2)
        return forward if block % 2 == 0 else forward[::-1]
    if order == "latin":
        # 0, 1, k - 1, 2, k - 2, ...: each difference of neighbours occurs once.
        first = [
            (place + 1) // 2 if place % 2 else (num_conditions - place // 2) % num_conditions
            for place in range(num_conditions)
        ]
        row = [(condition + block) % num_conditions for condition in first]
        is_second_square = num_conditions % 2 == 1 and (block // num_conditions) % 2 == 1
        return row[::-1] if is_second_square else row
    return _rotated(list(range(num_conditions)), block)


def _rotated(places: list[int], by: int) -> list[int]:
    shift = by % len(places)
    return places[shift:] + places[:shift]


class Period(NamedTuple):
    """Runs of a fleet that start together; the next period starts when all of them are sealed.

    number: from 0, in the order of time. devices: those of each host that are busy in it.
    """

    number: int
    devices: tuple[int, ...]


def period_of(spec: ExperimentSpec, replicate: int, order_index: int) -> Period | None:
    """The period of a run; None where every device of the fleet works through its runs by itself.

    A round is a block on every device. Its runs of equal order_index are one period; where their condition limits the
    neighbours, groups of devices take a period each.
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
