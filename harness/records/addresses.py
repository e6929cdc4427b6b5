"""Sealed runs and experiments by one address everywhere: a file, a name, or a folder of runs.

Nothing is written here. Where an address leads nowhere, the error says where runs lie.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from harness.errors import SpecError
from harness.records import layout
from harness.records.run import SealedRun
from harness.records.store import RunStore


class Addressed(NamedTuple):
    """An experiment: where it is from, what it says, and the folder in which its runs are looked for."""

    source: Path
    table: dict[str, Any]
    runs: Path


def store_at(runs: Path) -> RunStore:
    """The sealed runs of a folder; a SpecError that says where others lie when it holds none."""
    if next(runs.glob(f"*/*/*/{layout.MANIFEST}"), None) is None:
        below = sorted({str(path.parents[3]) for path in runs.glob(f"*/*/*/*/{layout.MANIFEST}")})
        more = f" and {len(below) - 3} more" if len(below) > 3 else ""
        hint = (
            f"They lie in {', '.join(below[-3:])}{more}: say --runs {below[-1]}"
            if below
            else ("Name their folder with --runs, or make some: harness run demo")
        )
        looked = "no sealed runs in it (looked for EXPERIMENT/CONDITION/REPLICATE)"
        raise SpecError(looked if runs.is_dir() else "there is no such folder", where=str(runs), hint=hint)
    return RunStore(runs)


def sealed_runs(runs: Path, address: str | Path) -> list[SealedRun]:
    """The sealed runs of one experiment, invalid ones included.

    address: the experiment's name below ``runs``, its file, or a folder of runs. Raises SpecError, which names what is
    there, when there are none, or when a folder holds several experiments.
    """
    text, place = str(address), Path(address)
    if text.endswith(".toml"):
        from harness.spec import load_toml

        return _by_name(runs, str(load_toml(place).get("name", place.stem)))
    if place.is_dir() and ("/" in text or not (runs / text).is_dir()):
        return _in_folder(place)
    return _by_name(runs, text)


def experiment_at(address: str | Path, runs: Path = Path("runs")) -> Addressed:
    """The experiment at an address: its file, its name, or the folder or name of sealed runs.

    A name means NAME.toml in the working directory, then the shipped experiment, then sealed runs below ``runs``.
    """
    from harness.spec import experiment_file, experiment_table

    place = Path(address)
    if place.is_dir() and not Path(f"{place}.toml").is_file():
        return _recorded(_in_folder(place))
    try:
        path = experiment_file(address)
    except SpecError:
        if (runs / place).is_dir():
            return _recorded(_by_name(runs, str(address)))
        raise
    return Addressed(path, experiment_table(path), runs)


def _recorded(sealed: list[SealedRun]) -> Addressed:
    """The experiment as its first run recorded it."""
    first = sealed[0]
    table = first.spec.model_dump(mode="json", exclude_none=True, exclude_unset=True)
    return Addressed(first.path.parents[1], table, first.path.parents[2])


def _by_name(runs: Path, experiment: str) -> list[SealedRun]:
    store = store_at(runs)
    sealed = list(store.sealed(experiment))
    if not sealed:
        known = sorted({run.experiment for run in store.sealed()})
        raise SpecError(
            f"no sealed runs of experiment {experiment!r}",
            where=str(runs),
            hint=f"Experiments there: {', '.join(known) or 'none'}",
        )
    return sealed


def _in_folder(place: Path) -> list[SealedRun]:
    place = place.absolute()
    if next(place.glob(f"*/*/{layout.MANIFEST}"), None) is not None:
        return _by_name(place.parent, place.name)
    sealed = list(store_at(place).sealed())
    names = sorted({run.experiment for run in sealed})
    if len(names) > 1:
        what = f"holds runs of {len(names)} experiments: {', '.join(names)}"
        raise SpecError(what, where=str(place), hint=f"Name one of them: {place}/{names[0]}")
    return sealed
