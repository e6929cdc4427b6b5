"""What is compiled before a run: no more than it needs, and once."""

from __future__ import annotations

import pytest

from harness.kinds import kind_named
from harness.runner.machine_code import PARTS, make, missing, parts_of

pytestmark = pytest.mark.same_everywhere


@pytest.mark.parametrize(
    ("backend", "parts"),
    [("emulator", ["simulator", "engine"]), ("attached", ["simulator"]), ("sim", ["simulator"])],
)
def test_a_run_waits_for_no_machine_code_that_it_does_not_load(backend: str, parts: list[str]) -> None:
    assert parts_of(kind_named(backend)) == parts


def test_what_was_made_is_not_missed_again() -> None:
    make(["engine"])
    assert "engine" not in missing(list(PARTS))
