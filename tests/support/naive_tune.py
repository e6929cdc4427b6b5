"""A second opinion on ``harness tune``: every configuration within its bounds, on plans that the search never saw."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.model.plan.model import Plan
from harness.model.sim.simulate import simulate
from harness.model.spec import ServerSpec

NEW_SEED = 7_000_003


class Setup(NamedTuple):
    """A configuration of slots rules: the limit, its compiled sizes, its KV slots."""

    limit: int
    sizes: tuple[int, ...]
    slots: int


def every_setup(most_limit: int, most_slots: int, most_sizes: int) -> Iterator[Setup]:
    """Every limit, every set of sizes that ends at it, every number of slots from the limit on."""
    for limit in range(1, most_limit + 1):
        for others in range(min(most_sizes, limit)):
            for chosen in combinations(range(1, limit), others):
                for slots in range(limit, max(limit, most_slots) + 1):
                    yield Setup(limit, (*chosen, limit), slots)


def costs(server: ServerSpec, plans: Sequence[Plan], setup: Setup) -> npt.NDArray[np.float64]:
    """Device seconds of each plan under a configuration."""
    changes = {"max_num_seqs": setup.limit, "decode_buckets": list(setup.sizes), "kv_slots": setup.slots}
    changed = server.model_validate(server.model_dump(exclude_unset=True) | changes)
    return np.array([simulate(plan, changed).device_ns for plan in plans]) / 1e9


def ratio(ours: npt.NDArray[np.float64], base: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The ratio of sums, and its 95 % half-width over plans (delta method)."""
    value = float(ours.sum() / base.sum())
    residual = ours - value * base
    return value, float(1.96 * residual.std(ddof=1) * len(base) ** 0.5 / base.sum())
