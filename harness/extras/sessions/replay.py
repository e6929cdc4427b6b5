"""Recorded requests through the rules of vLLM's scheduler, step by step: which decisions differ from the server's.

How many tokens were drafted and accepted is taken as recorded: the text decides that, no scheduler.
Each request is submitted, and each abort applied, before the step before which the server had it. So no decision hangs
on what a step costs: durations are compared apart. After the first difference the two servers hold different KV blocks,
and more differences may follow from it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from harness.analysis.stats import median
from harness.errors import RecordsError
from harness.extras.formats.vllm_sessions import Chains, ObservedRequest
from harness.extras.sessions.waits import Places, StepTimes, Waits, waits_of
from harness.model.engine import CostModel, EngineConfig
from harness.model.engine.cost import attended_tokens
from harness.model.engine.paged import PagedScheduler
from harness.model.engine.scheduler import Step
from harness.stacks.vllm.core_steps import CoreStep

ENDLESS = 1 << 30
ENDLESS_NS = 1 << 62


class Difference(NamedTuple):
    """A step that the server and the rules decided differently. recorded, by_rules: what each decided."""

    step: int
    kind: str
    recorded: str
    by_rules: str
    free_blocks: tuple[int | None, int]

    @property
    def sentence(self) -> str:
        """What differs, in one line."""
        had, have = self.free_blocks
        memory = "" if had is None else f"; free KV blocks: {had} recorded, {have} by the rules"
        return f"step {self.step}, {self.kind}: {self.recorded} recorded, {self.by_rules} by the rules{memory}"


@dataclass
class Replay:
    """What came of a replay.

    kinds: steps that differ, by their first difference. num_admitted, num_cached_differ: admissions, and those whose
    cached tokens differ. num_free_differ, first_free: steps with another number of free KV blocks, and (step, recorded,
    by the rules) of the first: in another memory many decisions are the same. num_contradicted: requests whose cached
    tokens are others in the sessions than in the steps. ratios: measured duration over the cost
    model's, by kind of step. waits: in the queue and for the first token. warning: what the rules do not know here.
    """

    num_steps: int = 0
    kinds: Counter[str] = field(default_factory=Counter[str])
    first: Difference | None = None
    num_admitted: int = 0
    num_cached_differ: int = 0
    num_free_differ: int = 0
    first_free: tuple[int, int, int] | None = None
    num_contradicted: int = 0
    num_preempted: int = 0
    num_preempted_by_rules: int = 0
    ratios: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    waits: Waits = field(default_factory=Waits)
    notes: list[str] = field(default_factory=list[str])
    warning: str = ""

    @property
    def num_differ(self) -> int:
        return self.kinds.total()

    @property
    def is_same(self) -> bool:
        """Whether every decision is the same, every number of free KV blocks, and both files."""
        return not self.num_differ and not self.num_free_differ and not self.num_contradicted

    def typical_ratios(self) -> dict[str, tuple[int, float]]:
        """(steps, median of measured over modelled duration) by kind of step."""
        return {kind: (len(ratios), median(ratios)) for kind, ratios in sorted(self.ratios.items())}


class _Decided(NamedTuple):
    """A step as it was decided, and the free KV blocks then."""

    step: Step
    free_blocks: int


class _Scheduler(PagedScheduler):
    """Tells when it decides a step ahead of the one that runs, for requests may have come between."""

    def decide(self, before_ahead: Callable[[], None]) -> _Decided:
        """The step that runs now, as it was decided: with requests that have ended since."""
        num_preempted = self._take_ahead()
        current = int(self._state.server["current"][0])
        if num_preempted >= 0:
            self._decide(current, num_preempted)
            self._snapshot = _Decided(self._step(current), self.free_blocks)
        decided = self._snapshot
        before_ahead()
        ahead = self._next_ahead()
        if ahead >= 0:
            self._decide(ahead, 0)
            self._snapshot = _Decided(self._step(ahead), self.free_blocks)
        self._is_running = True
        return decided

    def cost_of(self, step: CoreStep) -> int | None:
        """How long a recorded step lasts by the costs, in ns; None where its batch is not known."""
        if (work := step.details) is None:
            return None
        attended = sum(attended_tokens(before, computed) for before, computed in work.parts)
        batch = {
            "num_decodes": work.generation_requests,
            "context_tokens": work.decode_context,
            "num_loaded": 0,
            "draft_tokens": 0,
        }
        return self._duration_ns({**batch, "num_chunk_tokens": work.context_tokens, "attended_tokens": attended})


class _Server:
    """The rules' server, fed as the recorded one was."""

    def __init__(
        self, config: EngineConfig, costs: CostModel, requests: Sequence[ObservedRequest], chains: Chains
    ) -> None:
        self.scheduler = _Scheduler(config, costs)
        self._block_size, self._is_caching = config.block_tokens, config.prefix_caching
        self._chains = chains
        self._names: dict[tuple[int, int], int] = {}
        self._queue = deque(sorted(requests, key=lambda request: (request.queued_ns, request.number)))
        aborted = (request for request in requests if request.end is not None and request.end.reason == "abort")
        self._leaving = deque(sorted(aborted, key=lambda request: (_end_ns(request), request.number)))
        self._alive: set[int] = set()

    def take_until(self, at_ns: int) -> None:
        """Submit what was queued by then, and drop what was aborted by then."""
        while self._queue and self._queue[0].queued_ns <= at_ns:
            request = self._queue.popleft()
            self.scheduler.submit(request.number, *self._lengths(request))
            self._alive.add(request.number)
        while self._leaving and _end_ns(self._leaving[0]) <= at_ns:
            self._drop(self._leaving.popleft())

    def warm_up(self, until_ns: int) -> int:
        """Answer what had ended before the steps begin, each by itself; returns how many there were."""
        early = [each for each in self._queue if 0 < _end_ns(each) < until_ns]
        for request in early:
            self._queue.remove(request)
            self.scheduler.submit(request.number, *self._lengths(request))
            while self.scheduler.has_work:
                self.scheduler.schedule()
                self.scheduler.finish_step()
        return len(early)

    def leave_inside(self, at_ns: int) -> None:
        """Drop what was aborted while the step ran and got no token of it."""
        for request in [each for each in self._leaving if _end_ns(each) <= at_ns]:
            end = request.end
            if end is None or request.number not in self._alive:
                continue
            if self.scheduler.output_tokens(request.number) >= end.generated:
                self._leaving.remove(request)
                self._drop(request)

    def draft(self, drafts: Mapping[int, int]) -> None:
        """So many tokens were drafted for each request that the next step holds."""
        for number in self._alive & drafts.keys():
            self.scheduler.draft(number, drafts[number])

    def finish_step(self, step: Step, accepted: Mapping[int, int | None]) -> tuple[int, ...]:
        """The step ran, and the model accepted as many drafts as recorded; of those that the rules' step has."""
        drafts = {number: most for number, most in step.drafts if number in self._alive}
        return self.scheduler.finish_step(
            accepted={number: min(accepted.get(number) or 0, most) for number, most in drafts.items()}
        )

    def finished(self, numbers: Sequence[int]) -> None:
        """Requests are over by the rules."""
        self._alive -= set(numbers)

    def _drop(self, request: ObservedRequest) -> None:
        if request.number in self._alive:
            self._alive.remove(request.number)
            self.scheduler.abort(request.number)

    def _lengths(self, request: ObservedRequest) -> tuple[int, int, list[int], int | None]:
        limit = self.scheduler.config.slot_tokens
        generated = request.most or ENDLESS
        stop = None
        if request.end is not None and request.end.reason != "abort":
            stop = max(request.end.generated, 1)
            generated = max(generated, stop)
        generated = min(generated, limit - request.prompt)
        blocks = self._chains.blocks_of(request, with_answer=True) if self._is_caching else []
        keys = [self._names.setdefault(block, len(self._names)) for block in blocks]
        # Blocks that the file does not name are nobody else's.
        wanted = (request.prompt + min(generated, stop or generated)) // self._block_size
        keys += [-1 - (request.number << 24) - place for place in range(len(keys), wanted)]
        return request.prompt, generated, keys, stop


