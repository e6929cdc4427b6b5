"""The Python sources of a release, wherever they lie: in a wheel or a zip, in site-packages, in a virtual environment.

Files are read as text and never imported or run; nothing is unpacked.
"""

from __future__ import annotations

import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

from harness.errors import SpecError
from harness.stack.rbln.patches.observer_points import Read

RBLN, VLLM = "vllm_rbln", "vllm"
MAX_SOURCE_BYTES = 8 << 20
"""A longer file is no source that anybody wrote: a damaged or hostile archive."""
_HINT = "Give a wheel (pip download --no-deps vllm-rbln==VERSION), a virtual environment or a site-packages folder"
_PIN = re.compile(r"^Requires-Dist: vllm *\(?==([\w.]+)(?:\+\w+)?\)?\s*$", re.MULTILINE)
_VERSION = re.compile(r"^Version: (\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sources:
    """One package's sources. read: a file below site-packages, None when it is not there. vllm_pin: "" without one."""

    package: str
    version: str
    place: Path
    read: Read
    vllm_pin: str = ""


def open_sources(path: Path, package: str = RBLN) -> Sources:
    """The sources of ``package`` in ``path``; SpecError when it is not in there, or the path is no such place."""
    if path.is_dir():
        return _in_folder(path, package)
    if not path.is_file():
        raise SpecError("no such file or folder", where=str(path), hint=_HINT)
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {one.filename: one.file_size for one in archive.infolist() if one.filename.isprintable()}
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise SpecError(f"is no wheel or zip ({error})", where=str(path), hint=_HINT) from error

    def read(name: str) -> str | None:
        if name not in sizes:
            return None
        if sizes[name] > MAX_SOURCE_BYTES:
            raise SpecError(f"{name} has {sizes[name]} bytes: no source", where=str(path))
        try:
            with zipfile.ZipFile(path) as archive:
                return _decoded(archive.read(name), name, path)
        except SpecError:
            raise
        # zlib.error, NotImplementedError and RuntimeError: damaged, unknown or encrypted members.
        except Exception as error:
            raise SpecError(f"{name} cannot be read ({error})", where=str(path), hint="Download it again") from error

    return _sources(path, package, read, sorted(sizes))


def vllm_beside(rbln: Sources) -> Sources | None:
    """The vLLM that serves with ``rbln``: in the same site-packages, or a wheel of the pinned version beside it."""
    if rbln.place.is_dir():
        return open_sources(rbln.place, VLLM) if (rbln.place / VLLM / "__init__.py").is_file() else None
    return wheel_beside(rbln.place, VLLM, rbln.vllm_pin)


def wheel_beside(place: Path, package: str, version: str) -> Sources | None:
    """A wheel of another release in the folder of the wheel ``place``."""
    wheels = sorted(place.parent.glob(f"{package}-{version}-*.whl")) if version and place.is_file() else []
    return open_sources(wheels[0], package) if wheels else None


def _in_folder(path: Path, package: str) -> Sources:
    places = [path, *sorted(path.glob("lib/python3*/site-packages"))]
    root = next((one for one in places if (one / package / "__init__.py").is_file()), None)
    if root is None:
        raise SpecError(f"holds no {package}", where=str(path), hint=_HINT)

    def read(name: str) -> str | None:
        file = root / name
        try:
            if not file.is_file():
                return None
            if file.stat().st_size > MAX_SOURCE_BYTES:
                raise SpecError("too long for a source", where=str(file))
            return _decoded(file.read_bytes(), name, root)
        except OSError as error:
            raise SpecError(f"cannot be read ({error.strerror})", where=str(file)) from error

    names = [one.relative_to(root).as_posix() for one in sorted(root.glob(f"{package}-*.dist-info/METADATA"))]
    return _sources(root, package, read, [*names, f"{package}/"])


def _sources(place: Path, package: str, read: Read, names: list[str]) -> Sources:
    found = [name for name in names if name.startswith(f"{package}-") and name.endswith(".dist-info/METADATA")]
    if not found or not any(name.startswith(f"{package}/") for name in names):
        raise SpecError(f"holds no {package}", where=str(place), hint=_HINT)
    text = read(found[-1]) or ""
    version, pin = _VERSION.search(text), _PIN.search(text)
    if version is None:
        raise SpecError("says no version", where=f"{place}: {found[-1]}", hint="Download it again")
    return Sources(package, version[1].partition("+")[0], place, read, pin[1] if pin else "")


def _decoded(content: bytes, name: str, where: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"{name} is not UTF-8", where=str(where), hint="Download it again") from error
