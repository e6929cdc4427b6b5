"""The Python sources of a release (wheel, zip, site-packages, virtual environment), and a source as statements.

Statements compare by what they do, on any Python, whatever their layout: comments, docstrings, annotations, logging
calls, error messages and imports do not count. Files are read as text, never imported, run or unpacked.
"""

from __future__ import annotations

import ast
import hashlib
import re
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, cast

from harness.errors import SpecError

Read = Callable[[str], "str | None"]
"""The source of a file below site-packages; None when missing."""
RBLN, VLLM = "vllm_rbln", "vllm"
MAX_SOURCE_BYTES = 8 << 20
"""Largest source file that is read. A longer file comes from a damaged or hostile archive."""
_HINT = "Give a wheel (pip download --no-deps vllm-rbln==VERSION), a virtual environment or a site-packages folder"
_PIN = re.compile(r"^Requires-Dist: vllm *\(?==([\w.]+)(?:\+\w+)?\)?\s*$", re.MULTILINE)
_VERSION = re.compile(r"^Version: (\S+)\s*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sources:
    """Sources of one package. read: a file below site-packages, None when missing. vllm_pin: "" when none is pinned."""

    package: str
    version: str
    place: Path
    read: Read
    vllm_pin: str = ""


@dataclass(frozen=True, slots=True)
class Release:
    """A vllm-rbln and the vLLM that serves with it; vllm: None when its sources are not at hand.

    A release of vLLM itself is both.
    """

    named: Sources
    vllm: Sources | None

    @property
    def vllm_version(self) -> str:
        """The version of that vLLM, or the version that the release pins."""
        return self.named.vllm_pin if self.vllm is None else self.vllm.version

    @classmethod
    def of(cls, path: Path, vllm: Path | None = None) -> Release:
        """The release in ``path``: a vllm-rbln, with the vLLM in ``vllm`` or beside it, or else vLLM itself."""
        try:
            rbln = open_sources(path)
        except NoPackageError as error:
            try:
                itself = open_sources(path, VLLM)
            except NoPackageError:
                raise error from None
            if vllm is not None:
                raise SpecError(
                    "holds vLLM itself, which has no other vLLM beside it", where=str(path), hint="Leave --vllm out"
                ) from None
            return cls(itself, itself)
        return cls(rbln, vllm_beside(rbln) if vllm is None else open_sources(vllm, VLLM))


class NoPackageError(SpecError):
    """A path can hold sources, and holds none of the package that was looked for."""


def open_sources(path: Path, package: str = RBLN) -> Sources:
    """The sources of ``package`` in ``path``; SpecError when they are not there or the path cannot hold them."""
    if path.is_dir():
        return _in_folder(path, package)
    if not path.is_file():
        raise SpecError("no such file or folder", where=str(path), hint=_HINT)
    try:
        with zipfile.ZipFile(path) as archive:
            sizes = {
                member.filename: member.file_size for member in archive.infolist() if member.filename.isprintable()
            }
    except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise SpecError(f"is not a wheel or zip ({error})", where=str(path), hint=_HINT) from error

    def read(name: str) -> str | None:
        if name not in sizes:
            return None
        if sizes[name] > MAX_SOURCE_BYTES:
            raise SpecError(f"{name} has {sizes[name]} bytes: too long for a source", where=str(path))
        try:
            with zipfile.ZipFile(path) as archive:
                return _decoded(archive.read(name), name, path)
        except SpecError:
            raise
        # zlib.error, NotImplementedError and RuntimeError: damaged, unknown or encrypted members.
        except Exception as error:
            raise SpecError(f"{name} cannot be read ({error})", where=str(path), hint="Download it again") from error

    return _sources(path, package, read, sorted(sizes))


def vllm_beside(rbln: Sources) -> Sources | None:
    """The vLLM that serves with ``rbln``: in the same site-packages, or a wheel of the pinned version beside it."""
    if rbln.place.is_dir():
        return open_sources(rbln.place, VLLM) if (rbln.place / VLLM / "__init__.py").is_file() else None
    return wheel_beside(rbln.place, VLLM, rbln.vllm_pin)


def wheel_beside(place: Path, package: str, version: str) -> Sources | None:
    """A wheel of another release in the folder of the wheel ``place``."""
    wheels = sorted(place.parent.glob(f"{package}-{version}-*.whl")) if version and place.is_file() else []
    return open_sources(wheels[0], package) if wheels else None


def _in_folder(path: Path, package: str) -> Sources:
    places = [path, *sorted(path.glob("lib/python3*/site-packages"))]
    root = next((place for place in places if (place / package / "__init__.py").is_file()), None)
    if root is None:
        raise NoPackageError(f"holds no {package}", where=str(path), hint=_HINT)

    def read(name: str) -> str | None:
        file = root / name
        with SpecError.on_os_error("cannot be read", where=file):
            if not file.is_file():
                return None
            if file.stat().st_size > MAX_SOURCE_BYTES:
                raise SpecError("too long for a source", where=str(file))
            return _decoded(file.read_bytes(), name, root)

    names = [file.relative_to(root).as_posix() for file in sorted(root.glob(f"{package}-*.dist-info/METADATA"))]
    return _sources(root, package, read, [*names, f"{package}/"])


def _sources(place: Path, package: str, read: Read, names: list[str]) -> Sources:
    metadata = [name for name in names if name.startswith(f"{package}-") and name.endswith(".dist-info/METADATA")]
    if not metadata or not any(name.startswith(f"{package}/") for name in names):
        raise NoPackageError(f"holds no {package}", where=str(place), hint=_HINT)
    text = read(metadata[-1]) or ""
    version, pin = _VERSION.search(text), _PIN.search(text)
    if version is None:
        raise SpecError("states no version", where=f"{place}: {metadata[-1]}", hint="Download it again")
    return Sources(package, version[1].partition("+")[0], place, read, pin[1] if pin else "")


def _decoded(content: bytes, name: str, where: Path) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise SpecError(f"{name} is not UTF-8", where=str(where), hint="Download it again") from error


DIGEST_CHARS = 16
LINE_CHARS = 4
"""Hex digits that stand for a statement: enough to align two versions. Equality is decided by the whole digest."""
_LOG_LEVELS = frozenset({"debug", "info", "warning", "warning_once", "info_once", "error", "exception"})
# Fields without behaviour, or that differ between versions of Python for the same source.
_SKIPPED_FIELDS = frozenset({"annotation", "returns", "type_comment", "type_params", "kind", "ctx", "simple"})
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")
_Function = (ast.FunctionDef, ast.AsyncFunctionDef)


class Statement(NamedTuple):
    """A statement, or the head of a compound statement. meaning: compared. text: the source on one line."""

    meaning: str
    text: str

    @property
    def mark(self) -> str:
        return sha256(self.meaning)[:LINE_CHARS]


def sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def digest_of(statements: Sequence[Statement]) -> str:
    """Digest of what the statements do; "" for no statements."""
    return sha256("\n".join(statement.meaning for statement in statements))[:DIGEST_CHARS] if statements else ""


def function_statements(source: str, names: Sequence[str], *, with_logging: bool = False) -> list[Statement]:
    """The statements of the functions and classes called ``names`` ("Class.method"), in that order.

    A missing name gives no statements. with_logging: logging calls count too. Raises SyntaxError, ValueError and
    RecursionError for text that is not Python, as ``ast`` does.
    """
    tree = ast.parse(source)
    statements: list[Statement] = []
    for name in names:
        node = _find(tree, name.split("."))
        if node is not None:
            statements += _of_block([node], source.splitlines(), 0, with_logging)
    return statements


def strings(source: str) -> list[str]:
    """Every string of a source, f-strings with ``{}`` for their values, and the name of every annotated attribute.

    Names: vLLM makes a flag of each annotated attribute of its argument classes.
    """
    texts: list[str] = []
    inside = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            inside.update(id(part) for part in node.values)
            parts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values]
            texts.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            texts.append(node.value)
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            texts.append(node.target.id)
    return texts


