"""Compiling: tables as compiled code knows them, and functions that are linked into their callers.

A table is the address of its words and its shape. numba's own arrays, structs that are copied at every index, doubled
what LLVM had to read. A function that only compiled functions call is typed and lowered once, and optimised and
assembled only inside its callers. numba alone does both at each level of calls: 23 s of CPU instead of 10 for the
simulator. Four methods of its code library are overridden; a numba without them compiles in its usual way.
Only ``aot`` imports this module, to compile.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, ParamSpec, TypeVar, cast

import llvmlite.binding
import numba
import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba.core import cgutils, codegen, compiler, types
from numba.core.imputils import lower_constant
from numba.core.registry import cpu_target
from numba.core.typing import templates
from numba.core.typing.templates import AbstractTemplate, AttributeTemplate, signature
from numba.extending import lower_builtin, lower_getattr_generic, models, register_model

from harness.compiled.records import Several

_WORD = ir.IntType(64)
_from_dtype: Any = numba.from_dtype
_types_attributes: Any = templates.infer_getattr
_types_calls_of: Any = templates.infer_global


class TableType(types.Type):
    """An array of records or of int64. Its value is the address of its words: of its memory, then of its shape."""

    def __init__(self, item: Any, ndim: int) -> None:
        self.item = item
        self.ndim = ndim
        # Every function is called by the names of its arguments' types: a record's own is as long as its fields.
        super().__init__(name=f"table_{_digest(item.name, ndim)}")


class Tables(types.Type):
    """A named tuple of tables. Its value is the address of the first one's words; the others' follow."""

    def __init__(self, name: str, members: dict[str, TableType]) -> None:
        self.kind, self.members = name, members
        sizes = [num_words(one) for one in members.values()]
        self.places = dict(zip(members, accumulate(sizes, initial=0), strict=False))
        self.num_words = sum(sizes)
        super().__init__(name=f"{name}_{_digest(*(f'{key} {one.name}' for key, one in members.items()))}")


class SeveralTables(types.Type):
    """Several named tuples of one kind. Its value is the address of the first one's words; those of the others
    follow."""

    def __init__(self, each: Tables) -> None:
        self.each = each
        super().__init__(name=f"several_{each.name}")


class FunctionsByKind(types.Callable, types.Dummy):
    """Of several functions the one for the kind of tables among the arguments; by the name of the tables."""

    def __init__(self, functions: Mapping[str, Any]) -> None:
        self._functions = functions
        super().__init__(name=f"by_kind_{_digest(*functions, *map(str, functions.values()))}")

    def _chosen(self, arguments: Sequence[Any]) -> Any:
        kinds = (each.kind for each in arguments if isinstance(each, Tables))
        return next(self._functions[kind] for kind in kinds if kind in self._functions)

    def get_call_type(self, context: Any, args: Any, kws: Any) -> Any:
        return self._chosen(args).get_call_type(context, args, kws)

    def get_call_signatures(self) -> Any:
        return (), True

    def get_impl_key(self, sig: Any) -> Any:
        return self._chosen(sig.args).get_impl_key(sig)


def _digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:8]


def type_of(argument: Any) -> Any:
    """What compiled code takes for an argument of an entrypoint: see ``aot.kind_of``."""
    if isinstance(argument, np.ndarray):
        array = cast("npt.NDArray[Any]", argument)
        item = _from_dtype(array.dtype)
        if not isinstance(item, types.Record) and item != types.int64:
            raise TypeError(f"an array of {array.dtype}: compiled functions take int64 and records of it")
        return TableType(item, array.ndim)
    if isinstance(argument, tuple):
        tables = cast("Any", argument)
        return Tables(type(tables).__qualname__, {name: type_of(getattr(tables, name)) for name in tables._fields})
    if isinstance(argument, Several):
        return SeveralTables(type_of(cast("Several[Any]", argument)[0]))
    return types.int64


def num_words(kind: Any) -> int:
    """How many words an argument of that type has."""
    if isinstance(kind, Tables):
        return kind.num_words
    return 1 + kind.ndim if isinstance(kind, TableType) else 1


for _kind in (TableType, Tables, SeveralTables, FunctionsByKind):
    register_model(_kind)(models.OpaqueModel)


@lower_constant(FunctionsByKind)
def _no_value(context: Any, *_: Any) -> Any:
    return context.get_dummy_value()


@_types_attributes
class _TablesAttribute(AttributeTemplate):
    key = Tables

    def generic_resolve(self, tables: Tables, name: str) -> Any:
        return tables.members.get(name)


@lower_getattr_generic(Tables)
def _table(_context: Any, builder: Any, tables: Tables, value: Any, name: str) -> Any:
    return builder.gep(value, [_WORD(8 * tables.places[name])], inbounds=True)


@_types_calls_of(len)
class _Length(AbstractTemplate):
    def generic(self, args: Any, _named: Any) -> Any:
        return signature(types.int64, *args) if isinstance(args[0], TableType) else None


@lower_builtin(len, TableType)
def _length(_context: Any, builder: Any, _signature: Any, args: Sequence[Any]) -> Any:
    return _word(builder, args[0], 1)


@_types_calls_of(operator.getitem)
class _Item(AbstractTemplate):
    def generic(self, args: Any, _named: Any) -> Any:
        table, _ = args
        if isinstance(table, SeveralTables):
            return signature(table.each, table, types.int64)
        return signature(table.item, table, _place_type(table)) if isinstance(table, TableType) else None


@lower_builtin(operator.getitem, SeveralTables, types.Integer)
def _member(_context: Any, builder: Any, kinds: Any, args: Sequence[Any]) -> Any:
    several, place = args
    return builder.gep(several, [builder.mul(place, _WORD(8 * kinds.args[0].each.num_words))], inbounds=True)


@lower_builtin(operator.getitem, TableType, types.Integer)
@lower_builtin(operator.getitem, TableType, types.UniTuple)
def _item(context: Any, builder: Any, kinds: Any, args: Sequence[Any]) -> Any:
    address = _address(context, builder, kinds.args, args)
    return address if isinstance(kinds.return_type, types.Record) else builder.load(address)


@_types_calls_of(operator.setitem)
class _SetItem(AbstractTemplate):
    def generic(self, args: Any, _named: Any) -> Any:
        table, *_ = args
        if isinstance(table, TableType):
            return signature(types.none, table, _place_type(table), table.item)
        return None


@lower_builtin(operator.setitem, TableType, types.Integer, types.Any)
@lower_builtin(operator.setitem, TableType, types.UniTuple, types.Any)
def _set_item(context: Any, builder: Any, kinds: Any, args: Sequence[Any]) -> Any:
    table, _, item = kinds.args
    address = _address(context, builder, kinds.args, args)
    if isinstance(item, types.Record):
        cgutils.raw_memcpy(builder, address, args[2], _WORD(1), table.item.size)
    else:
        builder.store(args[2], address)
    return context.get_dummy_value()


def _place_type(table: TableType) -> Any:
    """The type of an index: int64, one for each dimension."""
    return types.int64 if table.ndim == 1 else types.UniTuple(types.int64, table.ndim)


def _address(context: Any, builder: Any, kinds: Sequence[Any], args: Sequence[Any]) -> Any:
    """Where an item lies."""
    table, words = kinds[0], args[0]
    place = args[1]
    if table.ndim > 1:
        first, *others = cgutils.unpack_tuple(builder, place)
        place = first
        for dimension, other in enumerate(others, start=2):
            place = builder.add(builder.mul(place, _word(builder, words, dimension)), other)
    pointer = context.get_value_type(table.item) if isinstance(table.item, types.Record) else _WORD.as_pointer()
    start = builder.inttoptr(_word(builder, words, 0), pointer)
    return builder.gep(start, [place], inbounds=True)


def _word(builder: Any, words: Any, place: int) -> Any:
    """A word of a table. Nothing changes it during a call: LLVM may read it once for all uses."""
    word = builder.load(builder.gep(builder.bitcast(words, _WORD.as_pointer()), [_WORD(place)], inbounds=True))
    word.set_metadata("invariant.load", builder.module.add_metadata([]))
    return word


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

    A number is its word; tables are the address of their first word; a word is that address of several tables.
    """
    lines, passed, word = [], ["ptr %result", "ptr null"], 0
    for kind in signature:
        lines.append(f"%p{word} = getelementptr i64, ptr %words, i64 {word}")
        loaded = "i64" if kind == types.int64 else "ptr" if isinstance(kind, SeveralTables) else ""
        if loaded:
            lines.append(f"%w{word} = load {loaded}, ptr %p{word}")
        passed.append(f"{loaded} %w{word}" if loaded else f"ptr %p{word}")
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
