"""Draws the lengths, waits and starts of a workload, and builds the plan of a replicate from them.

Every draw has a generator of its own, seeded by a text that names it, so no draw depends on how many were made before
it. Deviates are those of Python's ``random.Random(seed).random()``, the one sequence that Python promises to keep.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.model.plan.waits import HIGHEST_QUANTILE, LOWEST_QUANTILE, load_waits
from harness.model.spec import FixedLength, LengthDistribution, ServerSpec, SessionGroup, UniformLength, WorkloadSpec

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
_NORMAL = NormalDist()


def derive_seed(base_seed: int, name: str) -> int:
    """First 8 bytes, big-endian, of SHA-256 of ``<base_seed>:<name>``; the paper's rule, used for every source."""
    return int.from_bytes(hashlib.sha256(f"{base_seed}:{name}".encode("utf-8", "surrogatepass")).digest()[:8], "big")


def uniforms(seeds: Sequence[int], count: int) -> FloatArray:
    """The first ``count`` values of ``random.Random(seed).random()``, shape (seeds, count)."""
    generator, values = random.Random(), array("d")
    for seed in seeds:
        generator.seed(seed)
        values.extend(generator.random() for _ in range(count))
    return np.array(values).reshape(len(seeds), count)


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
    for group, distributions in workload.groups_or_self():
        names = [
            f"drawn/n{workload.num_sessions}r{replicate}/s{index}"
            for replicate in replicates
            for index in range(first, first + group.num_sessions)
        ]
        first += group.num_sessions
        count = distributions.requests_per_session
        # By plan and session, place in the session, and the two deviates of each request.
        lengths, picks = (
            uniforms([derive_seed(base_seed, f"{name}/{what}") for name in names], 2 * count).reshape(-1, count, 2)
            for what in ("lengths", "waits")
        )
        new = np.concatenate(
            (
                lengths_of(distributions.prompt_tokens, lengths[:, :1, 0]),
                lengths_of(distributions.new_tokens, lengths[:, 1:, 0]),
            ),
            axis=1,
        )
        generate = lengths_of(distributions.generate_tokens, lengths[:, :, 1])
        keep = (new + generate).cumsum(axis=1) - new - generate
        values = (keep, new, generate, waits.waits_ns(picks[:, :, 0], picks[:, :, 1]))
        parts.append([each.reshape(len(replicates), -1) for each in values])
    return Drawn(*(np.concatenate(column, axis=1) for column in zip(*parts, strict=True)))


def members(workload: WorkloadSpec) -> Iterator[tuple[SessionGroup, int, WorkloadSpec]]:
    """Every session's group, its place in that group, and the distributions it is drawn by; in session order."""
    for group, distributions in workload.groups_or_self():
        for place in range(group.num_sessions):
            yield group, place, distributions


def is_waited(workload: WorkloadSpec) -> npt.NDArray[np.bool_]:
    """Which requests of a plan are followed by a wait: all but the last of each session."""
    counts = [distributions.requests_per_session for _, _, distributions in members(workload)]
    waited = np.ones(sum(counts), dtype=np.bool_)
    waited[np.cumsum(counts) - 1] = False
    return waited


def wait_cap_ns(workload: WorkloadSpec) -> int:
    return round(workload.wait_cap_s * NS_PER_S)


def draw_length(distribution: LengthDistribution, rng: random.Random) -> int:
    """A number of tokens. Always one call of ``rng.random()``, so that distributions can be swapped singly."""
    return int(lengths_of(distribution, np.array([rng.random()]))[0])


def lengths_of(distribution: LengthDistribution, u: FloatArray) -> IntArray:
    """The numbers of tokens that deviates give, in their shape."""
    if isinstance(distribution, FixedLength):
        return np.full(u.shape, distribution.value, dtype=np.int64)
    if isinstance(distribution, UniformLength):
        return distribution.low + (u * (distribution.high - distribution.low + 1)).astype(np.int64)
    quantiles = np.clip(u, LOWEST_QUANTILE, HIGHEST_QUANTILE).ravel().tolist()
    # The library's exp, which numpy's need not equal to the last bit.
    drawn = [
        distribution.median * math.exp(min(distribution.sigma * _NORMAL.inv_cdf(each), 100.0)) for each in quantiles
    ]
    return np.array(
        [min(max(round(each), distribution.low), distribution.high) for each in drawn], dtype=np.int64
    ).reshape(u.shape)


