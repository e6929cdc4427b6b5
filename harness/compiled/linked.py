"""Functions that only compiled functions call: typed and lowered once, optimised and assembled only inside the callers.

By itself numba optimises every function with all that it calls, again at each level of calls, and assembles each one;
here that is done once, at the door. It overrides four methods of numba's code library; with a numba that has others,
functions compile as numba does it. Next: ``harness.compiled.inner`` is this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar, cast

import numba
from numba.core import codegen, compiler, types

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_jit: Any = numba.njit
_library_class: Any = getattr(codegen, "JITCodeLibrary", object)
_compiler_class: Any = compiler.Compiler
_OVERRIDDEN = ("_optimize_final_module", "_finalize_final_module", "get_pointer_to_function", "codegen")
IS_KNOWN_NUMBA = all(hasattr(_library_class, name) for name in _OVERRIDDEN)


class _NoEnvironment:
    """Stands for the code generator where one asks it for the address of a function that has none."""

    def set_env(self, _name: str, _environment: object) -> None:
        """Functions that never raise need no environment."""


class _LinkedLibrary(_library_class):
    """Code that its callers link in; it never stands in memory by itself."""

    def _optimize_final_module(self) -> None:
        """The caller's module is optimised as a whole."""

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, _name: str) -> int:
        return 0

    @property
    def codegen(self) -> _NoEnvironment:
        return _NoEnvironment()


class _LinkedCompiler(_compiler_class):
    """numba's own pipeline, into a library that is only linked."""

    def __init__(self, typing_context: Any, target_context: Any, library: Any, *rest: Any) -> None:
        own = _LinkedLibrary(target_context.codegen(), "linked") if library is None else library
        super().__init__(typing_context, target_context, own, *rest)


def linked(function: Callable[Parameters, Result], options: Mapping[str, Any]) -> Callable[Parameters, Result]:
    """Compile ``function`` for compiled callers only, once for all of them: a constant counts as any number."""
    extra: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    if IS_KNOWN_NUMBA:
        extra["pipeline_class"] = _LinkedCompiler
    dispatcher: Any = _jit(**options, **extra)(function)
    if dispatcher is function:
        # NUMBA_DISABLE_JIT: everything runs as plain Python.
        return function
    template_of = dispatcher.get_call_template

    def template_of_any_number(arguments: Any, named: Mapping[str, Any]) -> Any:
        plain = tuple(types.unliteral(one) for one in arguments)
        return template_of(plain, {name: types.unliteral(one) for name, one in named.items()})

    dispatcher.get_call_template = template_of_any_number
    return cast("Callable[Parameters, Result]", dispatcher)
