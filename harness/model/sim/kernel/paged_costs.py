"""What steps of paged rules cost, in the tables of the compiled simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.compiled import always_inline, jit
from harness.compiled.records import IntArray, Records, new_records, records_of
from harness.errors import SpecError
from harness.model.engine.config import PagedConfig
from harness.model.engine.cost import CostModel
from harness.model.engine.paged_state import PagedStep
from harness.model.engine.state import FS_PER_NS
from harness.model.sim.kernel.arrays import NO_NOISE


class PagedBatchCost:
    """A step of n decodes: the size that it is padded to without parts of prompts, and its cost with and without them.

    eager_ns: what it takes more where it has no graph.
    """

    bucket: int
    base_fs: int
    mixed_fs: int
    eager_ns: int


class PagedOtherCost:
    """Coefficients of a cost model. Those of a token are split in whole ns and the fs left: sums stay inside int64.

    load_block_ns: for each block from the second memory. largest_captured: tokens of the largest step with a graph.
    noise_seed: see ``arrays.OtherCost``.
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
    noise_seed: int


class PagedCosts(NamedTuple):
    """batch (limit + 1,): by number of decodes. other (1,).

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
    config: PagedConfig,
    cost_models: Sequence[CostModel],
    most_decodes: int,
    noise_seeds: Sequence[int] = (),
    noise: IntArray = NO_NOISE,
) -> PagedCosts:
    """Coefficients of the costs of each plan of a call, or of one model for all. most_decodes: of any step.

    Raises SpecError for a cost model that does not say what parts of prompts cost.
    """
    for model in cost_models:
        check_paged_costs(model)
    batch, other = _batch_costs(config, cost_models, most_decodes), _other_costs(config, cost_models, noise_seeds)
    if len(cost_models) == 1:
        return PagedCosts(batch, other, noise, NO_PAGED_BATCH, NO_PAGED_OTHER)
    return PagedCosts(batch[: config.max_num_seqs + 1].copy(), other[:1].copy(), noise, batch, other)


def check_paged_costs(model: CostModel) -> None:
    """Raise SpecError for a cost model that does not say what parts of prompts cost."""
    if model.chunk_step_fs is None:
        raise SpecError(
            "has no [chunked_prefill], which these rules need",
            where=f"cost model {model.name}",
            hint="Fit one with `harness server calibrate`, or try `emulated-gpu`: step times by arithmetic",
        )


def _batch_costs(config: PagedConfig, models: Sequence[CostModel], most_decodes: int) -> Records[PagedBatchCost]:
    numbers, size = range(1, most_decodes + 1), config.max_num_seqs + 1
    buckets = [config.padded(number) for number in numbers]
    captures, counts = bool(config.capture_sizes), np.array(numbers)
    is_eager = np.array([captures and not config.is_captured(number) for number in numbers], dtype=np.int64)
    batch = new_records(PagedBatchCost, size * len(models))
    for place, model in enumerate(models):
        rows = slice(place * size + 1, place * size + 1 + most_decodes)
        rest_fs = model.alpha_fs + model.beta_fs * counts
        batch["bucket"][rows] = buckets
        batch["base_fs"][rows] = rest_fs + [model.bucket_fs(bucket) for bucket in buckets]
        batch["mixed_fs"][rows] = rest_fs + [model.bucket_fs(number) for number in numbers]
        batch["eager_ns"][rows] = is_eager * model.eager_ns
    return batch


def _other_costs(
    config: PagedConfig, models: Sequence[CostModel], noise_seeds: Sequence[int]
) -> Records[PagedOtherCost]:
    columns: dict[str, list[int]] = {}
    for name, field in (("context", "context_fs"), ("chunk_token", "chunk_token_fs"), ("attended", "attended_fs")):
        split = [divmod(getattr(model, field), FS_PER_NS) for model in models]
        columns[f"{name}_ns"], columns[f"{name}_fs"] = [ns for ns, _ in split], [fs for _, fs in split]
    largest = config.capture_sizes[-1] if config.capture_sizes else _NEVER
    return records_of(
        PagedOtherCost,
        {
            **columns,
            "chunk_step_fs": [model.chunk_step_fs or 0 for model in models],
            "chunk_eager_ns": [model.chunk_eager_ns for model in models],
            "load_block_ns": config.offload_block_ns,
            "largest_captured": largest,
            "noise_seed": list(noise_seeds) or 0,
        },
        len(models),
    )


@jit
def chunk_ns(cost: PagedCosts, step: PagedStep, base_fs: int) -> int:
    """How long the parts of prompts of a step take, and ``base_fs`` with them."""
    other, tokens, attended = cost.other[0], step.num_chunk_tokens, step.attended_tokens
    whole_ns = other.chunk_token_ns * tokens + other.attended_ns * attended
    total_fs = base_fs + other.chunk_step_fs + other.chunk_token_fs * tokens + other.attended_fs * attended
    return int(whole_ns + (total_fs + FS_PER_NS // 2) // FS_PER_NS)


@always_inline
def paged_step_ns(cost: PagedCosts, step: PagedStep, context_tokens: int) -> int:
    """How long a step takes, with what a lacking graph adds, as ``CostModel`` has it. context_tokens: of decodes."""
    other, batch = cost.other[0], cost.batch[step.num_decodes]
    context_ns, context_fs = other.context_ns * context_tokens, other.context_fs * context_tokens
    # The step waits for what it reads from the second memory.
    context_ns += step.num_loaded * other.load_block_ns
    if step.num_chunk_tokens == 0:
        return int(context_ns + (batch.base_fs + context_fs + FS_PER_NS // 2) // FS_PER_NS + batch.eager_ns)
    spent_ns = context_ns + chunk_ns(cost, step, int(batch.mixed_fs + context_fs))
    if step.num_decodes + step.num_chunk_tokens > other.largest_captured:
        spent_ns += other.chunk_eager_ns
    return int(spent_ns)
