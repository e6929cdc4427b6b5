"""The tables of a report as CSV inside the page itself: an address for each, no file beside it.

Figures as analysis has them, times in ns. Nothing is computed.
"""

from __future__ import annotations

import base64

import pyarrow as pa

from harness.analysis import ExperimentSummary
from harness.table import table_of, to_csv


def csv_links(summary: ExperimentSummary) -> list[tuple[str, str]]:
    """(name, data address) of the report's tables as CSV, which lie in the page itself."""
    tables = {"conditions": summary.to_arrow(), "runs": summary.runs_to_arrow(), "serving": summary.serving_to_arrow()}
    return [(name, _csv_address(table)) for name, table in tables.items() if table.num_rows]


def _csv_address(table: pa.Table) -> str:
    text = to_csv(table_of("", "", table.to_pylist()))
    return "data:text/csv;base64," + base64.b64encode(text.encode()).decode()
