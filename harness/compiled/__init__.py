"""The decorators of compiled functions: numba, integers only, the machine code kept on disk.

Compiled functions never raise or allocate, and change only the arrays that they are given. ``aot`` loads the machine
code without numba. Where no folder can hold it, each process compiles again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ParamSpec, TypeVar, cast

from harness.compiled.aot import AotFunction, FunctionByKind, JitFunction
from harness.compiled.records import IS_PLAIN_PYTHON

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Arrays are owned by the caller for the whole call: counting references in the inner loops made them 4x slower. Nothing
# divides by what may be zero, so nothing checks for it.
OPTIONS: Mapping[str, Any] = {"nogil": True, "_nrt": False, "error_model": "numpy"}


def compiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that Python calls, on its first call, and keep the machine code for later processes.

    function: also one that compiled functions call, which is compiled once more for Python.
    """
    if IS_PLAIN_PYTHON:
        return function
    plain = function.function if isinstance(function, JitFunction) else function
    return cast("Callable[Parameters, Result]", AotFunction(plain, OPTIONS))


def bind(function: Callable[..., Result], *tables: Any) -> Callable[..., Result]:
    """A function that Python calls, with its first arguments fixed: tables that stay where they are."""
    return (
        cast("Callable[..., Result]", function.bind(*tables))
        if isinstance(function, AotFunction)
        else partial(function, *tables)
    )


def jit(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Compile a function that only compiled functions call, as a part of those."""
    return function if IS_PLAIN_PYTHON else cast("Callable[Parameters, Result]", JitFunction(function, OPTIONS))


def always_inline(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """As ``jit``, with a copy in each caller: for what most steps run, and a rare function calls too."""
    inlined = JitFunction(function, {**OPTIONS, "forceinline": True})
    return function if IS_PLAIN_PYTHON else cast("Callable[Parameters, Result]", inlined)


def by_kind(functions: Mapping[type, Callable[..., Result]]) -> Callable[..., Result]:
    """One name for functions that only compiled functions call: the kind of tables among its arguments chooses.

    functions: by the class of the named tuple. The choice is made when a caller is compiled, and costs nothing later.
    """
    return FunctionByKind({kind.__qualname__: function for kind, function in functions.items()})


def has_machine_code(function: Callable[..., Any]) -> bool:
    """Whether nothing is left to compile for a function that Python calls: its machine code is on disk, as it is."""
    return not isinstance(function, AotFunction) or function.has_machine_code
