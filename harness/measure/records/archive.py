"""A published archive: the files that one may hold, unpacked only after all names and sizes are checked.

Its runs are read from a temporary folder that ends with the process, or from the folder that a person names.
"""

from __future__ import annotations

import atexit
import hashlib
import shutil
import stat
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Mapping, Sequence, Set
from pathlib import Path

from harness.errors import RecordsError, SpecError, in_one_line
from harness.measure.records.disk import disk_errors
from harness.measure.records.run import SealedRun

ASK = "Ask its authors for another copy"
SUMS = "SHA256SUMS"
PROOF = "proof.json"
PACK = "proof.pack"
FROZEN = "frozen.json"
VERDICT = "verdict.json"
CRATE = "ro-crate-metadata.json"
PAGE = "index.html"
RUNS = "runs"
EXPLORATORY = "EXPLORATORY"
"""In an archive of exploratory runs, in place of freeze, proof and verdict: what such runs are."""
EXPLORATORY_NOTE = "exploratory: nothing was fixed before these runs, so they decide nothing"
SIGNATURE = ".sig"
NEEDED = {SUMS, PROOF, FROZEN, VERDICT, CRATE}
SIGNATURE_OF_SUMS = SUMS + SIGNATURE
# Archives of earlier versions have no page and no pack, and may have tokens of a time-stamp authority.
OPTIONAL = {PAGE, PACK, SIGNATURE_OF_SUMS, *(FROZEN + suffix for suffix in (SIGNATURE, ".tsr", ".ots"))}
# Tables are compressed before they are packed and logs shrink by 10 to 40 times; deflate could make 1,030 of it.
MOST_BYTES = 64 << 30
MOST_EXPANSION = 100
MOST_BYTES_OF_A_SMALL_ARCHIVE = 64 << 20
# What Python's zipfile raises where bytes of an archive were changed.
_UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, EOFError, ValueError, OverflowError, OSError)
_opened: dict[tuple[str, int, int], Path] = {}


def is_archive(path: Path) -> bool:
    """Whether a path names a file that would be an archive."""
    return path.suffix == ".zip" and path.is_file()


def is_unpacked(folder: Path) -> bool:
    """Whether a folder is an unpacked archive."""
    has_standing = (folder / PROOF).is_file() or (folder / EXPLORATORY).is_file()
    return (folder / SUMS).is_file() and has_standing and (folder / RUNS).is_dir()


def standing_of(path: Path) -> str:
    """That the runs of an archive are exploratory, in words; "" of other runs."""
    folder = opened(path) if is_archive(path) else path
    return EXPLORATORY_NOTE if (folder / EXPLORATORY).is_file() and is_unpacked(folder) else ""


def archive_of(run: SealedRun) -> Path | None:
    """The unpacked archive that a run lies in; None elsewhere."""
    folder = run.path.absolute().parents[3]
    return folder if is_unpacked(folder) else None


def runs_folder(path: Path) -> Path:
    """The folder of runs that a path means: of an archive, unpacked or not, its runs; else the path itself."""
    if is_archive(path):
        return opened(path) / RUNS
    return path / RUNS if is_unpacked(path) else path


