"""``harness search`` and ``harness predict ratios``: configurations compared before any of them is compiled.

Prints how sure each prediction is; writes only ledgers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.cli.terminal import say, show, terminal, time_left
from harness.table import Table, interval_text, with_error

SpaceArgument = Annotated[str, typer.Argument(help="A shipped search space, or a TOML file.")]


SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change one key of the space. Repeatable.")]


ClusterOption = Annotated[
    str | None, typer.Option(help="A Dask scheduler such as `tcp://host:8786`. Default: all cores of this machine.")
]


def search(
    space: SpaceArgument = "paper",
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the ledger.")] = None,
    cluster: ClusterOption = None,
    top: Annotated[int, typer.Option(min=1, max=1_000_000, help="How many candidates to show.")] = 10,
    changes: SetOption = None,
) -> None:
    """Simulate every configuration of a search space, best first.

    A finished ledger in the folder is read, not made again.

    Example: `harness search paper -o runs/search-paper --set rules=paper`
    """
    from harness.extras.search.result import search_tables
    from harness.extras.search.run import LEDGER
    from harness.extras.search.run import search as run_search
    from harness.extras.search.space import load_space

    console = terminal()
    spec = load_space(space, changes or ())
    folder = output or Path("runs") / f"search-{spec.name}"
    with time_left(spec.name) as on_progress:
        result = run_search(spec, folder, workers=cluster, on_progress=on_progress)
    with time_left("intervals") as on_progress:
        parts = list(search_tables(result, top, on_progress))
    for part in parts:
        if isinstance(part, str):
            say(console, part, markup=False)
        else:
            show(console, part)
        console.print()
    say(console, f"ledger: {folder / LEDGER}")


def ratios(
    space: SpaceArgument = "paper",
    ablations: Annotated[
        list[str] | None,
        typer.Option("--ablation", help="Also with one rule changed: computed, not measured. Repeatable."),
    ] = None,
    changes: SetOption = None,
) -> None:
    """Predicted cost ratios of named configurations, with intervals.

    Example: `harness predict ratios paper --ablation lru-slots --ablation no-waits`
    """
    from harness.extras.search.intervals import LABEL, UNCHANGED, SpacePredictor, ablation
    from harness.extras.search.space import load_space
    from harness.judge.planning.deciding import deciding_sizes, sizes_in_words

    console = terminal()
    spec = load_space(space, changes or ())
    predictor = SpacePredictor(spec)
    rows: list[tuple[str, ...]] = []
    for changed in (UNCHANGED, *(ablation(name) for name in ablations or ())):
        for name, server in spec.named.items():
            for users in spec.inputs.users:
                prediction = predictor.predict(server.shape, users, changed)
                note = f"{changed.name}: {LABEL}" if changed.name else ""
                note = note or ("" if prediction.shows_difference else "=")
                mean = with_error(prediction.mean, prediction.error, 4)
                ratios = (f"{prediction.ratio_of_sums:.4f}", f"{prediction.median_of_pairs:.4f}", mean)
                interval = interval_text(prediction.low, prediction.high, between="\u2013")
                turns = ""
                if prediction.shows_difference and not changed.name:
                    turns = predictor.break_even(server.shape, (users,)).short
                rows.append((name, str(users), prediction.rules, *ratios, interval, turns, note))
    headings = ("configuration", "N", "rules", "sums", "median", "mean")
    table = Table(
        f"{spec.name}: cost ratio to {spec.baseline.shape.label}",
        "sums, median: nominal; mean: of draws, +- what they leave open (95 %); break-even at: the error of the "
        "deciding costs that makes the ratio 1; =: no difference from the baseline shown",
        (*headings, f"{100 * spec.prediction.level:.0f} % interval", "break-even at", ""),
        tuple(rows),
    )
    show(console, table)
    for name, server in spec.named.items():
        sizes = deciding_sizes(server.shape.decode_buckets, spec.baseline.shape.decode_buckets)
        parts = [f"break-even at {sizes_in_words(sizes) if sizes else 'the prefill costs'}"]
        parts += filter(None, [predictor.unmeasured(server.shape, spec.baseline.shape)])
        say(console, f"{name}: {'; '.join(parts)}")
