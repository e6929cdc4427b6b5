"""How the hot functions of the engine are compiled: numba, cached on disk, integers only.

A function marked ``@compiled`` has one signature, never raises, and touches nothing but the arrays it is given.
Where no folder can hold the cache (read-only install and no writable home) it is compiled anew in each process.
Next: ``pools``, ``vendor``, ``paper`` and ``harness.sim.kernel`` are written in it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar, cast

import numba

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile ``function`` on its first call and keep the machine code for later processes."""
    jit: Any = numba.njit
    try:
        return cast("Callable[Parameters, Result]", jit(cache=True, nogil=True)(function))
    except RuntimeError:
        # numba found no writable place for its cache: slower start, same results.
        return cast("Callable[Parameters, Result]", jit(nogil=True)(function))
