"""Rows that are removed, doubled, moved or renamed change no count and no wait without a word, in any format."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.mutated_accounts import came_of
from tests.support.sound_traces import SOUND


@pytest.mark.parametrize("kind", sorted(SOUND))
def test_no_count_and_no_wait_changes_without_a_word(tmp_path: Path, kind: str) -> None:
    rng = random.Random(f"account of {kind}")
    came = [came_of(kind, rng, tmp_path) for _ in range(25)]
    assert {"equal", "said"} <= set(came), "some changes are read over, and some are told"
