"""Where a person's output may go: a new name or a regular file, and nothing else.

A link or a device is never written through nor renamed over.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from harness.errors import RecordsError, SpecError


def check_output(path: Path) -> Path:
    """``path`` again when it is new or a regular file; SpecError for a link, a device, a pipe or a folder."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return _check_folder(path)
    if not stat.S_ISREG(mode):
        what = "a link" if stat.S_ISLNK(mode) else "a folder" if stat.S_ISDIR(mode) else "a device or a pipe"
        raise SpecError(f"is {what}, not a file that can be replaced", where=str(path), hint="Name a new file")
    return path


def user_cache() -> Path:
    """The harness's part of the user's cache folder; SpecError where the user has none."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rbln-harness"
    except RuntimeError as error:
        hint = "Set HOME or XDG_CACHE_HOME to a folder"
        raise SpecError("this user has no home folder, where caches lie", where="~", hint=hint) from error


# What the harness writes below a folder of runs: experiment, condition, replicate and a table's name.
_LONGEST_BELOW = 320
_LONGEST_PATH = 4095


def check_runs_folder(folder: Path) -> Path:
    """``folder`` again when runs can be recorded there: its name is UTF-8, as records are, and leaves room below it."""
    try:
        name = str(folder.absolute()).encode("utf-8")
    except UnicodeEncodeError as error:
        hint = "Name another folder; where the shell's locale is C, set LC_ALL=C.UTF-8"
        raise SpecError("its name is not UTF-8", where=str(folder), hint=hint) from error
    if len(name) > _LONGEST_PATH - _LONGEST_BELOW:
        raise SpecError(
            f"its path has {len(name)} bytes: the paths of the runs in it would be longer than {_LONGEST_PATH}",
            where=f"{str(folder)[:60]}...",
            hint="Name a folder with a shorter path",
        )
    return folder


def _check_folder(path: Path) -> Path:
    """``path`` again when the nearest folder there is above it can be written to."""
    above = next((folder for folder in path.absolute().parents if os.path.lexists(folder)), path.absolute().parent)
    if not above.is_dir() or not _takes_files(above):
        why = f"nothing may be written in {above}" if above.is_dir() else f"{above} is no folder"
        raise SpecError(
            f"cannot be written: {why}", where=str(path), hint="Name a file in a folder that can be written"
        )
    return path


def _takes_files(folder: Path) -> bool:
    """Whether a file can be made there: to root every folder says yes, and some refuse then."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 ``text`` to a new or regular file; SpecError with the reason where that cannot be."""
    check_output(path)
    with SpecError.on_os_error("cannot be written", where=path, hint="Name a file in a folder that can be written"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


_ROOM = "Make room or choose a folder that can be written"
# The end of the hidden name that a file has until it is whole.
UNFINISHED = ".tmp"


@contextmanager
def whole_file(path: Path, *, is_durable: bool = True) -> Generator[BinaryIO]:
    """A file that gets the name ``path`` when the block ends; after an error nothing is left of it.

    is_durable: the file is on disk then; otherwise the caller has to flush it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}{UNFINISHED}")
    try:
        with open(temporary, "wb") as file:
            yield file
            file.flush()
            if is_durable:
                os.fsync(file.fileno())
        temporary.replace(path)
        if is_durable:
            sync(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, pieces: Iterable[bytes], *, what: str) -> Path:
    """Write ``pieces`` so that ``path`` holds all of them or stays as it was; RecordsError when the disk refuses."""
    check_output(path)
    with RecordsError.on_os_error(f"{what} cannot be written", where=path, hint=_ROOM):
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path) as file:
            file.writelines(pieces)
    return path


def holder_of(path: Path) -> str:
    """The pid of the process that holds the lock of ``hold_lock`` on this machine; "" where none does."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        pass
    return ""


def hold_lock(path: Path, what: str, hint: str) -> int:
    """The descriptor of a file that this process alone holds, with its pid inside. The kernel frees it when the process
    ends, for any reason. RecordsError where another process has it: its pid, and ``what`` it does.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = os.read(descriptor, 20).decode("ascii", "replace")
        os.close(descriptor)
        named = f", pid {holder}," if holder.isdecimal() else ""
        raise RecordsError(f"another harness process{named} is {what}", where=str(path.parent), hint=hint) from error
    os.ftruncate(descriptor, 0)
    os.write(descriptor, str(os.getpid()).encode())
    return descriptor


_held: set[int] = set()


def _let_go() -> None:
    """A lock ends with the process that took it: no child that outlives it keeps it."""
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_let_go)


@contextmanager
def one_at_a_time(folder: Path, name: str, what: str) -> Generator[None]:
    """Hold ``folder/.name.lock`` for the block, and leave nothing of it; see ``hold_lock``.

    A folder that cannot be written has no lock: nothing is made there.
    """
    path = folder / f".{name}.lock"
    are_new = [each for each in (folder, *folder.parents) if not each.exists()]
    hint = "Wait for it, end it with Ctrl-C, or write elsewhere"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = hold_lock(path, what, hint)
        # Its holder may have removed it meanwhile.
        while not (path.exists() and path.stat().st_ino == os.fstat(descriptor).st_ino):
            os.close(descriptor)
            descriptor = hold_lock(path, what, hint)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise RecordsError(f"cannot be written ({error.strerror})", where=str(path), hint=_ROOM) from error
        yield
        return
    _held.add(descriptor)
    try:
        yield
    finally:
        if descriptor in _held:
            path.unlink(missing_ok=True)
            _held.remove(descriptor)
            os.close(descriptor)
        with suppress(OSError):  # something was made in it
            for each in are_new:
                each.rmdir()


def sync(path: Path) -> None:
    """Flush the bytes of a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
