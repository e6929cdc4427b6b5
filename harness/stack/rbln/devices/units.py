"""Degrees, watts and bytes of what drivers and exporters write, whatever unit they write it in, and which it was.

A unit that is written counts; else the magnitude decides, by what such a card can be, and says so; what fits none is no
value. Nothing is read from a device here.
Source of the limits: a card of 4 devices draws some 30 to 300 W, a device is 10 to 110 C warm and holds 16 GB; drivers
3.x count in uW and m C inside.
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_NUMBER = re.compile(r"-?\d{1,20}(?:\.\d{1,20})?(?:[eE][+-]?\d{1,2})?")
_BYTE_UNITS = {"b": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}
_POWER_UNITS = {"uw": 1e-6, "µw": 1e-6, "mw": 1e-3, "w": 1.0, "kw": 1e3}
WARMEST_C = 200.0
MOST_W = 2000.0
ASSUMED = " by magnitude"
"""Ends a unit that nobody wrote and that is not the usual one: a reader must know that it was taken for granted."""
_MEMORY_SCALES = (("GiB", 1 << 30, 1 << 10), ("MiB", 1 << 20, 1 << 20), ("KiB", 1 << 10, 1 << 30), ("B", 1, 1 << 50))
"""Unit, bytes, and the total below which a number without a unit is taken for it."""


class Quantity(NamedTuple):
    """A value in its reader's unit, None when there is none. unit: what it was read as, "" without a value."""

    value: float | None
    unit: str


NOTHING = Quantity(None, "")


def number_of(value: object) -> float | None:
    """The first number in "45C", "23.5 W", 45 or "45"; None for what holds none, or none that is finite."""
    found = _NUMBER.search(str(value)[:64]) if value is not None and not isinstance(value, bool) else None
    number = float(found[0]) if found else math.nan
    return number if math.isfinite(number) else None


def temperature_c(value: object) -> Quantity:
    """Degrees Celsius. Source of thousandths: the driver's own sensors."""
    number = number_of(value)
    if number is None:
        return NOTHING
    if abs(number) <= WARMEST_C:
        return Quantity(number, "C")
    return Quantity(number / 1000, f"mC{ASSUMED}") if abs(number) <= WARMEST_C * 1000 else NOTHING


def power_w(value: object) -> Quantity:
    """Watts."""
    number = number_of(value)
    if number is None or number < 0:
        return NOTHING
    written = re.sub(r"[\d.\s+-]", "", str(value)).lower()
    if written in _POWER_UNITS:
        return Quantity(number * _POWER_UNITS[written], written.replace("w", "W"))
    for unit, scale in (("W", 1.0), (f"mW{ASSUMED}", 1e-3), (f"uW{ASSUMED}", 1e-6)):
        if number * scale < MOST_W:
            return Quantity(number * scale, unit)
    return NOTHING


def memory_bytes(used: object, total: object) -> tuple[Quantity, Quantity]:
    """Bytes in use and in all, of "15.7GiB", "512 MB" (also 2^20: that is how drivers mean it), 1024 or "1024".

    Without a written unit the total's magnitude decides for both: 16 are GiB, 16,000 MiB, 16,000,000 KiB.
    """
    total_number = number_of(total)
    guess = next((one for one in _MEMORY_SCALES if total_number is not None and total_number < one[2]), None)
    return _bytes(used, guess), _bytes(total, guess)


def _bytes(value: object, guess: tuple[str, int, int] | None) -> Quantity:
    number = number_of(value)
    if number is None or number < 0:
        return NOTHING
    written = re.sub(r"[\d.\s+-]", "", str(value)).lower()[:1]
    if written in _BYTE_UNITS:
        scale, unit = _BYTE_UNITS[written], "B" if written == "b" else f"{written.upper()}iB"
    else:
        unit, scale, _limit = guess or ("B", 1, 0)
        unit = unit if scale == 1 else f"{unit}{ASSUMED}"
    size = number * scale
    return Quantity(float(int(size)), unit) if size < 1 << 60 else NOTHING
