# pyright: basic, reportMissingImports=false
"""A stat logger for vLLM that writes a line of JSON per engine step into a file.

It runs in the API server's process. Nothing in the server changes: it reads values, keeps none, and stops for good at
its first error, which is a log line and never an exception. Every attribute may be absent: vLLM declares these classes
unstable. Without VLLM_STEP_LOG_FILE it does nothing.
Source: vllm 0.30.0 and 0.33.0 (v1/metrics/loggers.py, v1/metrics/stats.py, compilation/cuda_graph.py).
"""

from __future__ import annotations

import json
import logging
import os
import time
from importlib import metadata
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

FILE_VARIABLE = "VLLM_STEP_LOG_FILE"
FORMAT = 1
LOG = logging.getLogger("vllm.vllm_step_log")
now_ns = time.monotonic_ns  # noqa: TID251 - runs inside the server, where the harness's clock is not

SETTINGS = {
    "model": "model_config.model",
    "max_model_len": "model_config.max_model_len",
    "enforce_eager": "model_config.enforce_eager",
    "max_num_seqs": "scheduler_config.max_num_seqs",
    "max_num_batched_tokens": "scheduler_config.max_num_batched_tokens",
    "enable_chunked_prefill": "scheduler_config.enable_chunked_prefill",
    "async_scheduling": "scheduler_config.async_scheduling",
    "num_gpu_blocks": "cache_config.num_gpu_blocks",
    "block_size": "cache_config.block_size",
    "enable_prefix_caching": "cache_config.enable_prefix_caching",
    "cudagraph_mode": "compilation_config.cudagraph_mode",
    "cudagraph_capture_sizes": "compilation_config.cudagraph_capture_sizes",
    "tensor_parallel_size": "parallel_config.tensor_parallel_size",
    "data_parallel_size": "parallel_config.data_parallel_size",
    "api_server_count": "parallel_config._api_process_count",
    "device_type": "device_config.device_type",
    "num_speculative_tokens": "speculative_config.num_speculative_tokens",
    "cudagraph_metrics": "observability_config.cudagraph_metrics",
    "iteration_details": "observability_config.enable_logging_iteration_details",
}
"""Settings in effect: name in the header, and place in vLLM's configuration."""
SCHEDULER = {
    "running": "num_running_reqs",
    "waiting": "num_waiting_reqs",
    "skipped_waiting": "num_skipped_waiting_reqs",
    "kv_usage": "kv_cache_usage",
    "prefix_queries": "prefix_cache_stats.queries",
    "prefix_hits": "prefix_cache_stats.hits",
    "unpadded_tokens": "cudagraph_stats.num_unpadded_tokens",
    "padded_tokens": "cudagraph_stats.num_padded_tokens",
    "runtime_mode": "cudagraph_stats.runtime_mode",
    "context_requests": "iteration_details.num_ctx_requests",
    "context_tokens": "iteration_details.num_ctx_tokens",
    "generation_requests": "iteration_details.num_generation_requests",
    "generation_tokens": "iteration_details.num_generation_tokens",
    "is_dummy": "iteration_details.is_dummy",
}
ITERATION = {
    "prompt_tokens": "num_prompt_tokens",
    "generated_tokens": "num_generation_tokens",
    "preempted": "num_preempted_reqs",
}
COLUMNS = ("at_ns", *SCHEDULER, *ITERATION, "logger_ns")
"""at_ns: CLOCK_MONOTONIC when the API server received the step. logger_ns: time of the previous call of ``record``."""


class StepLogger(StatLoggerBase):
    """Writes a header line with the settings in effect, then an array per step with the values of ``COLUMNS``.

    A value that this vLLM does not have is null; a line {"absent": [...]} after the first step names such columns.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self._config = vllm_config
        self._engine = engine_index
        self._descriptor = -1
        self._is_on = bool(os.environ.get(FILE_VARIABLE))
        self._has_header = self._has_absent = False
        self._last_ns = 0
        self._encode = json.JSONEncoder(separators=(",", ":"), default=str).encode

    def log_engine_initialized(self) -> None:
        """Write the header: the engine is up, so its settings are final."""
        self._guarded(self._write_header)

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Called for each message of the engine core; messages without scheduler statistics are not steps."""
        del mm_cache_stats, engine_idx
        if self._is_on and scheduler_stats is not None:
            self._guarded(self._write_step, scheduler_stats, iteration_stats)

    def log(self) -> None:
        """Nothing to aggregate."""

    def _guarded(self, action: Any, *arguments: Any) -> None:
        if not self._is_on:
            return
        try:
            action(*arguments)
        except Exception as error:
            self._is_on = False
            LOG.warning("[STEP LOG] stopped: %s: %s", type(error).__name__, error)

    def _write_header(self) -> None:
        if self._has_header:
            return
        self._has_header = True
        path = os.environ[FILE_VARIABLE] + (f".{self._engine}" if self._engine else "")
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        values = {name: _plain(_value(self._config, place)) for name, place in SETTINGS.items()}
        absent = [name for name, place in SETTINGS.items() if not _is_there(self._config, place)]
        self._write(
            {
                "vllm_step_log": FORMAT,
                "columns": COLUMNS,
                "vllm": _version(),
                "pid": os.getpid(),
                "engine": self._engine,
                "started_ns": now_ns(),
                "effective": {name: value for name, value in values.items() if value is not None},
                "absent": absent,
            }
        )

    def _write_step(self, scheduler: Any, iteration: Any) -> None:
        began_ns = now_ns()
        self._write_header()
        row = [began_ns]
        row += [_plain(_value(scheduler, place)) for place in SCHEDULER.values()]
        row += [_plain(_value(iteration, place)) for place in ITERATION.values()]
        self._write([*row, self._last_ns])
        if not self._has_absent:
            self._has_absent = True
            absent = [name for name, place in SCHEDULER.items() if not _is_there(scheduler, place)]
            if iteration is not None:
                absent += [name for name, place in ITERATION.items() if not _is_there(iteration, place)]
            self._write({"absent": absent})
        self._last_ns = now_ns() - began_ns

    def _write(self, value: Any) -> None:
        line = (self._encode(value) + "\n").encode()
        if os.write(self._descriptor, line) != len(line):
            raise OSError("the record was written only in part")


def _value(owner: Any, place: str) -> Any:
    """The attribute at a dotted ``place``; None when any part of it is absent or cannot be read."""
    for name in place.split("."):
        try:
            owner = getattr(owner, name, None)
        except Exception:  # a property of an unknown version
            return None
        if owner is None:
            return None
    return owner


def _is_there(owner: Any, place: str) -> bool:
    """Whether this vLLM has the attribute. A part that is None hides the rest, which then counts as there."""
    for name in place.split("."):
        try:
            if not hasattr(owner, name):
                return False
            owner = getattr(owner, name)
        except Exception:
            return False
        if owner is None:
            return True
    return True


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)


def _version() -> str:
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return ""
