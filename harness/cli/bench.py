"""``harness bench``: what the harness can do on this machine, beside its marks.

Prints; judges nothing; leaves nothing behind. Next: ``benchmarks.figures`` and ``benchmarks.client``.
"""

from __future__ import annotations

from typing import Annotated

import typer

from harness.errors import SpecError


def register(app: typer.Typer) -> None:
    app.command(name="bench")(bench)


def bench(
    sections: Annotated[
        list[str] | None,
        typer.Argument(
            help="`client`, `emulator`, `parser`, `plan`, `simulator`, `stopping`, `devices`. Default: all."
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
) -> None:
    """Measure the client, the emulator, the log parser, plan building, the simulator, stopping rules and fleets.

    Example: `harness bench parser simulator`
    """
    from harness.cli.words import terminal

    try:
        from benchmarks.figures import SECTIONS
    except ModuleNotFoundError as error:
        hint = "Clone the repository and run: make bench"
        raise SpecError("the benchmarks are not part of an installed wheel", where="bench", hint=hint) from error

    wanted = sections or [*SECTIONS, "client"]
    unknown = sorted(set(wanted) - {*SECTIONS, "client"})
    if unknown:
        raise SpecError(f"unknown section {unknown[0]!r}", where="bench", hint=f"Use one of {[*SECTIONS, 'client']}")
    if peers and "client" not in wanted:
        raise SpecError("peers stand beside the client only", where="--peer", hint="harness bench client --peer ...")
    console = terminal()
    for name in wanted:
        if name == "client":
            from benchmarks import client as client_bench

            beside = [word for peer in peers or [] for word in ("--peer", peer)]
            client_bench.main([*(["--quick"] if quick else []), *beside])
            continue
        for figure in SECTIONS[name]():
            mark = f"  (mark: {figure.mark})" if figure.mark else ""
            note = f"  {figure.note}" if figure.note else ""
            console.print(f"{figure.name:<46} {figure.value}{mark}{note}", highlight=False, soft_wrap=True)
