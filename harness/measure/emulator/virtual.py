"""Every step of a plan on an emulated server in virtual time, with the tokens that the server would answer."""

from __future__ import annotations

from collections.abc import Callable

from harness.measure.emulator.model import ContextHash, PlannedAnswer, keyed_answer
from harness.model.engine import CostModel, EngineConfig, load_cost_model
from harness.model.engine.core import EngineCore, EngineRequest, StepEnd
from harness.model.engine.paged import scheduler_of
from harness.model.plan.event_queue import ClientEvent
from harness.model.plan.model import Plan
from harness.model.plan.tokens import TokenStreams
from harness.model.sim.driver import VirtualDriver
from harness.model.spec import ServerSpec


class _TokenDriver(VirtualDriver):
    """Draws every token, so that prompts hold the answers before them; keeps every step."""

    def __init__(self, plan: Plan, core: EngineCore, config: EngineConfig) -> None:
        super().__init__(plan, [core])
        self._config = config
        self.steps: list[StepEnd] = []
        self._answers: dict[int, list[list[int]]] = {}
        self._streams = TokenStreams(plan)

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
            arrival_ns=event.at_ns,
        )

    def num_tokens(self, key: tuple[int, int]) -> int:
        return len(self._answers[key[0]][key[1]])

    def ended(self, _server: int, end: StepEnd, /) -> None:
        for request in end.requests:
            session, index = self.names[request.handle]
            self._answers[session][index].append(request.draw_token())
        self.steps.append(end)


def run_virtually(
    plan: Plan,
    server: ServerSpec,
    cost_model: CostModel | None = None,
    lasting_ns: Callable[[int], int] | None = None,
) -> list[StepEnd]:
    """Every step of a plan on a fresh server, idle steps included; times are ns after the common start.

    lasting_ns: how long a step of so many ns really lasts; default: as long.
    """
    costs = load_cost_model(server.cost_model) if cost_model is None else cost_model
    config = EngineConfig.from_server(server)
    driver = _TokenDriver(plan, EngineCore(scheduler_of(config, costs), lasting_ns=lasting_ns), config)
    driver.play()
    return driver.steps
