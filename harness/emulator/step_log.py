"""The steps of an emulated or simulated vLLM server, as its step log has them: a header, then a line a step.

Read by ``harness.stack.vllm.step_log``, as the log of a real server is.
"""

from __future__ import annotations

from typing import Any

from harness.emulator.core import StepEnd
from harness.engine import EngineConfig
from harness.stack.vllm.step_log import COLUMNS, FORMAT

VLLM = "0.30.0"
"""The release whose scheduler the paged rules follow."""


def step_log_header(config: EngineConfig, started_ns: int) -> dict[str, Any]:
    """The header, with the settings in effect."""
    paged = config.paged
    return {
        "vllm_step_log": FORMAT,
        "columns": list(COLUMNS),
        "vllm": VLLM,
        "engine": 0,
        "started_ns": started_ns,
        "effective": {
            "max_model_len": paged.max_model_len,
            "enforce_eager": False,
            "max_num_seqs": paged.max_num_seqs,
            "max_num_batched_tokens": paged.max_num_batched_tokens,
            "enable_chunked_prefill": True,
            "async_scheduling": paged.async_scheduling,
            "num_gpu_blocks": paged.num_gpu_blocks,
            "block_size": paged.block_size,
            "enable_prefix_caching": paged.prefix_caching,
            "cudagraph_mode": "FULL_AND_PIECEWISE",
            "cudagraph_capture_sizes": list(paged.capture_sizes),
            "cudagraph_metrics": True,
            "iteration_details": True,
        },
        "absent": [],
    }


def step_log_row(config: EngineConfig, end: StepEnd, at_ns: int, logger_ns: int = 0) -> list[Any]:
    """The values of ``COLUMNS`` of a step, after its tokens were drawn. at_ns: CLOCK_MONOTONIC."""
    step, paged = end.start.step, config.paged
    num_tokens = sum(step.tokens)
    num_decodes = num_tokens - step.computed_tokens
    mode, padded = paged.graph_of(step.tokens)
    lookups = end.start.lookups if paged.prefix_caching else ()
    first = [request for request in end.requests if request.num_generated == 1]
    values = {
        "at_ns": at_ns,
        "running": end.num_running,
        "waiting": end.num_waiting,
        "skipped_waiting": 0,
        "kv_usage": end.used_blocks / paged.num_usable_blocks,
        "prefix_queries": sum(lookup.cached_tokens + lookup.computed_tokens for lookup in lookups),
        "prefix_hits": sum(lookup.cached_tokens for lookup in lookups),
        "unpadded_tokens": num_tokens,
        "padded_tokens": padded,
        "runtime_mode": mode,
        "context_requests": step.num_seqs - num_decodes,
        "context_tokens": step.computed_tokens,
        "generation_requests": num_decodes,
        "generation_tokens": num_decodes,
        "is_dummy": False,
        "prompt_tokens": sum(len(request.prompt) for request in first),
        "generated_tokens": len(end.requests),
        "preempted": len(step.preempted),
        "logger_ns": logger_ns,
    }
    return [values[column] for column in COLUMNS]
