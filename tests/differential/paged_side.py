"""Servers with paged KV memory: random histories of them, and the harness's engine as one of them.

Nothing of vLLM is imported here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from harness.errors import PlanError
from harness.model.engine import CostModel
from harness.model.engine.paged import PagedConfig, PagedScheduler
from harness.model.plan.blocks import token_block_keys
from harness.stacks.rbln.rules.kv_rules import PAGED, RULE_SETS
from tests.differential.engine_side import SALT_BITS
from tests.differential.histories import (
    GENERATED,
    Geometry,
    History,
    Submit,
    draw_operations,
    materialise,
    stream_tokens,
)
from tests.differential.seen import PagedSeen

COSTS = CostModel("any", "none", {1: 1}, chunk_step_fs=1)
"""Durations are not compared."""


@dataclass(frozen=True)
class PagedGeometry(Geometry):
    """One vLLM server of a history. slot_tokens: max_model_len. block_tokens: block_size. kv_slots: not used."""

    num_gpu_blocks: int = 0
    max_num_batched_tokens: int = 0
    long_prefill_tokens: int = 0
    capture_sizes: tuple[int, ...] = ()
    async_scheduling: bool = False

    @property
    def kind(self) -> str:
        """The dimension a count of steps is reported under."""
        scheduling = ", asynchronous" if self.async_scheduling else ""
        if not self.prefix_caching:
            return f"paged, caching off{scheduling}"
        needed = self.max_num_seqs * -(-self.slot_tokens // self.block_tokens)
        memory = "for the longest requests" if self.num_gpu_blocks > needed else "below the longest requests"
        chunks = "prompts in parts" if self.max_num_batched_tokens < self.slot_tokens else "whole prompts"
        return f"paged, memory {memory}, {chunks}{scheduling}"


def draw_paged_history(seed: int, num_steps: int) -> History:
    """The history of a seed: blocks of several sizes, plenty and little memory, token budgets from tiny to ample."""
    chosen = random.Random(f"paged {seed}")
    limit = chosen.choice([1, 2, 3, 4, 6, 8, 8, 12, 16, 32])
    block = chosen.choice([16, 16, 16, 8, 32, 64])
    longest = block * chosen.choice([4, 8, 16, 32, 64])
    per_seq = longest // block
    blocks = chosen.choice([per_seq, per_seq + 1, 2 * per_seq, 3 * per_seq, limit * per_seq // 2, limit * per_seq * 2])
    budget = chosen.choice([limit, limit + 1, 2 * limit, block, 4 * block, longest // 2, longest, 4 * longest])
    ladder = chosen.choice([(1, 2, 4, 8), (1, 2, 4, 6, 8), (1, 4, 16), (1, 2, 4, 8, 16, 32, 64), (4,)])
    geometry = PagedGeometry(
        max_num_seqs=limit,
        kv_slots=limit,
        slot_tokens=longest,
        # Half of the servers see answers that outgrow their prompts.
        partition_tokens=longest // 2 if chosen.random() < 0.5 else None,
        prefix_caching=chosen.random() > 0.1,
        block_tokens=block,
        num_gpu_blocks=1 + max(per_seq, blocks),
        max_num_batched_tokens=max(limit, budget),
        long_prefill_tokens=chosen.choice([0, 0, 0, 1, block, 3 * block - 1]),
        # As vLLM, which drops sizes above the token budget.
        capture_sizes=tuple(size for size in ladder if size <= max(limit, budget)) or (1,),
        async_scheduling=random.Random(f"asynchronous {seed}").random() < 0.5,
    )
    return History(geometry, draw_operations(geometry, num_steps, chosen, seed), seed)


class PagedEngine:
    """The harness's engine in the state after its start."""

    def __init__(self, geometry: PagedGeometry, rules: str = PAGED) -> None:
        self._block_size = geometry.block_tokens
        config = PagedConfig(
            max_num_seqs=geometry.max_num_seqs,
            capture_sizes=geometry.capture_sizes,
            num_gpu_blocks=geometry.num_gpu_blocks,
            block_size=geometry.block_tokens,
            max_num_batched_tokens=geometry.max_num_batched_tokens,
            max_model_len=geometry.slot_tokens,
            prefix_caching=geometry.prefix_caching,
            long_prefill_tokens=geometry.long_prefill_tokens,
            async_scheduling=geometry.async_scheduling,
            caps_lone_requests=RULE_SETS[rules].caps_lone_requests,
        )
        self.scheduler = PagedScheduler(config, COSTS)

    def submit(self, request: Submit) -> bool:
        """Queue a request; False when it is refused."""
        prompt = materialise(request.prompt)
        num_generated = -(-(request.max_tokens) // 1024) * 1024
        whole = np.concatenate([prompt, stream_tokens(GENERATED + request.handle, num_generated)])
        keys = token_block_keys(whole.astype(np.int32), self._block_size) ^ np.int64(request.salt * SALT_BITS)
        try:
            self.scheduler.submit(
                request.handle, len(prompt), request.max_tokens, keys.tolist(), stop_tokens=request.stop_tokens
            )
        except PlanError:
            return False
        return True

    def abort(self, handles: Iterable[int]) -> tuple[str, ...]:
        """Drop requests in the order given; vLLM logs nothing of it."""
        for handle in handles:
            self.scheduler.abort(handle)
        return ()

    def step(self, aborts_inside: tuple[int, ...], failed_copy: int = -1) -> PagedSeen:
        """One step."""
        del failed_copy
        scheduler = self.scheduler
        before = vars(scheduler.prefix_counts).copy()
        step = scheduler.schedule()
        blocks = {request: scheduler.inner_blocks(request) for request in step.requests}
        self.abort(aborts_inside)
        finished = scheduler.finish_step()
        counts = scheduler.prefix_counts
        return PagedSeen(
            requests=step.requests,
            tokens=step.tokens,
            cached={admission.request: admission.cached_tokens for admission in step.admissions},
            preempted=tuple(sorted(step.preempted)),
            blocks=blocks,
            lookups=(
                counts.queries - before["queries"],
                counts.hits - before["hits"],
                counts.preempted_queries - before["preempted_queries"],
                counts.preempted_hits - before["preempted_hits"],
            ),
            padding=scheduler.config.graph_of(step.tokens),
            finished=finished,
            running=scheduler.running,
            waiting=scheduler.waiting,
            free_order=scheduler.free_order,
        )
