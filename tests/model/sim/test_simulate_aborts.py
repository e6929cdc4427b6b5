"""Answers that the client leaves as planned: the same to the nanosecond in every simulator, and old plans unchanged."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import PlanError
from harness.model.engine import EngineConfig, load_cost_model
from harness.model.plan.files import read_plan, save_plan
from harness.model.plan.model import Plan, RequestPlan, SessionPlan, canonical_lines
from harness.model.sim import SimResult, simulate
from harness.model.spec import ServerSpec
from tests.measure.emulator.test_emulator_virtual import assert_same_run, servers
from tests.support.naive import naive_run

SERVER = ServerSpec(max_num_seqs=2, decode_buckets=(1, 2), kv_slots=3)


@st.composite
def requests(draw: st.DrawFn, stream_tokens: int) -> RequestPlan:
    keep = draw(st.sampled_from([0, stream_tokens // 2, stream_tokens]))
    generate = draw(st.integers(2, 60))
    tokens = draw(st.integers(1, generate - 1))
    # Instants on a grid that steps hit too, and others.
    after_ns = draw(st.sampled_from([0, 1, 10_371_000, 30_000_000, 150_000_000, 900_000_000]))
    return RequestPlan(
        keep,
        draw(st.integers(1, 300)),
        generate,
        draw(st.sampled_from([0, 1_000_000, 40_000_000])),
        abort_after_ns=after_ns,
        abort_after_tokens=0 if after_ns else draw(st.sampled_from([0, tokens])),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sessions: list[SessionPlan] = []
    streams: list[int] = []
    for index in range(draw(st.integers(1, 7))):
        after = draw(st.sampled_from([None, *range(index)]))
        continues = after if after is not None and draw(st.booleans()) else None
        stream = 0 if continues is None else streams[continues]
        own: list[RequestPlan] = []
        for _ in range(draw(st.integers(1, 3))):
            own.append(draw(requests(stream)))
            stream = own[-1].stream_tokens
        streams.append(stream)
        offset_ns = draw(st.sampled_from([0, 0, 5_000_000, 200_000_000]))
        sessions.append(SessionPlan(index, offset_ns, after, continues, tuple(own)))
    return Plan("drawn", draw(st.integers(0, 99)), 0, "as-drawn", 0, (1000, 150_000), tuple(sessions))


def aborted(result: SimResult) -> dict[tuple[int, int], int]:
    rows = result.requests.to_pylist()
    return {(row["session"], row["request"]): row["aborted_tokens"] for row in rows if row["aborted_tokens"] >= 0}


@settings(max_examples=20)
@given(plan=plans(), server=servers())
def test_any_planned_abort_takes_the_same_time_in_every_simulator(plan: Plan, server: ServerSpec) -> None:
    assert_same_run(plan, server)
    ours, naive = simulate(plan, server), naive_run(plan, EngineConfig.from_server(server), load_cost_model("paper"))
    assert aborted(ours) == naive.aborted
    columns = ["cached_tokens", "arrival_ns", "admitted_ns", "first_token_ns", "completed_ns"]
    rows = {(row["session"], row["request"]): [row[name] for name in columns] for row in ours.requests.to_pylist()}
    assert rows == naive.requests
    assert simulate(plan, server, max_steps_per_advance=1).requests == ours.requests


def test_who_leaves_frees_its_place_before_the_next_step() -> None:
    ask = RequestPlan(0, 100, 50)
    stays = tuple(SessionPlan(index, 0, None, None, (ask,)) for index in range(3))
    leaves = (replace(stays[0], requests=(replace(ask, abort_after_tokens=3),)), *stays[1:])
    kept, left = (simulate(Plan("drawn", 1, 0, "as-drawn", 0, (1000, 9000), of), SERVER) for of in (stays, leaves))
    admitted = [result.requests.column("admitted_ns").to_pylist()[2] for result in (kept, left)]
    assert admitted[1] < admitted[0]
    # Two prefills give the first tokens, two steps the second and the third.
    assert left.steps.to_pylist()[3]["start_ns"] == admitted[1]
    assert left.requests.column("aborted_tokens").to_pylist() == [3, -1, -1]


def test_the_next_prompt_keeps_of_a_left_answer_what_was_surely_received() -> None:
    counted = RequestPlan(0, 100, 50, abort_after_tokens=3)
    timed = RequestPlan(0, 100, 50, abort_after_ns=1)
    for left, keep in ((counted, 103), (timed, 100)):
        assert left.stream_tokens == keep
        follower = RequestPlan(keep + 1, 8, 5)
        with pytest.raises(PlanError, match=f"a stream that has {keep}"):
            Plan("drawn", 1, 0, "as-drawn", 0, (1000, 9000), (SessionPlan(0, 0, None, None, (left, follower)),))


@pytest.mark.parametrize(
    "aborts", [{"abort_after_ns": -1}, {"abort_after_tokens": 50}, {"abort_after_ns": 1, "abort_after_tokens": 1}]
)
def test_an_abort_that_cannot_happen_is_refused(aborts: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="aborted after"):
        Plan(
            "drawn",
            1,
            0,
            "as-drawn",
            0,
            (1000, 9000),
            (SessionPlan(0, 0, None, None, (RequestPlan(0, 9, 50, **aborts),)),),
        )


@settings(max_examples=10)
@given(plan=plans())
def test_a_plan_with_aborts_reads_back_and_one_without_has_the_bytes_it_always_had(plan: Plan) -> None:
    with TemporaryDirectory() as folder:
        assert read_plan(save_plan(plan, Path(folder))) == plan
    never = Plan("drawn", 1, 0, "as-drawn", 0, (1000, 9000), (SessionPlan(0, 0, None, None, (RequestPlan(0, 9, 5),)),))
    assert b"abort" not in b"".join(canonical_lines(never))
