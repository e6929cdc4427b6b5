"""From a workload to a Plan: the draws of one replicate, from seeds that are documented and never change.

Every draw comes from a generator of its own, seeded by a text that names it, so that no draw depends on how many were
made before it. Nothing here reads a clock or an environment.
Next: ``harness.runner`` and ``harness.sim`` replay what is built here.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from statistics import NormalDist

from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.plan.model import Plan, RequestPlan, SessionPlan
from harness.plan.traces.file import load_trace
from harness.plan.traces.lower import Lowering, sessions_of
from harness.plan.waits import HIGHEST_QUANTILE, LOWEST_QUANTILE, WaitDistribution, load_waits
from harness.spec import FixedLaw, LengthLaw, ServerSpec, SessionGroup, UniformLaw, WorkloadSpec

_NORMAL = NormalDist()


def derive_seed(base_seed: int, name: str) -> int:
    """First 8 bytes, big-endian, of SHA-256 of ``<base_seed>:<name>``; the paper's rule, used for every source."""
    return int.from_bytes(hashlib.sha256(f"{base_seed}:{name}".encode()).digest()[:8], "big")


def draw_length(law: LengthLaw, rng: random.Random) -> int:
    """A number of tokens; one call of ``rng.random()`` whatever the law, so that laws can be swapped singly."""
    u = rng.random()
    if isinstance(law, FixedLaw):
        return law.value
    if isinstance(law, UniformLaw):
        return law.low + int(u * (law.high - law.low + 1))
    u = min(max(u, LOWEST_QUANTILE), HIGHEST_QUANTILE)
    drawn = law.median * math.exp(min(law.sigma * _NORMAL.inv_cdf(u), 100.0))
    return min(max(round(drawn), law.low), law.high)


def build_plan(workload: WorkloadSpec, base_seed: int, replicate: int) -> Plan:
    """The input of one replicate (for the source "paper": of one block).

    Raises SpecError when the wait distribution is unknown or its file is wrong.
    """
    if base_seed < 0 or replicate < 0:
        raise SpecError(
            f"base seed {base_seed} and replicate {replicate} must not be negative", where="plan", hint="Give 0 or more"
        )
    if workload.source == "trace":
        return _traced(workload, base_seed, replicate)
    waits = _CappedWaits(load_waits(workload.waits), workload.wait_cap_s)
    build = {"drawn": _drawn, "paper": _paper, "sequential": _sequential}[workload.source]
    sessions = build(workload, waits, base_seed, replicate)
    return Plan(
        source=workload.source,
        seed=base_seed,
        replicate=replicate,
        treatment="as-drawn",
        shared_prefix_tokens=workload.shared_prefix_tokens,
        token_id_range=workload.token_id_range,
        sessions=sessions,
        provenance={
            "workload": _what_was_asked(workload),
            "waits": waits.distribution.name,
            "waits_sha256": waits.distribution.content_hash,
            "wait_cap_ns": waits.cap_ns,
            "waits_waited": waits.num_waited,
            "waits_capped": waits.num_capped,
        },
        prompt_form=workload.prompt_form,
    )


def _what_was_asked(workload: WorkloadSpec) -> str:
    """The keys that differ from their defaults, as JSON: a key that a later version adds changes no hash."""
    asked = workload.model_dump(mode="json", exclude_defaults=True, exclude={"waits"})
    return json.dumps(asked, sort_keys=True, separators=(",", ":"))


def _traced(workload: WorkloadSpec, base_seed: int, replicate: int) -> Plan:
    """A recorded trace as it is, or a sample of its sessions; what is left out is in the provenance."""
    trace = load_trace(workload.trace)
    is_whole = workload.num_sessions >= len(trace.recordings)
    is_steady = workload.start == "steady"
    how = Lowering(
        shrink=workload.length_divisor,
        max_context_tokens=workload.max_context_tokens,
        num_recordings=0 if is_whole else workload.num_sessions,
        concurrency=workload.concurrency,
        arrivals=workload.arrivals or ("together" if is_steady else trace.head.arrivals),
        human_waits=workload.human_waits,
        wait_cap_ns=round(workload.wait_cap_s * NS_PER_S),
        human_wait_cap_ns=round(workload.human_wait_cap_s * NS_PER_S),
        is_steady=is_steady,
    )
    rng = random.Random(derive_seed(base_seed, f"trace/r{replicate}/sample"))
    sessions, block_tokens, left = sessions_of(trace.recordings, trace.head.block_tokens, how, rng)
    if not sessions:
        raise SpecError(
            f"no request of the trace fits ({_counted(left.counts)})",
            where=workload.trace,
            hint="Raise max_context_tokens, or shrink the lengths: scale = '1/4'",
        )
    provenance: dict[str, str | int | float] = {
        "workload": _what_was_asked(workload),
        "trace": trace.head.name,
        "trace_sha256": trace.sha256,
        "trace_format": trace.head.source_format,
        "trace_arrivals": how.arrivals,
        "left_out": _counted(left.counts),
        "dropped_at_import": _counted(trace.head.dropped),
        "assumed_at_import": "; ".join(trace.head.labels),
    }
    if is_steady:
        provenance["warm_up_requests"] = left.num_warm_ups
    return Plan(
        source="trace",
        seed=base_seed,
        replicate=replicate,
        treatment="as-drawn",
        shared_prefix_tokens=0,
        token_id_range=workload.token_id_range,
        sessions=sessions,
        provenance=provenance,
        prompt_form=workload.prompt_form,
        block_tokens=block_tokens,
    )


