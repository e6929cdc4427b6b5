"""Proof that a patch only observes: two sources differ only by added calls of the module's logger.

Syntax trees are compared. What cannot be proved is refused, naming the line. An added call has a constant format, and
arguments that cannot run code, fail or wait.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from harness.errors import SpecError

LOGGER = "logger"
LEVELS = ("debug", "info")
LOGGER_MAKERS = ("init_logger", "getLogger")
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_FORM = re.compile(r"%(?:[^%]|%|$)")
# A number, a name, or the length of a tensor that may be None. Reading a tensor's shape copies nothing from the device,
# does not wait, and runs no code of the package.
_ARGUMENT = re.compile(r"\d+|(?:\d+ if )?(?P<name>[^\W\d]\w*)(?: is None else (?P=name)\.shape\[0\])?")
_HINT = "A patch may only add calls of the module's logger; take that line out"


class PatchAuditError(SpecError):
    """A patch does more than observe. The message names the line."""


@dataclass(frozen=True, slots=True)
class AddedLine:
    """An added logging call: line in the patched source, and format."""

    line: int
    format: str


def audit(before: str, after: str, *, where: str) -> tuple[AddedLine, ...]:
    """Every logging call that ``after`` adds to ``before``; PatchAuditError when anything else differs.

    where: named in the error. Comments and blank lines do not count. A source cannot prove the type of a value;
    ``logging`` reports a value that does not fit %d and does not raise.
    """
    try:
        module = _parse(after, where)
        statements = _added_statements(list(_heads([_parse(before, where)])), list(_heads([module])), where)
        parents = {child: parent for parent in ast.walk(module) for child in ast.iter_child_nodes(parent)}
        for statement in statements:
            for problem in _problems(statement, module, parents):
                raise _refusal(problem, statement, where)
    except (RecursionError, MemoryError) as error:  # the parser raises MemoryError
        raise PatchAuditError("is nested too deeply to be compared", where=where) from error
    if not statements:
        raise PatchAuditError(
            "adds no logging call", where=where, hint="A patch without a logging call observes nothing; drop it"
        )
    formats = [cast("ast.Constant", cast("ast.Call", statement.value).args[0]).value for statement in statements]
    return tuple(AddedLine(statement.lineno, str(text)) for statement, text in zip(statements, formats, strict=True))


def _parse(source: str, where: str) -> ast.Module:
    try:
        return ast.parse(source.encode())  # bytes, so that an encoding line counts
    except SyntaxError as error:
        raise PatchAuditError(f"line {error.lineno} is not Python: {error.msg}", where=where) from error
    except ValueError as error:  # a null byte, before Python 3.12
        raise PatchAuditError(f"is not Python: {error}", where=where) from error


Head = tuple[str, ast.AST]


def _heads(block: Sequence[ast.AST], depth: int = 0) -> Iterator[Head]:
    """The statements of a block and of the blocks in it, in order, each as text that only equal statements share.

    A statement with blocks is followed by the name of each block and its statements.
    """
    for node in block:
        blocks = {name: inner for name in _BLOCKS if isinstance(inner := getattr(node, name, None), list) and inner}
        head = copy.copy(node)
        for name in blocks:
            setattr(head, name, [])
        yield f"{depth} {ast.dump(head)}", node
        for name, inner in blocks.items():
            yield f"{depth} {name}", node
            yield from _heads(cast("list[ast.AST]", inner), depth + 1)


def _added_statements(olds: Sequence[Head], news: Sequence[Head], where: str) -> list[ast.Expr]:
    """The logging calls that ``news`` has beside ``olds``; all other statements must be the same, in the same order."""
    added: list[ast.Expr] = []
    at = 0
    for text, node in news:
        if at < len(olds) and text == olds[at][0]:
            at += 1
        elif text.partition(" ")[2] not in _BLOCKS and _is_logging(node):
            added.append(cast("ast.Expr", node))
        elif any(text == later for later, _ in olds[at:]):
            break
        else:
            raise _refusal("adds or changes", node, where)
    if at < len(olds):
        raise _refusal("deletes or moves", olds[at][1], f"{where} old")
    return added


def _refusal(what: str, node: ast.AST, where: str) -> PatchAuditError:
    line = ast.unparse(node).splitlines()[0]
    shown = line if len(line) <= 100 else f"{line[:97]}..."
    return PatchAuditError(f"{what} {shown!r}", where=f"{where} line {getattr(node, 'lineno', '?')}", hint=_HINT)


def _is_logging(node: ast.AST) -> bool:
    """Whether it has the outer form ``logger.<level>(...)``."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=level))):
            return name == LOGGER and level in LEVELS
        case _:
            return False