def opened(archive: Path) -> Path:
    """A temporary folder with the checked files of an archive, once per process; RecordsError as of ``unpack``."""
    facts = archive.stat()
    key = (str(archive.resolve()), facts.st_size, facts.st_mtime_ns)
    if key not in _opened:
        folder = Path(tempfile.mkdtemp(prefix="harness-open-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        unpack(archive, folder)
        _opened[key] = folder
    return _opened[key]


def open_into(archive: Path, folder: Path) -> Path:
    """Unpack an archive into a new folder, which has its name only once all is there and checked; returns it."""
    if folder.exists():
        raise SpecError("exists already", where=str(folder), hint="Name another folder with -o")
    with disk_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            whole = Path(temporary) / folder.name
            whole.mkdir()
            unpack(archive, whole)
            whole.rename(folder)
    return folder


def unpack(archive: Path, folder: Path) -> None:
    """Unpack a published experiment and check each file against its checksum; RecordsError where one differs.

    Nothing is unpacked when the archive holds anything else, or lacks a file that each has. SpecError without a file.
    """
    hint = "Name an archive of `harness prereg publish`"
    if not archive.is_file():
        raise SpecError("there is no such file", where=str(archive), hint=hint)
    try:
        with archive.open("rb") as file:
            is_zip = file.read(2) == b"PK"
        if not is_zip:
            raise SpecError("is no archive of a published experiment", where=str(archive), hint=hint)
        with zipfile.ZipFile(archive) as packed:
            infos = packed.infolist()
            if not {info.filename for info in infos} & {*NEEDED, PACK, EXPLORATORY}:
                raise SpecError("is no archive of a published experiment", where=str(archive), hint=hint)
            _check_zip(archive, infos)
            _check_listed(archive, {info.filename for info in infos}, _read_sums(packed.read(SUMS)))
            packed.extractall(folder, infos)
    except _UNREADABLE as error:
        raise wrong(archive, f"cannot be unpacked ({in_one_line(error)})") from error
    check_sums(archive, folder)


def checked_files(archive: Path, temporary: Path) -> Path:
    """The folder of an archive's files, each as it was packed: of one that is unpacked itself, else ``temporary``."""
    if not is_unpacked(archive):
        unpack(archive, temporary)
        return temporary
    _check_names(archive, set(files_of(archive)))
    check_sums(archive, archive)
    return archive


def files_of(folder: Path) -> list[str]:
    """Names of all files below a folder, sorted."""
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def check_sums(archive: Path, folder: Path, hint: str = ASK) -> None:
    """RecordsError unless a folder holds exactly the files of its checksums, each as it was packed."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise wrong(archive, f"{path.relative_to(folder)} is a link", hint)
    try:
        sums = _read_sums((folder / SUMS).read_bytes())
    except (OSError, UnicodeDecodeError) as error:
        raise wrong(archive, f"has no readable {SUMS}", hint) from error
    _check_listed(archive, set(files_of(folder)), sums, hint)
    for name, sha256 in sums.items():
        if hashlib.sha256((folder / name).read_bytes()).hexdigest() != sha256:
            raise wrong(archive, f"{name} differs from its checksum", hint)


def _read_sums(content: bytes) -> dict[str, str]:
    """SHA-256 by file."""
    lines = content.decode("utf-8").removesuffix("\n").split("\n")
    return {name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}


def _check_listed(archive: Path, names: set[str], sums: Mapping[str, str], hint: str = ASK) -> None:
    """RecordsError unless the files are those of the checksums."""
    if odd := sorted((names - {SUMS, SIGNATURE_OF_SUMS}) ^ sums.keys()):
        raise wrong(archive, f"{odd[0]} is missing or was added", hint)


def _check_zip(archive: Path, infos: Sequence[zipfile.ZipInfo]) -> None:
    names = {info.filename for info in infos}
    if len(names) != len(infos):
        raise wrong(archive, "holds a name twice")
    for info in infos:
        if stat.S_ISLNK(info.external_attr >> 16):
            raise wrong(archive, f"holds {info.filename!r}, which is a link")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise wrong(archive, f"holds {info.filename!r}, compressed in a way that publish never uses")
    _check_names(archive, names)
    total = sum(info.file_size for info in infos)
    limit = min(MOST_BYTES, max(MOST_BYTES_OF_A_SMALL_ARCHIVE, MOST_EXPANSION * archive.stat().st_size))
    if total > limit:
        raise wrong(archive, f"would unpack to {total} bytes, the limit for its size is {limit}")


def _check_names(archive: Path, names: Set[str]) -> None:
    """RecordsError for a file that no published experiment holds, and where one is missing that each has."""
    for name in sorted(names):
        if not is_known(name):
            raise wrong(archive, f"holds {name!r}, which is no file of a published experiment")
    if missing := sorted(({SUMS, CRATE} if EXPLORATORY in names else NEEDED) - names):
        raise wrong(archive, f"lacks {missing[0]}")


def is_known(name: str) -> bool:
    """Whether a published experiment may hold a file of this name."""
    parts = name.split("/")
    is_below_runs = len(parts) > 4 and parts[0] == RUNS
    is_plain = not any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts)
    return name in NEEDED | OPTIONAL | {EXPLORATORY} or (is_below_runs and is_plain)


def wrong(archive: Path, what: str, hint: str = ASK) -> RecordsError:
    """The error about an archive that is not as it was published."""
    return RecordsError(what, where=str(archive), hint=hint)