def _counted(counts: Mapping[str, int]) -> str:
    return "; ".join(f"{count} {what}" for what, count in sorted(counts.items()))


class _CappedWaits:
    """Draws waits, cuts them at the cap, and counts what it cut."""

    def __init__(self, distribution: WaitDistribution, cap_s: float) -> None:
        self.distribution = distribution
        self.cap_ns = round(cap_s * NS_PER_S)
        self.num_waited = 0
        self.num_capped = 0

    def draw(self, rng: random.Random, *, is_waited: bool) -> int:
        """One wait in ns; only those that will be waited are counted."""
        wait_ns = self.distribution.draw(rng)
        self.num_waited += is_waited
        self.num_capped += is_waited and wait_ns > self.cap_ns
        return min(wait_ns, self.cap_ns)


_Sessions = tuple[SessionPlan, ...]


def _drawn(workload: WorkloadSpec, waits: _CappedWaits, base_seed: int, replicate: int) -> _Sessions:
    """Own draws: per session one generator for lengths and one for waits, so that either can change alone."""
    sessions: list[SessionPlan] = []
    for index, (group, place, laws) in enumerate(_members(workload)):
        name = f"drawn/n{workload.num_sessions}r{replicate}/s{index}"
        lengths = random.Random(derive_seed(base_seed, f"{name}/lengths"))
        wait_rng = random.Random(derive_seed(base_seed, f"{name}/waits"))
        requests: list[RequestPlan] = []
        keep_tokens = 0
        for position in range(laws.requests_per_session):
            new_tokens = draw_length(laws.new_tokens if position else laws.prompt_tokens, lengths)
            generate_tokens = draw_length(laws.generate_tokens, lengths)
            wait_ns = waits.draw(wait_rng, is_waited=position < laws.requests_per_session - 1)
            requests.append(RequestPlan(keep_tokens, new_tokens, generate_tokens, wait_ns))
            keep_tokens += new_tokens + generate_tokens
        after, offset_ns = _start(workload, index)
        offset_ns += round((group.start_s + place * group.start_offset_s) * NS_PER_S)
        sessions.append(SessionPlan(index, offset_ns, after, None, tuple(requests)))
    return tuple(sessions)


def _members(workload: WorkloadSpec) -> Iterator[tuple[SessionGroup, int, WorkloadSpec]]:
    """Every session's group, its place in that group, and the laws it is drawn by; in session order."""
    for group, laws in workload.groups_or_self():
        for place in range(group.num_sessions):
            yield group, place, laws


def _start(workload: WorkloadSpec, index: int) -> tuple[int | None, int]:
    """(after, start_offset_ns): staggered, and in a closed population each place is taken over by the next session."""
    if workload.concurrency is not None and index >= workload.concurrency:
        return index - workload.concurrency, 0
    return None, round(index * workload.start_offset_s * NS_PER_S)


def _paper(workload: WorkloadSpec, waits: _CappedWaits, base_seed: int, replicate: int) -> _Sessions:
    """The paper's inputs: one generator per session, draws in the order prompt, generation, wait, generation.

    ``randint`` is not covered by Python's promise about ``random()``; a golden test holds it to the known draws.
    """
    sessions: list[SessionPlan] = []
    for index in range(workload.num_sessions):
        rng = random.Random(derive_seed(base_seed, f"n{workload.num_sessions}b{replicate}/s{index}"))
        prompt_tokens = rng.randint(800, 1600)
        generate_tokens = rng.randint(32, 256)
        first = RequestPlan(0, prompt_tokens, generate_tokens, waits.draw(rng, is_waited=True))
        second = RequestPlan(first.stream_tokens, 8, rng.randint(32, 256), 0)
        sessions.append(SessionPlan(index, 0, None, None, (first, second)))
    return tuple(sessions)


def _sequential(workload: WorkloadSpec, waits: _CappedWaits, base_seed: int, replicate: int) -> _Sessions:
    """The target, ``num_background`` others one after another, and the target's re-arrival without its own answer."""
    del waits  # Nobody waits: the background requests take the time a tool would.
    rng = random.Random(derive_seed(base_seed, f"sequential/m{workload.num_background}r{replicate}/lengths"))
    lengths: list[Callable[[], int]] = [
        lambda: draw_length(workload.prompt_tokens, rng),
        lambda: draw_length(workload.generate_tokens, rng),
    ]
    sessions = [
        SessionPlan(index, 0, index - 1 if index else None, None, (RequestPlan(0, lengths[0](), lengths[1]()),))
        for index in range(workload.num_background + 1)
    ]
    target = sessions[0].requests[0]
    new_tokens = draw_length(workload.new_tokens, rng)
    again = RequestPlan(target.prompt_tokens, new_tokens, draw_length(workload.generate_tokens, rng))
    last = len(sessions)
    return (*sessions, SessionPlan(last, 0, last - 1, 0, (again,)))


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
    prompts = [request.prompt_tokens for session in plan.sessions for request in session.requests]
    generated = [request.generate_tokens for session in plan.sessions for request in session.requests]
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
        "new prompt tokens, sum": sum(request.new_tokens for session in plan.sessions for request in session.requests),
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
    provenance = {f"provenance: {key}": value for key, value in plan.provenance.items()}
    return dict(chain(summary.items(), provenance.items()))
