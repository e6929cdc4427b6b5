"""Text written at an address, never beyond the end that is given: copies, single bytes, numbers in decimal; compiled.

Nothing here decides what is written. Next: ``sending`` and ``scan`` put requests and ids together with it.
"""

from __future__ import annotations

from harness.compiled import inner
from harness.compiled.addresses import set_byte
from harness.live.client.wire.syscalls import memcpy

COMMA, DASH, ZERO = 44, 45, 48
# What stands for an address when there was no room; whatever is put there is refused too, so that one look at the last
# address tells whether all was written.
NO_ROOM = -1


@inner
def put(to: int, end: int, source: int, count: int) -> int:
    """Copy bytes, up to the address ``end``; the address after the copy, NO_ROOM when nothing was written."""
    if to == NO_ROOM or count < 0 or to + count > end:
        return NO_ROOM
    memcpy(to, source, count)
    return to + count


@inner
def put_byte(to: int, end: int, byte: int) -> int:
    """Write one byte; as ``put``."""
    if to == NO_ROOM or to >= end:
        return NO_ROOM
    set_byte(to, byte)
    return to + 1


@inner
def put_number(to: int, end: int, number: int) -> int:
    """Write a non-negative number in decimal; as ``put``."""
    after = to + 1
    rest = number // 10
    while rest > 0:
        after += 1
        rest //= 10
    if to == NO_ROOM or number < 0 or after > end:
        return NO_ROOM
    place = after
    while place > to:
        place -= 1
        set_byte(place, ZERO + number % 10)
        number //= 10
    return after
