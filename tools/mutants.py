"""Small mistakes, one at a time, in a copy of the checkout: which of them do the tests near the changed module notice?

``python tools/mutants.py SEED [EACH [AREA ...]]`` draws EACH mistakes of each area, or of those that are named, and
writes a line of JSON for each to ``runs/mutants-SEED.jsonl``; a run that was ended goes on there. A mistake that no
test notices is a hole, or changes nothing that is promised. Tests that start servers (``live``, ``twin``) take no part.
Only test files that enter the changed function run, the cheapest first. The checkout is only read.
"""

from __future__ import annotations

import ast
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import hypothesis
import pytest

ROOT = Path(__file__).parent.parent
AREAS = ("model/engine", "analysis/compare", "measure/records", "measure/client", "model/traces")
EACH = 60
MAX_CPU_S, MAX_WALL_S = 150, 400
"""Of one mutant's tests. What takes longer does not end by itself, and counts as noticed."""
PACKAGES = ("aiohttp", "duckdb", "matplotlib.figure", "numpy", "pyarrow.dataset", "pydantic", "scipy.special", "xdist")
"""What tests import, loaded once."""
OPTIONS = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not live and not twin", "-W"]
# Plain Python says where numbers of the engine overflow, as they do by design.
OPTIONS += ["ignore::pytest.PytestAssertRewriteWarning", "-W", "ignore:overflow"]
SWAPS: Mapping[str, Sequence[str]] = {
    **{"<": ("<=", ">="), "<=": ("<", ">"), ">": (">=", "<="), ">=": (">", "<"), "==": ("!=",), "!=": ("==",)},
    **{"in": ("not in",), "not in": ("in",), "is": ("is not",), "is not": ("is",), "and": ("or",), "or": ("and",)},
    **{"+": ("-",), "-": ("+",), "*": ("+",), "/": ("*",), "//": ("*",), "%": ("//",)},
}
"""What an operator becomes."""
_OPERATOR = re.compile(r"\b(not\s+in|in|is\s+not|is|and|or)\b|\*\*|<<|>>|//|[<>=!]=|[-+*/%<>]")


WATCH = """
import os, sys, threading

if "MUTANTS_ENTERED" in os.environ:
    known, log = {}, os.open(os.environ["MUTANTS_ENTERED"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(frame, event, _):
        code = frame.f_code
        if id(code) not in known:
            known[id(code)] = code
            try:
                os.write(log, f"{code.co_filename}\\t{code.co_name}\\n".encode())
            except OSError:
                pass  # a test of full disks limits the size of files

    sys.setprofile(note)
    threading.setprofile(note)
"""
"""A ``sitecustomize`` module: every process of a test, started or forked, writes down which functions it enters."""


@dataclass(frozen=True)
class FileOfTests:
    """A file of tests, the (module, function) that they enter, and what they cost."""

    path: str
    entered: frozenset[tuple[str, str]]
    cpu_s: float


@dataclass(frozen=True, order=True)
class Mutant:
    """``old``, at an offset of a file in bytes, becomes ``new``."""

    area: str
    path: str
    offset: int
    kind: str
    old: str
    new: str

    def apply(self, text: bytes) -> bytes:
        old = self.old.encode()
        assert text[self.offset :].startswith(old)
        return text[: self.offset] + self.new.encode() + text[self.offset + len(old) :]


