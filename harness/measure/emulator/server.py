"""One emulator process from start to exit: bind, get ready, listen, serve, drain or abort, leave.

It listens only when it is ready, as vLLM does, and exits 0 after SIGTERM; a second signal ends it at once.
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
from pathlib import Path

import numpy as np
from aiohttp import web

from harness.clock import NS_PER_S, MonotonicClock, ScaledClock
from harness.errors import ServerError, SpecError
from harness.measure.emulator import logs
from harness.measure.emulator.api import Api
from harness.measure.emulator.config import EmulatorConfig
from harness.measure.emulator.driver import RealTimeDriver, StepReporter
from harness.measure.emulator.logs import LogWriter
from harness.measure.emulator.metrics import ServerMetrics
from harness.measure.emulator.model import ContextHash, PlannedAnswer, keyed_answer
from harness.measure.emulator.recorded import recorded
from harness.measure.emulator.step_log import StepFiles, StepTraceFile
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.engine.core import EngineCore
from harness.model.engine.paged import scheduler_of
from harness.model.spec import ServerSpec

PREFILL_CHUNK_TOKENS = 128  # RBLN-CA
STATS_INTERVAL_S = 10  # VLLM_LOG_STATS_INTERVAL
DRAIN_POLL_NS = 5_000_000
# A thread that renders metrics must give the interpreter back within a fraction of a step.
SWITCH_INTERVAL_S = 1e-4
SECOND_SIGNAL_EXIT_CODE = 143
# A connection without a request for this long (wall seconds) is closed.
IDLE_TIMEOUT_S = 75.0
WARM_UP_TOKENS = 300


def bind(host: str, port: int) -> socket.socket:
    """A bound socket that does not listen yet; ServerError when the address is not available."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
    except OSError as error:
        server.close()
        raise ServerError(
            f"cannot bind ({error.strerror})", where=f"{host}:{port}", hint="Choose another port, or 0 for a free one"
        ) from error
    return server


