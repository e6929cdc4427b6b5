"""Servers with paged KV memory: random histories of them, and the harness's engine as one of them, step by step and
as the compiled simulator plays a whole history.

Nothing of vLLM is imported here.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from itertools import count
from typing import Any, NamedTuple

import numpy as np

from harness.errors import PlanError
from harness.model.engine import CostModel
from harness.model.engine.config import NO_DRAFTS, EngineConfig, drafts_of, native_drafts_of
from harness.model.engine.paged import PagedScheduler
from harness.model.engine.paged_state import new_paged_state
from harness.model.engine.scheduler import DECODE, Step
from harness.model.engine.steps import FAR
from harness.model.plan.blocks import token_block_keys
from harness.model.plan.model import RequestPlan, SessionPlan
from harness.model.sim.kernel.arrays import PlanArrays, SimOutcome, new_outcome, new_scratch, paged_costs
from harness.model.sim.kernel.arrivals import PagedRun
from harness.model.sim.kernel.loop import run_paged_plans
from harness.model.sim.plans import session_arrays
from harness.model.sim.simulate import check_admitted
from harness.stacks.rbln.rules.kv_rules import PAGED
from tests.differential import engine_side
from tests.differential.engine_side import SALT_BITS
from tests.differential.histories import (
    GENERATED,
    STOP_TOKEN,
    Abort,
    Geometry,
    History,
    IntArray,
    Operation,
    RunStep,
    Submit,
    draw_operations,
    materialise,
    stream_tokens,
)
from tests.differential.seen import PagedSeen

PASS_NS = 1000
COSTS = CostModel(
    "any",
    "none",
    {1: 1},
    chunk_step_fs=1,
    draft_pass_ns=PASS_NS,
    query_fs={1 + drafts: {1: 1} for drafts in range(1, 8)},
)
"""Durations are not compared: every step with drafts lasts as long as the passes of the drafter."""
EnginePlant = Callable[[EngineConfig], EngineConfig]


@dataclass(frozen=True)
class PagedGeometry(Geometry):
    """One vLLM server of a history. slot_tokens: max_model_len. block_tokens: block_size. kv_slots: not used.

    num_drafts: tokens that draft_method drafts for a request and step; 0: none. is_parallel: in one pass. rates: by
    which acceptance is drawn (``Drafts``) of a history that a plan can have; (): what is drafted and accepted is told.
    is_native: it is vllm-rbln's native path, and capture_sizes are its buckets.
    """

    num_gpu_blocks: int = 0
    max_num_batched_tokens: int = 0
    long_prefill_tokens: int = 0
    capture_sizes: tuple[int, ...] = ()
    async_scheduling: bool = False
    num_drafts: int = 0
    draft_method: str = ""
    is_parallel: bool = False
    rates: tuple[float, ...] = ()
    is_native: bool = False

    @property
    def kind(self) -> str:
        """The dimension a count of steps is reported under."""
        scheduling = ", asynchronous" if self.async_scheduling else ""
        scheduling += f", {'parallel ' * self.is_parallel}{self.draft_method} drafts" if self.num_drafts else ""
        if not self.prefix_caching:
            return f"paged, caching off{scheduling}"
        needed = self.max_num_seqs * -(-self.slot_tokens // self.block_tokens)
        memory = "for the longest requests" if self.num_gpu_blocks > needed else "below the longest requests"
        chunks = "prompts in parts" if self.max_num_batched_tokens < self.slot_tokens else "whole prompts"
        return f"paged, memory {memory}, {chunks}{scheduling}"


def draw_paged_history(seed: int, num_steps: int, *, with_drafts: bool = False, is_native: bool = False) -> History:
    """The history of a seed: blocks of several sizes, plenty and little memory, token budgets from tiny to ample.

    with_drafts: two thirds of the servers decode speculatively, and half of these serve what a plan can have.
    is_native: of vllm-rbln's native path, whose token budgets may be below what all drafts need.
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
    budget = max(limit, budget, 2 + 3 * num_drafts if num_drafts else 0)
    method = drafting.choice(["ngram", "ngram", "eagle", "eagle", "draft_model"]) if num_drafts else ""
    rates = [drafting.choice((0.0, 1.0, drafting.random())) for _ in range(num_drafts)]
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
        draft_method=method,
        is_parallel=method not in ("", "ngram") and drafting.random() < 0.3,
        rates=tuple(sorted(rates, reverse=True)) if drafting.random() < 0.5 else (),
    )
    if is_native:
        geometry = native(geometry, drafting)
    operations = draw_operations(geometry, num_steps, chosen, seed)
    return History(geometry, tuple(planned(operations)) if geometry.rates else operations, seed)


