"""What would help behind a router, and layouts of a budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.extras.replicas.advice import layouts_of
from harness.model.spec import ServerSpec
from tests.support.command_line import harness

pytestmark = pytest.mark.same_everywhere

TWO = """
name = "two"
backend = "sim"
replicates = 3
base_seed = 3
[workload]
num_sessions = 6
requests_per_session = 3
[server]
replicas = 2
max_num_seqs = 4
[[condition]]
name = "round-robin"
"""


def test_layouts_share_out_one_budget() -> None:
    budget = ServerSpec(max_num_seqs=8, kv_slots=16)
    found = list(layouts_of(budget, (1, 2, 3, 4), ("round-robin", "session-affinity")))
    assert {layout.num_replicas for layout in found} == {1, 2, 4}
    assert len({layout.name for layout in found}) == len(found)
    for layout in found:
        assert layout.server.max_num_seqs * layout.num_replicas == 8
        assert layout.server.num_kv_slots * layout.num_replicas == 16
        assert layout.server.decode_buckets[-1] == layout.server.max_num_seqs
    # A policy is nothing for one replica.
    assert sum(layout.num_replicas == 1 for layout in found) == 2


def test_the_command_says_what_loses_more_and_what_would_help(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TWO)
    harness("run", "two.toml", "--runs", "runs", cwd=tmp_path)
    shown = harness("replicas", "two", "--runs", "runs", cwd=tmp_path).stdout
    assert "each replica" in shown
    advice = harness("replicas", "two", "--runs", "runs", "--advise", cwd=tmp_path).stdout
    assert "sessions at home" in advice
    assert "loses more than" in advice
    assert "Simulated: no server and no router was measured." in " ".join(advice.split())


def test_the_search_over_layouts_begins_with_one_server(tmp_path: Path) -> None:
    words = ("predict", "layouts", "demo", "--plans", "2", "--replicas", "1", "--replicas", "2", "--format", "json")
    costs, _reuse = json.loads(harness(*words, cwd=tmp_path).stdout)
    names = [row["layout"] for row in costs]
    assert names[0].startswith("1 x ")
    assert any(name.startswith("2 x ") and name.endswith("session-affinity") for name in names)
    refused = harness("predict", "layouts", "demo", "--replicas", "3", cwd=tmp_path)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--replicas: 8 positions and 12 KV slots make no such replicas of equal size" in refused.stderr
    refused = harness("predict", "layouts", "does-affinity-pay", cwd=tmp_path)
    assert refused.returncode == 2
    assert "a budget is a single server" in refused.stderr
