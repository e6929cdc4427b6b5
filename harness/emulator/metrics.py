"""The server's Prometheus metrics, with the names, types, labels, buckets and meanings of vLLM on vllm-rbln.

Seconds are model seconds, so that a scaled run reads like a real one. ``prefix_cache_hits`` counts hash hits,
also those whose slot is gone. Next: ``api`` renders them at /metrics; the periodic stats line comes from here too.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)

from harness.clock import NS_PER_S
from harness.emulator.core import EngineRequest, StepEnd
from harness.emulator.dialect import dialect_of
from harness.engine import DECODE, IDLE, PREFILL, EngineConfig

# Buckets: vllm/v1/metrics/loggers.py, vLLM 0.22.0.
ITERATION_TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
FIRST_TOKEN_S = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
]
PER_TOKEN_S = [
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
    20.0,
    40.0,
    80.0,
]
REQUEST_S = [
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0),
    *(960.0, 1920.0, 7680.0),
]
# In the order of RequestSeconds.
REQUEST_SECONDS: tuple[tuple[str, str, list[float]], ...] = (
    ("time_to_first_token_seconds", "time to first token in seconds", FIRST_TOKEN_S),
    ("inter_token_latency_seconds", "inter-token latency in seconds", PER_TOKEN_S),
    ("request_time_per_output_token_seconds", "time_per_output_token_seconds per request", PER_TOKEN_S),
    ("e2e_request_latency_seconds", "e2e request latency in seconds", REQUEST_S),
    ("request_queue_time_seconds", "time spent in WAITING phase for request", REQUEST_S),
    ("request_inference_time_seconds", "time spent in RUNNING phase for request", REQUEST_S),
    ("request_prefill_time_seconds", "time spent in PREFILL phase for request", REQUEST_S),
    ("request_decode_time_seconds", "time spent in DECODE phase for request", REQUEST_S),
)
WAITING_REASONS = ("capacity", "deferred")
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
TOKEN_SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
SLEEP_HELP = (
    "Engine sleep state; awake = 0 means engine is sleeping; awake = 1 means engine is awake; "
    "weights_offloaded = 1 means sleep level 1; discard_all = 1 means sleep level 2."
)
WAITING_HELP = (
    "Number of waiting requests by reason. Reason labels: 'capacity' = waiting for scheduling capacity; 'deferred' = "
    "deferred by transient constraints (LoRA budget, KV transfer, blocked status). Sum of all reasons equals "
    "vllm:num_requests_waiting."
)
_CONNECTOR = "External prefix cache {} from KV connector cross-instance cache sharing, in terms of number of {} tokens."
_PER_GPU = "Estimated number of {} per GPU (for Model Flops Utilization calculations)."
# Families that exist on the real stack and stay 0 there too.
NEVER_COUNTED = {
    "external_prefix_cache_queries": _CONNECTOR.format("queries", "queried"),
    "external_prefix_cache_hits": _CONNECTOR.format("hits", "cached"),
    "mm_cache_queries": "Multi-modal cache queries, in terms of number of queried items.",
    "mm_cache_hits": "Multi-modal cache hits, in terms of number of cached items.",
    "estimated_flops_per_gpu": _PER_GPU.format("floating point operations"),
    "estimated_read_bytes_per_gpu": _PER_GPU.format("bytes read from memory"),
    "estimated_write_bytes_per_gpu": _PER_GPU.format("bytes written to memory"),
}
TIMES_PREEMPTED = [1, 2, 3, 4, 5, 10, 20]
RECENT_REQUESTS = 1000  # the stats line's hit rate looks this far back


def one_two_five(max_value: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to ``max_value``."""
    steps = (mantissa * 10**exponent for exponent in range(20) for mantissa in (1, 2, 5))
    return [step for step in steps if step <= max_value]


class RequestSeconds(NamedTuple):
    """How long the parts of a request took, a histogram each."""

    first_token: Histogram
    inter_token: Histogram
    per_token: Histogram
    e2e: Histogram
    queue: Histogram
    inference: Histogram
    prefill: Histogram
    decode: Histogram


