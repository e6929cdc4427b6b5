from __future__ import annotations

import pytest

from harness.model.experiment import build_plan
from harness.model.sim import simulate
from harness.model.spec import ServerSpec, WorkloadSpec

BASE = ServerSpec()
BUCKET6 = ServerSpec(decode_buckets=(1, 2, 4, 6, 8))


def padding_ratio(server: ServerSpec, histogram: tuple[int, ...]) -> float:
    slots = [min(b for b in server.decode_buckets if b >= n) if n else 0 for n in range(len(histogram))]
    total = sum(count * b for count, b in zip(histogram, slots, strict=True))
    return sum(count * (b - n) for n, (count, b) in enumerate(zip(histogram, slots, strict=True))) / total


@pytest.mark.parametrize("seed", range(12))
def test_without_waits_a_new_bucket_changes_no_step_count_and_lowers_padding(seed: int):
    drawn = build_plan(WorkloadSpec(num_sessions=6), base_seed=seed, replicate=0)
    plan = drawn.with_treatment("no-waits")
    base, bucket6 = simulate(plan, BASE), simulate(plan, BUCKET6)
    assert base.decode_histogram == bucket6.decode_histogram
    assert padding_ratio(BUCKET6, bucket6.decode_histogram) < padding_ratio(BASE, base.decode_histogram)
    assert bucket6.decode_ns < base.decode_ns
