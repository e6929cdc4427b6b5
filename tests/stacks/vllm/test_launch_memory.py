"""The share of a GPU's memory that has room for so many KV blocks, by what a vLLM logs when it has started."""

from __future__ import annotations

import pytest

from harness.stacks.vllm.launch import utilization_for

# As v1/worker/gpu_worker.py of vLLM 0.32.0 writes it.
LOG = (
    "INFO 11-20 10:00:00 [kv_cache_utils.py:2329] Maximum concurrency for 8,192 tokens per request: 64.00x\n"
    "INFO 11-20 10:00:01 [gpu_worker.py:1034] Free memory on device (139.1/140.0 GiB) on startup. Desired GPU memory "
    "utilization is (0.5, 70.0 GiB). Actual usage is 30.0 GiB for consumed memory (weights + non-torch), 4.0 GiB for "
    "peak activation, and 1.0 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with "
    "`--kv-cache-memory=37580963840` (35.0 GiB) to fit into requested memory, or `--kv-cache-memory=0` (104.0 GiB) to "
    "fully utilize gpu memory. Current kv cache memory in use is 35.0 GiB.\n"
)


@pytest.mark.parametrize(("wanted", "share"), [(1000, 0.5), (2000, 0.75), (500, 0.375), (4000, 1.25)])
def test_blocks_become_a_share_of_the_memory_of_the_device(wanted: int, share: float) -> None:
    assert utilization_for(LOG, 1000, wanted) == share


def test_a_log_that_does_not_show_the_memory_tells_no_share() -> None:
    assert utilization_for("Free memory on device (139.1/140.0 GiB) on startup.\n", 1000, 2000) is None
