"""A plan on an emulated server in virtual time, with the tokens that the server would answer: its steps, held to the
simulator."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from harness.measure.emulator.model import ContextHash, PlannedAnswer, keyed_answer
from harness.model.engine import DECODE, CostModel, EngineConfig, load_cost_model
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd
from harness.model.engine.paged import scheduler_of
from harness.model.plan.event_queue import ClientEvent
from harness.model.plan.model import Plan
from harness.model.plan.tokens import TokenStreams
from harness.model.sim import simulate
from harness.model.sim.driver import Key, VirtualDriver, keep_times_ns
from harness.model.spec import ServerSpec


class TokenDriver(VirtualDriver):
    """Draws every token as the server draws it, so that prompts hold the answers before them; keeps every step."""

    def __init__(self, plan: Plan, core: EngineCore, config: EngineConfig) -> None:
        super().__init__(plan, [core])
        self._config, self._streams, self._keep_ns = config, TokenStreams(plan), keep_times_ns(plan)
        self._answers: dict[int, list[list[int]]] = {}
        self.steps: list[StepEnd] = []

    def request_of(self, event: ClientEvent) -> EngineRequest:
        prompt = self._streams.prompt(event.session, event.request, self._answers)
        self._answers.setdefault(event.session, []).append([])
        planned = self.plan.request(event.session, event.request)
        name = f"{event.session}-{event.request}"
        context = ContextHash.of(prompt, 0)
        keys, answer = keyed_answer(self._config, prompt, context, PlannedAnswer(planned.generate_tokens))
        return EngineRequest(
            handle=len(self.names),
            engine_id=name,
            external_id=name,
            prompt=prompt,
            max_tokens=planned.generate_tokens,
            block_keys=keys,
            planned_tokens=planned.generate_tokens,
            answer=answer,
            keep_ns=self._keep_ns[event.session, event.request],
            arrival_ns=event.at_ns,
        )

    def num_tokens(self, key: Key) -> int:
        return len(self._answers[key[0]][key[1]])

    def ended(self, _server: int, end: StepEnd, /) -> None:
        for request, num_tokens in zip(end.requests, end.num_tokens, strict=True):
            session, number = self.names[request.handle]
            self._answers[session][number] += request.draw_tokens(num_tokens)
        self.steps.append(end)


def run_virtually(
    plan: Plan,
    server: ServerSpec | EngineConfig,
    cost_model: CostModel | None = None,
    lasting_ns: Callable[[int], int] | None = None,
) -> list[StepEnd]:
    """Every step of a plan on a fresh server, idle steps included; times are ns after the common start.

    lasting_ns: how long a step of so many ns really lasts; default: as long.
    """
    config = server if isinstance(server, EngineConfig) else EngineConfig.from_server(server)
    costs = cost_model or load_cost_model(server.cost_model if isinstance(server, ServerSpec) else "paper")
    driver = TokenDriver(plan, EngineCore(scheduler_of(config, costs), lasting_ns=lasting_ns), config)
    driver.play()
    return driver.steps


def assert_same_run(plan: Plan, server: ServerSpec | EngineConfig, costs: CostModel | None = None) -> Counter[str]:
    """What happened; AssertionError where the emulator's loop and the compiled simulator differ, step by step or
    request by request."""
    config = server if isinstance(server, EngineConfig) else EngineConfig.from_server(server)
    ends = [end for end in run_virtually(plan, server, costs) if end.start.step.num_seqs]
    result = simulate(plan, server, costs)
    starts = [end.start for end in ends]
    assert [
        (
            start.start_ns,
            start.step.kind.lower(),
            start.step.num_seqs,
            start.step.bucket or None,
            start.step.duration_ns,
            None if start.step.kind == DECODE else start.step.computed_tokens,
        )
        for start in starts
    ] == [
        (row["start_ns"] + repeat * row["duration_ns"], *(row[name] for name in _OF_A_STEP))
        for row in result.steps.to_pylist()
        for repeat in range(row["count"])
    ]
    if not config.rule_set.is_paged:
        events = [(start.start_ns, event) for start in starts for event in start.step.kv_events]
        evictions = [(at_ns, each.slots[0], each.caller) for at_ns, each in events if each.kind == "EVICTION"]
        assert evictions == [(row["at_ns"], row["slot"], row["caller"]) for row in result.evictions.to_pylist()]
    rows = {f"{row['session']}-{row['request']}": row for row in result.requests.to_pylist()}
    finished = {request.external_id: (request, end.start.end_ns) for end in ends for request in end.finished}
    assert {
        name: (request.arrival_ns, request.scheduled_ns, request.first_token_ns, over_ns, request.cached_tokens)
        for name, (request, over_ns) in finished.items()
    } == {name: tuple(row[field] for field in _OF_A_REQUEST) for name, row in rows.items() if row["aborted_tokens"] < 0}
    num_preempted = sum(len(start.step.preempted) for start in starts)
    assert result.preemptions == num_preempted
    assert result.computed_tokens == sum(start.step.computed_tokens for start in starts)
    assert result.end_ns == max([row["completed_ns"] for row in rows.values()] + [start.end_ns for start in starts])
    return Counter(
        {
            "asynchronous steps": len(ends) * config.async_scheduling,
            "clients that leave": len(rows) - len(finished),
            "preemptions": num_preempted,
            "cases": 1,
        }
    )


_OF_A_STEP = ("kind", "n", "b", "duration_ns", "computed_tokens")
_OF_A_REQUEST = ("arrival_ns", "admitted_ns", "first_token_ns", "completed_ns", "cached_tokens")
