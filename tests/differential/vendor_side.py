"""The vendor's own scheduler, fed by hand: RBLNOptimumScheduler, its KV cache manager and vLLM's Request, unmodified.

No server, no worker, no device; sampled tokens come from the history. Runs in the twin's environment only.
"""

from __future__ import annotations

import copy
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm_rbln.utils.optimum.converter.from_optimum import sync_from_optimum
from vllm_rbln.v1.core.optimum_scheduler import RBLNOptimumScheduler

from tests.differential.histories import (
    GENERATED,
    STOP_TOKEN,
    Geometry,
    Submit,
    materialise,
    stream_tokens,
)
from tests.differential.seen import Seen
from tests.differential.vendor_copies import tokens_after_failed_copy
from tests.differential.vllm_requests import chain_hasher, parameters_of

COPY_LINES = ("Successfully copied KV ", "Copying prefix-cached KV ")


class LineCatcher(logging.Handler):
    """Keeps what the vendor's modules log about KV memory and preemption."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        # All carry the lines that users' tools read; everything else of the tree is about start-up.
        is_scheduling = "prefix_cache_manager" in record.name or record.name.endswith("optimum_scheduler")
        if is_scheduling or str(record.msg).startswith(COPY_LINES):
            self.lines.append(record.getMessage())

    def take(self) -> tuple[str, ...]:
        lines = tuple(self.lines)
        self.lines.clear()
        return lines


@cache
def line_catcher() -> LineCatcher:
    """The one handler of the vendor's logger tree in this process."""
    catcher = LineCatcher()
    root = logging.getLogger("vllm_rbln")
    root.handlers = [catcher]
    root.propagate = False
    root.setLevel(logging.DEBUG)
    # Where a line was logged, and by which thread, is not compared.
    logging._srcfile = None
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    return catcher


@cache
def base_config(artifact: Path) -> VllmConfig:
    """What ``vllm serve`` would make of a twin artifact; read once."""
    return EngineArgs(model=str(artifact)).create_engine_config()


def config_of(geometry: Geometry, artifact: Path) -> VllmConfig:
    """The server configuration of a geometry, worked out by the vendor's own reading of rbln_config.json."""
    config = copy.deepcopy(base_config(artifact))
    config.cache_config.enable_prefix_caching = geometry.prefix_caching
    _forget_synced(config.additional_config)
    if geometry.max_active_seqs is not None:
        config.scheduler_config.max_num_active_seqs = geometry.max_active_seqs
    region = geometry.partition_tokens or geometry.slot_tokens
    sync_from_optimum(
        config,
        {
            "batch_size": geometry.max_num_seqs,
            "max_seq_len": geometry.slot_tokens,
            "kvcache_block_size": region,
            "kvcache_partition_len": geometry.partition_tokens,
            "kvcache_num_blocks": geometry.kv_slots,
            "prefill_chunk_size": geometry.block_tokens,
        },
    )
    return config


def _forget_synced(options: Any) -> None:
    """Let the vendor's options be worked out anew: a dictionary in vllm-rbln 0.11, an object from 0.12 on."""
    if isinstance(options, dict):
        options.pop("num_blocks_synced", None)
        options.pop("attn_block_size", None)
    else:
        options.num_blocks_synced = False
        options.attn_block_size = None


