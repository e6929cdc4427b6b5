"""What a shell offers for names: experiments that ship, and those with sealed runs below ``--runs``.

Only names of files and folders are looked at; nothing is read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from harness.shipped import shipped_names


def _shipped(incomplete: str) -> list[str]:
    return [name for name in shipped_names("experiments") if name.startswith(incomplete)]


def complete_sealed(context: typer.Context, incomplete: str) -> list[str]:
    """Names of experiments with sealed runs below ``--runs``."""
    runs = Path(str(context.params.get("runs") or "runs"))
    return sorted({path.parents[2].name for path in runs.glob(f"{incomplete}*/*/*/manifest.json")})


_SHIPPED = typer.Argument(help="Experiment file (TOML), or a shipped one by name.", autocompletion=_shipped)
ExperimentArgument = Annotated[Path, _SHIPPED]
MaybeExperimentArgument = Annotated[Path | None, _SHIPPED]
SealedArgument = Annotated[
    str, typer.Argument(help="Name of an experiment with sealed runs.", autocompletion=complete_sealed)
]
