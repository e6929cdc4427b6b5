"""How the hot functions of the engine are compiled: numba, cached on disk, integers only.

A function marked ``@compiled`` or ``@inner`` never raises or allocates, and touches nothing but the arrays it is
given. Where no folder can hold the cache it is compiled anew in each process.
Next: ``pools``, ``vendor``, ``paper``, ``steps`` and ``harness.sim.kernel.events`` are written in it, and so is
``harness.live.client.wire.core``, whose memory is given by address.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import numba
import numba.core.config

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_jit: Any = numba.njit
_settings: Any = numba.core.config


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that Python calls, on its first call, and keep the machine code for later processes."""
    return _compile(function, {})


def inner(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that only compiled functions call; without a door for Python it compiles much faster."""
    return _compile(function, {"no_cpython_wrapper": True, "no_cfunc_wrapper": True})


def compiled_viewing(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """As ``compiled``, for a function that makes arrays of memory whose address it is given."""
    return _compile(function, {"_nrt": True})


def inner_viewing(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """As ``inner``, for a function that makes or returns arrays of memory whose address it is given."""
    return _compile(function, {"_nrt": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True})


def _compile(function: Callable[Parameters, Result], extra: dict[str, Any]) -> Callable[Parameters, Result]:
    # Arrays are owned by the caller for the whole call: counting references in the inner loops made them 4x slower.
    options: dict[str, Any] = {"nogil": True, "_nrt": False, **extra}
    folder = cache_folder()
    if folder is None:
        return cast("Callable[Parameters, Result]", _jit(**options)(function))
    before = _settings.CACHE_DIR
    _settings.CACHE_DIR = str(folder)
    try:
        return cast("Callable[Parameters, Result]", _jit(cache=True, **options)(function))
    except RuntimeError:
        # The folder vanished or filled up meanwhile: slower start, same results.
        return cast("Callable[Parameters, Result]", _jit(**options)(function))
    finally:
        _settings.CACHE_DIR = before


@lru_cache(maxsize=1)
def cache_folder() -> Path | None:
    """Where machine code is kept: named by the sources, so that no edit of a callee leaves a stale caller behind.

    numba looks only at the file of the function it caches, not at the files of the functions inlined into it.
    """
    name = f"numba-{_sources_digest()}"
    user_cache = os.environ.get("XDG_CACHE_HOME") or str(Path("~").expanduser() / ".cache")
    own = (Path(__file__).parent / "__pycache__", Path(user_cache) / "rbln-harness")
    given: str = _settings.CACHE_DIR
    for parent in (Path(given),) if given else own:
        folder = parent / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return None


def _sources_digest() -> str:
    digest = hashlib.sha256()
    here = Path(__file__).resolve().parent
    for path in sorted([*here.glob("*.py"), *here.parent.glob("sim/*.py"), *here.parent.glob("live/client/wire/*.py")]):
        text = path.read_bytes()
        if path.parent == here or b"harness.engine.compiled" in text:
            digest.update(text)
    return digest.hexdigest()[:16]
