"""When something is due: the run's clock in integers, and a heap of absolute deadlines; compiled.

Nothing here waits. Next: ``core`` takes the first deadline, ``receiving`` adds the session's next.
"""

from __future__ import annotations

from harness.clock import NS_PER_MS, NS_PER_S
from harness.compiled import inner_viewing as inner
from harness.live.client.wire import layout as at
from harness.live.client.wire import table
from harness.live.client.wire.layout import IntArray

# A kept connection that idled longer is replaced before it is used: servers close idle ones after a few seconds
# (uvicorn: 5 s), and a request sent in that very moment would be lost.
FRESH_AFTER_IDLE_NS = NS_PER_S
FRESH_LEAD_NS = 250 * NS_PER_MS


@inner
def to_clock_ns(reg: IntArray, monotonic_ns: int) -> int:
    """``ScaledClock.from_monotonic_ns``, in parts so that no product overflows."""
    numerator, denominator = reg[at.R_NUMERATOR], reg[at.R_DENOMINATOR]
    whole, rest = monotonic_ns // denominator, monotonic_ns % denominator
    return whole * numerator + rest * numerator // denominator


@inner
def to_monotonic_ns(reg: IntArray, clock_ns: int) -> int:
    """``ScaledClock.to_monotonic_ns``: rounded up, so that no wait ends early."""
    numerator, denominator = reg[at.R_NUMERATOR], reg[at.R_DENOMINATOR]
    whole, rest = clock_ns // numerator, clock_ns % numerator
    return whole * denominator - (-rest * denominator // numerator)


@inner
def is_before(heap: IntArray, one: int, other: int) -> bool:
    """Earlier first; at one instant in the order of kinds, then of rows."""
    for column in range(at.HEAP_WIDTH):
        if heap[one, column] != heap[other, column]:
            return heap[one, column] < heap[other, column]
    return False


@inner
def swap(heap: IntArray, one: int, other: int) -> None:
    """Exchange two entries."""
    for column in range(at.HEAP_WIDTH):
        heap[one, column], heap[other, column] = heap[other, column], heap[one, column]


@inner
def push(reg: IntArray, at_ns: int, kind: int, row: int) -> bool:
    """Add a deadline; False when there is no room, which one of each kind for each row always have."""
    heap, place = table.deadlines(reg), reg[at.R_HEAP_LEN]
    if place >= len(heap):
        return False
    reg[at.R_HEAP_LEN] = place + 1
    heap[place, at.H_AT_NS], heap[place, at.H_KIND], heap[place, at.H_ROW] = at_ns, kind, row
    while place and is_before(heap, place, (place - 1) // 2):
        swap(heap, place, (place - 1) // 2)
        place = (place - 1) // 2
    return True


@inner
def pop(reg: IntArray) -> None:
    """Remove the first deadline."""
    heap = table.deadlines(reg)
    last = reg[at.R_HEAP_LEN] - 1
    reg[at.R_HEAP_LEN] = last
    swap(heap, 0, last)
    place = 0
    while True:
        least = place
        for child in (2 * place + 1, 2 * place + 2):
            if child < last and is_before(heap, child, least):
                least = child
        if least == place:
            return
        swap(heap, place, least)
        place = least


@inner
def plan_send(reg: IntArray, row: int, due_ns: int, now_ns: int) -> bool:
    """A send at ``due_ns`` (clock), and a fresh connection before it when the old one would idle for long.

    False when there is no room for it.
    """
    due_monotonic_ns = to_monotonic_ns(reg, due_ns)
    is_told = push(reg, due_monotonic_ns, at.SEND, row)
    if due_monotonic_ns - now_ns > FRESH_AFTER_IDLE_NS:
        is_told = push(reg, due_monotonic_ns - FRESH_LEAD_NS, at.REFRESH, row) and is_told
    return is_told
