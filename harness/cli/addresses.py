"""Arguments and options that several commands share, and the experiments and runs that they name.

Values of ``--set`` that are not TOML are taken as strings, so that ``--set backend=emulator`` works.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from harness.cli.terminal import print_text
from harness.errors import SpecError
from harness.kinds import kind_named
from harness.shipped import shipped_names
from harness.table import TableForm

if TYPE_CHECKING:
    from harness.measure.records.run import SealedRun
    from harness.measure.records.store import RunStore
    from harness.model.spec import ExperimentSpec


def _shipped(incomplete: str) -> list[str]:
    return [name for name in shipped_names("experiments") if name.startswith(incomplete)]


def complete_sealed(context: typer.Context, incomplete: str) -> list[str]:
    """Names of experiments with sealed runs below ``--runs``."""
    runs = Path(str(context.params.get("runs") or "runs"))
    return sorted({path.parents[2].name for path in runs.glob(f"{incomplete}*/*/*/manifest.json")})


_SHIPPED = typer.Argument(
    help="Experiment: a file (TOML), NAME of NAME.toml here or of a shipped one, or a folder of its runs.",
    autocompletion=_shipped,
)
ExperimentArgument = Annotated[Path, _SHIPPED]
MaybeExperimentArgument = Annotated[Path | None, _SHIPPED]
RunsOption = Annotated[Path, typer.Option("--runs", help="Folder of sealed runs.")]
SetOption = Annotated[list[str] | None, typer.Option("--set", help="Change one key. Repeatable.")]
BackendOption = Annotated[str | None, typer.Option(help="Use this backend instead of the file's.")]
ReplicatesOption = Annotated[int | None, typer.Option(help="Use this number of replicates.")]
ResumeOption = Annotated[bool, typer.Option("--resume", help="Continue: perform only what is not sealed yet.")]
RetryInvalidOption = Annotated[
    bool, typer.Option("--retry-invalid", help="With --resume: repeat INVALID runs too; the old ones are kept.")
]
# Said in words: the choices themselves are too long for the column of values.
FORMS = "text, csv, json, markdown or latex"
TableFormOption = Annotated[
    TableForm, typer.Option("--format", metavar="FORM", help=f"How the table is written: {FORMS}.")
]
TableFormsOption = Annotated[
    TableForm, typer.Option("--format", metavar="FORM", help=f"How the tables are written: {FORMS}.")
]
SessionTargetOption = Annotated[
    float | None,
    typer.Option(
        "--session-target",
        metavar="SECONDS",
        help="Count the sessions that finish within so many seconds of active time. Default: [slo] session_s.",
        min=1e-9,
    ),
]


def output_option(meaning: str) -> Any:
    """The option ``--output``. meaning: what it names, and the default."""
    return typer.Option("--output", "-o", help=meaning)


PrintedOutput = Annotated[Path | None, output_option("Markdown file. Default: print.")]
# A real server runs in its own time and starts slowly, whatever the file says for the emulator.
REAL_SERVER_KEYS = ("time_scale=1.0", "server.start_timeout_s=300.0", "server.stop_grace_s=30.0")
_SEALED = typer.Argument(
    help="Experiment with sealed runs: its name below --runs, its file, a folder of runs, or an archive.",
    autocompletion=complete_sealed,
)
SealedArgument = Annotated[str, _SEALED]
RunsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="RUNS",
        help="EXPERIMENT[/CONDITION[/REPLICATE]], or an experiment and then CONDITION/REPLICATE.",
        autocompletion=complete_sealed,
    ),
]
MaybeSealedArgument = Annotated[str | None, _SEALED]


def changes_of(
    changes: Sequence[str] | None, backend: str | None, replicates: int | None = None, devices: str | None = None
) -> list[str]:
    """The changes that the options make to the file, each as ``--set`` would."""
    if replicates is not None and replicates < 1:
        raise SpecError(f"must be at least 1, got {replicates}", where="--replicates")
    if devices is not None and not re.fullmatch(r"\d+(,\d+)*", devices):
        hint = "Write the numbers of devices, e.g. --devices 0,1,2,3"
        raise SpecError(f"{devices!r} is no list of numbers", where="--devices", hint=hint)
    is_real = backend is not None and not kind_named(backend).scales_time
    made = [*(REAL_SERVER_KEYS if is_real else ()), *(changes or ())]
    made += [f'backend="{backend}"'] if backend is not None else []
    made += [f"replicates={replicates}"] if replicates is not None else []
    return made + ([f"fleet.devices=[{devices}]"] if devices is not None else [])


def asked_again(
    changes: Sequence[str] | None, backend: str | None, replicates: int | None, devices: str | None = None
) -> str:
    """The options beside an experiment's file, as the command that continues it repeats them."""
    repeated = "".join(f" --set {shlex.quote(change)}" for change in changes or ())
    options = {"backend": backend, "replicates": replicates, "devices": devices}
    return repeated + "".join(f" --{name} {value}" for name, value in options.items() if value)


