"""Proof that a patch only observes: two sources differ only by added calls of the module's logger.

Syntax trees are compared. What cannot be proved is refused, naming the line. An added call has a constant format, and
arguments that cannot run code, fail or wait.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import cast

from harness.errors import SpecError

LOGGER = "logger"
LEVELS = frozenset({"debug", "info"})
LOGGER_MAKERS = frozenset({"init_logger", "getLogger"})
# Reading a tensor's shape copies nothing from the device, does not wait, and runs no code of the package.
PURE_ATTRIBUTE = "shape"
_INTEGER_FORM = re.compile(r"%(?:d|%)")
_ANY_FORM = re.compile(r"%(?:[^%]|%|$)")
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
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
        old, new = _parse(before, where), _parse(after, where)
        comparison = _Comparison(where, new)
        comparison.same(old, new)
    except (RecursionError, MemoryError) as error:  # the parser raises MemoryError
        raise PatchAuditError("is nested too deeply to be compared", where=where) from error
    if not comparison.added:
        raise PatchAuditError(
            "adds no logging call", where=where, hint="A patch without a logging call observes nothing; drop it"
        )
    return tuple(comparison.added)


def _parse(source: str, where: str) -> ast.Module:
    try:
        return ast.parse(source.encode())  # bytes, so that an encoding line counts
    except SyntaxError as error:
        raise PatchAuditError(f"line {error.lineno} is not Python: {error.msg}", where=where) from error
    except ValueError as error:  # a null byte, before Python 3.12
        raise PatchAuditError(f"is not Python: {error}", where=where) from error


@dataclass
class _Comparison:
    """Walks two trees in parallel. parents: the new tree's nodes around the current place, outermost first."""

    where: str
    module: ast.Module
    added: list[AddedLine] = field(default_factory=list[AddedLine])
    parents: list[ast.AST] = field(default_factory=list[ast.AST])

    def same(self, old: ast.AST, new: ast.AST) -> None:
        """Raise unless ``new`` is ``old`` with logging calls added inside its functions."""
        if type(old) is not type(new):
            self._refuse(new, "changes")
        self.parents.append(new)
        for name in old._fields:
            self._same_field(getattr(old, name, None), getattr(new, name, None), new)
        self.parents.pop()

    def _same_field(self, old: object, new: object, owner: ast.AST) -> None:
        if isinstance(old, list) and isinstance(new, list):
            olds, news = cast("list[object]", old), cast("list[object]", new)
            if any(isinstance(item, ast.stmt) for item in (*olds, *news)):
                self._same_block(cast("list[ast.stmt]", olds), cast("list[ast.stmt]", news))
                return
            for before, after in zip(olds, news, strict=False):
                self._same_field(before, after, owner)
            if len(olds) != len(news):
                extra = news[len(olds) :]
                self._refuse(extra[0] if extra and isinstance(extra[0], ast.AST) else owner, "changes")
        elif isinstance(old, ast.AST) and isinstance(new, ast.AST):
            self.same(old, new)
        # The type too: True equals 1, and 1 equals 1.0.
        elif type(old) is not type(new) or old != new:
            self._refuse(owner, "changes")

    def _same_block(self, olds: Sequence[ast.stmt], news: Sequence[ast.stmt]) -> None:
        """A block may have additional logging calls, and must have all other statements in the same order."""
        if not olds:
            self._refuse(news[0], "adds a branch with")
        at = 0
        for position, statement in enumerate(news):
            if at < len(olds) and ast.dump(statement) == ast.dump(olds[at]):
                at += 1
            elif _is_logging(statement):
                self._admit(statement, news, position)
            # A statement without a block holds no calls that could be added.
            elif at < len(olds) and type(olds[at]) is type(statement) and hasattr(statement, "body"):
                self.same(olds[at], statement)
                at += 1
            else:
                self._refuse(statement, "adds or changes")
        if at < len(olds):
            raise PatchAuditError(f"deletes or moves {_text(olds[at])}", where=self._place(olds[at], "old line"))

    def _admit(self, statement: ast.stmt, block: Sequence[ast.stmt], position: int) -> None:
        call = cast("ast.Call", cast("ast.Expr", statement).value)
        functions = [node for node in self.parents if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
        scopes = [node for node in self.parents if isinstance(node, _SCOPES)]
        if not functions or isinstance(scopes[-1], ast.ClassDef):
            self._refuse(statement, "adds, outside any function,")
        if position == 0 and _is_docstring(block[1] if len(block) > 1 else None):
            self._refuse(statement, "adds, before a docstring,")
        function = functions[-1]
        for reason in _logger_problems(self.module):
            self._refuse(statement, f"{reason} in")
        bound = _names_bound_before([*self.parents, statement], function)
        for reason in _call_problems(call, bound):
            self._refuse(statement, f"{reason} in")
        self.added.append(AddedLine(statement.lineno, cast("str", cast("ast.Constant", call.args[0]).value)))

    def _refuse(self, node: ast.AST, what: str) -> None:
        """Raise with the nearest node that has a line in the source."""
        placed = next((near for near in (node, *reversed(self.parents)) if hasattr(near, "lineno")), node)
        raise PatchAuditError(f"{what} {_text(placed)}", where=self._place(placed, "line"), hint=_HINT)

    def _place(self, node: ast.AST, word: str) -> str:
        return f"{self.where} {word} {getattr(node, 'lineno', '?')}"


def _text(node: ast.AST) -> str:
    """The node's source, as one short line."""
    line = ast.unparse(node).splitlines()[0]
    return repr(line if len(line) <= 100 else line[:97] + "...")


def _is_docstring(statement: ast.stmt | None) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Constant)
        and isinstance(statement.value.value, str)
    )


