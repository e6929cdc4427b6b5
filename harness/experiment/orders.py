"""In which order a block runs its conditions: rotated, there and back, or by a Latin square without carry-over.

Every order has each condition once in each block. Nothing is drawn: the same experiment always has the same order.
"""

from __future__ import annotations

from harness.spec import OrderName


def order_of_block(order: OrderName, num_conditions: int, block: int) -> list[int]:
    """Places of the conditions in the experiment, in the order in which ``block`` runs them.

    rotation: each condition once at every place over as many blocks as there are conditions. abba: every second block
    runs backwards, so that a linear drift leaves each pair of blocks; pairs rotate. latin: Williams' square, in which
    moreover each condition follows each other one equally often; of an odd number of conditions, two squares.
    Source: Williams (1949), Experimental designs balanced for the estimation of residual effects of treatments.
    """
    if order == "abba":
        forward = _rotated(list(range(num_conditions)), block // 2)
        return forward if block % 2 == 0 else forward[::-1]
    if order == "latin":
        # 0, 1, k - 1, 2, k - 2, ...: neighbours differ by every step once.
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
