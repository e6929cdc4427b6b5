"""The lengths and waits of drawn sessions as numbers, those of many replicates of a workload at once.

Each session has a generator for lengths and one for waits, seeded by a text that names it, so that no draw depends on
how many were made before or beside it. Nothing here reads a clock or an environment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.clock import NS_PER_S
from harness.plan.seeds import FloatArray, derive_seed, uniforms
from harness.plan.waits import HIGHEST_QUANTILE, LOWEST_QUANTILE, load_waits
from harness.spec import FixedLaw, LengthLaw, SessionGroup, UniformLaw, WorkloadSpec

IntArray = npt.NDArray[np.int64]
_NORMAL = NormalDist()


class Drawn(NamedTuple):
    """Plans of one workload: int64, shape (plans, requests of a plan), by session; wait_ns before the cap."""

    keep_tokens: IntArray
    new_tokens: IntArray
    generate_tokens: IntArray
    wait_ns: IntArray


def draw_requests(workload: WorkloadSpec, base_seed: int, replicates: Sequence[int]) -> Drawn:
    """The requests of a workload of source "drawn", one plan for each of ``replicates``.

    Raises SpecError when the wait distribution is unknown or its file is wrong.
    """
    waits = load_waits(workload.waits)
    parts: list[list[IntArray]] = []
    first = 0
    for group, laws in workload.groups_or_self():
        names = [
            f"drawn/n{workload.num_sessions}r{replicate}/s{index}"
            for replicate in replicates
            for index in range(first, first + group.num_sessions)
        ]
        first += group.num_sessions
        count = laws.requests_per_session
        # By plan and session, place in the session, and the two deviates of each request.
        lengths, picks = (
            uniforms([derive_seed(base_seed, f"{name}/{what}") for name in names], 2 * count).reshape(-1, count, 2)
            for what in ("lengths", "waits")
        )
        new = np.concatenate(
            (lengths_of(laws.prompt_tokens, lengths[:, :1, 0]), lengths_of(laws.new_tokens, lengths[:, 1:, 0])), axis=1
        )
        generate = lengths_of(laws.generate_tokens, lengths[:, :, 1])
        keep = (new + generate).cumsum(axis=1) - new - generate
        values = (keep, new, generate, waits.waits_ns(picks[:, :, 0], picks[:, :, 1]))
        parts.append([each.reshape(len(replicates), -1) for each in values])
    return Drawn(*(np.concatenate(column, axis=1) for column in zip(*parts, strict=True)))


def members(workload: WorkloadSpec) -> Iterator[tuple[SessionGroup, int, WorkloadSpec]]:
    """Every session's group, its place in that group, and the laws it is drawn by; in session order."""
    for group, laws in workload.groups_or_self():
        for place in range(group.num_sessions):
            yield group, place, laws


def is_waited(workload: WorkloadSpec) -> npt.NDArray[np.bool_]:
    """Which requests of a plan are followed by a wait: all but the last of each session."""
    counts = [laws.requests_per_session for _, _, laws in members(workload)]
    waited = np.ones(sum(counts), dtype=np.bool_)
    waited[np.cumsum(counts) - 1] = False
    return waited


def wait_cap_ns(workload: WorkloadSpec) -> int:
    return round(workload.wait_cap_s * NS_PER_S)


def draw_length(law: LengthLaw, rng: random.Random) -> int:
    """A number of tokens; one call of ``rng.random()`` whatever the law, so that laws can be swapped singly."""
    return int(lengths_of(law, np.array([rng.random()]))[0])


def lengths_of(law: LengthLaw, u: FloatArray) -> IntArray:
    """The numbers of tokens that deviates give, in their shape."""
    if isinstance(law, FixedLaw):
        return np.full(u.shape, law.value, dtype=np.int64)
    if isinstance(law, UniformLaw):
        return law.low + (u * (law.high - law.low + 1)).astype(np.int64)
    quantiles = np.clip(u, LOWEST_QUANTILE, HIGHEST_QUANTILE).ravel().tolist()
    # The library's exp, which numpy's need not equal to the last bit.
    drawn = [law.median * math.exp(min(law.sigma * _NORMAL.inv_cdf(each), 100.0)) for each in quantiles]
    return np.array([min(max(round(each), law.low), law.high) for each in drawn], dtype=np.int64).reshape(u.shape)
