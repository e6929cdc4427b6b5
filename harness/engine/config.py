"""What the engine must know of a server: its limit, its buckets, its KV slots, and the rules it follows.

Frozen and checked once; nothing here depends on time or on requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from harness.errors import SpecError
from harness.stack.rbln.kv_rules import AUTO, RULE_SETS, RuleSet, check_active_limit, rule_set

if TYPE_CHECKING:
    from harness.spec import ServerShape, ServerSpec

PREFILL_CHUNK_TOKENS = 128
"""Tokens of one prefill device call on RBLN-CA; also the size of an inner block. Source: vllm-rbln 0.11.1."""


@dataclass(frozen=True)
class EngineConfig:
    """One server configuration, in the vendor's terms.

    max_num_seqs: the limit, most requests running at once (the artifact's batch_size).
    max_active_seqs: most requests admitted at once (--max-num-active-seqs), at most the limit; None: the limit.
    rules: a name of ``harness.stack.rbln.kv_rules``; "auto" becomes the newest stable release's.
    decode_buckets: ascending compiled decode batch sizes; the last is the limit.
    kv_slots: physical KV regions (kvcache_num_blocks, or --num-gpu-blocks-override).
    slot_tokens: longest request, prompt and output together (max_model_len).
    partition_tokens: length of one physical region when a request spans several (kvcache_partition_len of a
    flash-attention artifact); None: one region holds a whole request (eager attention).
    """

    max_num_seqs: int
    decode_buckets: tuple[int, ...]
    kv_slots: int
    slot_tokens: int = 8192
    block_tokens: int = PREFILL_CHUNK_TOKENS
    partition_tokens: int | None = None
    prefix_caching: bool = True
    rules: str = AUTO
    max_active_seqs: int | None = None

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise SpecError(f"max_num_seqs must be at least 1, got {self.max_num_seqs}", where="engine")
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

    @classmethod
    def from_server(cls, server: ServerSpec) -> EngineConfig:
        """The engine's view of a server specification."""
        return cls(**server.shape._asdict(), prefix_caching=server.prefix_caching, rules=server.rules)

    @classmethod
    def of_shape(cls, shape: ServerShape, rules: str) -> EngineConfig:
        """A server of this shape under these rules, everything else as the defaults have it."""
        return cls(**shape._asdict(), rules=rules)

    @property
    def rule_set(self) -> RuleSet:
        """What the rules' name stands for."""
        return RULE_SETS[self.rules]

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
        if not self.has_inner_blocks:
            return self.kv_slots
        return usable_slots(self.kv_slots, self.max_num_seqs, self.slots_per_seq)

    @property
    def has_inner_blocks(self) -> bool:
        """Whether the rules know the vendor's inner blocks; the paper's keep one prompt length per slot."""
        return self.rule_set.has_inner_blocks

    def bucket_of(self, num_seqs: int) -> int:
        """The compiled batch size that a decode step of ``num_seqs`` requests pays for."""
        return decode_bucket(num_seqs, self.decode_buckets)


def usable_slots(kv_slots: int, max_num_seqs: int, slots_per_seq: int = 1) -> int:
    """Physical slots that requests can hold: all of them, or one less where the vendor sets one aside for padding.

    It does so when ``max_num_seqs`` longest requests, of ``slots_per_seq`` slots each, do not fit at the same time.
    Source: vllm-rbln 0.11.1, utils/optimum/converter/from_optimum.py.
    """
    return kv_slots if kv_slots >= max_num_seqs * slots_per_seq else kv_slots - 1


def decode_bucket(num_seqs: int, buckets: Sequence[int]) -> int:
    """Smallest compiled batch size that holds ``num_seqs``; the step pays for all of it.

    buckets: ascending, e.g. [1, 2, 4, 8]. Raises SpecError when num_seqs > buckets[-1].
    Source: vllm-rbln 0.11.1, utils/optimum/bucket.py.
    """
    for bucket in buckets:
        if bucket >= num_seqs:
            return bucket
    raise SpecError(f"no decode bucket holds {num_seqs} requests (largest: {buckets[-1]})", where="engine")


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
