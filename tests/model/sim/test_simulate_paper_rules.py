"""The compiled paper rules give what the paper's description gives when written down naively, in another style."""

from __future__ import annotations

import pytest

from harness.model.engine import EngineConfig
from harness.model.experiment import build_plan
from harness.model.sim import simulate
from harness.model.spec import WorkloadSpec
from tests.support.naive_paper import paper_run


@pytest.mark.parametrize("is_dummy", [False, True])
@pytest.mark.parametrize(("limit", "slots"), [(8, 8), (16, 16), (4, 4), (3, 5), (1, 2)])
@pytest.mark.parametrize("users", [3, 6, 10])
def test_the_naive_paper_simulator_agrees(users: int, limit: int, slots: int, is_dummy: bool) -> None:
    buckets = (1, 2, 4, 8, 16)
    buckets = (*(bucket for bucket in buckets if bucket < limit), limit)
    config = EngineConfig(limit, buckets, slots, rules="paper+dummy" if is_dummy else "paper")
    plan = build_plan(WorkloadSpec(source="paper", num_sessions=users), 20260910, limit % 3)
    naive, result = paper_run(plan, limit, slots, buckets, is_dummy=is_dummy), simulate(plan, config)
    assert result.decode_ns / 1e9 == pytest.approx(naive.decode_s, abs=1e-6)
    assert result.prefill_ns / 1e9 == pytest.approx(naive.prefill_s, abs=1e-6)
    rows = result.requests.to_pylist()
    assert {(row["session"], row["request"]): row["cached_tokens"] for row in rows} == naive.reused