class EmulatorServer:
    """Everything that lives as long as one server process."""

    def __init__(self, config: EmulatorConfig) -> None:
        self.config = config
        self.clock = ScaledClock(config.time_scale)
        self._wall = MonotonicClock()
        engine = EngineConfig.from_server(config.server)
        self.engine = engine
        costs = load_cost_model(config.server.cost_model).scaled(config.step_factor)
        scheduler = scheduler_of(engine, costs, draw_seed=config.replica)
        self.core = EngineCore(scheduler, config.fault.copy_fails_at)
        self.socket = bind(config.host, config.port)
        is_paged = engine.rule_set.is_paged
        self.files = StepFiles(
            self._open_file(config.trace_path), self._open_file(config.step_log_path if is_paged else None)
        )
        self.log = LogWriter(self.clock, log_format=config.log_format, with_debug=config.log_level == "DEBUG")
        self.metrics = ServerMetrics(config.model, engine, scheduler.num_blocks + 1, config.server.cost_model)
        self.reporter = StepReporter(config, self.clock, self.log, self.metrics, self.files)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Serve until a signal ends it: the process is the server's from now on."""
        self.reporter.ends_process = True
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        driver = RealTimeDriver(self.core, self.clock, self.reporter, self.config)
        self._log_start()
        runner = web.AppRunner(
            Api(driver, self.config).application(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=IDLE_TIMEOUT_S,
            # As in vLLM, a compressed body is not unpacked: it could grow to a gigabyte.
            auto_decompress=False,
        )
        await runner.setup()
        stats = asyncio.ensure_future(self._log_stats())
        try:
            if await self._becomes_ready():
                await self._listen(runner)
                await self._stop.wait()
            await self._shut_down(driver)
        finally:
            stats.cancel()
            await runner.cleanup()
            self.socket.close()
            self.log.line(logs.SHUTTING_DOWN, "Shutting down FastAPI HTTP server.")
            for text in ("Shutting down", "Waiting for application shutdown.", "Application shutdown complete."):
                self.log.plain(f"INFO:     {text}")
            driver.close()
            self.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Flush and close the log and the trace; a reader that takes nothing for ``timeout_s`` loses the rest."""
        self.log.close(timeout_s)
        self.files.close(timeout_s)

    def _open_file(self, path: str | None) -> StepTraceFile | None:
        if path is None:
            return None
        try:
            return StepTraceFile(Path(path))
        except OSError as error:
            self.socket.close()
            raise SpecError(
                f"cannot be written ({error.strerror})", where=path, hint="Choose another trace path"
            ) from error

    async def _becomes_ready(self) -> bool:
        """Wait as long as the start-up faults say; False when a signal came first."""
        fault = self.config.fault
        if fault.never_ready:
            await self._stop.wait()
        elif fault.slow_start_s:
            wall = self._wall
            ready = asyncio.ensure_future(wall.wait_until_ns(wall.now_ns() + round(fault.slow_start_s * NS_PER_S)))
            stop = asyncio.ensure_future(self._stop.wait())
            await asyncio.wait({ready, stop}, return_when=asyncio.FIRST_COMPLETED)
            ready.cancel()
            stop.cancel()
        return not self._stop.is_set()

    async def _listen(self, runner: web.AppRunner) -> None:
        host, port = self.socket.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        self.log.line(logs.STARTING, f"Starting vLLM server on http://{shown}:{port}")
        self.log.plain(f"INFO:     Started server process [{os.getpid()}]")
        self.log.plain("INFO:     Waiting for application startup.")
        # Objects of the start live until exit. Each collection of them would cost milliseconds.
        gc.collect()
        gc.freeze()
        await web.SockSite(runner, self.socket, backlog=2048).start()
        self.log.plain("INFO:     Application startup complete.")

    def _signalled(self) -> None:
        if self._stop.is_set():
            self.close(timeout_s=0.2)
            os._exit(SECOND_SIGNAL_EXIT_CODE)
        self._stop.set()

    async def _shut_down(self, driver: RealTimeDriver) -> None:
        """Drain for as long as the shutdown timeout allows (wall seconds), then abort what is left."""
        driver.is_shutting_down = True
        timeout_s = self.config.shutdown_timeout_s
        self.log.line(logs.SHUTDOWN_INITIATED, f"Shutdown initiated (timeout={timeout_s})")
        num_requests = self.core.num_unfinished
        if timeout_s and num_requests:
            self.log.line(logs.SHUTDOWN_DRAINING, f"Draining {num_requests} in-flight requests (timeout={timeout_s}s)")
            wall = self._wall
            deadline_ns = wall.now_ns() + timeout_s * NS_PER_S
            while self.core.num_unfinished and wall.now_ns() < deadline_ns:
                await wall.wait_until_ns(wall.now_ns() + DRAIN_POLL_NS)
        if num_requests := self.core.num_unfinished:
            self.log.line(logs.SHUTDOWN_ABORTING, f"Aborting {num_requests} requests")
            driver.abort_all()
        self.log.line(logs.SHUTDOWN_COMPLETE, "Shutdown complete")

    async def _log_stats(self) -> None:
        due_ns = self.clock.now_ns()
        while True:
            due_ns += STATS_INTERVAL_S * NS_PER_S
            await self.clock.wait_until_ns(due_ns)
            line, is_idle = self.metrics.stats.line(STATS_INTERVAL_S)
            self.log.line(logs.STATS_IDLE if is_idle else logs.STATS, line)

    def _log_start(self) -> None:
        server = self.config.server
        line = self.log.line
        line(logs.VERSION, f"vLLM server version {self.metrics.dialect.vllm}, serving model {self.config.model}")
        line(
            logs.MAX_NUM_SEQS,
            f"Updating scheduler_config.max_num_seqs from 1 to {server.max_num_seqs} based on rbln_config.json",
        )
        source = "based on rbln_config.json"
        line(logs.MAX_MODEL_LEN, f"Updating model_config.max_model_len from 40960 to {server.slot_tokens} {source}")
        line(
            logs.MAX_BATCHED_TOKENS,
            f"Updating scheduler_config.max_num_batched_tokens from 2048 to {PREFILL_CHUNK_TOKENS} {source}",
        )
        line(
            logs.ENGINE_INIT,
            f"Initializing a V1 LLM engine (v{self.metrics.dialect.vllm}) with config: emulator "
            f"{self.config.model_dump_json(exclude={'trace_path'})}",
        )
        num_tokens = self.metrics.num_gpu_blocks * self.metrics.block_tokens
        size = f"{self.metrics.dialect.kv_device} KV cache size: {num_tokens:,} tokens"
        concurrency = num_tokens / server.slot_tokens
        at_once = f"Maximum concurrency for {server.slot_tokens:,} tokens per request: {concurrency:.2f}x"
        if self.metrics.dialect.reports_pool:
            line(logs.KV_SIZE, f"{size}, {at_once}")
        else:
            line(logs.KV_SIZE, size)
            line(logs.KV_CONCURRENCY, at_once)
        started_ns = self._wall.now_ns()
        warm_up(server)
        took_s = (self._wall.now_ns() - started_ns) / NS_PER_S
        line(logs.ENGINE_READY, f"init engine (profile, create kv cache, warmup model) took {took_s:.2f} s")


def warm_up(server: ServerSpec) -> None:
    """Load or compile what a step needs: a prefill, an abort and two decode steps.

    A first call may compile for seconds, which in a measurement would be one endless step.
    """
    config = EngineConfig.from_server(server)
    scheduler = scheduler_of(config, load_cost_model(server.cost_model))
    prompt = np.arange(WARM_UP_TOKENS, dtype=np.int32)
    keys, _ = keyed_answer(config, prompt, ContextHash.of(prompt, 0), PlannedAnswer(3))
    for handle in range(2):
        scheduler.submit(handle, len(prompt), 3, keys)
    scheduler.schedule()
    scheduler.finish_step()
    scheduler.abort(1)
    while scheduler.has_work:
        scheduler.schedule()
        scheduler.finish_step()
    scheduler.take_kv_events()
    # Read from disk once.
    recorded("answers")
