"""Lines about slots follow from each other: a whole log has no contradiction, and one that lost a line has."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.analysis.logs.parse import SlotWalk
from harness.measure.emulator.logs import BUCKET, SCHEDULED, Site, kv_event_line
from harness.model.engine import DECODE, PREFILL, KvEvent
from harness.model.experiment import build_plan
from harness.model.plan.model import Plan
from harness.model.spec import ServerSpec, UniformLength, WorkloadSpec
from harness.stacks.rbln.rules.log_grammar import LogEvent, read_message
from tests.support.virtual_emulator import run_virtually

RULES = ("vendor-0.11.1", "vendor-0.12.0", "vendor-0.11.2")


@st.composite
def servers(draw: st.DrawFn) -> ServerSpec:
    """Servers with fewer slots than requests too, and with requests that span several slots."""
    limit = draw(st.sampled_from((1, 2, 4)))
    return ServerSpec(
        max_num_seqs=limit,
        decode_buckets=tuple(sorted({*draw(st.sets(st.integers(1, limit))), limit})),
        kv_slots=draw(st.integers(2, limit + 2)),
        slot_tokens=1024,
        rules=draw(st.sampled_from(RULES)),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Plans whose clients leave some answers."""
    workload = WorkloadSpec(
        num_sessions=draw(st.integers(1, 6)),
        requests_per_session=draw(st.integers(1, 3)),
        prompt_tokens=UniformLength(low=20, high=draw(st.sampled_from((100, 600)))),
        generate_tokens=UniformLength(low=1, high=40),
        new_tokens=UniformLength(low=1, high=9),
        wait_cap_s=draw(st.sampled_from((0.001, 0.5))),
    )
    plan = build_plan(workload, draw(st.integers(0, 99)), 0)
    leaves_ns = draw(st.sampled_from((0, 0, 40_000_000, 300_000_000)))
    sessions = tuple(
        replace(session, requests=(*session.requests[:-1], replace(session.requests[-1], abort_after_ns=leaves_ns)))
        for session in plan.sessions
    )
    return replace(plan, sessions=sessions)


def lines_of(plan: Plan, server: ServerSpec) -> list[str]:
    """The lines about slots, steps and prefills that the server writes, in its order."""
    names: dict[int, str] = {}

    def line(event: KvEvent) -> tuple[Site, str]:
        return kv_event_line(event, names.get(event.request, ""))

    lines: list[tuple[Site, str]] = []
    for end in run_virtually(plan, server):
        start, step = end.start, end.start.step
        names |= {request.handle: request.engine_id for request in (*start.arrivals, *start.requests)}
        lines += map(line, (*start.kv_events_before, *step.kv_events))
        if step.kind == PREFILL:
            name = start.requests[0].engine_id
            text = f"Request {name} is now scheduled. Prompt tokens: 1, Already generated tokens: 0, "
            lines.append((SCHEDULED, text + "Allocated block(s): [0]"))
        elif step.kind == DECODE:
            text = f"[BUCKET] request_nums={step.num_seqs} padded_batch_size={step.bucket}"
            lines += [(BUCKET, text)] * len(end.ends_ns)
        lines += map(line, end.kv_events)
    return [text for _site, text in lines]


def events_of(lines: list[str]) -> list[LogEvent]:
    contents = [(line, read_message(line.encode())) for line in lines]
    assert all(content for _line, content in contents)
    return [content[0](0, None, 0, *content[1]) for _line, content in contents if content]


def walk(lines: list[str]) -> SlotWalk:
    slots = SlotWalk()
    for event in events_of(lines):
        slots.add(event)
    return slots


@settings(max_examples=60)
@given(plan=plans(), server=servers(), data=st.data())
def test_a_whole_log_contradicts_itself_nowhere_and_one_without_an_allocation_does(
    plan: Plan, server: ServerSpec, data: st.DataObject
) -> None:
    lines = lines_of(plan, server)
    whole = walk(lines)
    assert (whole.num_contradictions, whole.first, whole.num_unprefilled) == (0, "", 0)
    allocations = [place for place, line in enumerate(lines) if line.startswith("[PFX] [ALLOC]")]
    lost = data.draw(st.sampled_from(allocations))
    assert walk(lines[:lost] + lines[lost + 1 :]).num_contradictions
    prefills = [place for place, line in enumerate(lines) if line.startswith("Request ")]
    lost = data.draw(st.sampled_from(prefills))
    assert walk(lines[:lost] + lines[lost + 1 :]).num_unprefilled == 1


ALLOC = "[PFX] [ALLOC] REQUEST={} | OB_COUNT=1 OB=[{}] | IB_COUNT=1 IB=[1]"
FREE = "[PFX] [FREE-REQUEST] REQUEST={} | PREEMPTION=False | OUTER_BLOCKS=[{}]"
STEP = "[BUCKET] request_nums={} padded_batch_size=8"


@pytest.mark.parametrize(
    ("lines", "first"),
    [
        ([ALLOC.format("a", 0), STEP.format(2)], "a decode step of 2 requests, while 1 hold slots"),
        ([ALLOC.format("a", 0), FREE.format("a", "0, 1")], "a frees slots [0, 1], and was given [0]"),
        ([ALLOC.format("a", 0), ALLOC.format("b", 0)], "slot 0 is given to b, while a holds it"),
        ([ALLOC.format("a", 0), FREE.format("b", 3)], "b frees slots [3], and was given []"),
    ],
)
def test_the_first_line_that_cannot_be_is_named(lines: list[str], first: str) -> None:
    slots = walk([*lines, STEP.format(8)])
    assert slots.first == first
    assert slots.num_contradictions == 2


def test_a_request_that_was_never_admitted_frees_nothing() -> None:
    assert walk([ALLOC.format("a", 0), FREE.format("b", "")]).num_contradictions == 0
