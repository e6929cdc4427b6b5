"""The server's Prometheus metrics, with the names, types, labels, buckets and meanings of vLLM on vllm-rbln.

Seconds are model seconds, so that a scaled run reads like a real one. ``prefix_cache_hits`` counts hash hits,
also those whose slot is gone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Literal, NamedTuple

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
from prometheus_client.utils import floatToGoString

from harness.clock import NS_PER_S
from harness.emulator.core import EngineRequest, StepEnd
from harness.engine import DECODE, IDLE, PREFILL, EngineConfig
from harness.stack.rbln.dialect import dialect_of

# Buckets: vllm/v1/metrics/loggers.py, vLLM 0.22.0.
ITERATION_TOKENS = [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384]
FIRST_TOKEN_S = [
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0),
    *(80.0, 160.0, 640.0, 2560.0),
]
PER_TOKEN_S = [
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
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
# What the library's own collectors say.
PROCESS = ("process_", "python_")
RECENT_REQUESTS = 1000  # the stats line's hit rate looks this far back


def one_two_five(max_value: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to ``max_value``."""
    steps = (mantissa * 10**exponent for exponent in range(20) for mantissa in (1, 2, 5))
    return [step for step in steps if step <= max_value]


class Amount:
    """A counter or a gauge."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, by: float = 1) -> None:
        self.value += by

    def set(self, value: float) -> None:
        self.value = value

    def samples(self) -> tuple[float, ...]:
        return (self.value,)


class Distribution:
    """A histogram: how many values lie up to each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += times
        # One by one: so many additions are not a multiplication, to the last bit.
        total = self._sum
        for _ in range(times):
            total += value
        self._sum = total

    def samples(self) -> tuple[float, ...]:
        """Its lines: up to each bound, all of them, their sum."""
        cumulative = [float(sum(self._counts[: place + 1])) for place in range(len(self._counts))]
        return (*cumulative, cumulative[-1], self._sum)


class Family(NamedTuple):
    """One metric family. values: those of ``label``, a series each. buckets: of a histogram."""

    kind: Literal["gauge", "counter", "histogram"]
    name: str
    text: str
    buckets: Sequence[float] = ()
    label: str = ""
    values: tuple[str, ...] = ()

    @property
    def first_line(self) -> str:
        """How the first line of its samples begins."""
        return f"vllm:{self.name}{ {'gauge': '', 'counter': '_total', 'histogram': '_bucket'}[self.kind] }{{"


class RequestSeconds(NamedTuple):
    """How long the parts of a request took, a histogram each."""

    first_token: Distribution
    inter_token: Distribution
    per_token: Distribution
    e2e: Distribution
    queue: Distribution
    inference: Distribution
    prefill: Distribution
    decode: Distribution


_BEFORE_PROCESS = (
    Family("gauge", "num_requests_running", "Number of requests in model execution batches."),
    Family("gauge", "num_requests_waiting", "Number of requests waiting to be processed."),
    Family("gauge", "num_requests_waiting_by_reason", WAITING_HELP, (), "reason", WAITING_REASONS),
    Family("gauge", "engine_sleep_state", SLEEP_HELP, (), "sleep_state", SLEEP_STATES),
    Family("gauge", "kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage."),
    Family("counter", "prefix_cache_queries", "Prefix cache queries, in terms of number of queried tokens."),
    Family("counter", "prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens."),
    *(Family("counter", name, text) for name, text in NEVER_COUNTED.items()),
)


def _after_process(slot_tokens: int, counts_preemptions: bool) -> list[Family]:
    prefill, tokens = "Number of prefill tokens processed.", one_two_five(slot_tokens)
    max_tokens, params = "Histogram of maximum number of requested generation tokens.", "Histogram of the {} parameter."
    computed = "Histogram of new KV tokens computed during prefill (excluding cached tokens)."
    success = "Count of successfully processed requests."
    by_source = "Number of prompt tokens by source."
    preempted = "Histogram of the number of times a request was preempted."
    return [
        Family("counter", "num_preemptions", "Cumulative number of preemption from the engine."),
        Family("counter", "prompt_tokens", prefill),
        Family("counter", "prompt_tokens_by_source", by_source, (), "source", TOKEN_SOURCES),
        Family("counter", "prompt_tokens_cached", "Number of cached prompt tokens (local + external)."),
        Family("counter", "generation_tokens", "Number of generation tokens processed."),
        Family("counter", "request_success", success, (), "finished_reason", FINISHED_REASONS),
        Family("histogram", "request_prompt_tokens", prefill, tokens),
        Family("histogram", "request_generation_tokens", "Number of generation tokens processed.", tokens),
        Family(
            "histogram", "iteration_tokens_total", "Histogram of number of tokens per engine_step.", ITERATION_TOKENS
        ),
        Family("histogram", "request_max_num_generation_tokens", max_tokens, tokens),
        Family("histogram", "request_params_n", params.format("n request"), [1, 2, 5, 10, 20]),
        Family("histogram", "request_params_max_tokens", params.format("max_tokens request"), tokens),
        *(Family("histogram", name, f"Histogram of {what}.", buckets) for name, what, buckets in REQUEST_SECONDS),
        Family("histogram", "request_prefill_kv_computed_tokens", computed, tokens),
        *([Family("histogram", "request_num_preemptions", preempted, TIMES_PREEMPTED)] * counts_preemptions),
    ]


