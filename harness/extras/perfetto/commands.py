"""``harness trace perfetto``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.addresses import RunsArgument, RunsOption, named_runs
from harness.cli.terminal import print_folded


def perfetto(
    name: RunsArgument,
    output: Annotated[Path, typer.Option("--output", "-o", help="The trace file to write: `.json` or `.json.gz`.")],
    runs: RunsOption = Path("runs"),
) -> None:
    """Write runs as a trace for ui.perfetto.dev: requests and tool waits, every decode step and who was in it.

    Example: `harness trace perfetto demo/base-waits/0 -o trace.json.gz --runs runs/today`
    """
    from harness.extras.perfetto.trace import write_perfetto

    print_folded(f"trace: {write_perfetto(named_runs(name, runs), output)}")
