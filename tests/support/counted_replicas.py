"""Replicas in virtual time with an account of their own: steps, times and requests, as a perfect client saw them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from harness.analysis.reuse import INNER_BLOCKS, ReuseRule
from harness.extras.replicas.figures import ReplicaFigures, Served, figures_of
from harness.extras.replicas.policies import Policy
from harness.extras.replicas.simulated import ReplicaRun
from harness.model.engine import DECODE, PREFILL, CostModel, EngineConfig, Step
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd, StepStart
from harness.model.engine.paged import PagedScheduler
from harness.model.plan.event_queue import ClientEvent
from harness.model.plan.model import Plan
from harness.model.sim.driver import Key
from harness.model.sim.plans import check_slots, plan_arrays
from harness.model.spec import ServerSpec


@dataclass(slots=True, eq=False)
class Replica:
    """One engine core and what it did. Times in ns.

    batches: decode steps by (n, b). others: its other steps, as they were decided. wait_ns: time that prefills kept
    running requests waiting, once for each (W). num_slots_evicted: of a server with slots.
    """

    core: EngineCore
    costs: CostModel
    decode_ns: int = 0
    prefill_ns: int = 0
    wait_ns: int = 0
    num_slots_evicted: int = 0
    batches: Counter[tuple[int, int]] = field(default_factory=Counter[tuple[int, int]])
    others: list[Step] = field(default_factory=list[Step])

    @property
    def device_ns(self) -> int:
        """The sum of all its step times."""
        return self.decode_ns + self.prefill_ns

    @property
    def num_evicted(self) -> int:
        """Slots or blocks with content that were used again."""
        scheduler = self.core.scheduler
        return scheduler.num_evicted if isinstance(scheduler, PagedScheduler) else self.num_slots_evicted

    def started(self, start: StepStart) -> None:
        """Note what a step decided, and whom it keeps waiting."""
        step = start.step
        self.num_slots_evicted += len(step.evicted_slots)
        if step.kind != DECODE:
            self.others.append(step)
            self.prefill_ns += step.duration_ns
            self.wait_ns += self._kept_waiting_ns(step)

    def ended(self, end: StepEnd) -> None:
        """Add up decode steps."""
        step = end.start.step
        if step.kind == DECODE:
            self.decode_ns += end.ends_ns[-1] - end.start.start_ns
            self.batches[step.num_seqs, step.bucket] += len(end.ends_ns)

    def _kept_waiting_ns(self, step: Step) -> int:
        scheduler = self.core.scheduler
        if not isinstance(scheduler, PagedScheduler):
            # A prefill is of one request, and the others are ready to decode.
            return (scheduler.num_running - 1) * step.duration_ns if step.kind == PREFILL else 0
        num_decoding = sum(step.tokens) - step.computed_tokens
        return num_decoding * self.costs.chunked_step_ns(0, 0, 0, step.computed_tokens, step.attended_tokens)


class CountedReplicas(ReplicaRun):
    """A run that counts what each replica does. requests: those that were sent."""

    def __init__(self, plan: Plan, server: ServerSpec, costs: CostModel, router: Policy) -> None:
        super().__init__(plan, server, costs, router)
        self.replicas = [Replica(core, costs) for core in self.cores]
        self.requests: dict[Key, EngineRequest] = {}
        self.requests_table = self.rows.requests_table

    def request_of(self, event: ClientEvent) -> EngineRequest:
        made = self.requests[event.session, event.request] = super().request_of(event)
        return made

    def started(self, server: int, start: StepStart, /) -> None:
        self.replicas[server].started(start)

    def ended(self, server: int, end: StepEnd, /) -> None:
        super().ended(server, end)
        self.replicas[server].ended(end)


def play_replicas(plan: Plan, server: ServerSpec, costs: CostModel, router: Policy) -> CountedReplicas:
    """A plan on as many fresh replicas of ``server`` as the router has. Raises PlanError as the simulator does."""
    check_slots(plan_arrays([plan]), EngineConfig.from_server(server))
    run = CountedReplicas(plan, server, costs, router)
    run.play()
    return run


def figures_of_counted(run: CountedReplicas) -> ReplicaFigures:
    """The figures of a played run by its own account."""
    batches = [replica.batches for replica in run.replicas]
    device_ns = [replica.device_ns for replica in run.replicas]
    requests = run.requests_table()
    first_token_ns = {key: sent.first_token_ns for key, sent in run.requests.items() if sent.first_token_ns >= 0}
    return figures_of(Served(run.plan, requests, _rule_of(run), run.served_by, device_ns, batches, first_token_ns))


def _rule_of(run: CountedReplicas) -> ReuseRule:
    scheduler = run.replicas[0].core.scheduler
    if not isinstance(scheduler, PagedScheduler):
        return INNER_BLOCKS
    return ReuseRule(scheduler.config.block_size, keeps_generated=True)
