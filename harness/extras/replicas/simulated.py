"""Several servers behind a router in one virtual time: what a plan does on them, and the records of such a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.analysis.logs.derive import of_simulator
from harness.analysis.logs.parse import Derived
from harness.analysis.logs.replicas import merged_derived, merged_metrics, replicas_in_headers
from harness.errors import SpecError
from harness.extras.replicas.policies import BLOCK_TOKENS, Policy, RoutedRequest, policy_named
from harness.measure.records import layout
from harness.measure.records.writer import RawFile
from harness.model.engine import CostModel, EngineConfig
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd
from harness.model.engine.paged import scheduler_of
from harness.model.experiment import PlannedRun
from harness.model.plan.blocks import BlockKeys
from harness.model.plan.event_queue import ClientEvent, whole_sessions
from harness.model.plan.model import Plan
from harness.model.sim.driver import Key, UnreadRequests, VirtualDriver
from harness.model.sim.plans import check_times, plan_arrays
from harness.model.spec import ServerSpec
from harness.runner.backends.sim import ClientRows, EngineRecord, request_name


class ReplicaRun(VirtualDriver):
    """One plan on freshly started replicas behind a router.

    served_by: the replica of each request, in the order of the decisions. requests: those that were sent.
    """

    takes_equal_steps = True

    def __init__(self, plan: Plan, server: ServerSpec, costs: CostModel, router: Policy) -> None:
        config = EngineConfig.from_server(server)
        check_times(plan_arrays([plan]), config, [costs])
        super().__init__(
            plan, [EngineCore(scheduler_of(config, costs, draw_seed=place)) for place in range(len(router.open))]
        )
        self.router = router
        self.served_by: dict[Key, int] = {}
        self.requests: dict[Key, EngineRequest] = {}
        self._unread = UnreadRequests(plan, config)
        self._whole_sessions = whole_sessions(plan).tolist()
        self._prompt_keys = BlockKeys(plan, BLOCK_TOKENS).prompt

    def server_of(self, event: ClientEvent) -> int:
        key = (event.session, event.request)
        keys = self._prompt_keys(*key).tolist() if self.router.reads_prompts else ()
        self.served_by[key] = self.router.route(RoutedRequest(str(self._whole_sessions[event.session]), keys))
        return self.served_by[key]

    def request_of(self, event: ClientEvent) -> EngineRequest:
        key = (event.session, event.request)
        self.requests[key] = self._unread.request_of(event, len(self.names))
        return self.requests[key]

    def left(self, key: Key, at_ns: int) -> None:  # noqa: ARG002 - a router counts, and reads no time
        self.router.finished(self.served_by[key])

    def num_tokens(self, key: Key) -> int:
        return self.requests[key].num_generated

    def ended(self, server: int, end: StepEnd, /) -> None:
        for request, num_tokens in zip(end.requests, end.num_tokens, strict=True):
            # Nobody reads the answer, so no token is drawn.
            request.num_generated += num_tokens
        for _ in end.finished:
            self.router.finished(server)


class RecordedReplicas(ReplicaRun):
    """One plan on freshly started replicas, in virtual time, and its records. folder: of the run."""

    def __init__(self, run: PlannedRun, costs: CostModel, folder: Path) -> None:
        check_simulated_router(run.server)
        server = run.server.replica
        super().__init__(run.plan, server, costs, policy_named(run.server.routing.policy, run.server.num_replicas))
        # The step log of paged rules has a row for each step.
        self.takes_equal_steps = not server.is_paged
        self.rows = ClientRows(run.plan, run.spec.client.stream)
        num_logs = len(self.cores) if server.is_paged else 0
        self._step_logs = [_step_log(layout.replica_folder(folder, place)) for place in range(num_logs)]
        self._records = [
            EngineRecord(server, self._step_logs[place] if self._step_logs else None)
            for place in range(len(self.cores))
        ]
        self.settings = self._records[0].settings
        self._folder = folder
        requested = {"router": run.server.routing.model_dump(mode="json")}
        self.facts: dict[str, Any] = {"replicas": [{"backend": "sim"} for _ in self.cores], "requested": requested}

    def play(self) -> int:
        """Everything; returns the instant of the last token."""
        self._read_metrics(0, "before")
        super().play()
        self._read_metrics(self.end_ns, "after")
        for step_log in self._step_logs:
            step_log.close()
        lines = (json.dumps([request_name(*key), str(place)]) for key, place in self.served_by.items())
        served = RawFile(self._folder / layout.SERVED)
        served.write("".join(f"{line}\n" for line in lines).encode())
        served.close()
        return self.end_ns

    def derived(self, folder: Path) -> Derived:
        """What the log and the metrics of each replica would say, as those of one run."""
        parts = [
            of_simulator(record.tables(), layout.replica_folder(folder, place))
            for place, record in enumerate(self._records)
        ]
        in_headers = replicas_in_headers(folder / layout.SERVED, self.facts)
        return replace(merged_derived(parts, merged_metrics(parts)), in_headers=in_headers)

    def request_of(self, event: ClientEvent) -> EngineRequest:
        self.rows.sent((event.session, event.request), event.trigger_ns, event.at_ns)
        return super().request_of(event)

    def left(self, key: Key, at_ns: int) -> None:
        super().left(key, at_ns)
        self.rows.left(key, at_ns)

    def ended(self, server: int, end: StepEnd, /) -> None:
        super().ended(server, end)
        for request, num_tokens in zip(end.requests, end.num_tokens, strict=True):
            self.rows.tokens(self.names[request.handle], end.ends_ns, num_tokens)
        self._records[server].step(end, self.names)
        for request in end.finished:
            self.rows.completed(self.names[request.handle], end.ends_ns[-1], request.cached_tokens)

    def _read_metrics(self, at_ns: int, reason: str) -> None:
        for record in self._records:
            record.read_metrics(at_ns, reason)


def check_simulated_router(server: ServerSpec) -> None:
    """SpecError for a router that is not modelled."""
    if server.routing.kind != "harness":
        raise SpecError(
            f"{server.routing.kind} is not modelled: its decisions are its own",
            where="server.router.kind",
            hint='Simulate kind = "harness" with a policy like it, or measure it on servers',
        )


def _step_log(folder: Path) -> RawFile:
    folder.mkdir(parents=True, exist_ok=True)
    return RawFile(folder / layout.STEP_LOG)