def _is_logging(statement: ast.stmt) -> bool:
    """Whether it has the outer form ``logger.<level>(...)``."""
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and isinstance(statement.value.func, ast.Attribute)
        and isinstance(statement.value.func.value, ast.Name)
        and statement.value.func.value.id == LOGGER
        and statement.value.func.attr in LEVELS
    )


def _logger_problems(module: ast.Module) -> Iterator[str]:
    """``logger`` must be the only logger of the module, and bound only once."""
    makers = [
        statement
        for statement in module.body
        if isinstance(statement, ast.Assign)
        and isinstance(statement.value, ast.Call)
        and ast.unparse(statement.value.func).rpartition(".")[2] in LOGGER_MAKERS
        and [ast.unparse(target) for target in statement.targets] == [LOGGER]
    ]
    bindings = [node for node in ast.walk(module) if _binds(node, LOGGER)]
    if len(makers) != 1 or len(bindings) != 1:
        yield f"uses a name {LOGGER!r} that is not the module's only logger"


def _binds(node: ast.AST, name: str) -> bool:
    if isinstance(node, ast.Name):
        return node.id == name and not isinstance(node.ctx, ast.Load)
    if isinstance(node, ast.arg):
        return node.arg == name
    if isinstance(node, ast.alias):
        return (node.asname or node.name).partition(".")[0] == name
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return node.name == name
    if isinstance(node, (ast.Global, ast.Nonlocal)):
        return name in node.names
    # except ... as name; case ... as name; case *name; case {**name}
    return name in (
        getattr(node, "name", None) if isinstance(node, (ast.ExceptHandler, ast.MatchAs, ast.MatchStar)) else None,
        node.rest if isinstance(node, ast.MatchMapping) else None,
    )


def _call_problems(call: ast.Call, bound: frozenset[str]) -> Iterator[str]:
    """Reasons why a logging call could do more than log."""
    if call.keywords:
        yield "passes keyword arguments (exc_info and extra run code)"
    if not call.args or not isinstance(call.args[0], ast.Constant) or not isinstance(call.args[0].value, str):
        yield "needs a constant format, which is filled in only when the line is wanted,"
        return
    text = call.args[0].value
    forms = _ANY_FORM.findall(text)
    if any(not _INTEGER_FORM.fullmatch(form) for form in forms):
        yield "formats with something other than %d (%s and %r run code of the value)"
    if sum(form == "%d" for form in forms) != len(call.args) - 1:
        yield "has a different number of %d than of arguments"
    for argument in call.args[1:]:
        yield from _argument_problems(argument, bound, not_none=frozenset())


