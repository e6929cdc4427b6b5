"""``harness records export``: sealed runs as the files and spans of other tools.

Reads sealed runs only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.addresses import RunsOption, complete_sealed, valid_runs
from harness.errors import SpecError


def export(
    name: Annotated[
        str,
        typer.Argument(
            metavar="EXPERIMENT[/CONDITION[/REPLICATE]]",
            help="Sealed runs: of an experiment (its name, file or folder), a condition, or one run.",
            autocompletion=complete_sealed,
        ),
    ],
    form: Annotated[
        str,
        typer.Option("--format", help="vllm-bench, aiperf, guidellm, inference-perf, otel, csv or parquet."),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write. Default: EXPERIMENT-FORMAT.")
    ] = None,
    otlp: Annotated[
        str, typer.Option("--otlp", metavar="URL", help="With otel: also send the spans to this collector.")
    ] = "",
    runs: RunsOption = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Replace files that are there.")] = False,
) -> None:
    """Write sealed runs in the shapes of other tools: serving figures and requests, no text of a prompt.

    Valid runs only. What was simulated or emulated is marked in each file (docs/export.md).

    Example: `harness records export demo/base-waits --format aiperf -o aiperf-demo --runs runs/today`
    """
    from harness.export import measured, named_format, post_spans, write_runs
    from harness.export.otel import traces_url

    chosen = named_format(form)
    if otlp and chosen.name != "otel":
        raise SpecError(f"spans are sent as otel, not as {form}", where="--otlp", hint="Use --format otel")
    url = traces_url(otlp) if otlp else ""
    selected = valid_runs(name, runs)
    experiment = selected[0].experiment
    for path in write_runs(selected, chosen, output or Path(f"{experiment}-{chosen.name}"), may_replace=force):
        print(f"wrote {path}")
    for left in chosen.no_room:
        print(f"no room in {chosen.name}: {left}")
    if url:
        num_spans = sum(post_spans(measured(run), url) for run in selected)
        print(f"sent {num_spans} spans of {len(selected)} runs to {url}")
