"""vLLM's own scheduler, fed by hand: Scheduler, KVCacheManager, Request and CudagraphDispatcher, unmodified.

No server, no worker, no device; sampled tokens come from the history. Runs in the twin's environment only, without its
plugins.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.config import (
    CacheConfig,
    CompilationMode,
    CUDAGraphMode,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.version import __version__

from tests.differential.histories import GENERATED, STOP_TOKEN, Submit, materialise, stream_tokens
from tests.differential.paged_side import DrawnAcceptance, PagedGeometry, accepted_of, drafted_of
from tests.differential.seen import PagedSeen
from tests.differential.vllm_requests import chain_hasher, parameters_of


def release_of() -> str:
    """The release of vLLM that is installed."""
    return __version__.partition("+")[0]


@cache
def model_of(artifact: Path, max_model_len: int) -> ModelConfig:
    """A model configuration of the twin's artifact; its weights are never read."""
    return ModelConfig(model=str(artifact), max_model_len=max_model_len, skip_tokenizer_init=True)


def config_of(geometry: PagedGeometry, artifact: Path) -> VllmConfig:
    """The configuration that ``vllm serve`` makes of these settings."""
    memory = CacheConfig(block_size=geometry.block_tokens, enable_prefix_caching=geometry.prefix_caching)
    memory.num_gpu_blocks = geometry.num_gpu_blocks
    scheduling = SchedulerConfig(
        max_num_seqs=geometry.max_num_seqs,
        max_num_batched_tokens=geometry.max_num_batched_tokens,
        max_model_len=geometry.slot_tokens,
        long_prefill_token_threshold=min(geometry.long_prefill_tokens, geometry.slot_tokens),
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=geometry.async_scheduling,
    )
    config = VllmConfig(
        model_config=model_of(artifact, geometry.slot_tokens),
        cache_config=memory,
        scheduler_config=scheduling,
        parallel_config=ParallelConfig(),
        device_config=DeviceConfig(device="cpu"),
    )
    if geometry.num_drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram_gpu" if geometry.async_scheduling else "ngram",
            num_speculative_tokens=geometry.num_drafts,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
        if geometry.draft_method != "ngram":
            # The scheduler reads the name; a drafter's own model would have to be there for the configuration.
            config.speculative_config.method = geometry.draft_method
            config.speculative_config.parallel_drafting = geometry.is_parallel
    # A build for the CPU switches it off; the scheduler itself knows it everywhere.
    config.scheduler_config.async_scheduling = geometry.async_scheduling
    return config


def scheduler_of(config: VllmConfig, geometry: PagedGeometry, scheduler: Any = None) -> Any:
    """vLLM's scheduler of these settings in the state after its start. scheduler: another class."""
    spec = FullAttentionSpec(block_size=geometry.block_tokens, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)
    return (scheduler or (AsyncScheduler if geometry.async_scheduling else Scheduler))(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=geometry.num_gpu_blocks,
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        ),
        structured_output_manager=StructuredOutputManager(config),
        block_size=geometry.block_tokens,
        log_stats=True,
    )


def dispatcher_of(config: VllmConfig, capture_sizes: tuple[int, ...], num_drafts: int) -> CudagraphDispatcher:
    """What decides the size and the mode of a step on a GPU, with the default mode of CUDA graphs."""
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = list(capture_sizes)
    compilation.max_cudagraph_capture_size = capture_sizes[-1]
    compilation.splitting_ops = list(compilation._attention_ops)
    compilation.mode = CompilationMode.VLLM_COMPILE
    compilation.post_init_cudagraph_sizes()
    dispatcher = CudagraphDispatcher(config)
    dispatcher.initialize_cudagraph_keys(CUDAGraphMode.FULL_AND_PIECEWISE, 1 + num_drafts)
    return dispatcher


class Decided(NamedTuple):
    """A step that was decided. names, tokens, sampled: by request, in order; sampled: whether it gives a token."""

    output: Any
    names: tuple[str, ...]
    tokens: tuple[int, ...]
    sampled: tuple[bool, ...]
    cached: dict[str, int]


