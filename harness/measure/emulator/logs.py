"""The server's log, line for line in the formats of vLLM 0.22 and vllm-rbln 0.11.1.

Lines of the engine carry the modelled instant of the event, lines of the API server the instant they were made. Another
thread writes them, so that a slow reader never delays a step. ``harness.analysis.logs`` must read this log as it
reads the real stack's.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from harness.clock import NS_PER_S, NS_PER_US, ScaledClock, realtime_minus_monotonic_ns
from harness.measure.emulator.config import LogFormat
from harness.model.engine import KvEvent, Step


class BackgroundWriter:
    """Appends bytes to ``fd`` in order, from one daemon thread; writing never blocks the caller."""

    def __init__(self, fd: int, *, name: str) -> None:
        self._fd = fd
        self._chunks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, chunk: bytes) -> None:
        """Queue ``chunk``; it is written within milliseconds."""
        self._chunks.put(chunk)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and stop; a reader that takes nothing for ``timeout_s`` loses the rest."""
        self._chunks.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            chunks = [self._chunks.get()]
            while not self._chunks.empty():
                chunks.append(self._chunks.get())
            is_last = None in chunks
            pending = memoryview(b"".join(chunk for chunk in chunks if chunk is not None))
            # A reader that went away (EPIPE) must not kill the server, as it would not kill vLLM.
            with contextlib.suppress(OSError):
                while pending:
                    pending = pending[os.write(self._fd, pending) :]


API_SERVER, ENGINE_CORE = "APIServer", "EngineCore"


class Site(NamedTuple):
    """A place in the real stack's source that logs: what the head of its lines is made of."""

    level: str
    logger: str
    file: str
    line: int
    process: str = ENGINE_CORE

    @property
    def brand(self) -> str:
        """The beginning of each line of vllm-rbln's formatter."""
        return "[vllm-rbln] " if self.logger.startswith("vllm_rbln") else ""

    @property
    def short_path(self) -> str:
        """The file as vLLM's NewLineFormatter shows it at level DEBUG: the middle folders are left out."""
        *folders, _ = self.logger.split(".")
        parts = [*folders, self.file]
        if self.logger.startswith("vllm."):
            parts = parts[1:]
        num_head = 2 if parts[0] == "v1" else 1
        head, rest = parts[:num_head], parts[num_head:]
        return "/".join([*head, "...", *rest[-2:]] if len(rest) > 2 else [*head, *rest])


def _prefix_cache(module: str, line: int) -> Site:
    return Site("DEBUG", f"vllm_rbln.v1.core.prefix_cache_manager.{module}", f"{module}.py", line)


