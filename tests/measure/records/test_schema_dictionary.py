"""The data dictionary is the schema's own words, and docs/reference/data-dictionary.md is that text."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.measure.records.schema import EXPLAINED_TABLES, dictionary_markdown, explained
from harness.measure.records.store import RunStore

ROOT = Path(__file__).parents[3]


def test_the_document_is_what_the_schema_says() -> None:
    page = ROOT / "docs" / "reference" / "data-dictionary.md"
    assert page.read_text(encoding="utf-8") == dictionary_markdown(), (
        "write it again: harness explain tables -o docs/reference/data-dictionary.md"
    )


@pytest.mark.parametrize("name", EXPLAINED_TABLES)
def test_every_column_has_a_meaning_and_every_amount_a_unit(name: str) -> None:
    for column, _type, unit, meaning in explained(name):
        assert meaning, column
        assert unit or not column.endswith(("_ns", "_tokens")), column


def test_sql_sees_exactly_the_columns_that_are_explained(tmp_path: Path) -> None:
    connection = RunStore(tmp_path).connect()
    run_columns = ["experiment", "condition", "replicate", "is_valid"]
    for name, (_row, columns) in EXPLAINED_TABLES.items():
        expected = columns.names if name == "runs" else [*run_columns, *columns.names]
        assert connection.sql(f"from {name}").columns == expected
        assert connection.sql(f"from valid_{name}").columns == expected