def native(geometry: PagedGeometry, chosen: random.Random) -> PagedGeometry:
    """As vllm-rbln's native path can be started: synchronous, with buckets that end with the limit."""
    limit = geometry.max_num_seqs
    return replace(
        geometry,
        is_native=True,
        async_scheduling=False,
        is_parallel=False,
        draft_method={"draft_model": "mtp"}.get(geometry.draft_method, geometry.draft_method),
        long_prefill_tokens=max(2, geometry.long_prefill_tokens) if geometry.long_prefill_tokens else 0,
        max_num_batched_tokens=max(2, limit, chosen.choice((limit, limit + 1, geometry.max_num_batched_tokens))),
        capture_sizes=tuple(sorted({limit, *(size for size in (1, 2, 4, 6, 8, 16) if size < limit)})),
    )


def planned(operations: Iterable[Operation]) -> Iterator[Operation]:
    """The same of clients that a plan can have: no name twice, nobody leaves between steps, no answer stops early."""
    names, leaving, numbers = dict[int, int](), list[int](), count()
    for operation in operations:
        if isinstance(operation, Submit):
            prompt = tuple(
                (GENERATED + names[stream - GENERATED] if stream >= GENERATED else stream, start, length)
                for stream, start, length in operation.prompt
            )
            names[operation.handle] = next(numbers)
            most = operation.stop_tokens or operation.max_tokens
            yield Submit(names[operation.handle], prompt, most, None, operation.salt)
        elif isinstance(operation, Abort):
            leaving.append(operation.handle)
        else:
            gone = (names[handle] for handle in (*leaving, *operation.aborts_inside) if handle in names)
            yield RunStep(tuple(dict.fromkeys(gone)))
            leaving.clear()


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
    is_short = geometry.draft_method == "ngram" and mixed % 2 == 0 and not geometry.rates
    return mixed // 2 % (geometry.num_drafts + 1) if is_short else geometry.num_drafts


class DrawnAcceptance:
    """Acceptance by rates as the engine draws it with the seed 0: a hash of how many draws there were, and of whom."""

    def __init__(self, rates: Sequence[float]) -> None:
        self._rates, self._numbers = [round(rate * 2**32) for rate in rates], count(1)

    def accepted(self, prompt: int, output: int, num_drafts: int) -> int:
        """How many of so many drafts are accepted of a request with so many tokens of its prompt and answer."""
        mixed = 0x9E3779B1 * next(self._numbers) + 0x5BD1E995 * prompt + 0x27D4EB2F * output
        for _ in range(2):
            mixed &= 2**32 - 1
            mixed = (mixed ^ mixed >> 16) * 0x45D9F3B
        mixed &= 2**32 - 1
        mixed ^= mixed >> 16
        return sum(mixed < rate for rate in self._rates[:num_drafts])


