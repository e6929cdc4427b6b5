# pyright: basic
"""vLLM's own scheduler, fed by hand: Scheduler, KVCacheManager, Request and CudagraphDispatcher, unmodified.

No server, no worker, no device; sampled tokens come from the history. Runs in the twin's environment only, without its
plugins.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from vllm.config import (
    CacheConfig,
    CompilationMode,
    CUDAGraphMode,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.differential.histories import GENERATED, STOP_TOKEN, Submit, materialise, stream_tokens
from tests.differential.paged_side import PagedGeometry
from tests.differential.seen import PagedSeen
from tests.differential.vllm_requests import chain_hasher, parameters_of


@cache
def model_of(artifact: Path, max_model_len: int) -> ModelConfig:
    """A model configuration of the twin's artifact; its weights are never read."""
    return ModelConfig(model=str(artifact), max_model_len=max_model_len, skip_tokenizer_init=True)


def config_of(geometry: PagedGeometry, artifact: Path) -> VllmConfig:
    """The configuration that ``vllm serve --no-async-scheduling`` makes of these settings."""
    memory = CacheConfig(block_size=geometry.block_tokens, enable_prefix_caching=geometry.prefix_caching)
    memory.num_gpu_blocks = geometry.num_gpu_blocks
    scheduling = SchedulerConfig(
        max_num_seqs=geometry.max_num_seqs,
        max_num_batched_tokens=geometry.max_num_batched_tokens,
        max_model_len=geometry.slot_tokens,
        long_prefill_token_threshold=min(geometry.long_prefill_tokens, geometry.slot_tokens),
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    return VllmConfig(
        model_config=model_of(artifact, geometry.slot_tokens),
        cache_config=memory,
        scheduler_config=scheduling,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
    )


def dispatcher_of(config: VllmConfig, capture_sizes: tuple[int, ...]) -> CudagraphDispatcher:
    """What decides the size and the mode of a step on a GPU, with the default mode of CUDA graphs."""
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = list(capture_sizes)
    compilation.max_cudagraph_capture_size = capture_sizes[-1]
    compilation.splitting_ops = list(compilation._attention_ops)
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.post_init_cudagraph_sizes()
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, 1)
    return dispatcher


class PagedVendor:
    """One scheduler of vLLM in the state after its start."""

    def __init__(self, geometry: PagedGeometry, artifact: Path) -> None:
        config = config_of(geometry, artifact)
        block_size = geometry.block_tokens
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=geometry.num_gpu_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=block_size,
            log_stats=True,
        )
        self._dispatcher = dispatcher_of(config, geometry.capture_sizes)
        self._hasher = chain_hasher(block_size) if geometry.prefix_caching else None
        self._stops: dict[str, int | None] = {}

    def submit(self, request: Submit) -> bool:
        """Add a request at the tail of the queue; False when refused."""
        name = str(request.handle)
        try:
            self.scheduler.add_request(
                Request(
                    request_id=name,
                    prompt_token_ids=materialise(request.prompt).tolist(),
                    sampling_params=parameters_of(request.max_tokens),
                    pooling_params=None,
                    cache_salt=str(request.salt) if request.salt else None,
                    block_hasher=self._hasher,
                )
            )
        except AssertionError as error:
            if "duplicate request id" not in str(error):
                raise
            return False
        self._stops[name] = request.stop_tokens
        return True

    def abort(self, handles: tuple[int, ...]) -> tuple[str, ...]:
        """Drop requests in the order given; nothing is logged."""
        for handle in handles:
            self.scheduler.finish_requests(str(handle), RequestStatus.FINISHED_ABORTED)
        return ()

    def step(self, aborts_inside: tuple[int, ...], failed_copy: int = -1) -> PagedSeen:
        """One engine-core step: schedule, aborts, update_from_output."""
        del failed_copy
        scheduler = self.scheduler
        output = scheduler.schedule()
        names = list(output.num_scheduled_tokens)
        tokens = tuple(output.num_scheduled_tokens.values())
        known = output.scheduled_cached_reqs
        cached = {int(new.req_id): new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached |= {
            int(name): computed
            for name, computed in zip(known.req_ids, known.num_computed_tokens, strict=True)
            if name in known.resumed_req_ids
        }
        blocks = {int(name): tuple(scheduler.kv_cache_manager.get_block_ids(name)[0]) for name in names}
        # What the runner samples: nothing while a prompt is incomplete.
        sampled = [[] if scheduler.requests[name].is_prefill_chunk else [self._next_token(name)] for name in names]
        mode, padded = self._dispatcher.dispatch(sum(tokens), uniform_decode=max(tokens, default=1) == 1)
        stats = scheduler.kv_cache_manager.make_prefix_cache_stats()
        self.abort(aborts_inside)
        per_client = scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        ended = [output for outputs in per_client.values() for output in outputs.outputs]
        free = scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        return PagedSeen(
            requests=tuple(int(name) for name in names),
            tokens=tokens,
            cached=cached,
            preempted=tuple(sorted(int(name) for name in output.preempted_req_ids)),
            blocks=blocks,
            lookups=(stats.queries, stats.hits, stats.preempted_queries, stats.preempted_hits),
            padding=(mode.name, padded.num_tokens) if names else ("NONE", 0),
            finished=tuple(int(output.request_id) for output in ended if output.finish_reason is not None),
            running=tuple(int(request.request_id) for request in scheduler.running),
            waiting=tuple(int(request.request_id) for request in scheduler.waiting),
            free_order=tuple(block.block_id for block in free),
        )

    def _next_token(self, name: str) -> int:
        index = self.scheduler.requests[name].num_output_tokens
        if self._stops[name] == index + 1:
            return STOP_TOKEN
        return int(stream_tokens(GENERATED + int(name), -(-(index + 1) // 1024) * 1024)[index])
