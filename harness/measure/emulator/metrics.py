"""The server's Prometheus metrics, with the names, types, labels, buckets and meanings of vLLM on vllm-rbln.

The families are recorded in ``recorded/metrics.json``. Seconds are model seconds, so that a scaled run reads like a
real one. ``prefix_cache_hits`` counts hash hits, also those whose slot is gone.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

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
from harness.measure.emulator.recorded import recorded
from harness.model.engine import DECODE, IDLE, PREFILL, EngineConfig
from harness.model.engine.config import settings_of
from harness.model.engine.core import EngineRequest, StepEnd
from harness.stacks.rbln.rules.dialect import dialect_of

PREEMPTIONS_PER_REQUEST = "request_num_preemptions"
# What the library's own collectors expose.
PROCESS = ("process_", "python_")
# Ends the name of a sample that has the wall time at which the process made a family.
CREATED = "_created{"
RECENT_REQUESTS = 1000  # the stats line's hit rate looks this far back
SAMPLES = {"gauge": "", "counter": "_total", "histogram": "_bucket"}
SCHEDULE_MOVED = "schedule_moved_seconds"


def one_two_five(max_value: int) -> list[int]:
    """1, 2, 5, 10, 20, ... up to ``max_value``."""
    steps = (mantissa * 10**exponent for exponent in range(20) for mantissa in (1, 2, 5))
    return [step for step in steps if step <= max_value]


_OF_DRAFTS = {
    "drafts": "Number of spec decoding drafts.",
    "draft_tokens": "Number of draft tokens.",
    "accepted_tokens": "Number of accepted tokens.",
    "accepted_tokens_per_pos": "Accepted tokens per draft position.",
}
"""Counters of a server that decodes speculatively, by the end of their names."""


class BucketCounts:
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


class MetricFamily(NamedTuple):
    """A metric family. values: those of ``label``, a series each. buckets: of a histogram; a text: those of tokens.

    prefix: of its name: vLLM's, or the emulator's own.
    """

    kind: str
    name: str
    help: str
    buckets: Sequence[float] = ()
    label: str = ""
    values: Sequence[str] = ()
    prefix: str = "vllm:"

    @property
    def first_line(self) -> str:
        """How the first line of its samples begins."""
        return f"{self.prefix}{self.name}{SAMPLES[self.kind]}{{"

    def declare(self, model: str, registry: CollectorRegistry) -> None:
        """Add it to ``registry``, with all its series at 0."""
        name, labels = f"{self.prefix}{self.name}", {"model_name": model, "engine": "0"}
        names = [*labels, self.label] if self.label else [*labels]
        if self.kind == "histogram":
            Histogram(name, self.help, names, buckets=self.buckets, registry=registry).labels(**labels)
            return
        metric = (Gauge if self.kind == "gauge" else Counter)(name, self.help, names, registry=registry)
        for value in self.values or ("",):
            metric.labels(**labels, **({self.label: value} if self.label else {}))


def _families(place: str, config: EngineConfig) -> list[MetricFamily]:
    """The recorded families of a place in the exposition; token buckets end at the size of a slot."""
    rows: list[dict[str, Any]] = recorded("metrics")[place]
    families = [MetricFamily(**row) for row in rows]
    families = [
        family._replace(buckets=one_two_five(config.slot_tokens)) if isinstance(family.buckets, str) else family
        for family in families
    ]
    if place == "after_process" and (num_drafts := config.drafts.num_drafts):
        families += [MetricFamily("counter", f"spec_decode_num_{name}", words) for name, words in _OF_DRAFTS.items()]
        by_position = [str(position) for position in range(num_drafts)]
        families[-1] = families[-1]._replace(label="position", values=by_position)
    counts_preemptions = dialect_of(config.rule_set).counts_preemptions
    return [family for family in families if counts_preemptions or family.name != PREEMPTIONS_PER_REQUEST]


class Exposition(NamedTuple):
    """The metrics of a server before its first request, and the line at which the samples of each family begin."""

    lines: tuple[str, ...]
    families: tuple[MetricFamily, ...]
    first: dict[str, int]


@lru_cache(maxsize=16)
def exposition(model: str, config: EngineConfig, num_gpu_blocks: int, cost_model: str) -> Exposition:
    """The families as the library declares and orders them; a server then fills values in."""
    registry = CollectorRegistry()
    before, after = _families("before_process", config), _families("after_process", config)
    for family in before:
        family.declare(model, registry)
    for of_the_process in (ProcessCollector, PlatformCollector, GCCollector):
        of_the_process(registry=registry)
    for family in after:
        family.declare(model, registry)
    info = _cache_config(config, num_gpu_blocks)
    Gauge(
        "vllm:cache_config_info", "Information of the LLMEngine CacheConfig", labelnames=list(info), registry=registry
    ).labels(**info).set(1)
    # What no vLLM shows: all that this engine works by, so that a run can tell what was in force.
    settings = {key: json.dumps(value) for key, value in settings_of(config, cost_model).items()}
    Gauge(
        "emulator:config_info", "Settings of the emulated engine", labelnames=list(settings), registry=registry
    ).labels(**settings).set(1)
    moved = MetricFamily(
        "counter", SCHEDULE_MOVED, "Model seconds by which stalls moved the schedule.", prefix="emulator:"
    )
    moved.declare(model, registry)
    lines = tuple(generate_latest(registry).decode().split("\n"))
    families = (*before, *after, moved)
    begins = {family.first_line: family.name for family in families}
    first: dict[str, int] = {}
    for place, line in enumerate(lines):
        if (name := begins.get(line[: line.find("{") + 1])) is not None:
            first.setdefault(name, place)
    return Exposition(lines, families, first)


def _cache_config(config: EngineConfig, num_gpu_blocks: int) -> dict[str, str]:
    """The labels of vLLM's cache_config_info."""
    dialect, block_tokens = dialect_of(config.rule_set), block_tokens_of(config)
    info = {
        "block_size": block_tokens,
        "enable_prefix_caching": config.prefix_caching,
        # Twice: the API server's own count, plus the engine's. Source: vllm 0.22.0, core_client.py:713; the twin.
        "num_gpu_blocks": num_gpu_blocks if config.rule_set.is_paged else 2 * num_gpu_blocks,
        "engine": 0,
        **dialect.cache_config,
    }
    if dialect.reports_pool:
        num_tokens = num_gpu_blocks * block_tokens
        info |= {"kv_cache_size_tokens": num_tokens, "kv_cache_max_concurrency": num_tokens / config.slot_tokens}
    return {key: str(value) for key, value in info.items()}