def config_of(geometry: PagedGeometry, rules: str, release: str) -> EngineConfig:
    """The server of a history under these rules; what it drafts is scheduled as by that release of vLLM."""
    drafts, method, is_parallel = NO_DRAFTS, geometry.draft_method, geometry.is_parallel
    if geometry.is_native and geometry.num_drafts:
        drafts = native_drafts_of(method, geometry.num_drafts, geometry.rates)
    elif geometry.num_drafts:
        drafts = drafts_of(method, geometry.num_drafts, release, geometry.rates, is_parallel=is_parallel)
    names = ("num_gpu_blocks", "max_num_batched_tokens", "long_prefill_tokens", "async_scheduling")
    paged = {name: getattr(geometry, name) for name in names}
    # A partition is there to draw answers that outgrow their prompts.
    return engine_side.config_of(
        geometry, rules, partition_tokens=None, decode_buckets=geometry.capture_sizes, drafts=drafts, **paged
    )


class PagedEngine:
    """The harness's engine in the state after its start. plant: a mistake in its configuration."""

    def __init__(
        self,
        geometry: PagedGeometry,
        rules: str = PAGED,
        release: str = "0.30.0",
        plant: EnginePlant = lambda config: config,
    ) -> None:
        self._block_size, self._geometry = geometry.block_tokens, geometry
        config = plant(config_of(geometry, rules, release))
        self._ahead = config.drafts.key_lookahead
        self.scheduler = PagedScheduler(config, COSTS)

    def submit(self, request: Submit) -> bool:
        """Queue a request; False when it is refused."""
        prompt = materialise(request.prompt)
        num_generated = -(-(request.max_tokens) // 1024) * 1024
        whole = np.concatenate([prompt, stream_tokens(GENERATED + request.handle, num_generated)]).astype(np.int32)
        if request.stop_tokens:
            whole[len(prompt) + request.stop_tokens - 1] = STOP_TOKEN
        keys = token_block_keys(whole, self._block_size, self._ahead) ^ np.int64(request.salt * SALT_BITS)
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
        geometry = self._geometry
        if geometry.num_drafts and not (geometry.async_scheduling or geometry.rates):
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
        is_told = step.drafts and not self._geometry.rates
        finished = scheduler.finish_step(accepted=self._accepted(step)) if is_told else scheduler.finish_step()
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
            padding=native_shape(scheduler.config, step)
            if self._geometry.is_native
            else scheduler.config.graph_of(step.tokens),
            finished=finished,
            running=scheduler.running,
            waiting=scheduler.waiting,
            free_order=scheduler.free_order,
        )


def native_shape(config: EngineConfig, step: Step) -> tuple[str, int]:
    """Tokens of each request of a step as its graph is compiled, and requests."""
    if step.kind != DECODE:
        return (f"{config.max_num_batched_tokens} tokens", 1) if step.tokens else ("NONE", 0)
    return f"{config.queries[bool(step.drafts)]} tokens", step.bucket


class Played(NamedTuple):
    """A history as a simulator's records have it, in numbers of steps. steps: requests of each, and its padded tokens
    where it only decodes. admitted: step and cached tokens, preempted: how often, finished: step, of each request.
    """

    steps: dict[int, tuple[int, int | None]]
    admitted: dict[int, tuple[int, int]]
    preempted: dict[int, int]
    finished: dict[int, int]


def differing(seen: Sequence[PagedSeen], played: Played) -> list[str]:
    """What differs between the steps that a server took and the records of a simulator: a line for each kind."""
    admitted, preempted, finished = dict[int, tuple[int, int]](), dict[int, int](), dict[int, int]()
    gave_way = Counter[int]()
    steps = {
        index: (len(step.tokens), step.padding[1] if played.steps.get(index, (0, None))[1] is not None else None)
        for index, step in enumerate(seen)
        if step.tokens
    }
    for index, step in enumerate(seen):
        for handle, cached in step.cached.items():
            admitted.setdefault(handle, (index, cached))
        gave_way.update(step.preempted)
        finished |= dict.fromkeys(step.finished, index)
        preempted |= {handle: gave_way[handle] for handle in step.finished}
    lines: list[str] = []
    for name, theirs, ours in zip(Played._fields, (steps, admitted, preempted, finished), played, strict=True):
        for key in sorted(theirs.keys() | ours.keys()):
            if theirs.get(key) != ours.get(key):
                lines.append(f"compiled, {name} {key}: vendor {theirs.get(key)}, engine {ours.get(key)}")
                break
    return lines