def _end_ns(request: ObservedRequest) -> int:
    return 0 if request.end is None else request.end.end_ns


def replay(  # noqa: PLR0913 - what was recorded, and the rules
    config: EngineConfig,
    costs: CostModel,
    requests: Sequence[ObservedRequest],
    chains: Chains,
    steps: Sequence[CoreStep],
    *,
    has_costs: bool = False,
) -> Replay:
    """Step the rules through what a server had before each of its steps, and compare each decision.

    requests: of one file of sessions, by the monotonic clock of its machine. steps: of the same engine. has_costs:
    whether durations are compared with ``costs``.
    """
    found = Replay()
    ran = [step for step in steps if step.tokens]
    server, numbers, times = _Server(config, costs, requests, chains), _Numbers(requests), list[StepTimes]()
    if ran and (num_before := server.warm_up(ran[0].values["schedule_ns"])):
        found.notes.append(f"{num_before} requests came before the first step: they only fill the cache, one by one")
    for place, step in enumerate(ran):
        values = step.values
        numbers.learn(values, place)
        following = ran[place + 1].values["schedule_ns"] if place + 1 < len(ran) else ENDLESS_NS
        before_ns = ran[place - 1].values["end_ns"] if place else 0
        # The next step was decided while this one ran, or nobody was there for it when this one began.
        until_ns = following if following < values["update_ns"] else max(values["schedule_ns"], before_ns)
        server.take_until(values["schedule_ns"])
        if step.drafts and not config.async_scheduling:
            server.draft(dict(zip(numbers.batch(step), step.drafts, strict=True)))
        decided = server.scheduler.decide(partial(server.take_until, until_ns))
        found.num_steps += 1
        numbers.decided(decided.step, place)
        difference = _difference(step, decided, numbers, config, found)
        began_ns = max(values["schedule_ns"], before_ns)
        lasted_ns = values["end_ns"] - began_ns
        by_costs_ns = by_rules_ns = decided.step.duration_ns if has_costs else lasted_ns
        if difference is not None:
            found.kinds[difference.kind] += 1
            found.first = found.first or difference
            by_costs_ns = (server.scheduler.cost_of(step) if has_costs else None) or lasted_ns
        elif has_costs and decided.step.duration_ns:
            found.ratios.setdefault(decided.step.kind.lower(), []).append(lasted_ns / decided.step.duration_ns)
        instants = (values["step"], values["schedule_ns"], began_ns, values["update_ns"], values["end_ns"])
        times.append(StepTimes(*instants, by_costs_ns, by_rules_ns))
        server.leave_inside(values["update_ns"])
        accepted = dict(zip(numbers.batch(step), step.accepted, strict=True)) if step.accepted else {}
        server.finished(server.finish_step(decided.step, accepted))
    found.waits = waits_of(requests, times, numbers.places)
    if contradictions := list(numbers.contradictions(requests)):
        found.num_contradicted = len(contradictions)
        found.notes.append(
            f"the two files contradict each other in the cached tokens of {len(contradictions)} of "
            f"{len(numbers.cached)} requests, first of {contradictions[0]}"
        )
    if numbers.num_unknown:
        found.notes.append(f"{numbers.num_unknown} requests of the steps are not in the file of sessions")
    return found