class ServerMetrics:
    """All metric families of one server; ``observe`` is called once per step, as vLLM's stat loggers are."""

    def __init__(self, model: str, config: EngineConfig, num_gpu_blocks: int) -> None:
        self.registry = CollectorRegistry()
        self.dialect = dialect_of(config.rule_set)
        self._labels = {"model_name": model, "engine": "0"}
        self.num_gpu_blocks = num_gpu_blocks
        self._num_blocks = max(num_gpu_blocks - 1, 1)
        self.block_tokens = config.block_tokens if config.prefix_caching else config.slot_tokens
        self._looks_up = config.prefix_caching
        tokens = one_two_five(config.slot_tokens)
        self.running = self._gauge("num_requests_running", "Number of requests in model execution batches.")
        self.waiting = self._gauge("num_requests_waiting", "Number of requests waiting to be processed.")
        self._waiting_by_reason = self._gauges(
            "num_requests_waiting_by_reason", WAITING_HELP, "reason", WAITING_REASONS
        )
        self._sleep_state = self._gauges("engine_sleep_state", SLEEP_HELP, "sleep_state", SLEEP_STATES)
        self.kv_usage = self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.")
        self.queries = self._counter(
            "prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens."
        )
        self.hits = self._counter("prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.")
        for name, text in NEVER_COUNTED.items():
            self._counter(name, text)
        for of_the_process in (ProcessCollector, PlatformCollector, GCCollector):
            of_the_process(registry=self.registry)
        self.preemptions = self._counter("num_preemptions", "Cumulative number of preemption from the engine.")
        self.prompt_tokens = self._counter("prompt_tokens", "Number of prefill tokens processed.")
        self._by_source = self._counters(
            "prompt_tokens_by_source", "Number of prompt tokens by source.", "source", TOKEN_SOURCES
        )
        self.cached_tokens = self._counter("prompt_tokens_cached", "Number of cached prompt tokens (local + external).")
        self.generated = self._counter("generation_tokens", "Number of generation tokens processed.")
        self._success = self._counters(
            "request_success", "Count of successfully processed requests.", "finished_reason", FINISHED_REASONS
        )
        prefill = "Number of prefill tokens processed."
        self.request_prompt = self._histogram("request_prompt_tokens", prefill, tokens)
        self.request_generated = self._histogram(
            "request_generation_tokens", "Number of generation tokens processed.", tokens
        )
        self.iteration = self._histogram(
            "iteration_tokens_total", "Histogram of number of tokens per engine_step.", ITERATION_TOKENS
        )
        self.max_generated = self._histogram(
            "request_max_num_generation_tokens", "Histogram of maximum number of requested generation tokens.", tokens
        )
        self.param_n = self._histogram("request_params_n", "Histogram of the n request parameter.", [1, 2, 5, 10, 20])
        self.param_max_tokens = self._histogram(
            "request_params_max_tokens", "Histogram of the max_tokens request parameter.", tokens
        )
        self.seconds = RequestSeconds(
            *(self._histogram(name, f"Histogram of {what}.", buckets) for name, what, buckets in REQUEST_SECONDS)
        )
        self.computed = self._histogram(
            "request_prefill_kv_computed_tokens",
            "Histogram of new KV tokens computed during prefill (excluding cached tokens).",
            tokens,
        )
        self._preempted = self._preemption_histogram()
        self._set_constants(config, num_gpu_blocks)
        self.stats = StatsWindow(self.dialect.kv_device)

    def render(self) -> bytes:
        """The exposition text; safe to call from another thread."""
        return generate_latest(self.registry)

    def observe(self, end: StepEnd) -> None:
        """Everything one step changes; called after its tokens were drawn."""
        step = end.start.step
        self.running.set(end.num_running)
        self.waiting.set(end.num_waiting)
        self._waiting_by_reason["capacity"].set(end.num_waiting)
        self.kv_usage.set(end.used_blocks / self._num_blocks)
        self.preemptions.inc(len(step.preempted))
        for request in end.start.preempted:
            request.num_preemptions += 1
        num_prompt_tokens = 0
        if step.kind == PREFILL:
            num_prompt_tokens = self._observe_prefill(end)
        elif step.kind == DECODE:
            for request in end.requests:
                self.seconds.inter_token.observe((end.start.end_ns - request.last_token_ns) / NS_PER_S)
        if step.kind != IDLE:
            self.generated.inc(len(end.requests))
            self.iteration.observe(num_prompt_tokens + len(end.requests))
        for request in end.requests:
            request.last_token_ns = end.start.end_ns
        for request in end.finished:
            self._observe_finished(request)
        self.stats.num_generated += len(end.requests)
        self.stats.num_running, self.stats.num_waiting = end.num_running, end.num_waiting
        self.stats.kv_usage = end.used_blocks / self._num_blocks

    def _observe_prefill(self, end: StepEnd) -> int:
        step = end.start.step
        # A failed copy changes what is computed and nothing that is counted.
        num_tokens = step.context_tokens
        num_counted = num_tokens - step.cached_tokens
        if self._looks_up:
            self.queries.inc(num_tokens)
            self.hits.inc(step.hash_hit_tokens)
            self.stats.add_lookup(num_tokens, step.hash_hit_tokens)
        if not end.requests:  # aborted while it ran: its look-up happened, its tokens never came out
            return 0
        self.prompt_tokens.inc(num_tokens)
        self._by_source["local_compute"].inc(num_counted)
        self._by_source["local_cache_hit"].inc(step.cached_tokens)
        self.cached_tokens.inc(step.cached_tokens)
        self.stats.num_computed += num_counted
        request = end.requests[0]
        self.seconds.first_token.observe((end.start.end_ns - request.arrival_ns) / NS_PER_S)
        return num_tokens

    def _observe_finished(self, request: EngineRequest) -> None:
        reason = request.finish_reason or "abort"
        self._success[reason].inc()
        decode_s = (request.last_token_ns - request.first_token_ns) / NS_PER_S
        self.seconds.e2e.observe((request.last_token_ns - request.arrival_ns) / NS_PER_S)
        self.seconds.queue.observe((request.scheduled_ns - request.queued_ns) / NS_PER_S)
        self.seconds.prefill.observe((request.first_token_ns - request.scheduled_ns) / NS_PER_S)
        self.seconds.inference.observe((request.last_token_ns - request.scheduled_ns) / NS_PER_S)
        self.seconds.decode.observe(decode_s)
        num_generated = request.planned_tokens
        self.seconds.per_token.observe(decode_s / (num_generated - 1) if num_generated > 1 else 0)
        self.computed.observe(len(request.prompt) - request.cached_tokens)
        self.request_prompt.observe(len(request.prompt))
        self.request_generated.observe(num_generated)
        if request.choices.finish_one(num_generated):
            self.max_generated.observe(request.choices.most_generated)
            self.param_n.observe(request.choices.num)
        self.param_max_tokens.observe(request.max_tokens)
        if self._preempted is not None:
            self._preempted.observe(request.num_preemptions)

    def _preemption_histogram(self) -> Histogram | None:
        if not self.dialect.counts_preemptions:
            return None
        text = "Histogram of the number of times a request was preempted."
        return self._histogram("request_num_preemptions", text, TIMES_PREEMPTED)

    def _set_constants(self, config: EngineConfig, num_gpu_blocks: int) -> None:
        self._sleep_state["awake"].set(1)
        info = {
            "block_size": self.block_tokens,
            "enable_prefix_caching": config.prefix_caching,
            # Twice: the API server's own count, plus the engine's. Source: vllm 0.22.0, core_client.py:713; the twin.
            "num_gpu_blocks": 2 * num_gpu_blocks,
            "engine": 0,
            **self.dialect.cache_config,
        }
        if self.dialect.tells_pool:
            num_tokens = num_gpu_blocks * self.block_tokens
            info |= {"kv_cache_size_tokens": num_tokens, "kv_cache_max_concurrency": num_tokens / config.slot_tokens}
        family = Gauge(
            "vllm:cache_config_info",
            "Information of the LLMEngine CacheConfig",
            labelnames=list(info),
            registry=self.registry,
        )
        family.labels(**{key: str(value) for key, value in info.items()}).set(1)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"vllm:{name}", text, labelnames=list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        family = Counter(f"vllm:{name}", text, labelnames=list(self._labels), registry=self.registry)
        return family.labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: list[int] | list[float]) -> Histogram:
        family = Histogram(f"vllm:{name}", text, labelnames=list(self._labels), buckets=buckets, registry=self.registry)
        return family.labels(**self._labels)

    def _gauges(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Gauge]:
        family = Gauge(f"vllm:{name}", text, labelnames=[*self._labels, label], registry=self.registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}

    def _counters(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        family = Counter(f"vllm:{name}", text, labelnames=[*self._labels, label], registry=self.registry)
        return {value: family.labels(**self._labels, **{label: value}) for value in values}


class StatsWindow:
    """What the periodic ``Engine 000:`` line says: sums since the last one, and the hit rate of recent requests."""

    def __init__(self, kv_device: str) -> None:
        self._kv_device = kv_device
        self.num_computed = self.num_generated = self.num_running = self.num_waiting = 0
        self.kv_usage = 0.0
        self._last_rates = (0.0, 0.0)
        self._lookups: deque[tuple[int, int]] = deque(maxlen=RECENT_REQUESTS)

    def add_lookup(self, num_tokens: int, num_hits: int) -> None:
        """One admission asked for ``num_tokens`` and its hashes matched ``num_hits``."""
        self._lookups.append((num_tokens, num_hits))

    def line(self, interval_s: float) -> tuple[str, bool]:
        """The line for the interval that ends now, and whether the engine was idle in it and in the one before."""
        rates = (self.num_computed / interval_s, self.num_generated / interval_s)
        is_idle = not any((*rates, *self._last_rates))
        self._last_rates, self.num_computed, self.num_generated = rates, 0, 0
        asked = sum(num_tokens for num_tokens, _ in self._lookups)
        hit_rate = sum(num_hits for _, num_hits in self._lookups) / asked if asked else 0.0
        return (
            f"Engine 000: Avg prompt throughput: {rates[0]:.1f} tokens/s, "
            f"Avg generation throughput: {rates[1]:.1f} tokens/s, Running: {self.num_running} reqs, "
            f"Waiting: {self.num_waiting} reqs, {self._kv_device} KV cache usage: {self.kv_usage * 100:.1f}%, "
            f"Prefix cache hit rate: {hit_rate * 100:.1f}%"
        ), is_idle