# Line numbers: vllm-rbln 0.11.1 and vLLM 0.22.0, as released.
ALLOC = _prefix_cache("optimum_prefix_cache_manager", 308)
EVICTION = _prefix_cache("optimum_prefix_cache_manager", 361)
CACHE_HIT = _prefix_cache("optimum_prefix_cache_manager", 172)
CACHE_PARTIAL = _prefix_cache("optimum_prefix_cache_manager", 150)
FREE_REQUEST = _prefix_cache("optimum_prefix_cache_manager", 407)
MAPPING_REMOVE = _prefix_cache("optimum_block_mapping_manager", 106)
MAPPING_SEARCH = _prefix_cache("optimum_block_mapping_manager", 176)
SCHEDULED = Site("DEBUG", "vllm_rbln.v1.worker.optimum_model_runner", "optimum_model_runner.py", 638)
FINISHED = Site("DEBUG", "vllm_rbln.v1.worker.optimum_model_runner", "optimum_model_runner.py", 845)
PREEMPTED = Site("WARNING", "vllm_rbln.v1.core.optimum_scheduler", "optimum_scheduler.py", 674)
COPY_FAILED = Site("ERROR", "vllm_rbln.v1.worker.optimum_model_runner", "optimum_model_runner.py", 480)
KV_COPIED = Site("DEBUG", "vllm_rbln.model_executor.models.optimum.model_base", "model_base.py", 452)
BUCKET = Site("DEBUG", "vllm_rbln.model_executor.models.optimum.model_base", "model_base.py", 392)
MAX_NUM_SEQS = Site("INFO", "vllm_rbln.utils.optimum.converter.from_optimum", "from_optimum.py", 85)
MAX_MODEL_LEN = MAX_NUM_SEQS._replace(line=95)
MAX_BATCHED_TOKENS = Site("INFO", "vllm_rbln.utils.optimum.converter.common", "common.py", 164)
KV_SIZE = Site("INFO", "vllm.v1.core.kv_cache_utils", "kv_cache_utils.py", 1733)
KV_CONCURRENCY = KV_SIZE._replace(line=1734)
ENGINE_INIT = Site("INFO", "vllm.v1.engine.core", "core.py", 112)
ENGINE_READY = Site("INFO", "vllm.v1.engine.core", "core.py", 309)
SHUTDOWN_INITIATED = Site("INFO", "vllm.v1.engine.core", "core.py", 1266)
SHUTDOWN_ABORTING = Site("INFO", "vllm.v1.engine.core", "core.py", 1271)
SHUTDOWN_DRAINING = Site("INFO", "vllm.v1.engine.core", "core.py", 1280)
SHUTDOWN_COMPLETE = Site("INFO", "vllm.v1.engine.core", "core.py", 1289)
REJECTING = Site("INFO", "vllm.v1.engine.core", "core.py", 1333)
FATAL = Site("ERROR", "vllm.v1.engine.core", "core.py", 1167)
VERSION = Site("INFO", "vllm.entrypoints.utils", "utils.py", 344, API_SERVER)
STARTING = Site("INFO", "vllm.entrypoints.openai.api_server", "api_server.py", 596, API_SERVER)
RECEIVED = Site("INFO", "vllm.entrypoints.logger", "logger.py", 63, API_SERVER)
ADDED = Site("INFO", "vllm.v1.engine.async_llm", "async_llm.py", 415, API_SERVER)
ABORTING = Site("INFO", "vllm.v1.engine.async_llm", "async_llm.py", 721, API_SERVER)
ABORTED = Site("INFO", "vllm.v1.engine.async_llm", "async_llm.py", 595, API_SERVER)
STATS = Site("INFO", "vllm.v1.metrics.loggers", "loggers.py", 271, API_SERVER)
STATS_IDLE = STATS._replace(level="DEBUG")
REQUEST_FAULT = Site("ERROR", "vllm.entrypoints.openai.server_utils", "server_utils.py", 375, API_SERVER)
SHUTTING_DOWN = Site("INFO", "vllm.entrypoints.launcher", "launcher.py", 137, API_SERVER)
STALL = Site("WARNING", "harness.emulator", "driver.py", 1)
LONG_ANSWER = Site("INFO", "harness.emulator", "api.py", 1)


class LogWriter:
    """Formats lines and hands them to the writer thread.

    ``log_format`` "precise" is what ``VLLM_LOGGING_CONFIG_PATH`` with microseconds gives on the real stack.
    """

    def __init__(
        self, clock: ScaledClock, *, log_format: LogFormat, with_debug: bool, fd: int = 2, pid: int | None = None
    ) -> None:
        self._clock = clock
        self._is_precise = log_format == "precise"
        self._with_debug = with_debug
        self._pid = os.getpid() if pid is None else pid
        self._epoch_offset_ns = realtime_minus_monotonic_ns()
        self._writer = BackgroundWriter(fd, name="log-writer")
        self._second = -1
        self._second_text = ""

    def line(self, site: Site, message: str, at_ns: int | None = None) -> None:
        """One line of ``site``, stamped ``at_ns`` (model ns; default now)."""
        if site.level == "DEBUG" and not self._with_debug:
            return
        self._writer.write(self._format(site, message, self._clock.now_ns() if at_ns is None else at_ns))

    def plain(self, message: str) -> None:
        """One line in uvicorn's own format, which the real stack leaves alone."""
        prefix = "" if self._is_precise else f"({API_SERVER} pid={self._pid}) "
        self._writer.write(f"{prefix}{message}\n".encode(errors="replace"))

    def close(self, timeout_s: float = 5.0) -> None:
        """Write everything out."""
        self._writer.close(timeout_s)

    def _format(self, site: Site, message: str, at_ns: int) -> bytes:
        epoch_ns = self._clock.to_monotonic_ns(at_ns) + self._epoch_offset_ns
        seconds, nanoseconds = divmod(epoch_ns, NS_PER_S)
        if self._is_precise:
            micros = nanoseconds // NS_PER_US
            line = f"{seconds}.{micros:06d} {self._pid} {site.level} {site.logger} {message}\n"
            return line.encode(errors="replace")
        if seconds != self._second:
            self._second = seconds
            self._second_text = datetime.fromtimestamp(seconds).strftime("%m-%d %H:%M:%S")
        head = f"({site.process} pid={self._pid}) {site.brand}{site.level} {self._second_text}"
        head = f"{head} [{site.short_path if self._with_debug else site.file}:{site.line}] "
        # vLLM's NewLineFormatter repeats the head on every line of a message.
        message = message.replace("\n", "\r\n" + head)
        return f"{head}{message}\n".encode(errors="replace")


