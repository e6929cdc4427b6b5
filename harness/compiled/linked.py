"""Functions that only compiled functions call: typed and lowered once, optimised and assembled only inside the callers.

By itself numba optimises every function with all that it calls, again at each level of calls, and assembles each one;
here that is done once, at the door. It overrides four methods of numba's code library; with a numba that has others,
functions compile as numba does it. Only this module asks numba for machine code that ``door`` keeps, and only when
there is none yet. Next: ``door.Door`` and ``door.Inner`` call it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar, cast

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt
from numba.core import codegen, compiler, types
from numba.core.registry import cpu_target
from numba.np import arrayobj

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_jit: Any = numba.njit
_type_of: Any = numba.typeof
_arrays: Any = arrayobj
_parse: Any = llvmlite.binding.parse_bitcode
_assembly: Any = llvmlite.binding.parse_assembly
_UNWRAPPED: Mapping[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
_library_class: Any = getattr(codegen, "JITCodeLibrary", object)
_compiler_class: Any = compiler.Compiler
_OVERRIDDEN = ("_optimize_final_module", "_finalize_final_module", "get_pointer_to_function", "codegen")
IS_KNOWN_NUMBA = all(hasattr(_library_class, name) for name in _OVERRIDDEN)


class _NoEnvironment:
    """Stands for the code generator where one asks it for the address of a function that has none."""

    def set_env(self, _name: str, _environment: object) -> None:
        """Functions that never raise need no environment."""


class _UnloadedLibrary(_library_class):
    """Code that numba neither assembles nor loads: ``object_code`` does, from the optimised module."""

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, _name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> _NoEnvironment:
        return _NoEnvironment()


class _LinkedLibrary(_UnloadedLibrary):
    """Code that its callers link in."""

    def _optimize_final_module(self) -> None:
        """The caller's module is optimised as a whole."""


class _UnloadedCompiler(_compiler_class):
    """numba's own pipeline, into a library of another kind."""

    library_class: Any = _UnloadedLibrary

    def __init__(self, typing_context: Any, target_context: Any, library: Any, *rest: Any) -> None:
        own = self.library_class(target_context.codegen(), "linked") if library is None else library
        super().__init__(typing_context, target_context, own, *rest)


class _LinkedCompiler(_UnloadedCompiler):
    library_class = _LinkedLibrary


def takes_tables(function: Callable[..., Any]) -> bool:
    """Whether a call of its own would cost more than the function: a tuple of tables is passed as hundreds of words."""
    kinds = {name: kind for name, kind in function.__annotations__.items() if name != "return"}
    return set(kinds.values()) != {"int"}


@contextmanager
def _places_are_never_negative() -> Generator[None, None, None]:
    """Within, numba adds no length to an index below zero: nothing here counts from the end of a table."""

    def as_it_is(context: Any, builder: Any, kind: Any, index: Any, _size: Any) -> Any:
        return context.cast(builder, index, kind, types.intp)

    before, _arrays.fix_integer_index = _arrays.fix_integer_index, as_it_is
    try:
        yield
    finally:
        _arrays.fix_integer_index = before


def linked(function: Callable[Parameters, Result], options: Mapping[str, Any]) -> Callable[Parameters, Result]:
    """Compile ``function`` for compiled callers only, once for all of them: a constant counts as any number."""
    extra: dict[str, Any] = {**_UNWRAPPED, "forceinline": takes_tables(function)}
    if IS_KNOWN_NUMBA:
        extra["pipeline_class"] = _LinkedCompiler
    dispatcher: Any = _jit(**options, **extra)(function)
    template_of = dispatcher.get_call_template

    def template_of_any_number(arguments: Any, named: Mapping[str, Any]) -> Any:
        plain = tuple(types.unliteral(one) for one in arguments)
        return template_of(plain, {name: types.unliteral(one) for name, one in named.items()})

    dispatcher.get_call_template = template_of_any_number
    return cast("Callable[Parameters, Result]", dispatcher)


def type_of_function(dispatcher: Any) -> Any:
    """numba's type of a function that compiled functions may call."""
    return types.Dispatcher(dispatcher)


def type_of_made(made: Any) -> Any:
    """numba's type of an intrinsic, or of a function of the C library."""
    context, target = cast("tuple[Any, Any]", (cpu_target.typing_context, cpu_target.target_context))
    # What was made while something is compiled is registered, and looked up only after this.
    context.refresh()
    target.refresh()
    return context.resolve_value_type(made)


def object_code(
    function: Callable[..., Any], options: Mapping[str, Any], arguments: Sequence[Any], symbol: str
) -> bytes:
    """An object file of ``function`` for arguments like these, as ``symbol``, which reads them as words in memory.

    It needs nothing but the C library: the function takes no Python object and never raises.
    """
    extra = {"pipeline_class": _UnloadedCompiler} if IS_KNOWN_NUMBA else {}
    dispatcher: Any = _jit(**options, **_UNWRAPPED, **extra)(function)
    signature = tuple(_type_of(argument) for argument in arguments)
    with _places_are_never_negative():
        dispatcher.compile(signature)
        made = dispatcher.overloads[signature]
    if made.signature.return_type not in (types.int64, types.none):
        raise TypeError(f"{function.__qualname__} returns {made.signature.return_type}, not int64 or None")
    module = _parse(made.library._final_module.as_bitcode())
    target = module.get_function(made.fndesc.llvm_func_name)
    target.name = f"{symbol}.target"
    module.link_in(_assembly(_spread(symbol, target.name, [_word_types(argument) for argument in arguments])))
    return made.library._codegen._tm.emit_object(module)


def _word_types(argument: Any) -> list[str]:
    """LLVM's types of an argument's words, as numba takes them: see ``door``."""
    if isinstance(argument, np.ndarray):
        return ["ptr", "ptr", "i64", "i64", "ptr", *["i64"] * 2 * cast("npt.NDArray[Any]", argument).ndim]
    if isinstance(argument, tuple):
        return [word for part in cast("tuple[Any, ...]", argument) for word in _word_types(part)]
    return ["i64"]


def _spread(symbol: str, target: str, types_of: Sequence[Sequence[str]]) -> str:
    """A function in LLVM's assembly that calls another with the words at an address: faster than hundreds by ctypes."""
    words = [word for types_of_one in types_of for word in types_of_one]
    reads = [
        f"%p{place} = getelementptr i64, ptr %words, i64 {place}\n%w{place} = load {word}, ptr %p{place}"
        for place, word in enumerate(words)
    ]
    passed = ", ".join(["ptr %result", "ptr null", *(f"{word} %w{place}" for place, word in enumerate(words))])
    return "\n".join(
        [
            f'declare i32 @"{target}"({", ".join(["ptr", "ptr", *words])})',
            f'define i32 @"{symbol}"(ptr %result, ptr %words) {{',
            *reads,
            f'%status = call i32 @"{target}"({passed})',
            "ret i32 %status\n}",
        ]
    )
