"""The scheduler of vllm-rbln's native path, fed by hand: RBLNScheduler, its buckets and its token lengths, unmodified.

No server, no worker, no device. Sub-block caching is off. Runs in the twin's environment only, without its plugins.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vllm_rbln
from vllm.config import VllmConfig
from vllm_rbln.config import RBLNConfig
from vllm_rbln.v1.core.rbln_scheduler import RBLNScheduler
from vllm_rbln.v1.core.utils import step_is_prefill
from vllm_rbln.v1.worker.bucketing import get_bucketing_manager

from tests.differential.paged_vendor import Decided, PagedVendor, scheduler_of
from tests.support.vllm_graphs import cut_out

RUNNER = Path(vllm_rbln.__file__).parent / "v1" / "worker" / "rbln_model_runner.py"


class NativeVendor(PagedVendor):
    """One scheduler of the native path in the state after its start."""

    def _start(self, config: VllmConfig) -> Any:
        geometry = self._geometry
        config.additional_config = RBLNConfig(enable_sub_block_cache=False)
        buckets = list(geometry.capture_sizes)
        self._buckets = get_bucketing_manager("manual", max_batch_size=geometry.max_num_seqs, manual_buckets=buckets)
        # The whole module needs the device's compiler.
        runner = cut_out(RUNNER, "RBLNModelRunner", ("uses_fixed_decode_window",), {})
        self._is_fixed = runner(speculative_config=config.speculative_config).uses_fixed_decode_window
        return scheduler_of(config, geometry, RBLNScheduler)

    def _padding(self, decided: Decided) -> tuple[str, int]:
        """Tokens of each request of a step as its graph is compiled, and requests. Source: vllm-rbln 0.12.0,
        v1/worker/rbln_model_runner.py, _prepare_inputs."""
        if not decided.names:
            return "NONE", 0
        if step_is_prefill(decided.output):
            return f"{self._geometry.max_num_batched_tokens} tokens", 1
        has_drafts = self._is_fixed or bool(decided.output.scheduled_spec_decode_tokens)
        query = 1 + self._geometry.num_drafts * has_drafts
        return f"{query} tokens", self._buckets.find_decode_batch_bucket(len(decided.names))
