"""Plans from traces in virtual time: shipped ones on an emulated server, and prompts that name the same blocks."""

from __future__ import annotations

import random

import pytest

from harness.model.experiment import build_plan
from harness.model.plan.model import Plan
from harness.model.sim import simulate
from harness.model.spec import ServerSpec, WorkloadSpec
from harness.model.traces.lower import Lowering, sessions_of
from harness.model.traces.recording import RecordedRequest, Recording
from tests.support.virtual_emulator import assert_same_run

SERVER = ServerSpec(rules="vendor-0.11.1")


@pytest.mark.parametrize(
    ("name", "concurrency"), [("coding-agent", None), ("research-agent", 3), ("customer-support", 3)]
)
def test_shipped_traces_take_the_same_steps_on_an_emulated_server(name: str, concurrency: int | None) -> None:
    workload = WorkloadSpec.model_validate({"source": "trace", "trace": name, "concurrency": concurrency})
    assert_same_run(build_plan(workload, 1, 0), SERVER)


def test_prompts_that_name_the_same_blocks_are_reused_by_whole_blocks() -> None:
    names = tuple(range(10))
    ask = RecordedRequest(None, (), 0, "none", 700, 0, 2, names)
    late = ask._replace(blocks=(*names[:5], 99, *names[6:]), wait_ns=5_000_000_000)
    trees = [Recording("a", 0, (ask,)), Recording("b", 0, (late,))]
    sessions, block_tokens, _ = sessions_of(trees, 64, Lowering(arrivals="recorded"), random.Random(1))
    plan = Plan("trace", 1, 0, "as-drawn", 0, (1000, 150_000), sessions, block_tokens=block_tokens)
    assert simulate(plan, SERVER).cached_tokens == 256, "five names of 64 tokens are two whole blocks of 128"
