"""Asks Linux to run the calling thread soon after it wakes, at the price of shorter turns: a scheduler slice of 0.1 ms.

From Linux 6.12 on this needs no privilege and takes nothing from others (the fair share stays the same); where it is
not to be had nothing happens, and the audit says so. Next: ``harness.live.client`` holds it for the length of a replay.
"""

from __future__ import annotations

import contextlib
import ctypes
import platform
import struct
import sys
from collections.abc import Generator

from harness.clock import NS_PER_US

SLICE_NS = 100 * NS_PER_US
# struct sched_attr, first version: size, policy, flags, nice, priority, runtime, deadline, period.
SCHED_ATTR = struct.Struct("IIQiIQQQ")
RUNTIME_FIELD = 5
SCHED_OTHER = 0
# (sched_setattr, sched_getattr): the C library has no wrappers for them.
SYSTEM_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}


@contextlib.contextmanager
def short_slice(slice_ns: int = SLICE_NS) -> Generator[int | None]:
    """Hold a short slice for the block; gives the slice the kernel granted in ns, None when it granted none."""
    before = _get()
    if before is None or before[1] != SCHED_OTHER:
        yield None
        return
    asked = list(before)
    asked[RUNTIME_FIELD] = slice_ns
    _set(asked)
    after = _get()
    # Older kernels accept the call and ignore the field.
    granted = after[RUNTIME_FIELD] if after is not None else 0
    try:
        yield granted if granted == slice_ns else None
    finally:
        _set(list(before))


def _call(which: int, *arguments: object) -> int:
    return ctypes.CDLL(None, use_errno=True).syscall(SYSTEM_CALLS[platform.machine()][which], *arguments)


def _get() -> tuple[int, ...] | None:
    if not sys.platform.startswith("linux") or platform.machine() not in SYSTEM_CALLS:
        return None
    buffer = ctypes.create_string_buffer(SCHED_ATTR.size)
    if _call(1, 0, buffer, SCHED_ATTR.size, 0) != 0:
        return None
    return SCHED_ATTR.unpack(buffer.raw)


def _set(fields: list[int]) -> None:
    fields[0] = SCHED_ATTR.size
    _call(0, 0, ctypes.create_string_buffer(SCHED_ATTR.pack(*fields), SCHED_ATTR.size), 0)