class VendorServer:
    """One vendor scheduler in the state after its start."""

    def __init__(self, geometry: Geometry, artifact: Path) -> None:
        config = config_of(geometry, artifact)
        cache = config.cache_config
        group = KVCacheGroupSpec(
            ["layer"], FullAttentionSpec(block_size=cache.block_size, num_kv_heads=1, head_size=1, dtype=torch.bfloat16)
        )
        line_catcher()
        self._geometry = geometry
        self._hasher = chain_hasher(cache.block_size) if geometry.prefix_caching else None
        self.scheduler = RBLNOptimumScheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(
                num_blocks=cache.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=[group]
            ),
            structured_output_manager=StructuredOutputManager(config),
            block_size=cache.block_size,
            log_stats=True,
        )
        self._stops: dict[str, int | None] = {}
        line_catcher().take()

    def submit(self, request: Submit) -> bool:
        """Add a request at the tail of the queue, its prompt hashed as the input thread would; False when refused."""
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
        """Drop requests in the order given; the lines that freeing them logged."""
        # One by one: given several at once the vendor walks a set, whose order means nothing.
        for handle in handles:
            self.scheduler.finish_requests(str(handle), RequestStatus.FINISHED_ABORTED)
        return line_catcher().take()

    def step(self, aborts_inside: tuple[int, ...], failed_copy: int = -1) -> Seen:
        """One engine-core step: schedule, what the runner makes of a copy that fails, aborts, update_from_output."""
        scheduler = self.scheduler
        output = scheduler.schedule()
        lines = line_catcher().take()
        names = list(output.num_scheduled_tokens)
        resumed = set(output.scheduled_cached_reqs.resumed_req_ids)
        is_prefill = bool(output.scheduled_new_reqs) or bool(resumed)
        tables = {int(name): self._block_table(output, name) for name in names}
        recomputed = 0
        if is_prefill and 0 <= failed_copy < len(output.cached_block_table):
            recomputed = tokens_after_failed_copy(scheduler, output, failed_copy)
        copies = line_catcher().take()
        abort_lines = self.abort(aborts_inside)
        sampled = [[self._next_token(name)] for name in names]
        per_client = scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=sampled,
            ),
        )
        finished, hits = _finished_and_hits(per_client)
        finish_lines = line_catcher().take()
        pool = scheduler.kv_cache_manager.block_pool
        return Seen(
            kind="PREFILL" if is_prefill else "DECODE" if names else "IDLE",
            requests=tuple(int(name) for name in names),
            preempted=tuple(sorted(int(name) for name in output.preempted_req_ids)),
            cached_slots=tuple(output.cached_block_table),
            cached_lengths=tuple(output.cached_length),
            hash_hit_tokens=hits,
            block_tables=tables,
            dummy_slot=-1 if output.dummy_block is None else int(output.dummy_block),
            lines=lines,
            abort_lines=abort_lines,
            finish_lines=finish_lines,
            copy_lines=copies,
            recomputed_tokens=recomputed,
            finished=finished,
            running=tuple(int(request.request_id) for request in scheduler.running),
            waiting=tuple(int(request.request_id) for request in _queued(scheduler)),
            free_slots=self._free_slots(),
            free_blocks=pool.get_num_free_blocks(),
        )

    def _next_token(self, name: str) -> int:
        request = self.scheduler.requests.get(name)
        if request is None:
            return STOP_TOKEN
        index = request.num_output_tokens
        if self._stops[name] == index + 1:
            return STOP_TOKEN
        return int(stream_tokens(GENERATED + int(name), -(-(index + 1) // 1024) * 1024)[index])

    def _block_table(self, output: Any, name: str) -> tuple[int, ...]:
        if self._geometry.prefix_caching:
            table = output.block_table_dict[name].tolist()
            slots = self.scheduler.kv_cache_manager.prefix_cache_manager.get_block_ids(name)
            # Entries that no slot fills: the kernel of 0.12.1 reads them too, so they must be a real block there.
            unused = 0 if hasattr(self.scheduler, "kv_holding_waiting") else -1
            assert table == slots + [unused] * (len(table) - len(slots)), table
            return tuple(slots)
        return tuple(block - 1 for block in self.scheduler.kv_cache_manager.get_block_ids(name)[0])

    def _free_slots(self) -> int:
        if not self._geometry.prefix_caching:
            return -1
        return self.scheduler.kv_cache_manager.prefix_cache_manager._allocator.get_free_count()


def _queued(scheduler: Any) -> list[Any]:
    """Everybody who waits, first to be admitted first: two queues, of which 0.12.1 has others than its forerunners."""
    first = scheduler.kv_holding_waiting if hasattr(scheduler, "kv_holding_waiting") else scheduler.skipped_waiting
    return [*first, *scheduler.waiting]


def _finished_and_hits(per_client: dict[int, Any]) -> tuple[tuple[int, ...], int]:
    """Requests that ended in this step, in order, and tokens that the hash map promised."""
    finished: list[int] = []
    hits = 0
    for outputs in per_client.values():
        finished += [int(output.request_id) for output in outputs.outputs if output.finish_reason is not None]
        stats = outputs.scheduler_stats
        if stats is not None and stats.prefix_cache_stats is not None:
            hits += stats.prefix_cache_stats.hits + stats.prefix_cache_stats.preempted_hits
    return tuple(finished), hits