class PagedVendor:
    """One scheduler of vLLM in the state after its start."""

    def __init__(self, geometry: PagedGeometry, artifact: Path) -> None:
        config = config_of(geometry, artifact)
        self._geometry = geometry
        self.scheduler = self._start(config)
        # From vLLM 0.33.0 on.
        ahead = getattr(config, "num_hash_lookahead_tokens", 0)
        self._hasher = chain_hasher(geometry.block_tokens, ahead) if geometry.prefix_caching else None
        self._drawn = DrawnAcceptance(geometry.rates)
        self._stops: dict[str, int | None] = {}
        # As the engine core's: two batches with asynchronous scheduling.
        self._batches: deque[Decided] = deque()
        self._num_batches = config.max_concurrent_batches
        self._names: dict[int, str] = {}
        self._numbers = count()
        self._lookups = [0, 0, 0, 0]

    def _start(self, config: VllmConfig) -> Any:
        """Its scheduler."""
        self._dispatcher = dispatcher_of(config, self._geometry.capture_sizes, self._geometry.num_drafts)
        return scheduler_of(config, self._geometry)

    def _padding(self, decided: Decided) -> tuple[str, int]:
        """The mode of a step's graph, and its padded tokens."""
        if not decided.names:
            return "NONE", 0
        is_uniform = set(decided.tokens) <= {1 + self._geometry.num_drafts}
        mode, padded = self._dispatcher.dispatch(sum(decided.tokens), uniform_decode=is_uniform)
        return mode.name, padded.num_tokens

    def submit(self, request: Submit) -> bool:
        """Add a request at the tail of the queue; False when refused.

        A step in flight may still name a request that has ended: names are never used again.
        """
        alive = self._names.get(request.handle, "")
        name = alive if alive in self.scheduler.requests else f"{request.handle}.{next(self._numbers)}"
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
        self._stops[name], self._names[request.handle] = request.stop_tokens, name
        return True

    def abort(self, handles: tuple[int, ...]) -> tuple[str, ...]:
        """Drop requests in the order given; nothing is logged."""
        for handle in handles:
            self.scheduler.finish_requests(self._names.get(handle, ""), RequestStatus.FINISHED_ABORTED)
        return ()

    def step(self, aborts_inside: tuple[int, ...], failed_copy: int = -1) -> PagedSeen:
        """One step that runs: as the engine core's step, or its step_with_batch_queue."""
        del failed_copy
        scheduler = self.scheduler
        self._lookups = [0, 0, 0, 0]
        decided, gave_way = self._next()
        lookups = self._lookups
        alive = scheduler.requests
        names = [name for name in decided.names if name in alive]
        blocks = {handle_of(name): tuple(scheduler.kv_cache_manager.get_block_ids(name)[0]) for name in names}
        padding = self._padding(decided)
        cached = {handle_of(name): tokens for name, tokens in decided.cached.items() if name in alive}
        preempted = tuple(sorted(handle_of(name) for name in gave_way if name in alive))
        self.abort(aborts_inside)
        ended = self._update(decided)
        free = scheduler.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        # Renamed in vLLM 0.31.0.
        held = scheduler.skipped_waiting if hasattr(scheduler, "skipped_waiting") else scheduler.kv_holding_waiting
        waiting = (*held, *scheduler.waiting)
        return PagedSeen(
            requests=tuple(handle_of(name) for name in names),
            tokens=decided.tokens,
            cached=cached,
            preempted=preempted,
            blocks=blocks,
            lookups=(lookups[0], lookups[1], lookups[2], lookups[3]),
            padding=padding,
            finished=tuple(handle_of(output.request_id) for output in ended if output.finish_reason is not None),
            running=tuple(handle_of(request.request_id) for request in scheduler.running),
            waiting=tuple(handle_of(request.request_id) for request in waiting),
            free_order=tuple(block.block_id for block in free),
        )

    def _next(self) -> tuple[Decided, set[str]]:
        """The batch that runs now, and who was preempted for it; batches of nobody take no time."""
        gave_way: set[str] = set()
        while True:
            if self.scheduler.has_requests():
                self._batches.append(self._decide())
                if len(self._batches) < self._num_batches and self.scheduler.has_requests():
                    continue
            elif not self._batches:
                return self._decide(), gave_way
            decided = self._batches.popleft()
            gave_way |= set(decided.output.preempted_req_ids or ())
            if decided.names or not (self._batches or self.scheduler.has_unfinished_requests()):
                return decided, gave_way
            self._update(decided)

    def _decide(self) -> Decided:
        scheduler = self.scheduler
        output = scheduler.schedule()
        # Each look at them, by an update too, begins anew.
        stats = scheduler.kv_cache_manager.make_prefix_cache_stats()
        seen = (stats.queries, stats.hits, stats.preempted_queries, stats.preempted_hits)
        self._lookups = [before + number for before, number in zip(self._lookups, seen, strict=True)]
        known = output.scheduled_cached_reqs
        cached = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached |= {
            name: computed
            for name, computed in zip(known.req_ids, known.num_computed_tokens, strict=True)
            if name in known.resumed_req_ids
        }
        names = tuple(output.num_scheduled_tokens)
        # What the runner samples: nothing while a prompt is incomplete.
        sampled = tuple(not scheduler.requests[name].is_prefill_chunk for name in names)
        return Decided(output, names, tuple(output.num_scheduled_tokens.values()), sampled, cached)

    def _update(self, decided: Decided) -> list[Any]:
        tokens = [
            self._next_tokens(name, decided) if is_sampled and name in self.scheduler.requests else [0] * is_sampled
            for name, is_sampled in zip(decided.names, decided.sampled, strict=True)
        ]
        per_client = self.scheduler.update_from_output(
            decided.output,
            ModelRunnerOutput(
                req_ids=list(decided.names),
                req_id_to_index={name: index for index, name in enumerate(decided.names)},
                sampled_token_ids=tokens,
            ),
        )
        self._draft(decided)
        return [output for outputs in per_client.values() for output in outputs.outputs]

    def _draft(self, decided: Decided) -> None:
        """Tokens are drafted for the next step; with asynchronous scheduling the worker keeps them."""
        if not self._geometry.num_drafts or self._geometry.async_scheduling:
            return
        names = [name for name in decided.names if name in self.scheduler.requests]
        outputs = [self.scheduler.requests[name].num_output_tokens for name in names]
        drafts = [
            [0] * drafted_of(self._geometry, handle_of(name), output)
            for name, output in zip(names, outputs, strict=True)
        ]
        self.scheduler.update_draft_token_ids(DraftTokenIds(names, drafts))

    def _next_tokens(self, name: str, decided: Decided) -> list[int]:
        """The next token, and those before it that were drafted and accepted; what pads a request never is."""
        first = self.scheduler.requests[name].num_output_tokens
        num_drafts = len(decided.output.scheduled_spec_decode_tokens.get(name, ()))
        is_padded = name in decided.cached
        accepted = 0 if is_padded else self._accepted(name, first, num_drafts)
        return [self._token(name, first + place) for place in range(1 + accepted)]

    def _accepted(self, name: str, first: int, num_drafts: int) -> int:
        if not (self._geometry.rates and num_drafts):
            return accepted_of(handle_of(name), first, num_drafts)
        return self._drawn.accepted(self.scheduler.requests[name].num_prompt_tokens, first, num_drafts)

    def _token(self, name: str, index: int) -> int:
        if self._stops[name] == index + 1:
            return STOP_TOKEN
        return int(stream_tokens(GENERATED + handle_of(name), -(-(index + 1) // 1024) * 1024)[index])


def handle_of(name: str) -> int:
    """The handle of the request with this name."""
    return int(name.partition(".")[0])
