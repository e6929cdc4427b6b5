"""Servers with paged KV memory: random histories of them, and the harness's engine as one of them.

Nothing of vLLM is imported here.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from harness.errors import PlanError
from harness.model.engine import CostModel
from harness.model.engine.config import NO_DRAFTS, drafts_of
from harness.model.engine.paged import PagedConfig, PagedScheduler
from harness.model.engine.scheduler import Step
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
    """One vLLM server of a history. slot_tokens: max_model_len. block_tokens: block_size. kv_slots: not used.

    num_drafts: tokens that draft_method drafts for a request and step; 0: none.
    """

    num_gpu_blocks: int = 0
    max_num_batched_tokens: int = 0
    long_prefill_tokens: int = 0
    capture_sizes: tuple[int, ...] = ()
    async_scheduling: bool = False
    num_drafts: int = 0
    draft_method: str = ""

    @property
    def kind(self) -> str:
        """The dimension a count of steps is reported under."""
        scheduling = ", asynchronous" if self.async_scheduling else ""
        scheduling += f", {self.draft_method} drafts" if self.num_drafts else ""
        if not self.prefix_caching:
            return f"paged, caching off{scheduling}"
        needed = self.max_num_seqs * -(-self.slot_tokens // self.block_tokens)
        memory = "for the longest requests" if self.num_gpu_blocks > needed else "below the longest requests"
        chunks = "prompts in parts" if self.max_num_batched_tokens < self.slot_tokens else "whole prompts"
        return f"paged, memory {memory}, {chunks}{scheduling}"


def draw_paged_history(seed: int, num_steps: int, *, with_drafts: bool = False) -> History:
    """The history of a seed: blocks of several sizes, plenty and little memory, token budgets from tiny to ample.

    with_drafts: two thirds of the servers decode speculatively.
    """
    chosen = random.Random(f"paged {seed}")
    limit = chosen.choice([1, 2, 3, 4, 6, 8, 8, 12, 16, 32])
    block = chosen.choice([16, 16, 16, 8, 32, 64])
    longest = block * chosen.choice([4, 8, 16, 32, 64])
    per_seq = longest // block
    blocks = chosen.choice([per_seq, per_seq + 1, 2 * per_seq, 3 * per_seq, limit * per_seq // 2, limit * per_seq * 2])
    budget = chosen.choice([limit, limit + 1, 2 * limit, block, 4 * block, longest // 2, longest, 4 * longest])
    drafting = random.Random(f"drafts {seed}")
    num_drafts = drafting.choice([0, 0, 1, 2, 3, 5]) if with_drafts else 0
    # vLLM never admits a request whose padding is above the budget.
    budget = max(limit, budget, 2 * (1 + num_drafts) if num_drafts else 0)
    long_prefill = chosen.choice([0, 0, 0, 1, block, 3 * block - 1])
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
        max_num_batched_tokens=budget,
        long_prefill_tokens=long_prefill if long_prefill > num_drafts else 0,
        # As vLLM, which drops sizes above the token budget; whole graphs have multiples of a request's tokens.
        capture_sizes=tuple(size * (1 + num_drafts) for size in ladder if size * (1 + num_drafts) <= budget)
        or (1 + num_drafts,),
        async_scheduling=random.Random(f"asynchronous {seed}").random() < 0.5,
        num_drafts=num_drafts,
        draft_method=drafting.choice(["ngram", "eagle"]) if num_drafts else "",
    )
    return History(geometry, draw_operations(geometry, num_steps, chosen, seed), seed)


def _mixed(handle: int, position: int) -> int:
    """A number that hangs on the request and how much of its answer is there."""
    return int.from_bytes(blake2b(f"{handle} {position}".encode(), digest_size=8).digest(), "big")


def accepted_of(handle: int, position: int, num_drafts: int) -> int:
    """How many of so many drafts the model accepts, with ``position`` tokens of the answer there: often all or none."""
    mixed = _mixed(handle, position)
    return (num_drafts, 0, mixed // 3 % (num_drafts + 1))[mixed % 3]


def drafted_of(geometry: PagedGeometry, handle: int, position: int) -> int:
    """How many tokens are drafted for the next step: a look-up of text finds fewer than asked for, or nothing."""
    mixed = _mixed(handle, -1 - position)
    is_short = geometry.draft_method == "ngram" and mixed % 2 == 0
    return mixed // 2 % (geometry.num_drafts + 1) if is_short else geometry.num_drafts


class PagedEngine:
    """The harness's engine in the state after its start."""

    def __init__(self, geometry: PagedGeometry, rules: str = PAGED, release: str = "0.30.0") -> None:
        self._block_size, self._geometry = geometry.block_tokens, geometry
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
            drafts=drafts_of(geometry.draft_method, geometry.num_drafts, release) if geometry.num_drafts else NO_DRAFTS,
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

    def _accepted(self, step: Step) -> dict[int, int]:
        known = {*self.scheduler.running, *self.scheduler.waiting}
        return {
            request: accepted_of(request, self.scheduler.output_tokens(request), drafts)
            for request, drafts in step.drafts
            if request in known
        }

    def _draft(self, step: Step) -> None:
        if self._geometry.num_drafts and not self._geometry.async_scheduling:
            for request in set(step.requests) - set(step.unfinished):
                if request in self.scheduler.running:
                    position = self.scheduler.output_tokens(request)
                    self.scheduler.draft(request, drafted_of(self._geometry, request, position))

    def step(self, aborts_inside: tuple[int, ...], failed_copy: int = -1) -> PagedSeen:
        """One step."""
        del failed_copy
        scheduler = self.scheduler
        before = vars(scheduler.prefix_counts).copy()
        step = scheduler.schedule()
        blocks = {request: scheduler.inner_blocks(request) for request in step.requests}
        self.abort(aborts_inside)
        finished = scheduler.finish_step(accepted=self._accepted(step)) if step.drafts else scheduler.finish_step()
        self._draft(step)
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
