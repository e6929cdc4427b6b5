"""Sealed runs below a folder or at an address, and their transfer between folders.

Only folders with a manifest count. A damaged run is named, never skipped; of a transferred run each byte is checked
before the run is visible.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.errors import RecordsError, SpecError
from harness.measure.records import layout
from harness.measure.records.archive import runs_folder
from harness.measure.records.disk import disk_errors, sync_tree
from harness.measure.records.manifest import load_manifest
from harness.measure.records.run import SealedRun, damaged
from harness.measure.records.writer import set_aside
from harness.outputs import sync
from harness.run_key import RunKey

if TYPE_CHECKING:
    import duckdb
    import pyarrow as pa


QUERY_TIMEOUT_S = 60.0


class RunStore:
    """All sealed runs below one records folder."""

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    def __repr__(self) -> str:
        return f"RunStore({str(self.root)!r}): {len(self.sealed())} sealed runs"

    def sealed(self, experiment: str | None = None) -> list[SealedRun]:
        """Sealed runs, sorted by key; raises RecordsError naming the file when one is damaged (no bytes are read)."""
        folders = [folder for folder in self._folders() if layout.is_replicate_name(folder.name)]
        wanted = [folder for folder in folders if experiment in (None, folder.parent.parent.name)]
        return sorted((self._load(folder) for folder in wanted), key=lambda run: run.key)

    def foreign(self) -> list[Path]:
        """Folders at the depth of runs with other names, such as 00 beside 0: never read, never counted."""
        marks = (layout.PARTIAL, layout.ABORTED, layout.RETRIED)
        named = [folder for folder in self._folders() if not any(mark in folder.name for mark in marks)]
        return sorted(folder for folder in named if not layout.is_replicate_name(folder.name))

    def _folders(self) -> list[Path]:
        return [folder for folder in self.root.glob("*/*/*") if folder.is_dir() or folder.is_symlink()]

    def run(self, experiment: str, condition: str, replicate: int) -> SealedRun:
        """One sealed run; SpecError when there is none."""
        folder = layout.run_folder(self.root, experiment, condition, replicate)
        if not folder.is_dir():
            raise SpecError("no sealed run has this name", where=str(folder), hint="`harness runs` lists them")
        return self._load(folder)

    def unsealed(self) -> list[Path]:
        """Folders of runs that are being written, or were cut short."""
        folders = [*self.root.glob(f"*/*/*{layout.PARTIAL}/"), *self.root.glob(f"*/*/*{layout.ABORTED}*/")]
        return sorted(folder for folder in folders if folder.is_dir())

    def verify(self) -> int:
        """Verify every sealed run by hash and return how many there are; RecordsError names the first damage.

        A foreign folder with a manifest is damage: the run was copied or renamed.
        """
        for folder in self.foreign():
            if (folder / layout.MANIFEST).exists():
                raise damaged(folder, "is not the name of a run", hint="A replicate is named 0, 1, 2; move it away")
        runs = [each for run in self.sealed() for each in (run, *self.earlier_tries(run))]
        for run in runs:
            run.verify()
        return len(runs)

    def earlier_tries(self, run: SealedRun) -> list[SealedRun]:
        """The INVALID runs that ``run`` repeats, as sealed; RecordsError when one is missing or was changed."""
        kept: list[SealedRun] = []
        for earlier in run.manifest.earlier_tries:
            folder = run.path.with_name(earlier.folder)
            try_ = SealedRun(folder, load_manifest(folder / layout.MANIFEST))
            if (try_.key, try_.manifest.seal) != (run.key, earlier.seal):
                raise damaged(folder, f"is not the earlier try that {run.label} names")
            kept.append(try_)
        return kept

    def connect(self) -> duckdb.DuckDBPyConnection:
        """An in-memory DuckDB connection with a view for each table of docs/reference/data-dictionary.md.

        Every view starts with experiment, condition, replicate, is_valid. The plain views hold rows of all sealed runs,
        invalid ones included; ``valid_runs``, ``valid_requests``, ... hold the rows of valid runs. It is an ordinary
        connection without limits, which reads the files of the runs as it needs them.
        """
        from harness.measure.records.sql import connected

        return connected(self.sealed())

    def query(self, sql: str, timeout_s: float = QUERY_TIMEOUT_S) -> pa.Table:
        """Rows of a SQL statement over the tables of all sealed runs. The statement can write nothing.

        SpecError names what is wrong with the statement, or the limit of time or memory that it exceeds.
        """
        from harness.measure.records.sql import answered

        with answered(self.sealed(), sql, timeout_s) as answer:
            return answer.rows

    def drawn(self, sql: str, width: int, timeout_s: float = QUERY_TIMEOUT_S) -> str:
        """The rows of ``query`` as DuckDB draws them: types under names, the middle of many rows left out."""
        from harness.measure.records.sql import answered

        with answered(self.sealed(), sql, timeout_s) as answer:
            return answer.drawn(width)

    def _load(self, folder: Path) -> SealedRun:
        if folder.is_symlink():
            raise damaged(folder, "is a symbolic link", hint="Copy the run to where it is read")
        run = SealedRun(folder, load_manifest(folder / layout.MANIFEST))
        named = RunKey(folder.parent.parent.name, folder.parent.name, int(folder.name))
        if run.key != named:
            raise damaged(folder / layout.MANIFEST, f"belongs to run {'/'.join(map(str, run.key))}")
        run.check_listing()
        return run


class Addressed(NamedTuple):
    """An experiment: where it is from, what it says, and the folder in which its runs are looked for."""

    source: Path
    table: dict[str, Any]
    runs: Path


def store_at(runs: Path, experiment: str = "") -> RunStore:
    """The sealed runs of a folder or an archive; a SpecError that says where others lie when it holds none.

    experiment: whose runs are looked for, to say how they are made.
    """
    runs = runs_folder(runs)
    if next(runs.glob(f"*/*/*/{layout.MANIFEST}"), None) is None:
        found = [path.parents for path in runs.glob(f"*/*/*/*/{layout.MANIFEST}")]
        below = sorted({str(parents[3]) for parents in found if experiment in ("", parents[2].name)})
        more = f" and {len(below) - 3} more" if len(below) > 3 else ""
        hint = (
            f"They lie in {', '.join(below[-3:])}{more}: say --runs {below[-1]}"
            if below
            else f"Name their folder with --runs, go to the folder where they were made, or make some: "
            f"{_how_to_make(experiment, runs)}"
        )
        looked = "no sealed runs in it (looked for EXPERIMENT/CONDITION/REPLICATE)"
        is_there = "is a file, not a folder of runs" if runs.is_file() else "there is no such folder"
        raise SpecError(looked if runs.is_dir() else is_there, where=str(runs), hint=hint)
    return RunStore(runs)


def _how_to_make(experiment: str, runs: Path) -> str:
    """The command that makes runs of an experiment: by its frozen file, where there is one here."""
    frozen = Path("plans", "frozen", f"{experiment}.json")
    of_name = (path for path in sorted(Path().glob("*.toml")) if _written(path).get("name") == experiment)
    if frozen.is_file():
        return f"harness run --confirmatory {frozen} --runs {runs}"
    file = next(of_name, Path("FILE.toml"))
    measured = f"harness run {file} --runs {runs}"
    if _written(file).keys().isdisjoint({"rules", "stop"}):
        return measured
    return f"for a decision that counts harness prereg freeze {file} --commit, else {measured}, which uses up its seed"


def _written(path: Path) -> dict[str, Any]:
    """What a file says of an experiment, whose name need not be the file's; empty where it cannot be read."""
    from harness.model.spec import load_toml

    try:
        return load_toml(path)
    except SpecError:
        return {}


