"""Rows that are removed, doubled, moved or renamed: each call and wait is right, labelled or refused, in any format."""

from __future__ import annotations

import pytest

from harness.extras.formats import codex
from harness.model.traces import account, calls, links
from tests.support import mutated_accounts
from tests.support.mutated_accounts import read_many
from tests.support.naive_traces import NAIVE


@pytest.mark.parametrize("kind", sorted(NAIVE))
def test_every_call_of_a_changed_recording_is_right_labelled_or_refused(kind: str) -> None:
    came = read_many(kind, 250, seed=1)
    assert {"right", "right, and labelled"} <= set(came), "some changes are of no consequence, and some are told"


@pytest.mark.parametrize(
    ("owner", "name", "value", "kind"),
    [
        (codex._Session, "_check_order", None, "codex"),  # pyright: ignore[reportPrivateUsage]
        (calls.AgentLog, "came_at", None, "claude"),
        (account.Unread, "add", None, "claude"),
        (links._Tree, "_is_awaited", False, "claude"),  # pyright: ignore[reportPrivateUsage]
        (links._Tree, "_is_awaited", True, "claude"),  # pyright: ignore[reportPrivateUsage]
    ],
    ids=["order", "time", "unknown", "never", "always"],
)
def test_a_planted_mistake_is_noticed(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, value: bool | None, kind: str
) -> None:
    def trivial(*_: object) -> bool | None:
        return value

    monkeypatch.setattr(owner, name, trivial)
    monkeypatch.setattr(mutated_accounts, "_sound", mutated_accounts._sound.__wrapped__)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(AssertionError, match=kind):
        read_many(kind, 100, seed=1)
