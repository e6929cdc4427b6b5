"""``harness simulate --jsonl``: cases from a file or standard input, results to standard output."""

from __future__ import annotations

from pathlib import Path

from harness.cli.terminal import print_answers
from harness.extras.cases.cases import simulate_batches, simulate_jsonl


def simulate_file(path: Path) -> None:
    """Print the result of every line of a file, or of standard input ("-") as each line comes."""
    print_answers(path, simulate_jsonl if str(path) == "-" else simulate_batches)
