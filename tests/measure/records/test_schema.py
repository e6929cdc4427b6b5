"""Rows are found by their value, whatever the machine refuses."""

from __future__ import annotations

import subprocess
import sys

import pyarrow as pa
import pytest

from harness.measure.records.schema import rows_where

WITHOUT_THREADS = """
import resource
import pyarrow as pa
from harness.measure.records.schema import rows_where

table = pa.table({"status": ["ok", None, "timeout", "ok"], "row": [0, 1, 2, 3]})
rows_where(table, "row", 0)  # loads what it needs
with open("/proc/self/statm") as memory:
    now = int(memory.read().split()[0]) * resource.getpagesize()
# Room for a few pages, and for no stack of a thread.
resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 20),) * 2)
print(rows_where(table, "status", "ok")["row"].to_pylist())
"""


def test_rows_without_the_value_and_rows_of_no_value_are_left_out() -> None:
    table = pa.table({"status": ["ok", None, "timeout"], "row": [0, 1, 2]})
    assert rows_where(table, "status", "ok")["row"].to_pylist() == [0]
    assert rows_where(table, "row", 2)["status"].to_pylist() == ["timeout"]


@pytest.mark.same_everywhere
def test_rows_are_found_where_no_thread_can_be_started() -> None:
    found = subprocess.run(
        [sys.executable, "-c", WITHOUT_THREADS], capture_output=True, text=True, timeout=120, check=False
    )
    assert (found.stdout, found.stderr, found.returncode) == ("[0, 3]\n", "", 0)