def play_compiled(history: History, config: EngineConfig) -> Played:
    """The history of ``planned`` operations, played by the compiled simulator: each step lasts as long."""
    step_ns, played = PASS_NS * config.drafts.num_passes, Played({}, {}, {}, {})
    outcome = _run(_arrays_of(history, step_ns), config)
    for step in _rows(outcome.steps):
        padded = step["bucket"] if step["computed_tokens"] < 0 else None
        first = step["start_ns"] // step_ns
        played.steps.update(dict.fromkeys(range(first, first + step["count"]), (step["num_seqs"], padded)))
    # The simulator goes on to the last answer.
    end = sum(isinstance(operation, RunStep) for operation in history.operations)
    for handle, request in enumerate(_rows(outcome.requests)):
        admitted, finished = request["admitted_ns"] // step_ns, request["completed_ns"] // step_ns - 1
        if 0 <= admitted < end:
            played.admitted[handle] = admitted, request["cached_tokens"]
        if request["aborted_tokens"] < 0 and finished < end:
            played.finished[handle] = finished
            played.preempted[handle] = request["preemptions"]
    return played._replace(steps={index: step for index, step in played.steps.items() if index < end})


MOST_STEPS = 1 << 15


def _run(arrays: PlanArrays, config: EngineConfig) -> SimOutcome:
    """As ``run_batch``, which would refuse requests whose answers end with the longest context."""
    state, outcome = new_paged_state(config, len(arrays.requests)), new_outcome(arrays, config, MOST_STEPS)
    costs = paged_costs(config, [COSTS], config.max_num_seqs)
    run_paged_plans(PagedRun(arrays, state, new_scratch(arrays), outcome, costs), 0, 1, FAR)
    check_admitted(outcome, "")
    num_steps = int(outcome.totals["num_step_records"][0])
    assert num_steps <= MOST_STEPS
    return outcome._replace(steps=outcome.steps[:num_steps])


def _rows(records: Any) -> Iterator[dict[str, int]]:
    return (dict(zip(records.dtype.names, row, strict=True)) for row in records.tolist())


def _arrays_of(history: History, step_ns: int) -> PlanArrays:
    """Sessions of one request each, which keep of an earlier one all tokens that both have, and arrive, or are left,
    at or during the step of their number."""
    arrived, left, step = list[tuple[Submit, int]](), dict[int, int](), 0
    for operation in history.operations:
        if isinstance(operation, Submit):
            arrived.append((operation, step * step_ns))
        elif isinstance(operation, RunStep):
            for place, handle in enumerate(operation.aborts_inside):
                left.setdefault(handle, step * step_ns + 1 + place)
            step += 1
    sessions: list[SessionPlan] = []
    # Of the texts that begin alike: number and tokens.
    texts = dict[tuple[int, int], list[tuple[int, IntArray]]]()
    for place, (request, at_ns) in enumerate(arrived):
        prompt = materialise(request.prompt)
        alike = texts.setdefault((request.salt, int(prompt[0])), [])
        keep, earlier = max(((_num_equal(text, prompt), -number) for number, text in alike), default=(0, 0))
        alike.append((place, np.concatenate([prompt, stream_tokens(GENERATED + place, request.max_tokens)])))
        leaves_ns = left[place] - at_ns if place in left else 0
        planned_request = RequestPlan(keep, len(prompt) - keep, request.max_tokens, abort_after_ns=leaves_ns)
        sessions.append(SessionPlan(place, at_ns, None, -earlier if keep else None, (planned_request,)))
    return session_arrays([sessions], [0], [0])


def _num_equal(text: IntArray, prompt: IntArray) -> int:
    """How many tokens two texts begin with alike."""
    most = min(len(text), len(prompt))
    differs = np.flatnonzero(text[:most] != prompt[:most])
    return int(differs[0]) if len(differs) else most
