"""Rows that are removed, doubled, moved or renamed: each call and wait is right, labelled or refused, in any format."""

from __future__ import annotations

import pytest

from tests.support.mutated_accounts import read_many
from tests.support.naive_traces import NAIVE


@pytest.mark.parametrize("kind", sorted(NAIVE))
def test_every_call_of_a_changed_recording_is_right_labelled_or_refused(kind: str) -> None:
    came = read_many(kind, 250, seed=1)
    assert {"right", "right, and labelled"} <= set(came), "some changes are of no consequence, and some are told"
