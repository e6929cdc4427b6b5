"""What steps of paged rules cost, in the tables of the compiled simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.compiled import always_inline, jit
from harness.compiled.records import IntArray, Records, new_records, records_of
from harness.model.engine.config import EngineConfig
from harness.model.engine.cost import CostModel
from harness.model.engine.paged_state import PagedStep
from harness.model.engine.state import FS_PER_NS
from harness.model.sim.kernel.arrays import NO_NOISE


class PagedBatchCost:
    """A step of n decodes, or of n of their tokens where they have drafts: the size that it is padded to without parts
    of prompts, and its cost with and without them.

    eager_ns: what it takes more where it has no graph.
    """

    bucket: int
    base_fs: int
    mixed_fs: int
    eager_ns: int


class PagedOtherCost:
    """Coefficients of a cost model. Those of a token are split in whole ns and the fs left: sums stay inside int64.

    load_block_ns: for each block from the second memory. largest_captured: tokens of the largest step with a graph.
    least_chunk: tokens that a part of a prompt takes at least. counts_requests: sizes are numbers of requests.
    num_drafts: of each decode of a uniform step; first_uniform: place of such steps in ``PagedCosts.batch``. beta_fs:
    of a decode. draft_ns: of the drafter, after each step. noise_seed: see ``arrays.OtherCost``.
    """

    context_ns: int
    context_fs: int
    chunk_step_fs: int
    chunk_token_ns: int
    chunk_token_fs: int
    attended_ns: int
    attended_fs: int
    chunk_eager_ns: int
    load_block_ns: int
    largest_captured: int
    least_chunk: int
    counts_requests: int
    num_drafts: int
    first_uniform: int
    beta_fs: int
    draft_ns: int
    noise_seed: int


class PagedCosts(NamedTuple):
    """batch (limit + 1,): by number of decodes; with N drafts (2 + 2 limit (1 + N),): by their tokens, and then by the
    tokens of uniform steps, or by their number without and then with drafts where sizes count requests. other (1,).

    noise, drawn_batch, drawn_other: see ``arrays.CostArrays``.
    """

    batch: Records[PagedBatchCost]
    other: Records[PagedOtherCost]
    noise: IntArray
    drawn_batch: Records[PagedBatchCost]
    drawn_other: Records[PagedOtherCost]


NO_PAGED_BATCH, NO_PAGED_OTHER = new_records(PagedBatchCost, 0), new_records(PagedOtherCost, 0)
_NEVER = 1 << 62


def paged_costs(
    config: EngineConfig,
    cost_models: Sequence[CostModel],
    most_decodes: int,
    noise_seeds: Sequence[int] = (),
    noise: IntArray = NO_NOISE,
) -> PagedCosts:
    """Coefficients of the costs of each plan of a call, or of one model for all. most_decodes: of any step.

    Raises SpecError for a cost model that does not say what parts of prompts, or drafts, cost.
    """
    for model in cost_models:
        model.check_paged(config)
    batch, other = _batch_costs(config, cost_models, most_decodes), _other_costs(config, cost_models, noise_seeds)
    if len(cost_models) == 1:
        return PagedCosts(batch, other, noise, NO_PAGED_BATCH, NO_PAGED_OTHER)
    return PagedCosts(batch[: len(batch) // len(cost_models)].copy(), other[:1].copy(), noise, batch, other)


def _batch_costs(config: EngineConfig, models: Sequence[CostModel], most_decodes: int) -> Records[PagedBatchCost]:
    query = 1 + config.drafts.num_drafts
    never_mixes, size = config.rule_set.never_mixes, config.max_num_seqs * query + 1
    numbers = range(1, most_decodes * (1 if never_mixes else query) + 1)
    captures, counts = bool(config.capture_sizes), np.array(numbers)
    # Without drafts every decode step is uniform.
    kinds = [True] if query == 1 else [False, True]
    batch = new_records(PagedBatchCost, size * len(kinds) * len(models))
    for kind, is_uniform in enumerate(kinds):
        if never_mixes:
            graphs = [("FULL", config.padded(number)) for number in numbers]
        else:
            graphs = [config.graph(number, is_uniform=is_uniform) for number in numbers]
        is_eager = np.array([captures and mode == "NONE" for mode, _ in graphs], dtype=np.int64)
        for place, model in enumerate(models):
            first, priced = (place * len(kinds) + kind) * size + 1, model
            if never_mixes:
                priced = model.of_query(config.queries[kind])
            rows, rest_fs = slice(first, first + len(numbers)), model.alpha_fs + model.beta_fs * counts
            batch["bucket"][rows] = [bucket for _, bucket in graphs]
            batch["base_fs"][rows] = rest_fs + [priced.bucket_fs(bucket) for _, bucket in graphs]
            batch["mixed_fs"][rows] = rest_fs + [model.bucket_fs(number) for number in numbers]
            batch["eager_ns"][rows] = is_eager * model.eager_ns
    return batch


def _other_costs(
    config: EngineConfig, models: Sequence[CostModel], noise_seeds: Sequence[int]
) -> Records[PagedOtherCost]:
    columns: dict[str, list[int]] = {}
    for name, field in (("context", "context_fs"), ("chunk_token", "chunk_token_fs"), ("attended", "attended_fs")):
        split = [divmod(getattr(model, field), FS_PER_NS) for model in models]
        columns[f"{name}_ns"], columns[f"{name}_fs"] = [ns for ns, _ in split], [fs for _, fs in split]
    is_native = config.rule_set.never_mixes
    largest = config.capture_sizes[-1] if config.capture_sizes and not is_native else _NEVER
    return records_of(
        PagedOtherCost,
        {
            **columns,
            "chunk_step_fs": [model.chunk_step_fs or 0 for model in models],
            "chunk_eager_ns": [model.chunk_eager_ns for model in models],
            "load_block_ns": config.offload_block_ns,
            "largest_captured": largest,
            "least_chunk": config.max_num_batched_tokens * is_native,
            "counts_requests": is_native,
            "num_drafts": config.drafts.num_drafts,
            "first_uniform": config.max_num_seqs * (1 + config.drafts.num_drafts) + 1,
            "beta_fs": [0 if is_native else model.beta_fs for model in models],
            "draft_ns": [(model.draft_pass_ns or 0) * config.drafts.num_passes for model in models],
            "noise_seed": list(noise_seeds) or 0,
        },
        len(models),
    )


@jit
def chunk_ns(cost: PagedCosts, step: PagedStep, base_fs: int) -> int:
    """How long the parts of prompts of a step take, and ``base_fs`` with them."""
    other, attended = cost.other[0], step.attended_tokens
    tokens = max(step.num_chunk_tokens, other.least_chunk)
    whole_ns = other.chunk_token_ns * tokens + other.attended_ns * attended
    total_fs = base_fs + other.chunk_step_fs + other.chunk_token_fs * tokens + other.attended_fs * attended
    return int(whole_ns + (total_fs + FS_PER_NS // 2) // FS_PER_NS)


@always_inline
def batch_place(cost: PagedCosts, step: PagedStep) -> int:
    """Where in ``PagedCosts.batch`` the cost of a step's decodes is."""
    place, other = int(step.num_decodes), cost.other[0]
    if step.draft_tokens > 0:
        if not other.counts_requests:
            place += int(step.draft_tokens)
        if other.counts_requests or step.draft_tokens == other.num_drafts * step.num_decodes:
            place += int(other.first_uniform)
    return place


@always_inline
def paged_step_ns(cost: PagedCosts, step: PagedStep, context_tokens: int) -> int:
    """How long a step takes, with what a lacking graph adds, as ``CostModel`` has it. context_tokens: of decodes."""
    other, batch = cost.other[0], cost.batch[batch_place(cost, step)]
    context_ns, context_fs = other.context_ns * context_tokens, other.context_fs * context_tokens
    # A draft is a token of the step, and no decode.
    context_fs -= other.beta_fs * step.draft_tokens
    # The step waits for what it reads from the second memory, and for the drafter.
    context_ns += step.num_loaded * other.load_block_ns + other.draft_ns
    if step.num_chunk_tokens == 0:
        return int(context_ns + (batch.base_fs + context_fs + FS_PER_NS // 2) // FS_PER_NS + batch.eager_ns)
    spent_ns = context_ns + chunk_ns(cost, step, int(batch.mixed_fs + context_fs))
    if step.num_decodes + step.draft_tokens + step.num_chunk_tokens > other.largest_captured:
        spent_ns += other.chunk_eager_ns
    return int(spent_ns)