def draw_plan(workload: WorkloadSpec, base_seed: int, replicate: int) -> Plan:
    """The drawn input of one replicate (for the source "paper": of one block); the source is not "trace".

    Raises SpecError when the wait distribution is unknown or its file is wrong.
    """
    waits = load_waits(workload.waits)
    build = {"drawn": _drawn, "paper": _paper, "sequential": _sequential}[workload.source]
    built = build(workload, base_seed, replicate)
    return Plan(
        source=workload.source,
        seed=base_seed,
        replicate=replicate,
        treatment="as-drawn",
        shared_prefix_tokens=workload.shared_prefix_tokens,
        token_id_range=workload.token_id_range,
        sessions=built.sessions,
        provenance={
            "workload": requested_keys(workload),
            "waits": waits.name,
            "waits_sha256": waits.content_hash,
            "wait_cap_ns": wait_cap_ns(workload),
            "waits_waited": built.num_waited,
            "waits_capped": built.num_capped,
        },
        prompt_form=workload.prompt_form,
    )


def requested_keys(workload: WorkloadSpec) -> str:
    """num_sessions and the keys that differ from their defaults, as JSON: a key that is added later changes no hash.

    What a request carries besides its prompt is no part of the plan.
    """
    keys = workload.model_dump(mode="json", exclude_defaults=True, exclude={"waits", "request"})
    keys["num_sessions"] = workload.num_sessions
    return json.dumps(keys, sort_keys=True, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class _Built:
    """Sessions of a plan, and how many waits they hold; num_capped: of these, those cut at the cap."""

    sessions: tuple[SessionPlan, ...]
    num_waited: int = 0
    num_capped: int = 0


def _drawn(workload: WorkloadSpec, base_seed: int, replicate: int) -> _Built:
    """Each session has a generator for lengths and another for waits, so that either can change alone."""
    drawn = draw_requests(workload, base_seed, [replicate])
    cap_ns = wait_cap_ns(workload)
    kept, new, generated, waits_ns = (column[0].tolist() for column in drawn)
    requests = list(map(RequestPlan, kept, new, generated, [min(wait_ns, cap_ns) for wait_ns in waits_ns]))
    waited = is_waited(workload)
    sessions: list[SessionPlan] = []
    first = 0
    for index, (group, place, distributions) in enumerate(members(workload)):
        after, offset_ns = _start(workload, index)
        offset_ns += round((group.start_s + place * group.start_offset_s) * NS_PER_S)
        of_session = tuple(requests[first : first + distributions.requests_per_session])
        first += len(of_session)
        sessions.append(SessionPlan(index, offset_ns, after, None, of_session))
    return _Built(tuple(sessions), int(waited.sum()), int((drawn.wait_ns[0][waited] > cap_ns).sum()))


def _start(workload: WorkloadSpec, index: int) -> tuple[int | None, int]:
    """(after, start_offset_ns): staggered, and in a closed population each place is taken over by the next session."""
    if workload.concurrency is not None and index >= workload.concurrency:
        return index - workload.concurrency, 0
    return None, round(index * workload.start_offset_s * NS_PER_S)


def _paper(workload: WorkloadSpec, base_seed: int, replicate: int) -> _Built:
    """The paper's inputs: one generator per session, draws in the order prompt, generation, wait, generation.

    ``randint`` is not covered by Python's promise about ``random()``; a golden test holds it to the known draws.
    """
    lengths: list[tuple[int, int, int]] = []
    picks: list[tuple[float, float]] = []
    for index in range(workload.num_sessions):
        rng = random.Random(derive_seed(base_seed, f"n{workload.num_sessions}b{replicate}/s{index}"))
        prompt_tokens, generate_tokens = rng.randint(800, 1600), rng.randint(32, 256)
        picks.append((rng.random(), rng.random()))
        lengths.append((prompt_tokens, generate_tokens, rng.randint(32, 256)))
    waits_ns, cap_ns = load_waits(workload.waits).waits_ns(*np.array(picks).T), wait_cap_ns(workload)
    sessions: list[SessionPlan] = []
    for index, (prompt, generated, again) in enumerate(lengths):
        first = RequestPlan(0, prompt, generated, min(int(waits_ns[index]), cap_ns))
        sessions.append(SessionPlan(index, 0, None, None, (first, RequestPlan(first.stream_tokens, 8, again, 0))))
    return _Built(tuple(sessions), len(sessions), int((waits_ns > cap_ns).sum()))


def _sequential(workload: WorkloadSpec, base_seed: int, replicate: int) -> _Built:
    """The target, ``num_background`` others one after another, and the target's re-arrival without its own answer.

    Nobody waits: the background requests take the time a tool would.
    """
    rng = random.Random(derive_seed(base_seed, f"sequential/m{workload.num_background}r{replicate}/lengths"))

    def request(keep_tokens: int, new_tokens: LengthDistribution) -> tuple[RequestPlan]:
        new = draw_length(new_tokens, rng)
        return (RequestPlan(keep_tokens, new, draw_length(workload.generate_tokens, rng)),)

    sessions = [
        SessionPlan(index, 0, index - 1 if index else None, None, request(0, workload.prompt_tokens))
        for index in range(workload.num_background + 1)
    ]
    again = request(sessions[0].requests[0].prompt_tokens, workload.new_tokens)
    last = len(sessions)
    return _Built((*sessions, SessionPlan(last, 0, last - 1, 0, again)))


def check_fits(plan: Plan, server: ServerSpec) -> None:
    """Refuse a plan with a request that one KV slot cannot hold.

    Raises SpecError naming the first such session and request, with its lengths, and how many there are.
    """
    slot_tokens = server.slot_tokens
    too_long = [
        (session.index, position)
        for session in plan.sessions
        for position, request in enumerate(session.requests)
        if request.stream_tokens > slot_tokens or request.prompt_tokens > slot_tokens - 1
    ]
    if not too_long:
        return
    session, position = too_long[0]
    request = plan.request(session, position)
    others = f"; {len(too_long) - 1} more do not fit either" if len(too_long) > 1 else ""
    raise SpecError(
        f"a prompt of {request.prompt_tokens} tokens and {request.generate_tokens} generated ones do not fit a slot of "
        f"{slot_tokens}{others}",
        where=f"session {session}, request {position}",
        hint="Shorten the lengths, take fewer requests per session, or raise slot_tokens",
    )


def describe(plan: Plan) -> dict[str, str | int | float]:
    """What a person wants to know of a plan, in reading order; times in seconds."""
    prompts = [request.prompt_tokens for request in plan.requests]
    generated = [request.generate_tokens for request in plan.requests]
    waited_s = sorted(wait_ns / NS_PER_S for wait_ns in plan.waited_ns())
    summary: dict[str, str | int | float] = {
        "hash": plan.hash,
        "source": plan.source,
        "base seed": plan.seed,
        "replicate": plan.replicate,
        "treatment": plan.treatment,
        "as-drawn plan": plan.drawn_hash,
        "sessions": plan.num_sessions,
        "requests": plan.num_requests,
        "prompt tokens": f"{min(prompts)}-{max(prompts)}",
        "new prompt tokens, sum": sum(request.new_tokens for request in plan.requests),
        "generated tokens": f"{min(generated)}-{max(generated)}",
        "generated tokens, sum": sum(generated),
        "longest stream": max(prompt + answer for prompt, answer in zip(prompts, generated, strict=True)),
        "shared prefix tokens": plan.shared_prefix_tokens,
        "prompt form": plan.prompt_form,
        "sessions that follow another": sum(session.after is not None for session in plan.sessions),
        "sessions that wait for several": sum(bool(session.also_after) for session in plan.sessions),
        "answers that the client may leave": plan.num_abortable,
        "named blocks": sum(len(session.blocks) for session in plan.sessions),
        "waits": len(waited_s),
        "waits, total s": plan.total_wait_ns / NS_PER_S,
    }
    if waited_s:
        summary["wait p50 s"] = waited_s[(len(waited_s) - 1) // 2]
        summary["wait max s"] = waited_s[-1]
    for kind, waits_ns in plan.waits_by_kind_ns().items():
        if kind != "none":
            summary[f"waits for a {kind}"] = f"{len(waits_ns)}, total {sum(waits_ns) / NS_PER_S:.1f} s"
    return summary | {f"provenance: {key}": value for key, value in plan.provenance.items()}
