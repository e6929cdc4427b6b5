"""The paper's tables from a user's own sealed runs: numbers I to XV and S1 to S12, in the paper's columns and digits.

Cells are only laid out and rounded here; every figure is computed by ``harness.analysis`` and its neighbours. A table
whose runs are not there names the command that makes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from harness.errors import SpecError
from harness.study.paper_tables.main import MAIN_TABLES
from harness.study.paper_tables.render import render
from harness.study.paper_tables.source import Source
from harness.study.paper_tables.supplement import SUPPLEMENT_TABLES
from harness.study.paper_tables.table import PaperTable, make_table

__all__ = ["PaperTable", "Source", "paper_tables", "render"]


def paper_tables(source: Source, numbers: Sequence[str] = ()) -> list[PaperTable]:
    """The named tables, or all 27, in the paper's order. SpecError for a number that the paper does not have."""
    known = {spec.number: spec for spec in (*MAIN_TABLES, *SUPPLEMENT_TABLES)}
    asked = [number.upper() for number in numbers]
    if unknown := [number for number in asked if number not in known]:
        raise SpecError(f"the paper has no table {unknown[0]!r}", where="--table", hint=f"Tables: {', '.join(known)}")
    return [make_table(spec, source) for number, spec in known.items() if not asked or number in asked]