class _Numbers:
    """The number of each request of the steps in the file of sessions: by when it was queued, and its prompt."""

    def __init__(self, requests: Sequence[ObservedRequest]) -> None:
        self._by_queued: dict[tuple[int, int], deque[int]] = {}
        for request in sorted(requests, key=lambda each: each.number):
            self._by_queued.setdefault((request.queued_ns, request.prompt), deque()).append(request.number)
        self._of_handle: dict[int, int] = {}
        self._of_name: dict[str, int] = {}
        self.num_unknown = 0
        self.cached: dict[int, int] = {}
        self.places = Places()

    def learn(self, values: Mapping[str, Any], place: int) -> None:
        """Requests are admitted in the step at ``place``, some of them for the first time."""
        for handle, name, queued_ns, _tokens, cached, prompt in values["admitted"]:
            if handle not in self._of_handle:
                waiting = self._by_queued.get((queued_ns, prompt))
                self.num_unknown += not waiting
                self._of_handle[handle] = waiting.popleft() if waiting else -1 - handle
            number = self._of_name[name] = self._of_handle[handle]
            self.places.admitted.setdefault(number, place)
            if cached is not None:
                self.cached.setdefault(number, cached)

    def contradictions(self, requests: Sequence[ObservedRequest]) -> Iterator[str]:
        """Requests that were admitted once and whose cached tokens are others in the sessions than in the steps."""
        for request in requests:
            end, cached = request.end, self.cached.get(request.number)
            if end is None or end.preemptions or None in (end.cached, cached) or end.cached == cached:
                continue
            yield f"request {request.number}: {end.cached} in the sessions, {cached} in the steps"

    def decided(self, step: Step, place: int) -> None:
        """The rules decided the step at ``place``. Whoever computes the last part of a prompt has a token then."""
        for each in step.admissions:
            self.places.admitted_by_rules.setdefault(each.request, place)
        if step.computed_tokens:
            for number in set(step.requests) - set(step.unfinished):
                self.places.first_by_rules.setdefault(number, place)

    def of(self, handles: Sequence[int]) -> list[int]:
        """Numbers of handles."""
        return [self._of_handle.get(handle, -1 - handle) for handle in handles]

    def batch(self, step: CoreStep) -> dict[int, int]:
        """Tokens of each request of a step, in its order."""
        numbers = (self._of_name.get(name, -1 - place) for place, name in enumerate(step.request_ids))
        return dict(zip(numbers, step.tokens, strict=True))


