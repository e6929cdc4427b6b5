"""Cells of the paper's tables: numbers with the paper's digits, and what stands where there is none."""

from __future__ import annotations

from harness.analysis.method.tabular import Cell

NONE = "-"


def decimals(value: Cell, digits: int, *, sign: bool = False) -> str:
    """A number with the paper's digits; a dash for what is absent."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return NONE
    return f"{value:+.{digits}f}" if sign else f"{value:.{digits}f}"


def percent(value: Cell, digits: int = 2, *, sign: bool = False) -> str:
    """A share in percent."""
    return NONE if not isinstance(value, int | float) else f"{decimals(100 * value, digits, sign=sign)}%"


def whole(value: Cell) -> str:
    """A count, thousands apart."""
    return f"{value:,}" if isinstance(value, int) else NONE


def text(value: Cell) -> str:
    return NONE if value is None else str(value)
