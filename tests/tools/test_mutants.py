"""The mistakes that ``tools/mutants.py`` draws: valid Python, each another program, and the same for a seed."""

from __future__ import annotations

import ast
from functools import cache

import pytest

from tools import mutants as tool
from tools.mutants import AREAS, ROOT, Mutant, draw

pytestmark = pytest.mark.same_everywhere


@cache
def program(text: bytes) -> str:
    """What Python reads, without places."""
    return ast.dump(ast.parse(text))


@pytest.mark.parametrize("area", AREAS)
def test_each_mistake_is_valid_python_and_another_program(area: str) -> None:
    drawn = draw(area, 1, 40)
    assert len(set(drawn)) == 40
    assert {mutant.kind for mutant in drawn} >= {"comparison", "and/or", "arithmetic", "not", "return", "+/-1"}
    for mutant in drawn:
        before = (ROOT / mutant.path).read_bytes()
        assert program(mutant.apply(before)) != program(before), mutant


def test_a_seed_draws_the_same_mistakes() -> None:
    assert draw("analysis/compare", 1, 20) == draw("analysis/compare", 1, 40)[:20]


def test_a_mistake_is_one_place() -> None:
    mutant = Mutant("", "", 4, "comparison", "<", "<=")
    assert mutant.apply(b"a = 1 < 2"[2:]) == b"= 1 <= 2"


def test_the_function_around_a_mistake_is_known() -> None:
    path = "tools/mutants.py"
    text = (ROOT / path).read_bytes()
    assert tool.function_at(path, text.index(b"EACH = 60")) == "<module>"
    assert tool.function_at(path, text.index(b"return drawn[:each]")) == "draw"