class Exposition(NamedTuple):
    """What a server says before its first request, line by line, and at which line the samples of each family begin."""

    lines: tuple[str, ...]
    families: tuple[Family, ...]
    first: dict[str, int]


@lru_cache(maxsize=16)
def exposition(model: str, config: EngineConfig, num_gpu_blocks: int) -> Exposition:
    """The families as the library declares and orders them; a server then fills values in."""
    registry, dialect = CollectorRegistry(), dialect_of(config.rule_set)
    after = _after_process(config.slot_tokens, dialect.counts_preemptions)
    for family in _BEFORE_PROCESS:
        _declare(family, model, registry)
    for of_the_process in (ProcessCollector, PlatformCollector, GCCollector):
        of_the_process(registry=registry)
    for family in after:
        _declare(family, model, registry)
    info = _cache_config(config, num_gpu_blocks)
    Gauge(
        "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labelnames=list(info), registry=registry
    ).labels(**info).set(1)
    lines = tuple(generate_latest(registry).decode().split("\n"))
    families = (*_BEFORE_PROCESS, *after)
    begins = {family.first_line: family.name for family in families}
    first: dict[str, int] = {}
    for place, line in enumerate(lines):
        if (name := begins.get(line[: line.find("{") + 1])) is not None:
            first.setdefault(name, place)
    return Exposition(lines, families, first)


def _declare(family: Family, model: str, registry: CollectorRegistry) -> None:
    labels = {"model_name": model, "engine": "0"}
    names = [*labels, family.label] if family.label else [*labels]
    name = f"vllm:{family.name}"
    if family.kind == "histogram":
        Histogram(name, family.text, labelnames=names, buckets=family.buckets, registry=registry).labels(**labels)
        return
    declared = (Gauge if family.kind == "gauge" else Counter)(name, family.text, labelnames=names, registry=registry)
    for value in family.values or ("",):
        declared.labels(**labels, **({family.label: value} if family.label else {}))


def _cache_config(config: EngineConfig, num_gpu_blocks: int) -> dict[str, str]:
    """The labels of vLLM's cache_config_info."""
    dialect, block_tokens = dialect_of(config.rule_set), block_tokens_of(config)
    info = {
        "block_size": block_tokens,
        "enable_prefix_caching": config.prefix_caching,
        # Twice: the API server's own count, plus the engine's. Source: vllm 0.22.0, core_client.py:713; the twin.
        "num_gpu_blocks": 2 * num_gpu_blocks,
        "engine": 0,
        **dialect.cache_config,
    }
    if dialect.tells_pool:
        num_tokens = num_gpu_blocks * block_tokens
        info |= {"kv_cache_size_tokens": num_tokens, "kv_cache_max_concurrency": num_tokens / config.slot_tokens}
    return {key: str(value) for key, value in info.items()}


def block_tokens_of(config: EngineConfig) -> int:
    """Tokens of what the server calls a KV block."""
    return config.block_tokens if config.prefix_caching else config.slot_tokens


_number = lru_cache(maxsize=4096)(floatToGoString)


