"""What the vendor's model runner makes of KV that cannot be copied: its own code, on a device that fails when told.

No model is loaded and nothing is computed: only the runner's functions about copies and about the prefill's input run.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_rbln.model_executor.models.optimum.model_base import RBLNOptimumDecoderMixin
from vllm_rbln.v1.worker.optimum_model_runner import RBLNOptimumModelRunner


class FailingModel(RBLNOptimumDecoderMixin):
    """The vendor's decoder, as far as it copies KV; the copies of one prefill succeed up to ``failed_copy``."""

    def __init__(self, failed_copy: int) -> None:
        self._left = failed_copy

    def get_prefill_decoder(self) -> Any:
        return SimpleNamespace(runtime=self)

    def _copy_kv_cache(self, source: int, target: int, num_tokens: int) -> None:
        del source, target, num_tokens
        if self._left == 0:
            raise RuntimeError("device error, as asked for")
        self._left -= 1


def tokens_after_failed_copy(scheduler: Any, output: Any, failed_copy: int) -> int:
    """Tokens that the runner has the device prefill, when copy number ``failed_copy`` of this prefill fails."""
    (name,) = output.num_scheduled_tokens
    request = scheduler.requests[name]
    tokens = list(request.all_token_ids)
    runner = SimpleNamespace(
        model=FailingModel(failed_copy),
        input_batch=SimpleNamespace(
            block_table=SimpleNamespace(
                block_tables=[SimpleNamespace(num_blocks_per_row=[0], get_cpu_tensor=lambda: None)]
            ),
            req_id_to_index={name: 0},
            num_tokens_no_spec=[len(tokens)],
            token_ids_cpu=[tokens],
        ),
        requests={name: request},
        enable_prefix_caching=True,
        supports_mm_inputs=False,
        _mrope_positions=lambda *_: None,
    )
    planned = SimpleNamespace(is_prompt=True, block_tables=output.block_table_dict[name], running_requests_ids=[name])
    is_copied = RBLNOptimumModelRunner.try_copy_prefix_cached_kv(runner, planned, output)
    model_input = RBLNOptimumModelRunner._prepare_prefill(runner, output, use_cached_prefix=is_copied)
    return int(model_input.input_tokens.shape[1])