class _Places(ast.NodeVisitor):
    """Collects (offset, kind, old, new) of a module. Annotations, decorators and text are left as they are."""

    def __init__(self, text: bytes) -> None:
        self.text = text
        lines = text.splitlines(keepends=True)
        self.starts = [sum(map(len, lines[:number])) for number in range(len(lines) + 1)]
        self.found: list[tuple[int, str, str, str]] = []
        self.visit(ast.parse(text))

    def begin(self, node: Any) -> int:
        return self.starts[node.lineno - 1] + node.col_offset

    def end(self, node: Any) -> int:
        return self.starts[node.end_lineno - 1] + node.end_col_offset

    def replace(self, kind: str, node: ast.AST, new: str) -> None:
        self.found.append((self.begin(node), kind, self.text[self.begin(node) : self.end(node)].decode(), new))

    def between(self, kind: str, left: ast.AST, right: ast.AST) -> None:
        """The operator of two sides; brackets and comments around it do not look like one."""
        written = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self.text)
        match = _OPERATOR.search(written[self.end(left) : self.begin(right)].decode("ascii", "replace"))
        for new in SWAPS.get(" ".join(match[0].split()), ()) if match else ():
            self.found.append((self.end(left) + match.start(), kind, match[0], new))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        returned = [each.value for each in ast.walk(node) if isinstance(each, ast.Return) and each.value]
        for value, neighbour in zip(returned, returned[1:] + returned[:1], strict=True):
            if ast.dump(value) != ast.dump(neighbour):
                self.replace("return", value, self.text[self.begin(neighbour) : self.end(neighbour)].decode())
        for default in (*node.args.defaults, *filter(None, node.args.kw_defaults)):
            self.visit(default)
        for statement in node.body:
            self.visit(statement)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "strict":
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Its text is for people, and places within it are known from Python 3.12 on."""

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = (node.left, *node.comparators)
        for left, right in pairwise(sides):
            self.between("comparison", left, right)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        self.between("and/or", node.values[0], node.values[1])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if not any(_is_text(side) for side in (node.left, node.right)):
            self.between("arithmetic", node.left, node.right)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self.replace("not", node, f"bool({self.text[self.begin(node.operand) : self.end(node.operand)].decode()})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.replace("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self.replace("+/-1", node, str(node.value + 1))
            self.replace("+/-1", node, f"({node.value - 1})")
        elif isinstance(node.value, float):
            self.replace("constant", node, repr(node.value * 2 or 1.0))


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def draw(area: str, seed: int, each: int) -> list[Mutant]:
    """``each`` mutants of an area: of every kind as many, as long as there are some."""
    by_kind: dict[str, list[Mutant]] = defaultdict(list)
    for path in sorted((ROOT / "harness" / area).rglob("*.py")):
        for offset, kind, old, new in sorted(set(_Places(path.read_bytes()).found)):
            by_kind[kind].append(Mutant(area, str(path.relative_to(ROOT)), offset, kind, old, new))
    dice, drawn = random.Random(f"{seed} {area}"), list[Mutant]()
    for mutants in by_kind.values():
        dice.shuffle(mutants)
    while len(drawn) < each and any(by_kind.values()):
        drawn += [mutants.pop() for _, mutants in sorted(by_kind.items()) if mutants]
    return drawn[:each]


def function_at(path: str, offset: int) -> str:
    """The innermost function around a place, ``<module>`` where there is none: it runs whenever the module is used."""
    text = (ROOT / path).read_bytes()
    places, around = _Places(text), {0: "<module>"}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and places.begin(node) < offset < places.end(node):
            around[places.begin(node)] = node.name
    return around[max(around)]


def watched(copy: Path, area: str) -> list[FileOfTests]:
    """The test files of a room, each run once without any mistake; the cheapest come first."""
    (copy / "sitecustomize.py").write_text(WATCH)
    files, log = list[FileOfTests](), copy / "entered"
    for path in sorted((ROOT / "tests" / area).glob("test_*.py")):
        name = str(path.relative_to(ROOT))
        log.write_text("")
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        if not passes(copy, [name], log):
            raise SystemExit(f"mutants: {name} fails without any mistake: run it first")
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        lines = (line.split("\t") for line in set(log.read_text().splitlines()))
        here = f"{copy}/"
        entered = frozenset((place.removeprefix(here), function) for place, function in lines if place.startswith(here))
        files.append(FileOfTests(name, entered, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))
    return sorted(files, key=lambda file: file.cpu_s)


def passes(copy: Path, tests: Sequence[str], log: Path | None = None) -> bool:
    """Whether tests pass in a copy. They run in a fork of this process, which has imported what they need.

    log: where each process writes which functions it enters.
    """
    if child := os.fork():
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        return status in {0, 5}
    os.setsid()
    os.chdir(copy)
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    signal.alarm(MAX_WALL_S)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    sys.path[:] = [str(copy), *(place for place in sys.path if place not in {"", str(ROOT), str(ROOT / "tools")})]
    os.environ["PYTHONPATH"] = str(copy)
    os.environ["NUMBA_DISABLE_JIT"] = str(int(tests[0].startswith("tests/model/engine/")))
    if log is not None:
        os.environ["MUTANTS_ENTERED"] = str(log)
        exec(WATCH, {})
    os._exit(pytest.main([*OPTIONS, *tests]))


def is_noticed(mutant: Mutant, tests: Sequence[FileOfTests], copy: Path, stamp: int) -> bool:
    """Whether a test fails. stamp: another one for each mutant, so that no bytecode of an earlier one is taken."""
    place = mutant.path, function_at(mutant.path, mutant.offset)
    near = [file.path for file in tests if place in file.entered]
    path, before = copy / mutant.path, (copy / mutant.path).read_bytes()
    try:
        path.write_bytes(mutant.apply(before))
        os.utime(path, (stamp, stamp))
        return bool(near) and not passes(copy, near)
    finally:
        path.write_bytes(before)
        os.utime(path, (stamp + 1, stamp + 1))


def results(mutants: Sequence[Mutant], into: Path) -> Iterator[tuple[Mutant, bool]]:
    """Try each; what ``into`` has of an earlier run is not tried again."""
    known = {line.rpartition("\t")[0]: line for line in into.read_text().splitlines()} if into.is_file() else {}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "copy"
        subprocess.run(["git", "clone", "-q", "--shared", ROOT, copy], check=True)
        shutil.copytree(ROOT / "harness", copy / "harness", dirs_exist_ok=True)
        shutil.copytree(ROOT / "tests", copy / "tests", dirs_exist_ok=True)
        tests = {area: watched(copy, area) for area in {mutant.area for mutant in mutants}}
        for number, mutant in enumerate(mutants):
            name = json.dumps(asdict(mutant))
            if name not in known:
                is_seen = is_noticed(mutant, tests[mutant.area], copy, 2 * number)
                known[name] = f"{name}\t{'noticed' if is_seen else 'SURVIVES'}"
                with into.open("a") as file:
                    print(known[name], file=file)
            yield mutant, known[name].endswith("noticed")


def main() -> None:
    """Print how many mutants of each area were noticed, and those that were not."""
    seed, each = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else EACH
    areas = sys.argv[3:] or AREAS
    for name in PACKAGES:
        import_module(name)
    # A failure is enough: no shorter one is sought. tests/conftest.py builds on this profile.
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    hypothesis.settings.register_profile("once", phases=phases, database=None, derandomize=True)
    hypothesis.settings.load_profile("once")
    into = ROOT / "runs" / f"mutants-{seed}.jsonl"
    into.parent.mkdir(exist_ok=True)
    mutants = [mutant for area in areas for mutant in draw(area, seed, each)]
    random.Random(seed).shuffle(mutants)
    noticed, tried = Counter[str](), Counter[str]()
    for mutant, is_seen in results(mutants, into):
        tried[mutant.area] += 1
        noticed[mutant.area] += is_seen
        if not is_seen:
            line = (ROOT / mutant.path).read_bytes().count(b"\n", 0, mutant.offset) + 1
            print(f"{mutant.path}:{line}: {mutant.old} -> {mutant.new}", flush=True)
    for area in areas:
        print(f"{area}: {noticed[area]} of {tried[area]} noticed")
    print(f"all: {noticed.total()} of {tried.total()} noticed")


if __name__ == "__main__":
    main()
