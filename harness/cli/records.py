"""``harness records export``: sealed runs as the files and spans of other tools.

Reads sealed runs only.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from harness.cli.addresses import RunsOption, complete_sealed, sealed_runs
from harness.errors import SpecError

if TYPE_CHECKING:
    from harness.records import SealedRun


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
    from harness.export.post import traces_url

    chosen = named_format(form)
    if otlp and chosen.name != "otel":
        raise SpecError(f"spans are sent as otel, not as {form}", where="--otlp", hint="Use --format otel")
    url = traces_url(otlp) if otlp else ""
    selected = _valid_runs(name, runs)
    experiment = selected[0].experiment
    for path in write_runs(selected, chosen, output or Path(f"{experiment}-{chosen.name}"), may_replace=force):
        print(f"wrote {path}")
    for left in chosen.no_room:
        print(f"no room in {chosen.name}: {left}")
    if url:
        num_spans = sum(post_spans(measured(run), url) for run in selected)
        print(f"sent {num_spans} spans of {len(selected)} runs to {url}")


def _valid_runs(address: str, runs: Path) -> list[SealedRun]:
    """The valid runs at an address; INVALID ones are named on standard error."""
    experiment, label = _experiment_and_label(address.rstrip("/"), runs)
    sealed = sealed_runs(runs, experiment)
    named = [run for run in sealed if label in ("", run.condition, run.label)]
    for run in named:
        if not run.is_valid:
            print(f"left out: {run.label} is INVALID ({'; '.join(run.invalid_reasons)})", file=sys.stderr)
    valid = [run for run in named if run.is_valid]
    if not valid:
        known = ", ".join(run.label for run in sealed if run.is_valid)
        raise SpecError("no valid sealed runs of that name", where=address, hint=f"Valid there: {known or 'none'}")
    return valid


def _experiment_and_label(address: str, runs: Path) -> tuple[str, str]:
    """The address of the experiment, and what of it is named: a condition, condition/replicate, or "" for all."""
    from harness.records.layout import MANIFEST

    words = address.split("/")
    for num_words in range(len(words), max(0, len(words) - 3), -1):
        experiment = "/".join(words[:num_words])
        if any(next(place.glob(f"*/*/{MANIFEST}"), None) for place in (Path(experiment), runs / experiment)):
            return experiment, "/".join(words[num_words:])
    return address, ""
