"""Compiled functions that Python calls, kept as object files and loaded by LLVM alone.

numba makes an object file once for each kind of arguments. Importing numba, and its own cache after it, takes two
seconds of CPU; a process that finds the file needs neither. Nothing is compiled here.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import struct
import sys
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache, update_wrapper
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import numpy as np

from harness.compiled.records import Several, table_words

Native = Callable[[Any, bytes], int]
SYMBOL = "entrypoint"
"""The function's name in its object file: int32 entrypoint(int64 *result, const int64 *words)."""
SUFFIX = ".aot.o"
_log = logging.getLogger(__name__)
_PACKAGE = Path(__file__).resolve().parents[1]
_announced: set[Path] = set()
"""Files whose compilation was announced: a person waits for it."""


class JitFunction:
    """A function that only compiled functions call. numba finds its type here when one of those is compiled."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        self.__doc__ = function.__doc__
        self.function = function
        self.options = options
        self._dispatcher: Any = None

    @property
    def _numba_type_(self) -> Any:
        from harness.compiled.linked import linked, type_of_function

        if self._dispatcher is None:
            self._dispatcher = linked(self.function, self.options)
        return type_of_function(self._dispatcher)


class FunctionByKind:
    """Functions of which the kind of tables among the arguments chooses one, by the name of its class."""

    def __init__(self, functions: Mapping[str, Callable[..., Any]]) -> None:
        self.functions = functions

    @cached_property
    def _numba_type_(self) -> Any:
        from harness.compiled.linked import FunctionsByKind

        return FunctionsByKind({kind: cast("Any", each)._numba_type_ for kind, each in self.functions.items()})

    def __call__(self, *arguments: Any) -> Any:
        """In the interpreter; compiled functions call the one that was chosen."""
        kinds = (type(argument).__qualname__ for argument in arguments)
        return next(self.functions[kind] for kind in kinds if kind in self.functions)(*arguments)


class AotFunction:
    """One function for Python: arguments are int64 numbers, int64 arrays, tables of them and named tuples of those."""

    def __init__(self, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
        update_wrapper(self, function)
        self._function = function
        self._options = options
        self._has_result = function.__annotations__.get("return") not in (None, "None")
        self._codes: dict[object, Native] = {}

    def __call__(self, *arguments: Any) -> int | None:
        """Its number, or None."""
        return self._run(self._code_for(arguments), _words(arguments))

    def bind(self, *tables: Any) -> Callable[..., int | None]:
        """The function of its other arguments, always of the same kinds. The addresses of ``tables`` are read once."""
        words, code = _words(tables), None

        def call(*rest: Any) -> int | None:
            nonlocal code
            if code is None:
                code = self._code_for((*tables, *rest))
            return self._run(code, words + _words(rest))

        return call

    def _run(self, code: Native, words: bytes) -> int | None:
        result = ctypes.c_int64()
        if code(ctypes.byref(result), words):
            raise RuntimeError(f"{self._function.__qualname__}: compiled functions never raise, this one did")
        return result.value if self._has_result else None

    def _code_for(self, arguments: Sequence[Any]) -> Native:
        kinds = tuple(map(kind_of, arguments))
        code = self._codes.get(kinds)
        if code is None:
            code = self._codes[kinds] = _load(self._object_code(arguments, repr(kinds)))
        return code

    @property
    def has_machine_code(self) -> bool:
        """Whether machine code of the function as it is now is on disk, for whichever arguments."""
        folder = _folder()
        return folder is not None and any(folder.glob(f"{self._file_name}-*{SUFFIX}"))

    @cached_property
    def _file_name(self) -> str:
        """Names the function, and what is compiled into it: its bytecode, all that it calls, and how that is done."""
        digest = hashlib.sha256()
        for part in (_target(), repr(self._options), *_bytecode(self._function, set())):
            digest.update(part.encode())
        for path in sorted(Path(__file__).parent.glob("*.py")):
            digest.update(path.read_bytes())
        return f"{self._function.__qualname__}-{digest.hexdigest()[:16]}"

    def _object_code(self, arguments: Sequence[Any], kinds: str) -> bytes:
        """From its file, or compiled now. Other processes wait while one compiles."""
        folder = _folder()
        if folder is None:
            return self._make(arguments, folder)
        path = folder / f"{self._file_name}-{hashlib.sha256(kinds.encode()).hexdigest()[:8]}{SUFFIX}"
        with suppress(OSError):
            return path.read_bytes()
        with _file_lock(path.with_suffix(".lock")):
            with suppress(OSError):
                return path.read_bytes()
            code = self._make(arguments, folder)
            with suppress(OSError):
                # The folder may be full or gone: slower starts, same results.
                partial = path.with_suffix(f".{os.getpid()}")
                partial.write_bytes(code)
                partial.replace(path)
        return code

    def _make(self, arguments: Sequence[Any], folder: Path | None) -> bytes:
        from harness.compiled.linked import object_code

        source = Path(self._function.__code__.co_filename)
        if source not in _announced:
            _announced.add(source)
            what = source.relative_to(_PACKAGE.parent) if source.is_relative_to(_PACKAGE) else source.name
            _log.warning("compiling %s for this machine: once, some 10 s; kept in %s", what, folder)
        return object_code(self._function, self._options, arguments, SYMBOL)


def _bytecode(function: Callable[..., Any], seen: set[JitFunction]) -> Iterator[str]:
    """The code of a function and of all compiled functions that it calls, with the values of the constants they name.

    Tables need no mention: their fields are in the kinds of the arguments.
    """
    code = function.__code__
    yield repr((code.co_code, code.co_consts, code.co_names, code.co_varnames, function.__defaults__))
    for name in code.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, ModuleType):
            raise TypeError(f"{function.__qualname__}: import what it needs from {name}, of which nobody sees changes")
        if isinstance(value, int):
            yield f"{name}={value}"
        for called in value.functions.values() if isinstance(value, FunctionByKind) else (value,):
            if isinstance(called, JitFunction) and called not in seen:
                seen.add(called)
                yield f"{name} {dict(called.options)}"
                yield from _bytecode(called.function, seen)


@lru_cache(maxsize=1)
def _folder() -> Path | None:
    """Where machine code is kept; None where no folder can hold it."""
    usual = [Path(__file__).parent / "__pycache__"]
    with suppress(RuntimeError):  # a user without a home folder
        usual.append(Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rbln-harness")
    given = os.environ.get("NUMBA_CACHE_DIR", "")
    for parent in (Path(given),) if given else usual:
        folder = parent / "machine-code"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    return None


def _words(arguments: Sequence[Any]) -> bytes:
    """Arguments as the code takes them: a number, or of each array its address and its shape. See ``linked``.

    Of several named tuples it is the address of their words.
    """
    words: list[int] = []
    for argument in arguments:
        if isinstance(argument, Several):
            words.append(cast("Several[Any]", argument).words.ctypes.data)
        elif isinstance(argument, tuple | np.ndarray):
            words += table_words(cast("Any", argument if isinstance(argument, tuple) else (argument,)))
        else:
            words.append(argument)
    return struct.pack(f"{len(words)}q", *words)


def kind_of(argument: Any) -> object:
    """What decides the machine code for an argument, and nothing else of it.

    Raises TypeError for an array that does not lie in memory row after row.
    """
    if isinstance(argument, np.ndarray):
        if not argument.flags.c_contiguous:
            raise TypeError("a compiled function takes arrays that lie in memory row after row: copy this one first")
        return (argument.dtype, argument.ndim)
    if isinstance(argument, tuple):
        tables = cast("tuple[Any, ...]", argument)
        return (type(tables).__qualname__, *map(kind_of, tables))
    if isinstance(argument, Several):
        return ("several", kind_of(cast("Several[Any]", argument)[0]))
    return "int64"


@lru_cache(maxsize=1)
def _llvm() -> Any:
    # Imported late: commands that only read records run no machine code.
    return import_module("llvmlite.binding")


@lru_cache(maxsize=1)
def _target() -> str:
    """Versions of the compilers, the bytecode, and the processor that the code is for."""
    makers = [f"{name} {version(name)}" for name in ("numba", "llvmlite", "numpy")]
    features = _llvm().get_host_cpu_features().flatten()
    return " ".join([*makers, sys.implementation.cache_tag or "", _llvm().get_host_cpu_name(), features])


@lru_cache(maxsize=1)
def _target_machine() -> Any:
    llvm = _llvm()
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine()


_engines: list[Any] = []
"""They own the code, and live as long as the process."""


def _load(code: bytes) -> Native:
    llvm = _llvm()
    engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    prototype = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_char_p)
    return cast("Native", prototype(engine.get_function_address(SYMBOL)))


@contextmanager
def _file_lock(lock: Path) -> Generator[None, None, None]:
    """Hold a file's lock; without one where no file can be made."""
    try:
        file = lock.open("w")
    except OSError:
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