def experiment_with(
    address: str | Path, changes: Sequence[str] | None = None, runs: Path = Path("runs")
) -> tuple[ExperimentSpec, Path, Path]:
    """(the experiment at an address with these changes, its source, the folder of its runs)."""
    from harness.measure.records.store import experiment_at
    from harness.model.spec import parse_experiment
    from harness.model.spec.changes import override_table

    source, table, runs = experiment_at(address, runs)
    return parse_experiment(override_table(table, changes or ()), where=str(source)), source, runs


def from_here(path: Path) -> Path:
    """The path as a command in this folder takes it: relative where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def sealed_runs(runs: Path, address: str | Path) -> list[SealedRun]:
    """``harness.measure.records.store.sealed_runs``, imported when it is called: --help needs no records."""
    from harness.measure.records import store

    return store.sealed_runs(runs, address)


def held_to(sealed: Sequence[SealedRun], session_target_s: float | None) -> list[SealedRun]:
    """The runs with this target of a session, s; None: with that of their experiment."""
    if session_target_s is None:
        return list(sealed)
    return [run.with_targets(session_s=session_target_s) for run in sealed]


def store_at(runs: Path) -> RunStore:
    """``harness.measure.records.store.store_at``, imported when it is called."""
    from harness.measure.records import store

    return store.store_at(runs)


def valid_runs(address: str, runs: Path) -> list[SealedRun]:
    """The valid runs of an experiment, a condition or one run; INVALID ones are named on standard error."""
    experiment, label = _experiment_and_label(address.rstrip("/"), runs)
    sealed = sealed_runs(runs, experiment)
    named = [run for run in sealed if label in ("", run.condition, run.label)]
    for run in named:
        if not run.is_valid:
            print_text(f"left out: {run.label} is INVALID ({'; '.join(run.invalid_reasons)})", is_error=True)
    valid = [run for run in named if run.is_valid]
    if not valid:
        known = ", ".join(run.label for run in sealed if run.is_valid)
        raise SpecError("no valid sealed runs of that name", where=address, hint=f"Valid there: {known or 'none'}")
    return valid


def named_runs(words: Sequence[str], runs: Path) -> list[SealedRun]:
    """Sealed runs, INVALID ones too: EXPERIMENT[/CONDITION[/REPLICATE]] each, or an experiment and CONDITION/REPLICATE.

    Raises SpecError that lists the runs there are.
    """
    experiment, label = _experiment_and_label(words[0].rstrip("/"), runs)
    if label and len(words) > 1:
        return [run for word in words for run in named_runs([word], runs)]
    sealed = sealed_runs(runs, experiment)
    wanted = words[1:] or [label]
    for each in wanted:
        if each and not any(each in (run.condition, run.label) for run in sealed):
            listed = ", ".join(run.label for run in sealed)
            raise SpecError(f"no sealed run {each!r}", where=experiment, hint=f"Runs: {listed}")
    return [run for each in wanted for run in sealed if each in ("", run.condition, run.label)]


def _experiment_and_label(address: str, runs: Path) -> tuple[str, str]:
    """The address of the experiment, and what of it is named: a condition, condition/replicate, or "" for all."""
    from harness.measure.records.layout import MANIFEST

    words = address.split("/")
    for num_words in range(len(words), max(0, len(words) - 3), -1):
        experiment = "/".join(words[:num_words])
        if any(next(place.glob(f"*/*/{MANIFEST}"), None) for place in (Path(experiment), runs / experiment)):
            return experiment, "/".join(words[num_words:])
    return address, ""
