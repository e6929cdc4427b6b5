"""When something is due: the run's clock in integers, and a heap of absolute deadlines; compiled.

Nothing here waits. Next: ``core`` takes the first deadline, ``receiving`` adds the session's next.
"""

from __future__ import annotations

from harness.clock import NS_PER_MS, NS_PER_S
from harness.compiled import inner
from harness.live.client.wire.layout import (
    DEADLINES_PER_REQUEST,
    DUE_REFRESH,
    DUE_SEND,
    Deadline,
    Registers,
    deadline_at,
)

# A kept connection that idled longer is replaced before it is used: servers close idle ones after a few seconds
# (uvicorn: 5 s), and a request sent in that very moment would be lost.
FRESH_AFTER_IDLE_NS = NS_PER_S
FRESH_LEAD_NS = 250 * NS_PER_MS


@inner
def to_clock_ns(reg: Registers, monotonic_ns: int) -> int:
    """``ScaledClock.from_monotonic_ns``, in parts so that no product overflows."""
    numerator, denominator = reg.clock_numerator, reg.clock_denominator
    whole, rest = monotonic_ns // denominator, monotonic_ns % denominator
    return whole * numerator + rest * numerator // denominator


@inner
def to_monotonic_ns(reg: Registers, clock_ns: int) -> int:
    """``ScaledClock.to_monotonic_ns``: rounded up, so that no wait ends early."""
    numerator, denominator = reg.clock_numerator, reg.clock_denominator
    whole, rest = clock_ns // numerator, clock_ns % numerator
    return whole * denominator - (-rest * denominator // numerator)


@inner
def is_before(one: Deadline, other: Deadline) -> bool:
    """Earlier first; at one instant in the order of kinds, then of rows."""
    if one.at_ns != other.at_ns:
        return one.at_ns < other.at_ns
    return one.kind < other.kind if one.kind != other.kind else one.row < other.row


@inner
def swap(one: Deadline, other: Deadline) -> None:
    """Exchange two entries."""
    one.at_ns, other.at_ns = other.at_ns, one.at_ns
    one.kind, other.kind = other.kind, one.kind
    one.row, other.row = other.row, one.row


@inner
def push(reg: Registers, at_ns: int, kind: int, row: int) -> bool:
    """Add a deadline; False when there is no room, which one of each kind for each row always have."""
    place = reg.num_deadlines
    if place > DEADLINES_PER_REQUEST * reg.num_requests:
        return False
    reg.num_deadlines = place + 1
    added = deadline_at(reg.deadlines_at, place)
    added.at_ns, added.kind, added.row = at_ns, kind, row
    while place:
        above = (place - 1) // 2
        if not is_before(deadline_at(reg.deadlines_at, place), deadline_at(reg.deadlines_at, above)):
            return True
        swap(deadline_at(reg.deadlines_at, place), deadline_at(reg.deadlines_at, above))
        place = above
    return True


@inner
def pop(reg: Registers) -> None:
    """Remove the first deadline."""
    last = reg.num_deadlines - 1
    reg.num_deadlines = last
    swap(deadline_at(reg.deadlines_at, 0), deadline_at(reg.deadlines_at, last))
    place = 0
    while True:
        least = place
        for child in range(2 * place + 1, min(2 * place + 3, last)):
            if is_before(deadline_at(reg.deadlines_at, child), deadline_at(reg.deadlines_at, least)):
                least = child
        if least == place:
            return
        swap(deadline_at(reg.deadlines_at, place), deadline_at(reg.deadlines_at, least))
        place = least


@inner
def plan_send(reg: Registers, row: int, due_ns: int, now_ns: int) -> bool:
    """A send at ``due_ns`` (clock), and a fresh connection before it when the old one would idle for long.

    False when there is no room for it.
    """
    due_monotonic_ns = to_monotonic_ns(reg, due_ns)
    is_told = push(reg, due_monotonic_ns, DUE_SEND, row)
    if due_monotonic_ns - now_ns > FRESH_AFTER_IDLE_NS:
        is_told = push(reg, due_monotonic_ns - FRESH_LEAD_NS, DUE_REFRESH, row) and is_told
    return is_told