def sealed_runs(runs: Path, address: str | Path) -> list[SealedRun]:
    """The sealed runs of one experiment, invalid ones included.

    address: the experiment's name below ``runs``, its file, a folder of runs, or a published archive. Raises SpecError,
    which names what is there, when there are none, or when a folder holds several experiments.
    """
    text, place = str(address), Path(address)
    if (of_archive := runs_folder(place)) != place:
        return _in_folder(of_archive)
    runs = runs_folder(runs)
    if text.endswith(".toml"):
        from harness.model.spec import load_toml

        name = load_toml(place).get("name")
        if not isinstance(name, str):
            raise SpecError("names no experiment", where=text, hint="Write name = ..., or give the name itself")
        return _by_name(runs, name)
    if place.is_dir() and ("/" in text or not (runs / text).is_dir()):
        return _in_folder(place)
    if ("/" in text or place.suffix[1:].isalpha()) and not (runs / text).is_dir():
        what = "is a file, and no experiment (TOML)" if place.is_file() else "there is no such file or folder"
        raise SpecError(what, where=text, hint="Name an experiment, its file or a folder of runs: harness runs")
    return _by_name(runs, text)


def experiment_at(address: str | Path, runs: Path = Path("runs")) -> Addressed:
    """The experiment at an address: its file, its name, or the folder or name of sealed runs.

    A name means NAME.toml in the working directory, then the shipped experiment, then sealed runs below ``runs``.
    """
    from harness.model.spec import experiment_file, experiment_table

    place = runs_folder(Path(address))
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
    store = store_at(runs, experiment)
    sealed = list(store.sealed(experiment))
    if not sealed:
        known = sorted({run.experiment for run in store.sealed()})
        how = _how_to_make(experiment, runs)
        made = "" if "FILE.toml" in how else f". Make some: {how}"
        raise SpecError(
            f"no sealed runs of experiment {experiment!r}",
            where=str(runs),
            hint=f"Experiments there: {', '.join(known) or 'none'}{made}",
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


@dataclass(frozen=True, slots=True)
class Archive:
    """Sealed runs as one tar file. sha256: of ``content``."""

    keys: tuple[RunKey, ...]
    sha256: str
    content: bytes


def packed(runs: Iterable[SealedRun]) -> Archive:
    """An archive of whole runs, each verified before it leaves."""
    stream, keys = io.BytesIO(), list[RunKey]()
    with tarfile.open(fileobj=stream, mode="w:gz", compresslevel=1) as tar:
        for run in runs:
            run.verify()
            tar.add(run.path, arcname="/".join(map(str, run.key)))
            keys.append(run.key)
    content = stream.getvalue()
    return Archive(tuple(keys), hashlib.sha256(content).hexdigest(), content)


def received(root: Path, archive: Archive) -> list[SealedRun]:
    """Its runs, sealed below ``root``. Runs that are there already, with the same seal, are kept.

    Raises RecordsError when a byte is not as it was sealed, when another run has the name, or when the disk fails: then
    nothing of the run is visible.
    """
    if hashlib.sha256(archive.content).hexdigest() != archive.sha256:
        raise RecordsError(
            "an archive arrived damaged", where=str(root), hint="Continue with --resume: it is sent again"
        )
    with tarfile.open(fileobj=io.BytesIO(archive.content)) as tar:
        files = {PurePosixPath(member.name): member for member in tar.getmembers() if not member.isdir()}
        if wrong := [path for path, member in files.items() if not member.isreg() or ".." in path.parts]:
            raise RecordsError(f"an archive holds {str(wrong[0])!r}, which cannot be a file of a run", where=str(root))
        return [_received_run(root, key, tar, files) for key in archive.keys]


def _received_run(
    root: Path, key: RunKey, tar: tarfile.TarFile, files: dict[PurePosixPath, tarfile.TarInfo]
) -> SealedRun:
    final, name = layout.run_folder(root, *key), PurePosixPath(*map(str, key))
    partial = final.with_name(f"{final.name}{layout.PARTIAL}")
    with disk_errors(partial):
        if partial.exists():
            set_aside(partial)
        for path, member in files.items():
            if path.is_relative_to(name) and (source := tar.extractfile(member)) is not None:
                target = partial / path.relative_to(name)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(source.read())
        run = SealedRun(partial, load_manifest(partial / layout.MANIFEST))
        run.verify()
        if run.key != key:
            raise RecordsError(f"an archive calls {run.label} {key.condition}/{key.replicate}", where=str(partial))
        if final.exists() and load_manifest(final / layout.MANIFEST).seal == run.manifest.seal:
            shutil.rmtree(partial)
            return SealedRun(final, run.manifest)
        sync_tree(partial)
        # rename() onto an existing sealed folder fails: it is not empty.
        partial.rename(final)
        sync(final.parent)
    return SealedRun(final, run.manifest)
