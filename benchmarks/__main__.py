"""``python -m benchmarks``: what the harness can do on this machine, beside its marks.

Prints the figures. Writes only the file that ``--output`` names.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from benchmarks import client as client_scenarios
from benchmarks.compare import COMPARED, changes, read_figures, write_figures
from benchmarks.figure import Figure
from benchmarks.figures import SECTIONS
from benchmarks.tuning import bench_tuning
from harness.cli.terminal import say, terminal
from harness.errors import ExitCode, HarnessError, SpecError
from harness.outputs import check_output


def bench(  # noqa: PLR0913, PLR0917  # options of a command
    sections: Annotated[
        list[str] | None,
        typer.Argument(
            help="`client`, `emulator`, `parser`, `plan`, `simulator`, `paged`, `stopping`, `heavy_tails`, "
            "`power`, `coverage`, `gate`, `tuning`, `agents`, `spaces`, `targets`, `channels`, `costs`, `devices`, "
            "`memory`, `late`. Default: all."
        ),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Shorter client scenarios.")] = False,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            "--peer",
            metavar="NAME=COMMAND",
            help="Another load generator beside the client: a command with {url} or {port}, and {num_requests}.",
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the figures and their samples there, as JSON.")
    ] = None,
    keep: Annotated[
        Path | None,
        typer.Option("--keep", metavar="FOLDER", help="Keep parts of `tuning` there, and go on from those that are."),
    ] = None,
    compare: Annotated[
        Path | None, typer.Option("--compare", metavar="OLD.json", help="Say what got slower since that file.")
    ] = None,
) -> None:
    """Measure how fast the harness is on this machine.

    Speeds show how many times as good they are as a reference: simpler code for the same work, run in turns with it.
    `--compare` compares these ratios, so files of two machines too, beyond the noise of repeated samples; exit code 4
    when something got slower.

    Example: `python -m benchmarks parser simulator -o new.json --compare old.json`
    """
    wanted = sections or [*SECTIONS, "client"]
    unknown = sorted(set(wanted) - {*SECTIONS, "client"})
    if unknown:
        raise SpecError(f"unknown section {unknown[0]!r}", hint=f"Use one of {[*SECTIONS, 'client']}")
    if peers and "client" not in wanted:
        raise SpecError(
            "peers stand beside the client only", where="--peer", hint="Name the section: client --peer ..."
        )
    # Both are looked at before minutes of measuring.
    then = None if compare is None else read_figures(compare)
    if output is not None:
        check_output(output)
    console, figures = terminal(), list["Figure"]()
    for name in wanted:
        if name == "client":
            figures += _client(quick, peers or [])
        else:
            figures += _printed(console, bench_tuning(keep=keep) if name == "tuning" else SECTIONS[name]())
    if output is not None:
        write_figures(output, figures)
    if then is not None:
        compared = changes(then, figures)
        say(console, "\n".join(["", COMPARED, *map(str, compared)]), markup=False)
        if any(change.verdict == "slower" for change in compared):
            raise typer.Exit(int(ExitCode.RULE_FAILED))


def _printed(console: Console, figures: Iterator[Figure]) -> Iterator[Figure]:
    for figure in figures:
        say(console, str(figure), markup=False)
        yield figure


def _client(quick: bool, peers: list[str]) -> list[Figure]:
    words = [word for peer in peers for word in ("--peer", peer)]
    return client_scenarios.main(["--quick", *words] if quick else words)


if __name__ == "__main__":
    try:
        typer.run(bench)
    except HarnessError as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        sys.exit(int(error.exit_code))
