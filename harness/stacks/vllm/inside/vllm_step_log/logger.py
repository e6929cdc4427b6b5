# pyright: basic, reportMissingImports=false
"""A stat logger for vLLM that writes a line of JSON per engine step into a file.

It runs in the API server's process. Nothing in the server changes: it reads values, keeps none, and stops for good at
its first error, which is a log line and never an exception. Every attribute may be absent: vLLM declares these classes
unstable. Without VLLM_STEP_LOG_FILE it does nothing.
Source: vllm 0.30.0 and 0.33.0 (v1/metrics/loggers.py, v1/metrics/stats.py, compilation/cuda_graph.py).
"""

from __future__ import annotations

import os
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from . import LOG, LineFile, engine_file, header_of, is_there, now_ns, plain, value_at

FILE_VARIABLE = "VLLM_STEP_LOG_FILE"
FORMAT = 1

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
        self._file: LineFile | None = None
        self._is_on = bool(os.environ.get(FILE_VARIABLE))
        self._has_header = self._has_absent = False
        self._last_ns = 0

    def log_engine_initialized(self) -> None:
        """Write the header: the engine is up, so its settings are final."""
        self._guarded(self._write_header)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
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
        self._file = LineFile(engine_file(os.environ[FILE_VARIABLE], self._engine))
        names = {"vllm_step_log": FORMAT, "columns": COLUMNS, "engine": self._engine}
        self._file.write({**names, **header_of(self._config)})

    def _write_step(self, scheduler: Any, iteration: Any) -> None:
        began_ns = now_ns()
        self._write_header()
        assert self._file is not None
        row = [began_ns]
        row += [plain(value_at(scheduler, place)) for place in SCHEDULER.values()]
        row += [plain(value_at(iteration, place)) for place in ITERATION.values()]
        self._file.write([*row, self._last_ns])
        if not self._has_absent:
            self._has_absent = True
            absent = [name for name, place in SCHEDULER.items() if not is_there(scheduler, place)]
            if iteration is not None:
                absent += [name for name, place in ITERATION.items() if not is_there(iteration, place)]
            self._file.write({"absent": absent})
        self._last_ns = now_ns() - began_ns