def block_tokens_of(config: EngineConfig) -> int:
    """Tokens of what the server calls a KV block."""
    return config.block_tokens if config.prefix_caching or config.rule_set.is_paged else config.slot_tokens


_number = lru_cache(maxsize=4096)(floatToGoString)


class ServerMetrics:
    """All metric families of one server; ``observe`` is called once per step, as vLLM's stat loggers are."""

    def __init__(self, model: str, config: EngineConfig, num_gpu_blocks: int, cost_model: str = "") -> None:
        self.dialect = dialect_of(config.rule_set)
        self.num_gpu_blocks, self.block_tokens = num_gpu_blocks, block_tokens_of(config)
        self._num_blocks = max(num_gpu_blocks - 1, 1)
        self._looks_up = config.prefix_caching
        self._exposition = exposition(model, config, num_gpu_blocks, cost_model)
        # By family and label, "" for a family without one.
        self._amounts = {
            family.name: dict.fromkeys(family.values or ("",), 0.0)
            for family in self._exposition.families
            if family.kind != "histogram"
        }
        self._distributions = {
            family.name: BucketCounts(family.buckets)
            for family in self._exposition.families
            if family.kind == "histogram"
        }
        self._amounts["engine_sleep_state"]["awake"] = 1
        self.stats = StatsWindow(self.dialect.kv_device)

    def render(self, *, of_the_process: bool = True) -> bytes:
        """The exposition text; safe to call from another thread.

        of_the_process: with this process's own memory, CPU and files as they are now. Without, nothing of a process is
        in it.
        """
        lines = list(self._exposition.lines)
        for name, place in self._exposition.first.items():
            amounts = self._amounts.get(name)
            samples = self._distributions[name].samples() if amounts is None else amounts.values()
            for at, value in enumerate(samples, place):
                head, _, _ = lines[at].rpartition(" ")
                lines[at] = f"{head} {_number(value)}"
        if of_the_process:
            registry = CollectorRegistry()
            for collector in (ProcessCollector, PlatformCollector, GCCollector):
                collector(registry=registry)
            now = {line.rpartition(" ")[0]: line for line in generate_latest(registry).decode().split("\n")}
            lines = [now.get(line.rpartition(" ")[0], line) if line.startswith(PROCESS) else line for line in lines]
        else:
            lines = [line for line in lines if not line.startswith(PROCESS) and CREATED not in line]
        return "\n".join(lines).encode()

    def observe(self, end: StepEnd) -> None:
        """Everything one step changes; called after its tokens were drawn."""
        step, num_tokens = end.start.step, sum(end.num_tokens)
        kv_usage = end.used_blocks / self._num_blocks
        self._amounts["num_requests_running"][""] = end.num_running
        self._amounts["num_requests_waiting"][""] = end.num_waiting
        self._amounts["num_requests_waiting_by_reason"]["capacity"] = end.num_waiting
        self._amounts["kv_cache_usage_perc"][""] = kv_usage
        self._add("num_preemptions", len(step.preempted))
        num_prompt_tokens = 0
        if step.tokens:
            num_prompt_tokens = self._observe_paged(end)
        elif step.kind == PREFILL:
            num_prompt_tokens = self._observe_prefill(end)
        elif step.kind == DECODE:
            self._observe_decode(end)
        if step.kind != IDLE:
            self._add("generation_tokens", num_tokens)
            each = num_tokens // len(end.ends_ns)
            self._observe("iteration_tokens_total", num_prompt_tokens + each, len(end.ends_ns))
            self._observe_drafts(end)
        for request in end.requests:
            request.last_token_ns = end.ends_ns[-1]
        for request in end.finished:
            self._observe_finished(request)
        self.stats.num_generated += num_tokens
        self.stats.num_running, self.stats.num_waiting = end.num_running, end.num_waiting
        self.stats.kv_usage = kv_usage

    def schedule_moved(self, by_ns: int) -> None:
        """The host stalled, and moved every later step by so many model ns."""
        self._add(SCHEDULE_MOVED, by_ns / NS_PER_S)

    def _add(self, name: str, by: float, label: str = "") -> None:
        self._amounts[name][label] += by

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self._distributions[name].observe(value, times)

    def _observe_decode(self, end: StepEnd) -> None:
        gaps = self._distributions["inter_token_latency_seconds"]
        for request in end.requests:
            gaps.observe((end.ends_ns[0] - request.last_token_ns) / NS_PER_S)
        for before_ns, at_ns in pairwise(end.ends_ns):
            gaps.observe((at_ns - before_ns) / NS_PER_S, len(end.requests))

    def _observe_prefill(self, end: StepEnd) -> int:
        step = end.start.step
        # A failed copy changes what is computed and nothing that is counted.
        self._observe_lookup(step.context_tokens, step.hash_hit_tokens)
        # A request that was aborted while it ran was looked up, and gets no token.
        return sum(
            self._observe_prompt(request, end, step.context_tokens, step.cached_tokens) for request in end.requests
        )

    def _observe_paged(self, end: StepEnd) -> int:
        """A step of paged rules: a prompt is counted with its first token.

        Source: vLLM 0.30.0, v1/metrics/stats.py.
        """
        end_ns = end.start.end_ns
        external = end.start.step.external_hits
        if end.start.step.external_queries:
            self._add("external_prefix_cache_queries", end.start.step.external_queries)
            self._add("external_prefix_cache_hits", external)
        for lookup in end.start.lookups:
            # What the second memory gave is counted there alone.
            loaded = min(external, lookup.cached_tokens)
            external -= loaded
            self._observe_lookup(lookup.cached_tokens + lookup.computed_tokens, lookup.cached_tokens - loaded)
        num_prompt_tokens = 0
        for request in end.requests:
            if request.num_generated > 1:
                self._observe("inter_token_latency_seconds", (end_ns - request.last_token_ns) / NS_PER_S)
            else:
                num_prompt_tokens += self._observe_prompt(request, end, len(request.prompt), request.cached_tokens)
        return num_prompt_tokens

    def _observe_drafts(self, end: StepEnd) -> None:
        """Drafts of the requests that get tokens, those too that pad them."""
        known = {request.handle for request in end.requests}
        for part in end.parts:
            if part.drafts and part.handle in known:
                self._add("spec_decode_num_drafts", 1)
                self._add("spec_decode_num_draft_tokens", part.drafts)
                self._add("spec_decode_num_accepted_tokens", part.accepted)
                for position in range(part.accepted):
                    self._add("spec_decode_num_accepted_tokens_per_pos", 1, str(position))

    def _observe_lookup(self, num_tokens: int, num_hits: int) -> None:
        if self._looks_up:
            self._add("prefix_cache_queries", num_tokens)
            self._add("prefix_cache_hits", num_hits)
            self.stats.add_lookup(num_tokens, num_hits)

    def _observe_prompt(self, request: EngineRequest, end: StepEnd, num_tokens: int, cached_tokens: int) -> int:
        """The prompt of a request that got its first token; returns its tokens."""
        self._add("prompt_tokens", num_tokens)
        self._add("prompt_tokens_by_source", num_tokens - cached_tokens, "local_compute")
        self._add("prompt_tokens_by_source", cached_tokens, "local_cache_hit")
        self._add("prompt_tokens_cached", cached_tokens)
        self.stats.num_computed += num_tokens - cached_tokens
        self._observe("time_to_first_token_seconds", (end.start.end_ns - request.arrival_ns) / NS_PER_S)
        return num_tokens

    def _observe_finished(self, request: EngineRequest) -> None:
        self._add("request_success", 1, request.finish_reason or "abort")
        num_generated = request.planned_tokens
        decode_s = (request.last_token_ns - request.first_token_ns) / NS_PER_S
        figures = {
            "e2e_request_latency_seconds": (request.last_token_ns - request.arrival_ns) / NS_PER_S,
            "request_queue_time_seconds": (request.scheduled_ns - request.queued_ns) / NS_PER_S,
            "request_prefill_time_seconds": (request.first_token_ns - request.scheduled_ns) / NS_PER_S,
            "request_inference_time_seconds": (request.last_token_ns - request.scheduled_ns) / NS_PER_S,
            "request_decode_time_seconds": decode_s,
            "request_time_per_output_token_seconds": decode_s / (num_generated - 1) if num_generated > 1 else 0,
            "request_prefill_kv_computed_tokens": len(request.prompt) - request.cached_tokens,
            "request_prompt_tokens": len(request.prompt),
            "request_generation_tokens": num_generated,
            "request_params_max_tokens": request.max_tokens,
            "request_max_num_generation_tokens": num_generated,
            "request_params_n": 1,
        }
        if self.dialect.counts_preemptions:
            figures[PREEMPTIONS_PER_REQUEST] = request.num_preemptions
        for name, value in figures.items():
            self._observe(name, value)


class StatsWindow:
    """The periodic ``Engine 000:`` line: sums since the last one, and the hit rate of recent requests."""

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
        num_queried = sum(num_tokens for num_tokens, _ in self._lookups)
        hit_rate = sum(num_hits for _, num_hits in self._lookups) / num_queried if num_queried else 0.0
        return (
            f"Engine 000: Avg prompt throughput: {rates[0]:.1f} tokens/s, "
            f"Avg generation throughput: {rates[1]:.1f} tokens/s, Running: {self.num_running} reqs, "
            f"Waiting: {self.num_waiting} reqs, {self._kv_device} KV cache usage: {self.kv_usage * 100:.1f}%, "
            f"Prefix cache hit rate: {hit_rate * 100:.1f}%"
        ), is_idle
