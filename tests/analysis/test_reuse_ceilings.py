"""Ceilings of reuse: what could have been reused, what was, and a cause for every token between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from harness.analysis.figures import run_figures
from harness.analysis.reuse import (
    ELSEWHERE,
    EVICTED,
    GENERATED,
    KEPT,
    OTHERS,
    PART_OF_BLOCK,
    Ceilings,
    ceilings,
    rearrivals,
)
from harness.measure.records.schema import KV_EVENTS
from harness.model.plan.model import Plan, RequestPlan, SessionPlan
from harness.runner import run_experiment
from tests.support.analysis_tables import request_row, requests_table
from tests.support.experiments import small_experiment


def plan_of(*sessions: tuple[RequestPlan, ...], blocks: tuple[tuple[int, ...], ...] = (), prefix: int = 0) -> Plan:
    names = blocks or ((),) * len(sessions)
    parts = tuple(
        SessionPlan(index, 0, None, None, requests, blocks=own)
        for index, (requests, own) in enumerate(zip(sessions, names, strict=True))
    )
    return Plan("drawn", 1, 0, "as-drawn", prefix, (1000, 150_000), parts, block_tokens=128 if blocks else 0)


def answered(session: int, request: int, sent: int, prompt: int, cached: int = 0) -> dict[str, Any]:
    name = f"cmpl-s{session}r{request}"
    times = {"sent_ns": sent, "response_id": name}
    return request_row(session=session, request=request, prompt_tokens=prompt, cached_tokens=cached, **times)


def event(index: int, kind: str, request: str = "", slot: int = 0, caller: str = "") -> dict[str, Any]:
    row: dict[str, Any] = {"log_ns": None, "index": index, "step": 0, "kind": kind, "slots": [slot]}
    return row | {"request_id": request, "caller": caller, "num_blocks": 1, "reused_tokens": 0}


def events(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=KV_EVENTS)


TWICE = (RequestPlan(0, 300, 50), RequestPlan(350, 50, 10))


@pytest.mark.parametrize(
    ("between", "cause"),
    [
        ((), KEPT),
        ((event(3, "eviction", slot=0, caller="dummy"),), EVICTED.format("dummy")),
        (
            (event(3, "eviction", slot=0, caller="request"), event(4, "eviction", slot=0, caller="dummy")),
            EVICTED.format("request"),
        ),
        ((event(3, "eviction", slot=1, caller="dummy"),), KEPT),
    ],
)
def test_a_lost_prefix_goes_to_whoever_first_took_its_slot(between: tuple[dict[str, Any], ...], cause: str) -> None:
    log = events(event(0, "alloc", "cmpl-s0r0-0", slot=0), *between, event(9, "alloc", "cmpl-s0r1-0", slot=2))
    requests = requests_table(answered(0, 0, 0, 300), answered(0, 1, 5, 400))
    found = ceilings(requests, log, plan_of(TWICE))
    assert (found.prompt, found.endless, found.by_turn, found.blocks) == (700, 350, 350, 256)
    assert found.lost == {GENERATED: 50, PART_OF_BLOCK: 44, cause: 256}


def test_the_log_of_a_vllm_does_not_say_who_took_a_prefix() -> None:
    requests = requests_table(answered(0, 0, 0, 300), answered(0, 1, 5, 400))
    lost = ceilings(requests, events(), plan_of(TWICE)).lost
    assert lost == {GENERATED: 50, PART_OF_BLOCK: 44, "not in the log": 256}


THRICE = (*TWICE, RequestPlan(410, 50, 10))


@pytest.mark.parametrize(
    ("engines", "here", "elsewhere"),
    [
        # The third turn finds the second on its engine, the first alone, or nothing.
        ((0, 0, 0), 256 + 384, 0),
        ((0, 1, 0), 0 + 256, 256 + 128),
        ((0, 1, 1), 0 + 384, 256),
        ((0, 1, 2), 0, 256 + 384),
    ],
)
def test_what_another_engine_served_can_not_be_reused(engines: tuple[int, ...], here: int, elsewhere: int) -> None:
    requests = requests_table(answered(0, 0, 0, 300), answered(0, 1, 5, 400), answered(0, 2, 9, 460))
    engine_of = {(0, turn): engine for turn, engine in enumerate(engines)}
    found = ceilings(requests, events(), plan_of(THRICE), engine_of=engine_of)
    assert (found.blocks, found.lost.get(ELSEWHERE, 0)) == (here, elsewhere)
    assert sum(found.lost.values()) == found.endless
    returns = rearrivals(requests, plan_of(THRICE), engine_of=engine_of)
    assert sum(each.reusable_tokens for each in returns) == here


def test_a_turn_whose_engine_is_not_known_counts_as_served_by_the_same_one() -> None:
    requests = requests_table(answered(0, 0, 0, 300), answered(0, 1, 5, 400))
    assert ceilings(requests, events(), plan_of(TWICE), engine_of={(0, 1): 1}).blocks == 256


def test_an_endless_cache_knows_the_named_blocks_and_the_prefix_that_another_session_sent() -> None:
    fresh = (RequestPlan(0, 300, 10),)
    requests = requests_table(answered(1, 0, 0, 300), answered(0, 0, 5, 300, cached=128))
    named = ceilings(requests, events(), plan_of(fresh, fresh, blocks=((7, 8), (7, 9))))
    assert (named.endless, named.lost, named.beyond) == (128, {}, 0)
    assert ceilings(requests, events(), plan_of(fresh, fresh, prefix=200)).lost == {OTHERS: 72}


def test_reuse_that_no_earlier_prompt_explains_is_false_sharing() -> None:
    fresh = (RequestPlan(0, 300, 10),)
    requests = requests_table(answered(0, 0, 0, 300), answered(1, 0, 5, 300, cached=256))
    assert ceilings(requests, events(), plan_of(fresh, fresh)).beyond == 256


def assert_sums(one: Ceilings) -> None:
    assert one.blocks <= one.by_turn <= one.endless < one.prompt
    assert sum(one.lost.values()) == one.endless - (one.reused - one.beyond)
    assert one.beyond == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"workload": {"num_sessions": 8, "requests_per_session": 3, "shared_prefix_tokens": 256}},
        {"workload": {"num_sessions": 12, "requests_per_session": 3, "concurrency": 6}},
        {"workload": {"source": "trace", "trace": "research-agent", "num_sessions": 3}},
        {"workload": {"source": "trace", "trace": "customer-support", "num_sessions": 6, "start": "steady"}},
        {"workload": {"source": "sequential", "num_background": 7}},
    ],
)
def test_what_is_lost_sums_to_the_endless_ceiling_less_the_reuse_in_every_simulated_run(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    conditions = [{"name": "base"}, {"name": "more", "server": {"kv_slots": 16}}]
    spec = small_experiment(backend="sim", condition=conditions, server={"max_num_seqs": 8}, **changes)
    found = {run.condition: run_figures(run).ceilings for run in run_experiment(spec, runs_root=tmp_path).runs}
    for one in found.values():
        assert_sums(one)
        assert (one + one).lost == {cause: 2 * tokens for cause, tokens in one.lost.items()}
    assert "not in the log" not in {cause for one in found.values() if one for cause in one.lost}
