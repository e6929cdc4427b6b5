"""What the engine must know of a server: its shape and rules, the settings requested and in force, its fresh tables.

Settings in force hold keys of a ServerSpec with the values that a server showed (``usable_kv_slots`` may stand for
``kv_slots``); a key that no source showed is absent. Nothing here depends on time or on requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from harness.compiled.records import IntArray, new_records, record_fields, records_of
from harness.errors import SpecError
from harness.model.engine.state import (
    EVENT_HEADER,
    Block,
    EngineState,
    Eviction,
    Place,
    Prefix,
    Row,
    Server,
    Slot,
    new_queues,
)
from harness.model.spec import ServerShape, ServerSpec
from harness.model.spec.server import DEFAULTS, HARNESS_KEYS, SERVER_KEYS
from harness.stacks.rbln.rules.decode_graphs import decode_queries
from harness.stacks.rbln.rules.kv_rules import AUTO, RULE_SETS, RuleSet, check_active_limit, is_paged, rule_set
from harness.stacks.vllm.graph_rules import Graph, GraphFlags, graphs_of

PREFILL_CHUNK_TOKENS = 128
"""Tokens of one prefill device call on RBLN-CA; also the size of an inner block. Source: vllm-rbln 0.11.1."""
PAGED_BLOCK_TOKENS = 16
"""Default block size of vLLM. Source: vLLM 0.30.0, config/cache.py."""
CPU_BLOCK_TOKENS = 128
"""Default block size of vLLM on a CPU. Source: vLLM 0.30.0, platforms/cpu.py."""
PAGED_STEP_TOKENS = 2048
"""Default token budget of a step of ``vllm serve`` on a device of less than 70 GiB; 8,192 on H100 and H200, 16,384 from
160 GiB. Source: vLLM 0.30.0, engine/arg_utils.py, get_batch_defaults."""


@dataclass(frozen=True, kw_only=True)
class PagedSettings:
    """Keys of a server with paged KV memory, as the engine takes them (``SERVER_KEYS``); the defaults of vllm serve.

    max_num_batched_tokens: most tokens of a step. long_prefill_tokens: most tokens of a prompt in a step; 0: no such
    limit. async_scheduling: each step is decided when the step before it begins. keep_kv_ns: longest that the blocks of
    a request that asks for it are pinned once it has ended; 0: never. offload_blocks: of a second memory; 0: none.
    offload_block_ns: to load one of them.
    """

    max_num_batched_tokens: int = PAGED_STEP_TOKENS
    long_prefill_tokens: int = 0
    async_scheduling: bool = False
    keep_kv_ns: int = 0
    offload_blocks: int = 0
    offload_block_ns: int = 0


PAGED_SCALARS = {field.name for field in fields(PagedSettings)}


@dataclass(frozen=True)
class Drafts:
    """How a server decodes speculatively. num_drafts: tokens drafted for a request and step; 0: it does not.

    method, release: of vLLM, which decide what it captures. lookahead_tokens: so many more has a request KV blocks for.
    drops_last_match: the last block that is found in the prefix cache is computed again. key_lookahead: so many tokens
    after it does a block's key name too, 0 or 1. registers_drafts: without asynchronous scheduling, accepted drafts can
    be found in the cache when their step is over, else when the request's next step is decided. trims_computed: then
    too, what was accepted behind the end of an answer counts as not computed. draft_slots: of the token budget, that a
    request takes beside its tokens. is_parallel: one pass of the drafter drafts all.
    rates: share of the requests of a step that accept at least their first draft, their first two, and so on, by which
    acceptance is drawn; (): whoever drives the server says what was accepted.
    """

    num_drafts: int = 0
    method: str = ""
    release: str = ""
    lookahead_tokens: int = 0
    drops_last_match: bool = False
    key_lookahead: int = 0
    registers_drafts: bool = False
    trims_computed: bool = False
    draft_slots: int = 0
    is_parallel: bool = False
    rates: tuple[float, ...] = ()

    @property
    def num_passes(self) -> int:
        """Passes of the drafter after each step: one for each draft, or for all; looking text up is one."""
        return min(self.num_drafts, 1) if self.is_parallel or self.method in NGRAM_METHODS else self.num_drafts


NO_DRAFTS = Drafts()
NATIVE_RELEASE = "0.30.0"
"""Of vLLM, on which vllm-rbln 0.12.0 is built."""
NGRAM_METHODS = ("ngram", "ngram_gpu", "suffix")
"""They draft by looking text up, and keep no KV."""
EAGLE_METHODS = ("eagle", "eagle3", "mtp")
"""They draft from the states of the model and the token after; a drafter of mtp has one module."""
DRAFT_MODEL = "draft_model"
LOOK_AHEAD_RELEASES = ("0.33.0",)
"""Of vLLM: the hash of a block that EAGLE fills covers the token after it; accepted drafts are registered at once."""


def drafts_of(
    method: str, num_drafts: int, release: str, rates: tuple[float, ...] = (), *, is_parallel: bool = False
) -> Drafts:
    """The rules by which a release of vLLM schedules the drafts of a method. rates, is_parallel: see ``Drafts``.

    Raises SpecError for a method whose rules are not known here. Source: vLLM 0.30.0 to 0.33.0, config/vllm.py
    (num_lookahead_tokens, num_hash_lookahead_tokens), config/speculative.py (max_num_new_slots_for_drafting),
    v1/core/sched/scheduler.py and v1/core/single_type_kv_cache_manager.py.
    """
    is_new, is_eagle, is_model = release in LOOK_AHEAD_RELEASES, method in EAGLE_METHODS, method == DRAFT_MODEL
    known = (*EAGLE_METHODS, DRAFT_MODEL, *(() if is_parallel else NGRAM_METHODS))
    if method not in known:
        raise SpecError(
            f"{'parallel ' * is_parallel}drafts by {method!r} in vLLM {release}, whose rules are not known",
            where="speculative decoding",
            hint=f"Known are {', '.join(known)}",
        )
    return Drafts(
        num_drafts,
        method,
        release,
        lookahead_tokens=num_drafts if is_eagle or is_model else 0,
        drops_last_match=is_eagle and not is_new,
        key_lookahead=int(is_eagle and is_new),
        registers_drafts=is_new,
        trims_computed=is_new,
        draft_slots=(num_drafts - is_eagle) if is_parallel else int(is_model),
        is_parallel=is_parallel,
        rates=rates,
    )


def native_drafts_of(method: str, num_drafts: int, rates: tuple[float, ...] = ()) -> Drafts:
    """The same on vllm-rbln's native path: every method has room for its drafts.

    Raises SpecError for a method whose rules are not known here. Source: vllm-rbln 0.12.0, v1/core/rbln_scheduler.py.
    """
    known = ("ngram", "suffix", *EAGLE_METHODS)
    if method not in known:
        raise SpecError(
            f"drafts by {method!r} on vllm-rbln's native path, whose rules are not known",
            where="speculative decoding",
            hint=f"Known are {', '.join(known)}",
        )
    return replace(drafts_of(method, num_drafts, NATIVE_RELEASE, rates), lookahead_tokens=num_drafts)


@dataclass(frozen=True)
class EngineConfig(PagedSettings):
    """One server configuration, in the vendor's terms.

    max_num_seqs: the limit, most requests running at once (the artifact's batch_size).
    max_active_seqs: most requests admitted at once (--max-num-active-seqs), at most the limit; None: the limit.
    rules: a name of ``harness.stacks.rbln.rules.kv_rules``; "auto" becomes the newest stable release's.
    decode_buckets: ascending compiled decode batch sizes; the last is the limit. Of a vLLM the sizes that it is asked
    to capture: see ``capture_sizes``.
    kv_slots: physical KV regions (kvcache_num_blocks, or --num-gpu-blocks-override); 0: paged rules.
    slot_tokens: longest request, prompt and output together (max_model_len).
    num_gpu_blocks, drafts (how it decodes speculatively) and all of PagedSettings: paged rules only; block_tokens is
    their block size. Rules that never mix run each part of a prompt alone, on a graph of ``max_num_batched_tokens``;
    sizes count requests there, and each is compiled for every number of tokens of a request.
    partition_tokens: length of one physical region when a request spans several (kvcache_partition_len of a
    flash-attention artifact); None: one region holds a whole request (eager attention).
    """

    max_num_seqs: int
    decode_buckets: tuple[int, ...]
    kv_slots: int = 0
    slot_tokens: int = 8192
    block_tokens: int = PREFILL_CHUNK_TOKENS
    partition_tokens: int | None = None
    prefix_caching: bool = True
    rules: str = AUTO
    max_active_seqs: int | None = None
    num_gpu_blocks: int | None = None
    drafts: Drafts = NO_DRAFTS

    def __post_init__(self) -> None:
        if is_paged(self.rules):
            self._check_paged()
            return
        if self.kv_slots < 1:
            raise SpecError(f"kv_slots must be at least 1, got {self.kv_slots}", where="engine")
        check_buckets(self.decode_buckets, self.max_num_seqs)
        if self.block_tokens < 1 or self.slot_tokens % self.block_tokens:
            raise SpecError(
                f"slot_tokens ({self.slot_tokens}) is not a multiple of block_tokens ({self.block_tokens})",
                where="engine",
            )
        partition = self.partition_tokens
        if partition is not None and (
            partition < 1 or partition % self.block_tokens or self.slot_tokens % partition or not self.prefix_caching
        ):
            raise SpecError(
                f"partition_tokens ({partition}) must divide slot_tokens ({self.slot_tokens}), be a multiple of "
                f"block_tokens ({self.block_tokens}), and needs prefix caching",
                where="engine",
            )
        try:
            object.__setattr__(self, "rules", rule_set(self.rules).name)
            check_active_limit(self.max_active_seqs, self.max_num_seqs, self.rule_set)
        except ValueError as error:
            raise SpecError(str(error), where="engine") from error
        if self.num_usable_slots < 1:
            raise SpecError(
                "one KV slot below the limit leaves no usable slot: it is reserved for padding",
                where="engine",
                hint="Give at least 2 slots",
            )

    def _check_paged(self) -> None:
        """SpecError for what vLLM would refuse, or whose rules are not known."""
        if self.rule_set.never_mixes:
            self._check_native()
        elif 0 < self.long_prefill_tokens <= self.drafts.num_drafts:
            raise SpecError(
                f"long_prefill_tokens ({self.long_prefill_tokens}) is not above the {self.drafts.num_drafts} drafts of "
                "a step",
                where="engine",
                hint="vLLM ends with an error where it pads a request at its admission",
            )
        if self.offload_blocks and self.drafts.lookahead_tokens:
            raise SpecError(
                f"drafts by {self.drafts.method!r} beside a second KV memory, whose rules are not known",
                where="engine",
                hint="Leave the second memory out, or draft with ngram",
            )
        if min(self.max_num_seqs, self.block_tokens, self.max_num_batched_tokens, self.slot_tokens) < 1:
            raise SpecError("every size must be at least 1", where="engine")
        sizes = self.capture_sizes
        if any(size < 1 for size in sizes) or any(later <= earlier for earlier, later in pairwise(sizes)):
            raise SpecError(f"capture sizes {list(sizes)} are not ascending and positive", where="engine")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise SpecError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) is below max_num_seqs ({self.max_num_seqs})",
                where="engine",
                hint="vLLM refuses this too: a full decode step would not fit a step",
            )
        if self.num_blocks <= self.blocks_of(self.slot_tokens):
            raise SpecError(
                f"num_gpu_blocks ({self.num_blocks}) of {self.block_tokens} tokens do not hold one request of "
                f"{self.slot_tokens} tokens and the placeholder block",
                where="engine",
                hint=f"Give at least {self.blocks_of(self.slot_tokens) + 1} blocks, or shorter requests",
            )

    def _check_native(self) -> None:
        """SpecError for what vllm-rbln's native path does not have, or nobody has held to it."""
        if self.async_scheduling or self.offload_blocks or self.keep_kv_ns:
            raise SpecError(
                "asynchronous scheduling, a second KV memory and kept KV are not modelled on vllm-rbln's native path",
                where="engine",
                hint="Leave async_scheduling, offload_blocks and keep_kv_s out; with drafts it never is asynchronous",
            )
        if self.max_num_batched_tokens == 1 or self.long_prefill_tokens == 1:
            raise SpecError(
                "a part of a prompt of one token would run as a decode",
                where="engine",
                hint="Give at least 2 for max_num_batched_tokens, and for long_prefill_tokens",
            )
        check_buckets(self.capture_sizes, self.max_num_seqs)

    @classmethod
    def from_server(cls, server: ServerSpec) -> EngineConfig:
        """The engine's view of a server specification. Raises SpecError for several replicas, which are no engine."""
        if server.is_routed:
            raise SpecError(
                f"{server.num_replicas} replicas behind a router are not one engine",
                where="server.replicas",
                hint="A run with --backend sim simulates them",
            )
        written = {key: value for key in SCALAR_OF if (value := getattr(server, key)) is not None}
        units = {key: SERVER_KEYS[key].unit for key in written}
        rules = server.rule_set()
        return cls(
            **server.shape._asdict(),
            prefix_caching=server.prefix_caching,
            rules=rules.name,
            drafts=modelled_drafts(server, rules),
            block_tokens=paged_block_tokens(server) if server.is_paged else PREFILL_CHUNK_TOKENS,
            **{
                SCALAR_OF[key]: value if units[key] == 1 else round(value * units[key])
                for key, value in written.items()
            },
        )

    @classmethod
    def of_shape(cls, shape: ServerShape, rules: str) -> EngineConfig:
        """A server of this shape under these rules, everything else as the defaults have it."""
        block_tokens = PAGED_BLOCK_TOKENS if is_paged(rules) else PREFILL_CHUNK_TOKENS
        return cls(**shape._asdict(), rules=rules, block_tokens=block_tokens)

    @property
    def rule_set(self) -> RuleSet:
        """What the rules' name stands for."""
        return RULE_SETS[self.rules]

    @property
    def capture_sizes(self) -> tuple[int, ...]:
        """Ascending sizes that a decode step is padded to (--cudagraph-capture-sizes), in tokens where it drafts; a
        larger step runs without a graph, unpadded."""
        return self._graphs[0]

    @cached_property
    def _graphs(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sizes that vLLM captures of those asked for; and of these the sizes of whole graphs, for decode steps in
        which all requests have as many tokens. SpecError: it would not start."""
        sizes, drafts = captured_sizes(self.decode_buckets, self.max_num_batched_tokens), self.drafts
        if not (drafts.num_drafts and sizes) or self.rule_set.never_mixes:
            query = 1 + drafts.num_drafts
            return sizes, tuple(size for size in sizes if query <= size <= query * self.max_num_seqs)
        try:
            graphs = graphs_of(
                GraphFlags(
                    release=drafts.release,
                    method=drafts.method,
                    num_speculative_tokens=drafts.num_drafts,
                    max_num_seqs=self.max_num_seqs,
                    max_num_batched_tokens=self.max_num_batched_tokens,
                    cudagraph_capture_sizes=sizes,
                    parallel_drafting=drafts.is_parallel,
                )
            )
        except ValueError as error:
            what = f"vLLM would not start with these captured sizes: {error}"
            raise SpecError(
                what, where="engine", hint="Sizes count tokens; `harness server sizes` lists them"
            ) from None
        return graphs.sizes, tuple(graphs.full)

    @cached_property
    def queries(self) -> tuple[int, int]:
        """Tokens of each request of a decode step, without and with drafts, where steps never mix; see
        ``decode_queries``."""
        drafts = self.drafts
        queries = decode_queries(drafts.method or None, drafts.num_drafts)
        return queries[0], queries[-1]

    @property
    def num_blocks(self) -> int:
        """KV blocks, one of which vLLM keeps as a placeholder. Room for max_num_seqs longest requests by default."""
        most = self.max_num_seqs * self.blocks_of(self.slot_tokens) + 1
        return most if self.num_gpu_blocks is None else self.num_gpu_blocks

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks that hold so many tokens."""
        return -(-num_tokens // self.block_tokens)

    def padded(self, num_tokens: int) -> int:
        """The size that a step of so many tokens is run with: the next captured, or its own above the largest."""
        place = bisect_left(self.capture_sizes, num_tokens)
        return self.capture_sizes[place] if place < len(self.capture_sizes) else num_tokens

    def is_captured(self, num_tokens: int) -> bool:
        """Whether a graph is large enough for a step of so many tokens."""
        return bool(self.capture_sizes) and num_tokens <= self.capture_sizes[-1]

    def graph_of(self, tokens: Sequence[int]) -> tuple[Graph, int]:
        """The mode of the CUDA graph that a step of requests of so many tokens runs with, and its size."""
        num_tokens, query = sum(tokens), 1 + self.drafts.num_drafts
        if num_tokens == 0:
            return "NONE", 0
        return self.graph(num_tokens, is_uniform=max(tokens) == query and num_tokens == query * len(tokens))

    def graph(self, num_tokens: int, *, is_uniform: bool) -> tuple[Graph, int]:
        """As ``graph_of``. is_uniform: each request has one token and all its drafts.

        Source: v1/cudagraph_dispatcher.py, v1/worker/gpu/cudagraph_utils.py, with the mode FULL_AND_PIECEWISE.
        """
        if is_uniform and (place := bisect_left(self._graphs[1], num_tokens)) < len(self._graphs[1]):
            return "FULL", self._graphs[1][place]
        return ("PIECEWISE", self.padded(num_tokens)) if self.is_captured(num_tokens) else ("NONE", num_tokens)

    @property
    def active_limit(self) -> int:
        """Most requests that admission lets run at once; the dummy rule still goes by ``max_num_seqs``."""
        return self.max_num_seqs if self.max_active_seqs is None else self.max_active_seqs

    @property
    def region_tokens(self) -> int:
        """Tokens that one physical slot holds."""
        return self.slot_tokens if self.partition_tokens is None else self.partition_tokens

    @property
    def slots_per_seq(self) -> int:
        """Physical slots of the longest request."""
        return -(-self.slot_tokens // self.region_tokens)

    @property
    def is_full(self) -> bool:
        """Whether every one of ``max_num_seqs`` longest requests has its slots at the same time.

        When not, the vendor takes one physical slot away for good and pads decode batches with it.
        Source: vllm-rbln 0.11.1, utils/optimum/converter/from_optimum.py.
        """
        return self.kv_slots >= self.max_num_seqs * self.slots_per_seq

    @property
    def num_usable_slots(self) -> int:
        """Slots that requests can hold. The paper's rules know no reserved slot."""
        return self.kv_slots if self.is_full or not self.has_inner_blocks else self.kv_slots - 1

    @property
    def has_inner_blocks(self) -> bool:
        """Whether the rules know the vendor's inner blocks; the paper's keep one prompt length per slot."""
        return self.rule_set.has_inner_blocks

    def bucket_of(self, num_seqs: int) -> int:
        """The compiled batch size that a decode step of ``num_seqs`` requests pays for: the smallest that holds them.

        Source: vllm-rbln 0.11.1, utils/optimum/bucket.py.
        """
        if self.rule_set.is_paged:
            return self.padded(num_seqs)
        return self.decode_buckets[bisect_left(self.decode_buckets, num_seqs)]


def modelled_drafts(server: ServerSpec, rules: RuleSet) -> Drafts:
    """How a modelled server decodes speculatively, by the newest release of these rules.

    Raises SpecError where the server does not say how many drafts are accepted.
    """
    num_drafts = server.num_speculative_tokens or 0
    if not num_drafts:
        return NO_DRAFTS
    method, rates = server.speculative_method or "", server.synthetic_acceptance_rates or ()
    if len(rates) < num_drafts:
        raise SpecError(
            f"has {len(rates)} rates for {num_drafts} drafts",
            where="server.synthetic_acceptance_rates",
            hint="Give the share of steps that accept the first draft, that accept the first two, and so on",
        )
    if rules.never_mixes:
        return native_drafts_of(method, num_drafts, rates[:num_drafts])
    return drafts_of(method, num_drafts, rules.vllm[-1], rates[:num_drafts])


SCALAR_OF = {key: row.engine or key for key, row in SERVER_KEYS.items() if (row.engine or key) in PAGED_SCALARS}
"""The engine's name of each key that it takes over as it is, by its key."""


def paged_block_tokens(server: ServerSpec) -> int:
    """Tokens of a block of paged KV memory, as written, else as vLLM has them by default.

    The default depends on the device. Where so few blocks are written that they must be those of a CPU, they are.
    """
    if server.block_size:
        return server.block_size
    blocks = server.num_gpu_blocks
    is_too_small = blocks is not None and (blocks - 1) * PAGED_BLOCK_TOKENS < server.slot_tokens
    return CPU_BLOCK_TOKENS if server.is_vllm and is_too_small else PAGED_BLOCK_TOKENS


def sequences_that_fit(num_gpu_blocks: int, block_size: int, longest_tokens: int) -> int:
    """Requests of ``longest_tokens``, prompt and answer, whose KV fits into paged memory at a time.

    One block is vLLM's placeholder, and the last token of an answer needs no KV. Nothing shared is counted.
    """
    return (num_gpu_blocks - 1) // max(1, -(-(longest_tokens - 1) // block_size))


def captured_sizes(sizes: Sequence[int], max_num_batched_tokens: int | None) -> tuple[int, ...]:
    """The sizes that vLLM captures of those asked for: none above the token budget.

    Source: vLLM 0.30.0, config/vllm.py, _set_cudagraph_sizes().
    """
    return tuple(size for size in sizes if max_num_batched_tokens is None or size <= max_num_batched_tokens)


def check_buckets(buckets: Sequence[int], max_num_seqs: int) -> None:
    """Raise SpecError unless ``buckets`` are ascending, positive and end with the limit."""
    if not buckets:
        raise SpecError("the bucket set is empty", where="engine", hint="Give at least the limit itself")
    if buckets[0] < 1 or any(later <= earlier for earlier, later in pairwise(buckets)):
        raise SpecError(f"buckets {list(buckets)} are not ascending and positive", where="engine")
    if buckets[-1] != max_num_seqs:
        raise SpecError(
            f"buckets {list(buckets)} do not end with the limit ({max_num_seqs})",
            where="engine",
            hint="Add the limit to the bucket set",
        )


def requested_settings(server: ServerSpec) -> dict[str, Any]:
    """Every requested setting of a server as JSON values without secrets, with defaults filled in."""
    drafts = server.num_speculative_tokens
    rates = list((server.synthetic_acceptance_rates or ())[:drafts]) if drafts else None
    return {
        **server.model_dump(mode="json", exclude=set(HARNESS_KEYS)),
        "num_speculative_tokens": drafts or None,
        "speculative_method": server.speculative_method if drafts else None,
        "synthetic_acceptance_rates": rates,
        "kv_slots": server.num_kv_slots,
        "max_active_seqs": server.max_active_seqs or server.max_num_seqs,
        "rules": AUTO if server.rules == AUTO else rule_set(server.rules).name,
    }


def settings_of(config: EngineConfig, cost_model: str) -> dict[str, Any]:
    """The settings that an engine really runs with. cost_model: the name by which its costs were loaded."""
    settings: dict[str, Any] = {
        "max_num_seqs": config.max_num_seqs,
        "decode_buckets": list(config.decode_buckets),
        "slot_tokens": config.slot_tokens,
        "prefix_caching": config.prefix_caching,
        "rules": config.rules,
        "max_active_seqs": config.active_limit,
        "cost_model": cost_model,
    }
    if not config.rule_set.is_paged:
        return {**settings, "kv_slots": config.kv_slots}
    settings |= {
        "num_gpu_blocks": config.num_blocks,
        "block_size": config.block_tokens,
        "decode_buckets": list(config.capture_sizes),
    }
    for key, scalar in SCALAR_OF.items():
        value, row = getattr(config, scalar), SERVER_KEYS[key]
        # What only models have is shown where it is on.
        if value or row.kind != "modelled":
            settings[key] = value if row.unit == 1 else value / row.unit
    return settings | drafts_shown(config.drafts)


def drafts_shown(drafts: Drafts) -> dict[str, Any]:
    """The keys of a ServerSpec that show how a server drafts; {} of one that does not."""
    if not drafts.num_drafts:
        return {}
    return {
        "num_speculative_tokens": drafts.num_drafts,
        "speculative_method": drafts.method,
        "synthetic_acceptance_rates": list(drafts.rates),
    }


def keys_shown(in_force: Iterable[str]) -> frozenset[str]:
    """The keys of a ServerSpec whose values these facts show."""
    keys = frozenset(in_force)
    return keys | {"kv_slots"} if "usable_kv_slots" in keys else keys


def changed_keys(server: ServerSpec) -> frozenset[str]:
    """Settings whose value is not the default's."""
    return frozenset(key for key, usual in DEFAULTS.items() if getattr(server, key) != usual) - HARNESS_KEYS


def differences(server: ServerSpec, in_force: Mapping[str, Any], keys: Set[str]) -> list[str]:
    """ "kv_slots: requested 12, in force 8", for each of ``keys`` that is in force otherwise than requested."""
    differing: list[str] = []
    requested = requested_settings(server)
    for key in sorted(requested.keys() & keys):
        name, wanted = key, requested[key]
        if wanted is None or (key == "decode_buckets" and not wanted):  # left to the server
            continue
        if key == "decode_buckets" and server.is_paged:
            budget = in_force.get("max_num_batched_tokens", server.max_num_batched_tokens)
            wanted = list(captured_sizes(wanted, budget))
        if key == "kv_slots" and key not in in_force:
            name, wanted = "usable_kv_slots", _usable_slots(server, in_force.get("partition_tokens"))
        if name in in_force and wanted != in_force[name] and not (key == "rules" and wanted == AUTO):
            differing.append(f"{name}: requested {wanted}, in force {in_force[name]}")
    return differing


def _usable_slots(server: ServerSpec, partition_tokens: int | None) -> int:
    """Slots that requests can hold, as ``EngineConfig`` has it. partition_tokens: where a request spans several."""
    slots_per_seq = -(-server.slot_tokens // (partition_tokens or server.slot_tokens))
    num_slots = server.physical_slots(slots_per_seq)
    return num_slots if num_slots >= server.max_num_seqs * slots_per_seq else num_slots - 1


def new_state(
    config: EngineConfig, num_rows: int, *, with_events: bool = False, evicts_by_last_use: bool = False
) -> EngineState:
    """The state of a fresh server with room for ``num_rows`` requests alive at once.

    evicts_by_last_use: whatever the rules say, slots leave by last use (an ablation).
    """
    limit, num_slots = config.max_num_seqs, config.num_usable_slots
    block_tokens = config.block_tokens if config.prefix_caching else config.slot_tokens
    blocks_per_slot = config.region_tokens // block_tokens
    blocks_per_seq, slots_per_seq = config.slot_tokens // block_tokens, config.slots_per_seq
    num_blocks = num_slots * blocks_per_slot if config.has_inner_blocks else 0
    table_size = 1 << max(4, (2 * num_blocks - 1).bit_length())
    event_room = 0
    if with_events:
        # One step allocates once or preempts at most everyone; each eviction logs its blocks and the inactive slots.
        evictions = slots_per_seq * (1 + limit) + limit + 1
        event_room = evictions * (2 * EVENT_HEADER + blocks_per_slot + num_slots + 2)
        event_room += (limit + 2) * (4 * EVENT_HEADER + 3 * blocks_per_seq + 4 * slots_per_seq)
    rules = config.rule_set
    scalars: dict[str, int] = {
        "limit": limit,
        "active_limit": config.active_limit,
        "num_slots": num_slots,
        "block_tokens": block_tokens,
        "blocks_per_slot": blocks_per_slot,
        "max_model_len": config.slot_tokens,
        "is_full": config.is_full,
        "is_caching": config.prefix_caching,
        "num_blocks": num_blocks,
        "table_mask": table_size - 1,
        "has_events": with_events,
        # Flags of the rules that compiled functions read have the same names there.
        **{name: value for name, value in vars(rules).items() if name in record_fields(Server)},
        "free_blocks": num_blocks,
        # Blocks never handed out are not linked: they precede every freed block, in ascending order.
        "fresh_block": 1,
        "fifo_head": -1,
        "fifo_tail": -1,
        "free_slots": num_slots,
        "free_seats": limit,
        "dummy_slot": -1,
    }
    if evicts_by_last_use:
        scalars["evicts_by_last_use"] = 1
    state = EngineState(
        server=records_of(Server, scalars, 2),
        rows=new_records(Row, num_rows),
        queues=new_queues(1),
        places=new_records(Place, limit),
        slots=new_records(Slot, num_slots),
        blocks=new_records(Block, num_blocks + 1),
        prefix=new_records(Prefix, max(blocks_per_seq, slots_per_seq)),
        evicted=new_records(Eviction, num_slots + slots_per_seq + limit),
        buckets=_zeros(table_size),
        seat_blocks=_zeros(limit, blocks_per_seq),
        seat_slots=_zeros(limit, slots_per_seq),
        slot_blocks=_zeros(num_slots, blocks_per_slot),
        events=_zeros(event_room),
    )
    # As `steps.reset` leaves them.
    state.slots["free"][:] = np.arange(num_slots)
    state.places["free_seat"][:] = np.arange(limit)[::-1]
    return state


def _zeros(*shape: int) -> IntArray:
    return np.zeros(shape, dtype=np.int64)