def kv_event_line(event: KvEvent, engine_id: str) -> tuple[Site, str]:  # noqa: PLR0911  # one return per kind of line
    """The log line of one KV event. Formats: vllm-rbln 0.11.1, v1/core/prefix_cache_manager and optimum_scheduler."""
    slots, blocks = list(event.slots), list(event.blocks)
    slot, ibs = slots[0] if slots else None, f"IB_COUNT={event.num_blocks} IB={blocks}"
    if event.kind == "ALLOC":
        return ALLOC, f"[PFX] [ALLOC] REQUEST={engine_id} | OB_COUNT={len(slots)} OB={slots} | {ibs}"
    if event.kind == "EVICTION":
        return EVICTION, (
            f"[PFX] [EVICTION] OB={slot} | IB_COUNT={event.num_blocks} | FREE_BLOCKS_AFTER={event.free_slots} | "
            f"INACTIVE_MAPPINGS_AFTER={list(event.inactive_slots)}"
        )
    if event.kind == "MAPPING_REMOVE":
        return MAPPING_REMOVE, f"[PFX] [MAPPING-REMOVE] OB={slot} | {ibs}"
    if event.kind == "MAPPING_SEARCH":
        size = len(blocks)
        return MAPPING_SEARCH, (
            f"[PFX] [MAPPING-SEARCH] QUERY_IB={blocks[0]} | SEGMENT_SIZE={size} SEGMENT={blocks} | MATCHED_OB={slot}"
        )
    if event.kind == "CACHE_HIT":
        # The vendor prints, for every slot, the first blocks of the whole list, not of that slot's share.
        shares = [blocks[:count] for count in event.block_counts]
        return CACHE_HIT, (
            f"[PFX] [CACHE-HIT] REQUEST={engine_id} | OB_COUNT={len(slots)} OB={slots} | "
            f"IB_COUNT={event.num_blocks} IB={shares}"
        )
    if event.kind == "CACHE_PARTIAL":
        reused, looked_up = event.reused_tokens, event.hit_tokens
        missed = looked_up - reused
        return CACHE_PARTIAL, (
            f"[PFX] [CACHE-PARTIAL] REQUEST={engine_id} | REUSED={reused}/{looked_up} tokens "
            f"({reused / looked_up * 100:.1f}%) | MISSED={missed} tokens ({missed / looked_up * 100:.1f}%) | "
            "REASON=partial_cache_miss"
        )
    if event.kind == "PREEMPT":
        return PREEMPTED, (
            f"Request {engine_id} is preempted. Freed block(s): {blocks} "
            f"Already generated tokens: {event.output_tokens}"
        )
    return FREE_REQUEST, (
        f"[PFX] [FREE-REQUEST] REQUEST={engine_id} | PREEMPTION={event.is_preemption} | OUTER_BLOCKS={slots}"
    )


def copy_lines(step: Step, targets: Sequence[int], engine_id: str) -> list[tuple[Site, str]]:
    """The log lines of a prefill's KV copies into the slots ``targets``, up to the one that fails.

    Formats: vllm-rbln 0.12.0, models/optimum/model_base.py and v1/worker/optimum_model_runner.py.
    """
    num_copied = len(step.cached_slots) if step.failed_copy < 0 else step.failed_copy
    pairs = zip(step.cached_slots[:num_copied], targets, strict=False)
    lines = [
        (KV_COPIED, f"Successfully copied KV cache from block {source} to block {target}") for source, target in pairs
    ]
    if step.failed_copy >= 0:
        failed = f"Copying prefix-cached KV failed for request(s) {[engine_id]}. "
        lines.append((COPY_FAILED, f"{failed}Falling back to a full prefill without prefix-cache reuse."))
    return lines
