"""Plans from traces in virtual time: joins and named blocks, the same to the nanosecond in every simulator."""

from __future__ import annotations

import random

import pytest

from harness.model.engine import EngineConfig, load_cost_model
from harness.model.experiment import build_plan
from harness.model.plan.model import Plan
from harness.model.sim import simulate
from harness.model.spec import ServerSpec, WorkloadSpec
from harness.model.traces.lower import Lowering, sessions_of
from harness.model.traces.recording import RecordedRequest, Recording
from tests.support.naive import naive_run
from tests.support.virtual_emulator import run_virtually

SERVER = ServerSpec(rules="vendor-0.11.1")


def assert_all_agree(plan: Plan) -> None:
    """The compiled simulator, the naive one and the emulator's own core on a virtual clock."""
    ours = simulate(plan, SERVER)
    naive = naive_run(plan, EngineConfig.from_server(SERVER), load_cost_model("paper"))
    emulated = run_virtually(plan, SERVER)
    assert (ours.decode_ns, ours.prefill_ns) == (naive.decode_ns, naive.prefill_ns)
    assert ours.cached_tokens == sum(record[0] for record in naive.requests.values())
    assert sum(end.start.end_ns - end.start.start_ns for end in emulated) == ours.device_ns
    assert emulated[-1].start.end_ns == ours.end_ns == max(record[4] for record in naive.requests.values())


@pytest.mark.parametrize(
    ("name", "concurrency"), [("coding-agent", None), ("research-agent", 3), ("customer-support", 3)]
)
def test_shipped_traces_take_the_same_time_in_every_simulator(name: str, concurrency: int | None) -> None:
    workload = WorkloadSpec.model_validate({"source": "trace", "trace": name, "concurrency": concurrency})
    assert_all_agree(build_plan(workload, 1, 0))


def test_prompts_that_name_the_same_blocks_are_reused_by_whole_blocks() -> None:
    names = tuple(range(10))
    ask = RecordedRequest(None, (), 0, "none", 700, 0, 2, names)
    late = ask._replace(blocks=(*names[:5], 99, *names[6:]), wait_ns=5_000_000_000)
    trees = [Recording("a", 0, (ask,)), Recording("b", 0, (late,))]
    sessions, block_tokens, _ = sessions_of(trees, 64, Lowering(arrivals="recorded"), random.Random(1))
    plan = Plan("trace", 1, 0, "as-drawn", 0, (1000, 150_000), sessions, block_tokens=block_tokens)
    assert simulate(plan, SERVER).cached_tokens == 256, "five names of 64 tokens are two whole blocks of 128"
