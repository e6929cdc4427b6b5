"""Units are the written ones, else those that a card's magnitudes allow, and what fits none is no value."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.stacks.rbln.launch.devices import NOTHING, Quantity, memory_bytes, number_of, power_w, temperature_c


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("41C", Quantity(41.0, "C")),
        (38, Quantity(38.0, "C")),
        (41_500, Quantity(41.5, "mC by magnitude")),
        ("n/a", NOTHING),
        (True, NOTHING),
        (1e9, NOTHING),
    ],
)
def test_degrees_are_celsius_or_thousandths(value: object, expected: Quantity) -> None:
    assert temperature_c(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("57.3W", Quantity(57.3, "W")),
        ("34140 mW", Quantity(34.14, "mW")),
        (60, Quantity(60.0, "W")),
        (60_000, Quantity(60.0, "mW by magnitude")),
        (60_000_000, Quantity(60.0, "uW by magnitude")),
        (1e15, NOTHING),
        (-3, NOTHING),
    ],
)
def test_power_is_watts_or_a_part_of_them(value: object, expected: Quantity) -> None:
    assert power_w(value) == expected


@pytest.mark.parametrize(
    ("used", "total", "expected_total", "unit"),
    [
        ("1.5GiB", "15.7GiB", int(15.7 * (1 << 30)), "GiB"),
        (1, 16, 16 << 30, "GiB by magnitude"),
        (1_000, 16_000, 16_000 << 20, "MiB by magnitude"),
        (1_000_000, 16_000_000, 16_000_000 << 10, "KiB by magnitude"),
        ("0", "17179869184", 1 << 34, "B"),
        ("0.0B", "16857956352B", 16_857_956_352, "B"),
    ],
)
def test_memory_takes_one_unit_for_both_numbers(used: object, total: object, expected_total: int, unit: str) -> None:
    assert memory_bytes(used, total)[1] == Quantity(float(expected_total), unit)


@given(st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.booleans(), st.lists(st.integers())))
def test_whatever_a_driver_writes_is_a_finite_value_or_none(value: object) -> None:
    number = number_of(value)
    assert number is None or math.isfinite(number)
    for quantity in (temperature_c(value), power_w(value), *memory_bytes(value, value)):
        assert (quantity.value is None) == (quantity.unit == "")
        assert quantity.value is None or math.isfinite(quantity.value)