def _problems(statement: ast.Expr, module: ast.Module, parents: Mapping[ast.AST, ast.AST]) -> Iterator[str]:
    """Reasons why an added logging call could do more than log."""
    path: list[ast.AST] = [statement]
    while path[-1] in parents:
        path.append(parents[path[-1]])
    scopes = [node for node in path if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))]
    if not scopes or isinstance(scopes[0], ast.ClassDef):
        yield "adds, outside any function,"
        return
    match scopes[0].body:
        case [first, ast.Expr(value=ast.Constant(value=str())), *_] if first is statement:
            yield "adds, before a docstring,"
        case _:
            pass
    if not _has_only_logger(module):
        yield f"uses a name {LOGGER!r} that is not the module's only logger in"
    yield from _call_problems(cast("ast.Call", statement.value), _names_bound_before(path, scopes[0]))


def _call_problems(call: ast.Call, bound: set[str]) -> Iterator[str]:
    if call.keywords:
        yield "passes keyword arguments (exc_info and extra run code) in"
    match call.args:
        case [ast.Constant(value=str(text)), *arguments]:
            forms = _FORM.findall(text)
        case _:
            yield "needs a constant format, which is filled in only when the line is wanted, in"
            return
    if not set(forms) <= {"%d", "%%"}:
        yield "formats with something other than %d (%s and %r run code of the value) in"
    if forms.count("%d") != len(arguments):
        yield "has a different number of %d than of arguments in"
    for argument in arguments:
        shown = ast.unparse(argument)
        form = _ARGUMENT.fullmatch(shown)
        if form is None:
            yield f"evaluates {shown!r}, which may run code or fail, in"
        elif form["name"] and form["name"] not in bound:
            yield f"reads {form['name']!r}, which may not be bound there, in"


def _has_only_logger(module: ast.Module) -> bool:
    """Whether ``logger`` is bound once, by a statement of the module that makes a logger."""
    makers = 0
    for statement in module.body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="logger")], value=ast.Call(func=maker)):
                makers += ast.unparse(maker).rpartition(".")[2] in LOGGER_MAKERS
            case _:
                pass
    return makers == 1 and sum(map(_binds_logger, ast.walk(module))) == 1


def _binds_logger(node: ast.AST) -> bool:
    if isinstance(node, ast.alias):
        return (node.asname or node.name).partition(".")[0] == LOGGER
    if isinstance(node, ast.Name):
        return node.id == LOGGER and not isinstance(node.ctx, ast.Load)
    # What is left that has a name: parameters, functions, classes, handlers, patterns, global and nonlocal.
    if isinstance(node, (ast.Attribute, ast.Constant, ast.ImportFrom, ast.keyword)):
        return False
    fields = [value for _, value in ast.iter_fields(node)]
    return any(value == LOGGER or (isinstance(value, list) and LOGGER in value) for value in fields)


def _names_bound_before(path: Sequence[ast.AST], function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    """Names of ``function`` that certainly have a value at the first node of ``path``, which leads outwards.

    These are its parameters and the plain assignments before the node, in blocks around it. A name that is deleted
    anywhere in the function, or bound by an exception handler, does not count.
    """
    arguments = function.args
    names = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    for child, parent in pairwise(path[: path.index(function) + 1]):
        for _, block in ast.iter_fields(parent):
            if isinstance(block, list) and child in block:
                statements = cast("list[ast.stmt]", block)
                names |= _surely_bound(statements[: statements.index(cast("ast.stmt", child))])
    unbound = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del)}
    return names - unbound - {node.name for node in ast.walk(function) if isinstance(node, ast.ExceptHandler)}


def _surely_bound(block: Sequence[ast.stmt]) -> set[str]:
    """Names that the statements bind on every path."""
    names: set[str] = set()
    for statement in block:
        match statement:
            case ast.Assign(targets=targets):
                nodes = [node for target in targets for node in ast.walk(target)]
                names |= {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                names.add(name)
            case ast.If(body=body, orelse=orelse):
                names |= _surely_bound(body) & _surely_bound(orelse)
            case _:
                pass
    return names
