"""One table says what each backend is; nothing else in the harness tells backends apart by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import harness
from harness.errors import SpecError
from harness.kinds import DEFAULT_BACKEND, KINDS, kind_named, kind_of_run, origin_note
from harness.measure.server.doctor import Check
from harness.model.experiment import resolve
from harness.model.spec import load_experiment
from harness.runner.backends import backend_named, readiness, what_you_can_do
from harness.runner.experiment import checked

PACKAGE = Path(harness.__file__).parent
# The table, each backend's own file, and what lies inside a server's interpreter and stamps artifacts as its own.
# A row of the table of server keys says which launches apply the key.
OWN_FILES = {"kinds.py", "model/spec/server.py", *(f"runner/backends/{name}.py" for name in KINDS)}


def test_every_kind_has_a_backend_of_its_name_a_label_and_a_line_in_the_doctor() -> None:
    for name, kind in KINDS.items():
        assert kind.label
        assert backend_named(name).kind is kind
    assert [check.name for check in readiness()] == [f"backend {name}" for name in KINDS]


def test_a_backend_that_is_not_here_is_optional_and_says_how_to_get_it() -> None:
    checks = {check.name: check for check in readiness()}
    assert all(check.ok is not False and check.found and check.need for check in checks.values())
    assert checks["backend emulator"].ok
    assert all(check.how[0].isupper() for check in checks.values())


def test_the_last_lines_of_the_doctor_offer_a_command_for_each_kind_that_is_here() -> None:
    first, *lines = what_you_can_do(readiness())
    assert (first, lines[0]) == ("You can:", "  harness run demo  (emulator)")
    assert all(any(name in line for line in lines) for name in KINDS)


def test_what_is_broken_comes_before_everything_else() -> None:
    broken = Check(name="timerfd", ok=False, found="absent", need="deadlines", how="Use Linux")
    assert what_you_can_do([broken, *readiness()]) == ["First: mend timerfd; its line above says how"]


def test_an_unknown_backend_is_refused_with_those_there_are() -> None:
    with pytest.raises(SpecError, match=r"unknown backend 'gpu'.*emulator"):
        kind_named("gpu")


def test_a_sealed_run_of_a_kind_that_is_not_known_keeps_its_name_and_claims_nothing() -> None:
    kind = kind_of_run("next-years-card")
    assert (kind.label, kind.has_device) == ("next-years-card", None)


@pytest.mark.parametrize("backend", ["rbln", "twin", "vllm", "attached"])
def test_a_real_server_keeps_its_own_time_and_a_scale_is_refused_before_anything_starts(backend: str) -> None:
    spec = load_experiment("demo").model_copy(update={"backend": backend, "time_scale": 4.0})
    with pytest.raises(SpecError, match=f"{backend} runs in real time and cannot be scaled by 4"):
        checked(resolve(spec))


def test_what_people_get_without_choosing_needs_no_device() -> None:
    assert kind_named(DEFAULT_BACKEND).has_device is False


@cache
def modules_that_name_a_backend() -> dict[str, ast.Module]:
    """Every module but a backend's own, by its path."""
    texts = {str(path.relative_to(PACKAGE)): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
    return {
        path: ast.parse(text)
        for path, text in texts.items()
        if path not in OWN_FILES and any(f"{mark}{name}{mark}" in text for name in KINDS for mark in "\"'")
    }


def nodes(*kinds: type[ast.AST]) -> Iterator[tuple[str, ast.AST]]:
    """The nodes of these kinds, with their module's path."""
    for path, tree in modules_that_name_a_backend().items():
        yield from ((path, node) for node in ast.walk(tree) if isinstance(node, kinds))


def test_no_file_but_its_own_compares_the_name_of_a_backend() -> None:
    assert [path for path, node in nodes(ast.Compare) if _names(node) and "/inside/" not in path] == []


def test_no_file_but_its_own_keeps_a_list_of_backends() -> None:
    lists = nodes(ast.Tuple, ast.List, ast.Set, ast.Subscript)
    assert [path for path, node in lists if len(_names(node)) > 1] == []


def _names(node: ast.AST) -> set[str]:
    """Names of backends that stand as text in an expression."""
    return {
        one.value
        for one in ast.walk(node)
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value in KINDS
    }


def test_a_kind_whose_server_showed_itself_to_be_the_emulator_has_a_name_of_its_own_and_no_device() -> None:
    emulated = kind_of_run("attached", is_emulator=True)
    assert emulated.name != "attached"
    assert emulated == kind_of_run(emulated.name)
    assert emulated.has_device is False
    assert not emulated.is_restarted
    assert all(kind_of_run(name, is_emulator=True) == kind for name, kind in KINDS.items() if kind.has_device is False)


def test_where_figures_are_from_is_never_empty() -> None:
    notes = {name: origin_note(name) for name in (*KINDS, "attached-emulator", "next-years-card")}
    assert all(notes.values())
    assert {name for name, note in notes.items() if note.startswith("Measured")} == {"rbln", "vllm", "attached"}
    assert notes["attached-emulator"] == notes["emulator"]


def test_a_vllm_for_cpus_is_no_device() -> None:
    assert origin_note("vllm", is_on_cpu=True) == "Measured on a CPU; no accelerator was measured."
    assert origin_note("vllm") == "Measured by backend vllm; no record shows which device."
    assert origin_note("emulator", is_on_cpu=True).startswith("Emulated")
