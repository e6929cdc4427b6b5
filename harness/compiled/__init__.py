"""The decorators of compiled functions: numba, integers only, the machine code kept on disk.

Compiled functions never raise or allocate, and change only the arrays that they are given. ``aot`` loads the machine
code without numba. Where no folder can hold it, each process compiles again.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

from harness.compiled.aot import SUFFIX, AotFunction, JitFunction
from harness.compiled.records import IS_PLAIN_PYTHON

_ROOT = Path(__file__).resolve().parents[2]
# Imports for annotations alone change no machine code.
_IMPORTS_OF_TYPES = re.compile(r"^if TYPE_CHECKING:\n(?:[ \t]+.*\n|\n)+", re.MULTILINE)
_IMPORT = re.compile(r"^ *from (harness[.\w]*) import (\([^)]*\)|[^\n(]*)", re.MULTILINE)

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Arrays are owned by the caller for the whole call: counting references in the inner loops made them 4x slower. Nothing
# divides by what may be zero, so nothing checks for it.
OPTIONS: Mapping[str, Any] = {"nogil": True, "_nrt": False, "error_model": "numpy"}


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that Python calls, on its first call, and keep the machine code for later processes."""
    entrypoint = AotFunction(function, OPTIONS, cache_folder(function.__code__.co_filename))
    return function if IS_PLAIN_PYTHON else cast("Callable[Parameters, Result]", entrypoint)


def jit(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that only compiled functions call, as a part of those."""
    return function if IS_PLAIN_PYTHON else cast("Callable[Parameters, Result]", JitFunction(function, OPTIONS))


def always_inline(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """As ``jit``, with a copy in each caller: for what most steps run, and a rare function calls too."""
    inlined = JitFunction(function, {**OPTIONS, "forceinline": True})
    return function if IS_PLAIN_PYTHON else cast("Callable[Parameters, Result]", inlined)


def has_machine_code(source: str) -> bool:
    """Whether machine code of functions in ``source``, from its present text, is on disk."""
    folder = cache_folder(source)
    return folder is not None and any(folder.glob(f"*{SUFFIX}"))


def cache_folder(source: str) -> Path | None:
    """Where the machine code of ``source`` is kept; None where no folder can hold it.

    Its name is a digest of that file, of every file of this package that it imports, directly or through others, and
    of the decorators. numba looks only at the file of the cached function, not at those of functions and constants
    linked into it.
    """
    return _folder_named(sources_digest(source))


@lru_cache(maxsize=64)
def _folder_named(digest: str) -> Path | None:
    user_cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~").expanduser() / ".cache")
    usual = (Path(__file__).parent / "__pycache__", Path(user_cache) / "rbln-harness")
    given = os.environ.get("NUMBA_CACHE_DIR", "")
    for parent in (Path(given),) if given else usual:
        folder = parent / f"numba-{digest}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return None


@lru_cache(maxsize=64)
def sources_digest(source: str) -> str:
    """SHA-256, shortened, over a file and the files of this package that it imports, directly or through others."""
    digest = hashlib.sha256()
    for path in sorted(imported_files(Path(source).resolve())):
        digest.update(f"{path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def imported_files(source: Path) -> set[Path]:
    """A file, the files of this package that it imports, directly or through others, and those of the decorators."""
    files = {source, *Path(__file__).resolve().parent.glob("*.py")}
    new = list(files)
    while new:
        imported = _imports(new.pop()) - files
        files |= imported
        new.extend(imported)
    return files


@lru_cache(maxsize=256)
def _imports(source: Path) -> frozenset[Path]:
    """Files of this package that the import statements of ``source`` name; ``from a import b`` may name a/b.py."""
    names: set[str] = set()
    for module, members in _IMPORT.findall(_IMPORTS_OF_TYPES.sub("", source.read_text())):
        names |= {module, *(f"{module}.{member}" for member in re.findall(r"\w+", members))}
    files = (_ROOT / f"{name.replace('.', '/')}.py" for name in names)
    return frozenset(path for path in files if path.is_file())
