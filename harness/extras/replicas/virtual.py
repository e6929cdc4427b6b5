"""Several servers behind a router in one virtual time: a whole plan on k engine cores, without sockets or waiting.

Each replica is an EngineCore; the clock jumps to the next event of a client or a replica. With one replica the
steps are those of ``harness.model.sim.driver``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from harness.clock import ScaledClock
from harness.errors import PlanError
from harness.extras.replicas.policies import Asked, Policy
from harness.measure.client.rows import RequestRows
from harness.measure.records.schema import ABORTED
from harness.model.engine import DECODE, PREFILL, CostModel, EngineConfig, Step
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd
from harness.model.engine.paged import PagedScheduler, scheduler_of
from harness.model.plan import Plan
from harness.model.plan.event_queue import ClientEvent, VirtualClients
from harness.model.sim.driver import UnreadRequests
from harness.model.sim.plans import check_slots, plan_arrays
from harness.model.spec import ServerSpec

Key = tuple[int, int]
"""A request of a plan: (session, request)."""
Lasting = Callable[[int], int]


@dataclass(slots=True, eq=False)
class Replica:
    """One engine core and what it did. Times in ns.

    ends_ns: of its running step, and of the equal steps that follow while nothing arrives; empty while it is idle.
    batches: decode steps by (n, b). others: its other steps, as they were decided. wait_ns: time that prefills kept
    running requests waiting, once for each (W). num_slots_evicted: of a server with slots.
    """

    core: EngineCore
    costs: CostModel
    ends_ns: Sequence[int] = ()
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
        return scheduler.pool.num_evicted if isinstance(scheduler, PagedScheduler) else self.num_slots_evicted

    def start(self, now_ns: int, *, takes_equal_steps: bool) -> None:
        """Begin the next step, if there is anything to do."""
        if self.core.running_step is None and (start := self.core.start_step(now_ns)) is not None:
            self.ends_ns = self.core.equal_ends_ns() if takes_equal_steps else (start.end_ns,)

    def submit(self, request: EngineRequest) -> None:
        """Hand a request to the core; equal steps that would begin after its arrival are given up."""
        self.core.submit(request)
        self.cut(request.arrival_ns)

    def cut(self, at_ns: int) -> None:
        """Let the step that runs at ``at_ns`` be the last of those begun together."""
        self.ends_ns = self.ends_ns[: bisect_left(self.ends_ns, at_ns) + 1]

    def end(self) -> StepEnd:
        """End what runs, and add up its time."""
        num_running = self.core.scheduler.num_running
        end = self.core.end_step(self.ends_ns)
        took_ns, step = self.ends_ns[-1] - end.start.start_ns, end.start.step
        self.num_slots_evicted += len(step.evicted_slots)
        if step.kind == DECODE:
            self.decode_ns += took_ns
            self.batches[step.num_seqs, step.bucket] += len(self.ends_ns)
        else:
            self.prefill_ns += took_ns
            self.wait_ns += self._kept_waiting_ns(step, took_ns, num_running)
            self.others.append(step)
        self.ends_ns = ()
        return end

    def _kept_waiting_ns(self, step: Step, took_ns: int, num_running: int) -> int:
        if not isinstance(self.core.scheduler, PagedScheduler):
            # A prefill is of one request, and the others are ready to decode.
            return (num_running - 1) * took_ns if step.kind == PREFILL else 0
        num_decoding = sum(step.tokens) - step.computed_tokens
        return num_decoding * self.costs.chunked_step_ns(0, 0, 0, step.computed_tokens, step.attended_tokens)


class ReplicaRun(VirtualClients):
    """One plan on freshly started replicas behind a router.

    served_by: the replica of each request, in the order of the decisions. first_token_ns: by request. lasting_ns: of
    each replica, how long a step of so many ns really lasts; default: as long.
    """

    def __init__(
        self, plan: Plan, server: ServerSpec, costs: CostModel, router: Policy, lasting_ns: Sequence[Lasting] = ()
    ) -> None:
        super().__init__(plan)
        config = EngineConfig.from_server(server)
        self.router = router
        self.replicas = [
            Replica(EngineCore(scheduler_of(config, costs), lasting_ns=lasting), costs)
            for lasting in lasting_ns or [None] * len(router.open)
        ]
        # A client that leaves has the tokens of every step before.
        self._takes_equal_steps = not any(request.is_abortable for request in plan.requests)
        self.served_by: dict[Key, int] = {}
        self.first_token_ns: dict[Key, int] = {}
        self.end_ns = 0
        self._unread = UnreadRequests(plan, config)
        self._rows = RequestRows(plan)
        self._row_of = {key: row for row, key in enumerate(zip(self._rows.session, self._rows.request, strict=True))}
        self.requests: dict[Key, EngineRequest] = {}
        self._names = [dict[int, Key]() for _ in router.open]

    def play(self) -> int:
        """Everything, from the common start to the end of the last step or answer; returns the instant of that.

        At one instant steps end before requests are sent.
        """
        now_ns = 0
        while True:
            self.act_until(now_ns)
            for replica in self.replicas:
                replica.start(now_ns, takes_equal_steps=self._takes_equal_steps)
            due = [replica.ends_ns[-1] for replica in self.replicas if replica.ends_ns]
            if self.client_events.next_ns is not None:
                due.append(self.client_events.next_ns)
            if not due:
                break
            now_ns = min(due)
            # Clients that leave during a step get none of its tokens.
            self.act_until(now_ns, is_step_over=True)
            for place, replica in enumerate(self.replicas):
                if replica.ends_ns and replica.ends_ns[-1] == now_ns:
                    self._finish(place, replica.end(), now_ns)
        if any(replica.core.num_unfinished for replica in self.replicas):
            raise PlanError(
                "a request can never be admitted: the KV memory of a replica is too small for it",
                hint="Give more kv_slots or shorter prompts",
            )
        return self.end_ns

    def send(self, event: ClientEvent) -> None:
        key = (event.session, event.request)
        place = self.router.route(Asked(str(event.session), self._unread.prompt_keys(*key).tolist()))
        self.served_by[key] = place
        replica, row = self.replicas[place], self._row_of[key]
        self._rows.trigger_ns[row] = event.trigger_ns
        self._rows.due_ns[row] = self._rows.sent_ns[row] = event.at_ns
        handle = replica.core.new_handle()
        self._names[place][handle] = key
        self.requests[key] = self._unread.request_of(event, handle)
        replica.submit(self.requests[key])

    def leave(self, key: Key, at_ns: int) -> None:
        place, row = self.served_by[key], self._row_of[key]
        self.replicas[place].core.abort(self.requests[key].handle, at_ns)
        self._rows.done_ns[row], self._rows.status[row] = at_ns, ABORTED
        self.end_ns = max(self.end_ns, at_ns)
        self.router.finished(place)

    def num_tokens(self, key: Key) -> int:
        return self.requests[key].num_generated

    def ended(self, place: int, end: StepEnd) -> None:
        """A step of a replica is over; its tokens are received."""

    def requests_table(self) -> pa.Table:
        """The table of requests of a perfect client."""
        return self._rows.to_table(self.plan, ScaledClock(1.0))

    def _finish(self, place: int, end: StepEnd, now_ns: int) -> None:
        names, self.end_ns = self._names[place], now_ns
        finished = [names[request.handle] for request in end.finished]
        received = [names[request.handle] for request in end.requests]
        for key, request in zip(received, end.requests, strict=True):
            # Nobody reads the answer, so no token is drawn.
            request.num_generated += len(end.ends_ns)
            self.first_token_ns.setdefault(key, request.first_token_ns)
        self.ended(place, end)
        for key, request in zip(finished, end.finished, strict=True):
            self._completed(self._row_of[key], key, now_ns, request.cached_tokens)
            self.router.finished(place)
        self.step_ended(finished, received, now_ns)

    def _completed(self, row: int, key: Key, at_ns: int, cached_tokens: int) -> None:
        rows, planned = self._rows, self.plan.request(*key)
        rows.first_byte_ns[row], rows.done_ns[row] = self.first_token_ns[key], at_ns
        rows.status[row], rows.http_status[row] = "ok", 200
        rows.prompt_tokens[row], rows.completion_tokens[row] = planned.prompt_tokens, planned.generate_tokens
        rows.cached_tokens[row] = cached_tokens
        rows.note_texts(row, f"cmpl-s{key[0]}r{key[1]}", "length")


def play_replicas(plan: Plan, server: ServerSpec, costs: CostModel, router: Policy) -> ReplicaRun:
    """A plan on as many fresh replicas of ``server`` as the router has. Raises PlanError as the simulator does."""
    check_slots(plan_arrays([plan]), EngineConfig.from_server(server))
    run = ReplicaRun(plan, server, costs, router)
    run.play()
    return run
