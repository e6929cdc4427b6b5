"""A ``vllm`` command in an environment of its own: the emulator serves, and the real step-log plugin is fed its steps.

The plugin is loaded by its entry point from PYTHONPATH, as vLLM loads it; the classes it meets are those of
``LITTLE_VLLM``. Batches above the largest captured size run without a graph, as in vLLM.
"""

from __future__ import annotations

from pathlib import Path

from tests.stacks.vllm.test_step_log import little_vllm
from tests.support.emulated_vllm import vllm_environment

TIMES_FASTER = 10.0
"""Than the steps of the emulator's own cost model: a test waits for them."""
SERVE = """
import argparse, asyncio, os, sys
from types import SimpleNamespace as Space

from vllm.compilation.cuda_graph import CUDAGraphStat
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, SchedulerIterationDetails, SchedulerStats

from harness.measure.emulator import server as emulator
from harness.measure.emulator.config import EmulatorConfig
from harness.measure.emulator.driver import StepReporter
from harness.model.spec import ServerSpec

parser = argparse.ArgumentParser(allow_abbrev=False)
parser.add_argument("serve")
parser.add_argument("model")
parser.add_argument("--host")
numbers = "port max-num-seqs max-model-len num-gpu-blocks-override block-size max-num-batched-tokens"
for name in numbers.split():
    parser.add_argument(f"--{name}", type=int)
parser.add_argument("--long-prefill-token-threshold", type=int, default=0)
parser.add_argument("--cudagraph-capture-sizes", type=int, nargs="+")
parser.add_argument("--enable-prefix-caching", action=argparse.BooleanOptionalAction)
for name in ("cudagraph-metrics", "enable-logging-iteration-details", "enable-prompt-tokens-details", "enforce-eager"):
    parser.add_argument(f"--{name}", action="store_true")
for name in ("api-server-count", "generation-config", "shutdown-timeout", "seed", "speculative-config"):
    parser.add_argument(f"--{name}")
options = parser.parse_args()
sizes = options.cudagraph_capture_sizes
config = Space(
    model_config=Space(model=options.model, max_model_len=options.max_model_len, enforce_eager=options.enforce_eager),
    scheduler_config=Space(
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens or 8192,
        long_prefill_token_threshold=options.long_prefill_token_threshold,
        enable_chunked_prefill=True,
        async_scheduling=True,
    ),
    cache_config=Space(
        num_gpu_blocks=options.num_gpu_blocks_override or 4096,
        block_size=options.block_size or 128,
        enable_prefix_caching=options.enable_prefix_caching,
    ),
    compilation_config=Space(
        cudagraph_mode="NONE" if options.enforce_eager else "FULL_AND_PIECEWISE",
        cudagraph_capture_sizes=[] if options.enforce_eager else sizes[::-1],
    ),
    parallel_config=Space(tensor_parallel_size=1, data_parallel_size=1, _api_process_count=1),
    device_config=Space(device_type="cuda"),
    speculative_config=Space(num_speculative_tokens=2) if options.speculative_config else None,
    observability_config=Space(cudagraph_metrics=True, enable_logging_iteration_details=True),
)
loggers = [make(config, 0) for make in load_stat_logger_plugin_factories()]


class Reporter(StepReporter):
    def step_started(self, start):
        pass

    def step_ended(self, end, woken_ns):
        super().step_ended(end, woken_ns)
        step = end.start.step
        is_prefill = step.kind == "PREFILL"
        tokens = step.computed_tokens if is_prefill else step.num_seqs
        fitting = [size for size in config.compilation_config.cudagraph_capture_sizes[::-1] if size >= tokens]
        padded, mode = (fitting[0], "FULL") if fitting else (tokens, "NONE")
        iteration = IterationStats()
        iteration.num_generation_tokens = len(end.requests)
        iteration.num_prompt_tokens = tokens if is_prefill else 0
        for logger in loggers:
            logger.record(
                SchedulerStats(
                    num_running_reqs=end.num_running,
                    num_waiting_reqs=end.num_waiting,
                    kv_cache_usage=0.5,
                    prefix_cache_stats=PrefixCacheStats(step.computed_tokens + step.cached_tokens, step.cached_tokens),
                    cudagraph_stats=CUDAGraphStat(tokens, padded, padded - tokens, mode),
                    iteration_details=SchedulerIterationDetails(
                        0, int(is_prefill), tokens * is_prefill, *([0 if is_prefill else tokens] * 2), 1.0
                    ),
                ),
                iteration,
            )


class Metrics(emulator.ServerMetrics):
    def render(self, **options):
        lines = super().render(**options).split(b"\\n")
        return b"\\n".join(line for line in lines if b"emulator:" not in line and b"cache_config_info" not in line)


emulator.StepReporter, emulator.ServerMetrics = Reporter, Metrics
emulator.LogWriter.line = lambda *arguments, **named: None
for logger in loggers:
    logger.log_engine_initialized()
print("INFO 01-01 00:00:00 [api_server.py:1] vLLM server version 0.30.0", flush=True)
server = ServerSpec(
    max_num_seqs=options.max_num_seqs,
    decode_buckets=range(1, options.max_num_seqs + 1),
    slot_tokens=options.max_model_len,
    prefix_caching=options.enable_prefix_caching,
)
asyncio.run(
    emulator.EmulatorServer(
        EmulatorConfig(
            server=server,
            host=options.host,
            port=options.port,
            model=options.model,
            bucket_log=False,
            time_scale=TIMES_FASTER,
        )
    ).run()
)
"""


def fake_vllm(folder: Path) -> Path:
    """A virtual environment, as ``server.environment`` names it."""
    little_vllm(folder / "site")
    return vllm_environment(folder, f"TIMES_FASTER = {TIMES_FASTER}\n{SERVE}")