def _difference(
    step: CoreStep, decided: _Decided, numbers: _Numbers, config: EngineConfig, found: Replay
) -> Difference | None:
    """The first decision of a step that differs; counts requests whose cached tokens differ."""
    values, by_rules = step.values, decided.step
    admitted = dict(zip(numbers.of([entry[0] for entry in values["admitted"]]), values["admitted"], strict=True))
    cached = {number: entry[4] for number, entry in admitted.items() if entry[4] is not None}
    cached_by_rules = {each.request: each.cached_tokens for each in by_rules.admissions}
    both = cached.keys() & cached_by_rules.keys()
    preempted = sorted(numbers.of(values["preempted"]))
    found.num_admitted += len(admitted)
    found.num_cached_differ += sum(cached[number] != cached_by_rules[number] for number in both)
    found.num_preempted += len(preempted)
    found.num_preempted_by_rules += len(by_rules.preempted)
    batch, batch_by_rules = numbers.batch(step), dict(zip(by_rules.requests, by_rules.tokens, strict=True))
    padded = values["padded_tokens"]
    size = config.graph_of(step.tokens)[1] if padded is not None else None
    pairs: tuple[tuple[str, object, object], ...] = (
        ("admitted", sorted(admitted), sorted(cached_by_rules)),
        ("cached tokens", _of(cached, both), _of(cached_by_rules, both)),
        ("preempted", preempted, sorted(by_rules.preempted)),
        ("batch", list(batch), list(batch_by_rules)),
        ("tokens of a prompt", batch, batch_by_rules),
        ("padded size", padded, size),
    )
    free = (values["free_blocks"], decided.free_blocks)
    if free[0] is not None and free[0] != free[1]:
        found.num_free_differ += 1
        found.first_free = found.first_free or (values["step"], *free)
    for kind, recorded, theirs in pairs:
        if recorded != theirs:
            return Difference(values["step"], kind, str(recorded), str(theirs), free)
    return None


def _of(cached: Mapping[int, int], numbers: Iterable[int]) -> dict[int, int]:
    return {number: cached[number] for number in sorted(numbers)}


def check_settings(config: EngineConfig, block_tokens: int) -> None:
    """Refuse, as RecordsError, a server whose blocks the rules do not know."""
    if config.prefix_caching and block_tokens != config.block_tokens:
        raise RecordsError(
            f"names blocks of {block_tokens} tokens and keeps KV in blocks of {config.block_tokens}",
            where="the file of sessions",
            hint="The rules hold for one pool of full attention; this server has another",
        )


def check_same_server(sessions: Mapping[str, Any], steps: Mapping[str, Any]) -> None:
    """Refuse, as RecordsError, headers of two servers, or of two starts of one. What one does not show is not compared.

    sessions, steps: the first lines of the two files.
    """
    names = ("vllm", "pid", "scheduler")
    pairs = {name: (sessions.get(name), steps.get(name)) for name in names}
    shown, theirs = sessions.get("effective") or {}, steps.get("effective") or {}
    pairs |= {name: (shown.get(name), theirs.get(name)) for name in shown.keys() & theirs.keys()}
    differing = [
        f"{name} {ours!r} in the sessions and {other!r} in the steps"
        for name, (ours, other) in sorted(pairs.items())
        if ours is not None and other is not None and ours != other
    ]
    if differing:
        what = f"are not of the same start of a server: {'; '.join(differing)}"
        raise RecordsError(what, where="the sessions and the steps", hint="Give the files of one engine and one start")