def _argument_problems(node: ast.expr, bound: frozenset[str], not_none: frozenset[str]) -> Iterator[str]:
    """Allowed: a number, a bound name, ``x.shape[0]`` where x is known not to be None, ``a if x is None else b``."""
    if isinstance(node, ast.Constant):
        if type(node.value) is not int:
            yield f"passes the constant {node.value!r} to %d"
    elif isinstance(node, ast.Name):
        if node.id not in bound:
            yield f"reads {node.id!r}, which may not be bound there,"
    elif isinstance(node, ast.IfExp) and (tested := _tested_for_none(node.test)):
        name, is_none = tested
        if name not in bound:
            yield f"reads {name!r}, which may not be bound there,"
        known = not_none | {name}
        yield from _argument_problems(node.body, bound, not_none if is_none else known)
        yield from _argument_problems(node.orelse, bound, known if is_none else not_none)
    elif (shaped := _name_of_shape(node)) is not None:
        if shaped not in bound:
            yield f"reads {shaped!r}, which may not be bound there,"
        if shaped not in not_none:
            yield f"reads the shape of {shaped!r}, which may be None,"
    else:
        yield f"evaluates {_text(node)}, which may run code,"


def _tested_for_none(test: ast.expr) -> tuple[str, bool] | None:
    """("x", True) for ``x is None``, ("x", False) for ``x is not None``."""
    if (
        isinstance(test, ast.Compare)
        and isinstance(test.left, ast.Name)
        and len(test.ops) == 1
        and isinstance(test.ops[0], (ast.Is, ast.IsNot))
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    ):
        return test.left.id, isinstance(test.ops[0], ast.Is)
    return None


def _name_of_shape(node: ast.expr) -> str | None:
    """ "x" for ``x.shape[0]``."""
    if (
        isinstance(node, ast.Subscript)
        and isinstance(node.slice, ast.Constant)
        and type(node.slice.value) is int
        and node.slice.value == 0
        and isinstance(node.value, ast.Attribute)
        and node.value.attr == PURE_ATTRIBUTE
        and isinstance(node.value.value, ast.Name)
    ):
        return node.value.value.id
    return None


def _names_bound_before(path: Sequence[ast.AST], function: ast.FunctionDef | ast.AsyncFunctionDef) -> frozenset[str]:
    """Names of ``function`` that certainly have a value at the last node of ``path``.

    These are its parameters and the plain assignments before the node, in blocks around it. A name that is deleted
    anywhere in the function, or bound by an exception handler, does not count.
    """
    arguments = function.args
    names = {argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
    inside = path[path.index(function) :]
    for parent, child in pairwise(inside):
        for _, block in ast.iter_fields(parent):
            if isinstance(block, list) and child in block:
                statements = cast("list[ast.stmt]", block)
                for statement in statements[: statements.index(cast("ast.stmt", child))]:
                    names |= _surely_bound(statement)
    unbound = {node.id for node in ast.walk(function) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Del)}
    unbound |= {node.name for node in ast.walk(function) if isinstance(node, ast.ExceptHandler) and node.name}
    return frozenset(names - unbound)


def _surely_bound(statement: ast.stmt) -> set[str]:
    """Names that a statement binds on every path."""
    if isinstance(statement, ast.Assign):
        targets: list[ast.expr] = []
        for target in statement.targets:
            targets += target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
        return {target.id for target in targets if isinstance(target, ast.Name)}
    if isinstance(statement, ast.AnnAssign) and statement.value is not None and isinstance(statement.target, ast.Name):
        return {statement.target.id}
    if isinstance(statement, ast.If) and statement.orelse:
        branches = [_bound_by_all(statement.body), _bound_by_all(statement.orelse)]
        return branches[0] & branches[1]
    return set()


def _bound_by_all(block: Sequence[ast.stmt]) -> set[str]:
    names: set[str] = set()
    for statement in block:
        names |= _surely_bound(statement)
    return names
