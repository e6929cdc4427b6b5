"""``harness simulate --jsonl``: cases from a file or standard input, results to standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from harness.errors import SpecError, escape_controls
from harness.extras.cases.cases import simulate_batches, simulate_jsonl


def simulate_file(path: Path) -> None:
    """Print the result of every line of a file, or of standard input ("-") as each line comes."""
    if str(path) == "-":
        _print_results(simulate_jsonl(sys.stdin), str(path))
        return
    with SpecError.on_os_error("cannot be read", where=path, hint="Check the path"):
        lines = path.open(encoding="utf-8")
    with lines:
        _print_results(simulate_batches(lines), str(path))


def _print_results(results: Iterable[str], source: str) -> None:
    """Print every result; SpecError in the end where no line of ``source`` was a case."""
    num_lines = num_errors = 0
    for line in results:
        print(escape_controls(line), flush=source == "-")
        num_lines += 1
        num_errors += '"error": ' in line
    if num_lines and num_errors == num_lines:
        what = f"none of its {num_lines} lines is a case"
        raise SpecError(what, where=source, hint="Write one JSON object in each line")