def _find(node: ast.AST, path: Sequence[str]) -> ast.stmt | None:
    for name in path:
        body = cast("list[ast.stmt]", getattr(node, "body", []))
        # The last definition counts, as it does when the module runs; overloads come before it.
        named = [item for item in body if isinstance(item, (*_Function, ast.ClassDef)) and item.name == name]
        if not named:
            return None
        node = named[-1]
    return cast("ast.stmt", node)


def _of_block(block: Sequence[ast.AST], lines: Sequence[str], depth: int, with_logging: bool) -> Iterator[Statement]:
    for node in block:
        if _counts(node, with_logging):
            yield Statement(f"{depth} {_meaning(node, is_head=True)}", _text(node, lines))
            for name in _BLOCKS:
                inner = getattr(node, name, None)
                if isinstance(inner, list) and inner:
                    if name in ("orelse", "finalbody"):
                        yield Statement(f"{depth} {name}", "else:" if name == "orelse" else "finally:")
                    yield from _of_block(cast("list[ast.AST]", inner), lines, depth + 1, with_logging)


def _counts(node: ast.AST, with_logging: bool) -> bool:
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return False
    if isinstance(node, ast.AnnAssign):
        return node.value is not None
    if not isinstance(node, ast.Expr):
        return True
    value = node.value
    if isinstance(value, ast.Constant):
        return False
    is_logging = (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and isinstance(value.func.value, ast.Name)
        and value.func.value.id == "logger"
        and value.func.attr in _LOG_LEVELS
    )
    return with_logging or not is_logging


def _meaning(node: object, *, is_head: bool = False) -> str:
    """A text that is equal for equal trees, on every Python that can parse them."""
    if isinstance(node, list):
        return f"[{','.join(_meaning(item) for item in cast('list[object]', node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    kind, skipped = type(node).__name__, _SKIPPED_FIELDS
    if isinstance(node, ast.AnnAssign):
        return f"Assign([{_meaning(node.target)}],{_meaning(node.value)})"
    if isinstance(node, ast.Assign):
        return f"Assign({_meaning(node.targets)},{_meaning(node.value)})"
    if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
        return f"Raise({_meaning(node.exc.func)})"  # the text of a message is not behaviour
    if isinstance(node, ast.Assert):
        skipped = skipped | {"msg"}
    if is_head:
        skipped = skipped | set(_BLOCKS)
    values = ((name, cast("object", getattr(node, name, None))) for name in node._fields if name not in skipped)
    # Empty fields are left out: newer Pythons have fields that older versions lack.
    return f"{kind}({','.join(f'{name}={_meaning(value)}' for name, value in values if value not in (None, []))})"


def _text(node: ast.AST, lines: Sequence[str]) -> str:
    """The source of the statement up to its block, on one line."""
    first, last = getattr(node, "lineno", 0), getattr(node, "end_lineno", 0)
    if not first:
        return type(node).__name__
    inner = (item for name in _BLOCKS for item in getattr(node, name, ()))
    starts = [item.lineno for item in inner if isinstance(item, ast.stmt)]
    if starts:
        last = max(first, min(last, min(starts) - 1))
    kept = [re.sub(r"\s#\s.*$|^\s*#.*$", "", line) for line in lines[first - 1 : last]]
    return " ".join(" ".join(kept).split())