class ServerMetrics:
    """All metric families of one server; ``observe`` is called once per step, as vLLM's stat loggers are."""

    def __init__(self, model: str, config: EngineConfig, num_gpu_blocks: int) -> None:
        self.dialect = dialect_of(config.rule_set)
        self.num_gpu_blocks, self.block_tokens = num_gpu_blocks, block_tokens_of(config)
        self._num_blocks = max(num_gpu_blocks - 1, 1)
        self._looks_up = config.prefix_caching
        self._exposition = exposition(model, config, num_gpu_blocks)
        self._amounts: dict[str, tuple[Amount, ...]] = {}
        self._distributions: dict[str, Distribution] = {}
        for family in self._exposition.families:
            if family.kind == "histogram":
                self._distributions[family.name] = Distribution(family.buckets)
            else:
                self._amounts[family.name] = tuple(Amount() for _ in family.values or ("",))
        one = {name: amounts[0] for name, amounts in self._amounts.items()}
        self.running, self.waiting = one["num_requests_running"], one["num_requests_waiting"]
        self._waiting_for_capacity = one["num_requests_waiting_by_reason"]
        one["engine_sleep_state"].set(1)  # awake
        self.kv_usage = one["kv_cache_usage_perc"]
        self.queries, self.hits = one["prefix_cache_queries"], one["prefix_cache_hits"]
        self.preemptions, self.prompt_tokens = one["num_preemptions"], one["prompt_tokens"]
        self._by_source = dict(zip(TOKEN_SOURCES, self._amounts["prompt_tokens_by_source"], strict=True))
        self.cached_tokens, self.generated = one["prompt_tokens_cached"], one["generation_tokens"]
        self._success = dict(zip(FINISHED_REASONS, self._amounts["request_success"], strict=True))
        of = self._distributions
        self.request_prompt, self.request_generated = of["request_prompt_tokens"], of["request_generation_tokens"]
        self.iteration, self.max_generated = of["iteration_tokens_total"], of["request_max_num_generation_tokens"]
        self.param_n, self.param_max_tokens = of["request_params_n"], of["request_params_max_tokens"]
        self.seconds = RequestSeconds(*(of[name] for name, _, _ in REQUEST_SECONDS))
        self.computed = of["request_prefill_kv_computed_tokens"]
        self._preempted = of.get("request_num_preemptions")
        self.stats = StatsWindow(self.dialect.kv_device)

    def render(self, *, of_the_process: bool = True) -> bytes:
        """The exposition text; safe to call from another thread.

        of_the_process: with this process's own memory, CPU and files as they are now.
        """
        lines = list(self._exposition.lines)
        for name, place in self._exposition.first.items():
            series = self._amounts.get(name) or (self._distributions[name],)
            for at, value in enumerate((value for one in series for value in one.samples()), place):
                head, _, _ = lines[at].rpartition(" ")
                lines[at] = f"{head} {_number(value)}"
        if of_the_process:
            registry = CollectorRegistry()
            for collector in (ProcessCollector, PlatformCollector, GCCollector):
                collector(registry=registry)
            now = {line.rpartition(" ")[0]: line for line in generate_latest(registry).decode().split("\n")}
            lines = [now.get(line.rpartition(" ")[0], line) if line.startswith(PROCESS) else line for line in lines]
        return "\n".join(lines).encode()

    def observe(self, end: StepEnd) -> None:
        """Everything one step changes; called after its tokens were drawn."""
        step, num_tokens = end.start.step, len(end.requests) * len(end.ends_ns)
        self.running.set(end.num_running)
        self.waiting.set(end.num_waiting)
        self._waiting_for_capacity.set(end.num_waiting)
        self.kv_usage.set(end.used_blocks / self._num_blocks)
        self.preemptions.inc(len(step.preempted))
        for request in end.start.preempted:
            request.num_preemptions += 1
        num_prompt_tokens = 0
        if step.kind == PREFILL:
            num_prompt_tokens = self._observe_prefill(end)
        elif step.kind == DECODE:
            self._observe_decode(end)
        if step.kind != IDLE:
            self.generated.inc(num_tokens)
            self.iteration.observe(num_prompt_tokens + len(end.requests), len(end.ends_ns))
        for request in end.requests:
            request.last_token_ns = end.ends_ns[-1]
        for request in end.finished:
            self._observe_finished(request)
        self.stats.num_generated += num_tokens
        self.stats.num_running, self.stats.num_waiting = end.num_running, end.num_waiting
        self.stats.kv_usage = end.used_blocks / self._num_blocks

    def _observe_decode(self, end: StepEnd) -> None:
        for request in end.requests:
            self.seconds.inter_token.observe((end.ends_ns[0] - request.last_token_ns) / NS_PER_S)
        for before_ns, at_ns in pairwise(end.ends_ns):
            self.seconds.inter_token.observe((at_ns - before_ns) / NS_PER_S, len(end.requests))

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
