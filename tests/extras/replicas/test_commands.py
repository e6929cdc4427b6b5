"""`harness predict replicas`: policies side by side, as a table and as data."""

from __future__ import annotations

import json

import pytest

from tests.support.command_line import harness

pytestmark = pytest.mark.same_everywhere


def test_policies_are_compared_on_the_same_plans() -> None:
    shown = harness("predict", "replicas", "demo", "--plans", "3").stdout
    assert "Simulated: no server and no router was measured." in " ".join(shown.split())
    assert all(
        name in shown for name in ("round-robin", "least-requests", "session-affinity", "prefix-aware", "baseline")
    )
    data = harness("predict", "replicas", "demo", "--plans", "3", "--format", "json").stdout
    costs, reuse = json.loads(data)
    assert [row["policy"] for row in costs] == [row["policy"] for row in reuse]
    rows = {row["policy"]: row for row in reuse}
    assert rows["session-affinity"]["home"] == 1.0
    assert rows["round-robin"]["lost_routing"] > 0
    assert all(row["kept"] + row["lost_routing"] + row["lost_eviction"] == pytest.approx(1) for row in rows.values())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--policy", "sticky"), "round-robin"),
        (("--condition", "nothing"), "base-waits"),
        (("--replicas", "0"), "--replicas"),
    ],
)
def test_what_cannot_be_compared_is_refused_in_one_line(words: tuple[str, ...], said: str) -> None:
    ended = harness("predict", "replicas", "demo", *words)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert "Traceback" not in ended.stderr
