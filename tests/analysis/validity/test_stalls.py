"""A server that stood still while requests were in flight is found in its step log; work that takes long is not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pyarrow as pa

from harness.analysis.validity.stalls import check_server_stalls, check_step_log_stalls
from harness.clock import NS_PER_MS
from harness.measure.records import schema
from harness.measure.records.manifest import Finding
from harness.model.engine import CostModel, load_cost_model
from harness.stacks.vllm.step_log import read_step_log
from tests.support.analysis_tables import manifest, request_row, requests_table
from tests.support.step_files import COLUMNS, VLLM_HEADER, lines, vllm_step

PAPER = load_cost_model("paper")


def steps_at(*instants_ms: float) -> pa.Table:
    rows = [{"step": step, "log_ns": int(at * NS_PER_MS), "n": 1, "b": 1} for step, at in enumerate(instants_ms)]
    return pa.Table.from_pylist(rows, schema.STEPS)


def admissions_at(*instants_ms: float) -> pa.Table:
    rows = [{"index": place, "kind": "alloc", "log_ns": int(at * NS_PER_MS)} for place, at in enumerate(instants_ms)]
    return pa.Table.from_pylist(rows, schema.KV_EVENTS)


def found(
    flights_ms: Sequence[tuple[float, float]],
    steps: pa.Table,
    admissions: pa.Table,
    cost_model: CostModel | None = PAPER,
    prompt_tokens: int = 300,
    **facts: Any,
) -> list[Finding]:
    flights = requests_of(flights_ms, prompt_tokens)
    return list(check_server_stalls(manifest(**facts), flights, steps, admissions, cost_model))


def requests_of(flights_ms: Sequence[tuple[float, float]], prompt_tokens: int = 300) -> pa.Table:
    tokens = {"prompt_tokens": prompt_tokens, "planned_prompt_tokens": prompt_tokens}
    rows = [
        request_row(session, 0, sent_ns=int(sent * NS_PER_MS), done_ns=int(done * NS_PER_MS), **tokens)
        for session, (sent, done) in enumerate(flights_ms)
    ]
    return requests_table(*rows)


STEADY = [50 + 11 * step for step in range(100)]
FROZEN = [at + (2000 if at > 600 else 0) for at in STEADY]


def test_a_server_that_was_stopped_for_two_seconds_makes_the_run_invalid() -> None:
    (finding,) = found([(0, 3300)], steps_at(*FROZEN), admissions_at(5))
    assert (finding.code, finding.severity) == ("server-stalled", "invalid")
    (kept,) = found([(0, 3300)], steps_at(*FROZEN), admissions_at(5), requested={"limits": {"server_stall_ms": 3000.0}})
    assert kept.severity == "warning"


def test_while_the_client_itself_stood_still_no_server_is_blamed() -> None:
    frozen = {"client_pauses_ns": [[610 * NS_PER_MS, 2000 * NS_PER_MS], [620 * NS_PER_MS, 1900 * NS_PER_MS]]}
    assert found([(0, 3300)], steps_at(*FROZEN), admissions_at(5), client_audit=frozen) == []
    elsewhere = {"client_pauses_ns": [[2900 * NS_PER_MS, 2000 * NS_PER_MS]]}
    (finding,) = found([(0, 3300)], steps_at(*FROZEN), admissions_at(5), client_audit=elsewhere)
    assert finding.severity == "invalid"


def test_without_a_cost_model_nobody_knows_how_long_a_prefill_takes() -> None:
    assert found([(0, 3300)], steps_at(*FROZEN), admissions_at(5), cost_model=None) == []


def test_a_pause_without_a_request_in_flight_and_a_steady_server_are_no_finding() -> None:
    assert found([(0, 1200)], steps_at(*STEADY), admissions_at(5)) == []
    assert found([(0, 606), (2590, 3300)], steps_at(*FROZEN), admissions_at(5, 2595)) == []


def test_long_prefills_are_work_that_the_cost_model_explains() -> None:
    prefill_ms = PAPER.prefill_ns(6000) / NS_PER_MS
    instants = [prefill_ms + 20 + 11 * step for step in range(50)]
    assert found([(0, instants[-1] + 5)], steps_at(*instants), admissions_at(5), prompt_tokens=6000) == []
    late = [at + 1500 for at in instants]
    (finding,) = found([(0, late[-1] + 5)], steps_at(*late), admissions_at(5), prompt_tokens=6000)
    assert finding.severity == "invalid"


def test_a_server_that_never_began_with_what_was_sent_is_found() -> None:
    late = [at + 2500 for at in STEADY]
    (finding,) = found([(0, late[-1] + 5)], steps_at(*late), admissions_at(2505))
    assert finding.severity == "invalid"


def test_time_is_judged_in_wall_time() -> None:
    assert found([(0, 3300)], steps_at(*FROZEN), admissions_at(5), clock={"scale": 20.0}) == []


def found_in_step_log(
    instants_ms: Sequence[float], flights_ms: Sequence[tuple[float, float]], prompt_tokens: int = 0, **facts: Any
) -> list[Finding]:
    """Decode steps of a vLLM that end at these instants; the step after the longest gap computes prompt tokens too."""
    gaps = [later - earlier for earlier, later in pairwise(instants_ms)]
    steps = [vllm_step(int(at * NS_PER_MS), 1, 1) for at in instants_ms]
    if prompt_tokens:
        place = gaps.index(max(gaps)) + 1
        details = {"context_requests": 1, "context_tokens": prompt_tokens, "generation_requests": 1}
        details |= {"generation_tokens": 1, "unpadded_tokens": prompt_tokens + 1, "padded_tokens": prompt_tokens + 1}
        steps[place] = [details.get(name, value) for name, value in zip(COLUMNS, steps[place], strict=True)]
    log = read_step_log(lines(VLLM_HEADER, *steps))
    costs = load_cost_model("emulated-gpu")
    return list(check_step_log_stalls(manifest(**facts), requests_of(flights_ms), log, costs))


def test_a_vllm_that_stood_still_is_found_between_two_steps_of_its_log() -> None:
    (finding,) = found_in_step_log(FROZEN, [(0, 3300)])
    assert (finding.code, finding.severity) == ("server-stalled", "invalid")
    assert found_in_step_log(STEADY, [(0, 1200)]) == []
    assert found_in_step_log(FROZEN, [(0, 606), (2590, 3300)]) == []


def test_a_vllms_long_part_of_a_prompt_is_work_that_the_cost_model_explains() -> None:
    # 20 us a token: 100,000 tokens take 2 s.
    assert found_in_step_log(FROZEN, [(0, 3300)], prompt_tokens=100_000) == []
    (finding,) = found_in_step_log(FROZEN, [(0, 3300)], prompt_tokens=1_000)
    assert finding.severity == "invalid"
