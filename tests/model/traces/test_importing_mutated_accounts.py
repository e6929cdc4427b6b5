"""Rows that are removed, doubled, moved or renamed: each call and wait is right, labelled or refused, in any format."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.mutated_accounts import came_of, mutated
from tests.support.naive_traces import NAIVE


@pytest.mark.parametrize("kind", sorted(NAIVE))
def test_every_call_of_a_changed_recording_is_right_labelled_or_refused(tmp_path: Path, kind: str) -> None:
    rng = random.Random(f"account of {kind}")
    came = [came_of(kind, *mutated(kind, rng), tmp_path) for _ in range(70)]
    assert {"right", "right, and labelled"} <= set(came), "some changes are of no consequence, and some are told"
