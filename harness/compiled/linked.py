"""Functions that only compiled functions call: typed and lowered once, optimised and assembled only inside the callers.

By itself numba optimises every function with all that it calls, again at each level of calls, and assembles each one.
Here that is done once for each entrypoint, which halves the first compilation. Four methods of numba's code library are
overridden; a numba without them compiles functions in its usual way. Only ``aot`` imports this module, to compile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ParamSpec, TypeVar, cast

import llvmlite.binding
import numba
from numba.core import codegen, compiler, types
from numba.core.registry import cpu_target

from harness.compiled.tables import num_words, type_of

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_jit: Any = numba.njit
_parse: Any = llvmlite.binding.parse_bitcode
_assembly: Any = llvmlite.binding.parse_assembly
_library_class: Any = getattr(codegen, "JITCodeLibrary", object)
_compiler_class: Any = compiler.Compiler
_OVERRIDDEN = ("_optimize_final_module", "_finalize_final_module", "get_pointer_to_function", "codegen")
IS_KNOWN_NUMBA = all(hasattr(_library_class, name) for name in _OVERRIDDEN)


class _NoEnvironment:
    """Stands for the code generator, for functions that have no address."""

    def set_env(self, _name: str, _environment: object) -> None:
        """Functions that never raise need no environment."""


class _LinkedLibrary(_library_class):
    """Code that numba neither optimises as a whole nor assembles nor loads: its callers link it in."""

    def _optimize_final_module(self) -> None:
        """``object_code`` does, once, for an entrypoint and all that it calls."""

    def _finalize_final_module(self) -> None:
        self._finalized = True

    def get_pointer_to_function(self, _name: str) -> int:
        self._ensure_finalized()
        return 0

    @property
    def codegen(self) -> _NoEnvironment:
        return _NoEnvironment()


class _LinkedCompiler(_compiler_class):
    """numba's own pipeline, into a library of another kind."""

    def __init__(self, typing_context: Any, target_context: Any, library: Any, *rest: Any) -> None:
        own = _LinkedLibrary(target_context.codegen(), "linked") if library is None else library
        super().__init__(typing_context, target_context, own, *rest)


def _dispatcher(function: Callable[..., Any], options: Mapping[str, Any]) -> Any:
    extra = {"pipeline_class": _LinkedCompiler} if IS_KNOWN_NUMBA else {}
    return _jit(**options, **extra, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)


def linked(function: Callable[Parameters, Result], options: Mapping[str, Any]) -> Callable[Parameters, Result]:
    """Compile ``function`` for compiled callers only, once for all of them: a constant counts as any number."""
    dispatcher = _dispatcher(function, options)
    template_of = dispatcher.get_call_template

    def template_of_any_number(arguments: Any, named: Mapping[str, Any]) -> Any:
        plain = tuple(types.unliteral(one) for one in arguments)
        return template_of(plain, {name: types.unliteral(one) for name, one in named.items()})

    dispatcher.get_call_template = template_of_any_number
    return cast("Callable[Parameters, Result]", dispatcher)


def type_of_function(dispatcher: Any) -> Any:
    """numba's type of a function that compiled functions may call."""
    return types.Dispatcher(dispatcher)


def object_code(
    function: Callable[..., Any], options: Mapping[str, Any], arguments: Sequence[Any], symbol: str
) -> bytes:
    """An object file of ``function`` for arguments like these, as ``symbol``, which reads them as words in memory.

    It needs nothing but the C library: the function takes no Python object and never raises.
    """
    dispatcher = _dispatcher(function, options)
    signature = tuple(type_of(argument) for argument in arguments)
    dispatcher.compile(signature)
    made = dispatcher.overloads[signature]
    if made.signature.return_type not in (types.int64, types.none):
        raise TypeError(f"{function.__qualname__} returns {made.signature.return_type}, not int64 or None")
    module = _parse(made.library._final_module.as_bitcode())
    target = module.get_function(made.fndesc.llvm_func_name)
    target.name = f"{symbol}.target"
    module.link_in(_assembly(_spread(symbol, target.name, signature)))
    return _assembled(module, symbol)


def _assembled(module: Any, symbol: str) -> bytes:
    """The object file of a module that others call by one symbol alone: with the rest LLVM may do as it likes."""
    for one in module.functions:
        if not one.is_declaration and one.name != symbol:
            one.linkage = "internal"
    machine = cast("Any", cpu_target.target_context).codegen()._tm
    tuning = llvmlite.binding.create_pipeline_tuning_options()
    # Loops here are over a handful of requests: what is made for long ones only costs.
    tuning.loop_vectorization = tuning.loop_unrolling = False
    builder = llvmlite.binding.create_pass_builder(machine, tuning)
    builder.getModulePassManager().run(module, builder)
    return machine.emit_object(module)


def _spread(symbol: str, target: str, signature: Sequence[Any]) -> str:
    """A function in LLVM's assembly that calls another with what stands in the words at an address.

    A number is its word; tables are the address of their first word.
    """
    lines, passed, word = [], ["ptr %result", "ptr null"], 0
    for kind in signature:
        lines.append(f"%p{word} = getelementptr i64, ptr %words, i64 {word}")
        if kind == types.int64:
            lines.append(f"%w{word} = load i64, ptr %p{word}")
        passed.append(f"i64 %w{word}" if kind == types.int64 else f"ptr %p{word}")
        word += num_words(kind)
    kinds = ", ".join(one.split()[0] for one in passed)
    return "\n".join(
        [
            f'declare i32 @"{target}"({kinds})',
            f'define i32 @"{symbol}"(ptr %result, ptr %words) {{',
            *lines,
            f'%status = call i32 @"{target}"({", ".join(passed)})',
            "ret i32 %status\n}",
        ]
    )
