"""Several servers behind a router in one virtual time: what a plan does on them, and the records of such a run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.analysis.logs.derive import of_simulator
from harness.analysis.logs.parse import Derived
from harness.analysis.logs.replicas import merged_derived, merged_metrics, replicas_in_headers
from harness.errors import SpecError
from harness.extras.replicas.policies import BLOCK_TOKENS, Policy, RoutedRequest, policy_named
from harness.measure.records import layout
from harness.measure.records.writer import RawFile
from harness.model.engine import CostModel
from harness.model.engine.core import StepEnd
from harness.model.experiment import PlannedRun
from harness.model.plan.blocks import BlockKeys
from harness.model.plan.event_queue import ClientEvent, whole_sessions
from harness.model.plan.model import Plan
from harness.model.sim.driver import Key
from harness.model.spec import ServerSpec
from harness.runner.backends.sim import VirtualRun, request_name


class ReplicaRun(VirtualRun):
    """One plan on freshly started replicas behind a router.

    served_by: the replica of each request, in the order of the decisions.
    """

    def __init__(  # noqa: PLR0913  # as ``VirtualRun`` takes them
        self,
        plan: Plan,
        server: ServerSpec,
        costs: CostModel,
        router: Policy,
        *,
        is_streaming: bool = True,
        step_logs: Sequence[RawFile | None] = (),
    ) -> None:
        super().__init__(plan, server, costs, len(router.open), is_streaming=is_streaming, step_logs=step_logs)
        self.router = router
        self.served_by: dict[Key, int] = {}
        self._whole_sessions = whole_sessions(plan).tolist()
        self._prompt_keys = BlockKeys(plan, BLOCK_TOKENS).prompt

    def server_of(self, event: ClientEvent) -> int:
        key = (event.session, event.request)
        keys = self._prompt_keys(*key).tolist() if self.router.reads_prompts else ()
        self.served_by[key] = self.router.route(RoutedRequest(str(self._whole_sessions[event.session]), keys))
        return self.served_by[key]

    def left(self, key: Key, at_ns: int) -> None:
        super().left(key, at_ns)
        self.router.finished(self.served_by[key])

    def ended(self, server: int, end: StepEnd, /) -> None:
        super().ended(server, end)
        for _ in end.finished:
            self.router.finished(server)


class RecordedReplicas(ReplicaRun):
    """A planned run of replicas, and its files. folder: of the run."""

    def __init__(self, run: PlannedRun, costs: CostModel, folder: Path) -> None:
        check_simulated_router(run.server)
        server, numbers = run.server.replica, range(run.server.num_replicas)
        router = policy_named(run.server.routing.policy, len(numbers))
        self._folder = folder
        self._step_logs = [_step_log(layout.replica_folder(folder, place)) for place in numbers if server.is_paged]
        super().__init__(
            run.plan,
            server,
            costs,
            router,
            is_streaming=run.spec.client.stream,
            step_logs=self._step_logs or [None for _ in numbers],
        )
        requested = {"router": run.server.routing.model_dump(mode="json")}
        self.facts = {"replicas": [{"backend": "sim"} for _ in numbers], "requested": requested}

    def play(self) -> int:
        end_ns = super().play()
        for step_log in self._step_logs:
            step_log.close()
        lines = (json.dumps([request_name(*key), str(place)]) for key, place in self.served_by.items())
        served = RawFile(self._folder / layout.SERVED)
        served.write("".join(f"{line}\n" for line in lines).encode())
        served.close()
        return end_ns

    def derived(self, folder: Path) -> Derived:
        """What the log and the metrics of each replica would say, as those of one run."""
        parts = [
            of_simulator(record.tables(), layout.replica_folder(folder, place))
            for place, record in enumerate(self.records)
        ]
        in_headers = replicas_in_headers(folder / layout.SERVED, self.facts)
        return replace(merged_derived(parts, merged_metrics(parts)), in_headers=in_headers)


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
