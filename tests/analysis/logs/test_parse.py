"""The log parser against golden logs: both formats, torn at any byte, interleaved, coloured, foreign.

Events are compared as values; what cannot be read must be counted. No server runs here.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.parser import bench_parser, log_chunks
from harness.analysis.logs.parse import MAX_LINE_BYTES, ParseCounts, parse_log
from harness.stacks.rbln.rules import log_grammar as ev
from tests.support.analysis_tables import GOLDEN
from tests.support.cut_logs import kind_of

PRECISE = (GOLDEN / "precise.log").read_bytes()
DEFAULT = (GOLDEN / "default.log").read_bytes()
EITHER = st.sampled_from([PRECISE, DEFAULT])
FOREIGN = (
    b"",
    b"Traceback (most recent call last):",
    b'  File "x.py", line 3, in <module>',
    b"\x00\xff\xfe not text at all",
    b"(APIServer pid=7) INFO:     Waiting for application startup.",
    b"Loading safetensors checkpoint shards: 100% Completed | 2/2 [00:00<00:00, 11.2it/s]",
    b"Request for a Engine manual: Updating KV cache [12]",
)


def parse(*chunks: bytes) -> tuple[list[Any], ParseCounts]:
    counts = ParseCounts()
    return list(parse_log(chunks, counts)), counts


def said(events: list[Any]) -> list[tuple[Any, ...]]:
    """What events say, without where in the stream they stood."""
    return [(type(event).__name__, *event[1:]) for event in events]


def optional_head(line: bytes) -> int:
    """Length of the part of a line that may be missing without the line being torn."""
    match = re.match(rb"(\(\w+ pid=\d+\) )?(\[vllm-rbln\] )?", line)
    return match.end() if match else 0


def test_every_line_form_is_read_in_both_formats(golden_log: bytes) -> None:
    events, counts = parse(golden_log)
    assert Counter(map(kind_of, events)) == {
        "BucketEvent": 5,
        "alloc": 4,
        "eviction": 3,
        "cache_hit": 1,
        "cache_partial": 1,
        "free_request": 3,
        "mapping_remove": 3,
        "mapping search": 1,
        "fault": 1,
        "preempted": 1,
        "PrefillEvent": 1,
        "finished": 1,
        "KV copied": 1,
        "IterationEvent": 9,
        "engine statistics": 1,
        "SettingEvent": 1,
        "request received": 1,
        "request added": 1,
    }
    assert (counts.lines, counts.foreign, counts.unread, counts.tail_bytes) == (41, 2, 0, 0)


def test_a_recorded_log_of_the_next_family_is_read_to_the_last_line() -> None:
    """vllm-rbln 0.12.0 with vLLM 0.30.0 on the stand-in device, two of nine requests, as it was written."""
    events, counts = parse((GOLDEN / "twin-0.12.0.log").read_bytes())
    assert (counts.unread, counts.fragments, counts.unread_samples) == (0, 0, [])
    steps = [event for event in events if isinstance(event, ev.IterationEvent)]
    assert [step.iteration for step in steps] == [*range(8), *range(64, 72)]
    assert {step.is_from_engine for step in steps} == {False}
    assert sum(step.generation_tokens for step in steps) == sum(isinstance(one, ev.BucketEvent) for one in events) == 14


PARTS = "Engine 000: Avg prompt throughput: 1.0 tokens/s, Avg generation throughput: 2.0 tokens/s, Running: 3 reqs, "
STEP = (
    "Iteration(7): 0 context requests, 0 context tokens, 2 generation requests, 2 generation tokens, "
    "iteration elapsed time: 0.55 ms"
)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (f"{PARTS}Waiting: 4 reqs, RBLN KV cache usage: 5.5%", ("engine statistics",)),
        (
            f"{PARTS}Waiting: 4 reqs, Deferred: 1 reqs, Preemptions: 2, CPU KV cache usage: 5.5%, "
            "Prefix cache hit rate: 6.0%, Corrupted: 0 reqs, External prefix cache hit rate: 1.0%, "
            "MM cache hit rate: 0.0%",
            ("engine statistics",),
        ),
        (f"{PARTS}Waiting: 0 reqs, CPU KV cache usage: 5.5%, MM cache hit rate: 0.0%", ("engine statistics",)),
        (STEP, (7, 0, 0, 2, 2, 0.55, False, True)),
        (f"{STEP} (dummy)", (7, 0, 0, 2, 2, 0.55, True, True)),
        (f"Engine 000: {STEP}, CPU KV cache usage: 3.1%", (7, 0, 0, 2, 2, 0.55, False, False)),
        (
            f"Engine 001: {STEP} (dummy), RBLN KV cache usage: 3.1%, encoder inputs: 1, encoder output embeddings: 64",
            (7, 0, 0, 2, 2, 0.55, True, False),
        ),
        (
            "Copying prefix-cached KV failed for request(s) ['cmpl-a-0-0-1', 'cmpl-b-0-0-2']. "
            "Falling back to a full prefill without prefix-cache reuse.",
            (("cmpl-a-0-0-1", "cmpl-b-0-0-2"),),
        ),
    ],
)
def test_every_optional_part_of_both_families_is_read(message: str, expected: tuple[Any, ...]) -> None:
    events, counts = parse(f"1751364000.000250 7 INFO vllm.x {message}\n".encode())
    assert ([event[3:] for event in events], counts.unread) == ([expected], 0)


@pytest.mark.parametrize(
    "message",
    [
        f"{PARTS}Waiting: 0 reqs, CPU KV cache use: 5.5%",
        f"Engine 000: {STEP}, KV: 3.1%",
        f"{STEP} and more",
        "Copying prefix-cached KV failed for request cmpl-a. Falling back",
        "Request cmpl-a is preempted. Freed: [1]",
        "Updating scheduler_config.max_num_seqs to 8 based on rbln_config.json",
        "[PFX] [TOUCH] OB=3",
        f"[BUCKET] request_nums={'9' * 5000} padded_batch_size={'9' * 5000}",
    ],
)
def test_a_line_that_looks_needed_but_fits_no_form_is_told_of(message: str) -> None:
    events, counts = parse(f"1751364000.000250 7 INFO vllm.x {message}\n".encode())
    assert (events, counts.unread) == ([], 1)


def test_both_formats_tell_the_same_story() -> None:
    default, precise = said(parse(DEFAULT)[0]), said(parse(PRECISE)[0])
    assert [(event[0], *event[3:]) for event in default] == [(event[0], *event[3:]) for event in precise]


def test_fields_are_those_of_the_line() -> None:
    events, _ = parse(PRECISE)
    hit: Any = next(event for event in events if kind_of(event) == "cache_hit")
    assert (hit.request_id, hit.slots, hit.num_blocks, hit.reused_tokens) == (
        "cmpl-golden-2-0-0-deadbeef",
        (0,),
        2,
        256,
    )
    assert hit.pid == 4242
    partial: Any = next(event for event in events if kind_of(event) == "cache_partial")
    assert (partial.request_id, partial.reused_tokens) == ("cmpl-golden-0-1-0-0badf00d", 0)
    setting = next(event for event in events if isinstance(event, ev.SettingEvent))
    assert (setting.setting, setting.before, setting.after) == ("scheduler_config.max_num_seqs", "256", "2")


def test_precise_stamps_are_exact_and_default_ones_are_not_guessed() -> None:
    line = b"1751364000.000250 7 INFO vllm_rbln.x [BUCKET] request_nums=3 padded_batch_size=4\n"
    (event,), _ = parse(line)
    assert event == ev.BucketEvent(len(line), 1_751_364_000_000_250_000, 7, 3, 4)
    assert all(event.created_ns is None for event in parse(DEFAULT)[0])


def test_the_place_of_a_line_is_its_last_byte(golden_log: bytes) -> None:
    events, _ = parse(golden_log)
    for event in events:
        assert golden_log[event.end_offset - 1 : event.end_offset] == b"\n"


@pytest.mark.parametrize(
    "head",
    [
        b"INFO 07-01 10:00:00 [model_base.py:392] ",
        b"[vllm-rbln] INFO 07-01 10:00:00 [overlay/.../optimum/model_base.py:397] ",
        b"\x1b[0;36m(EngineCore pid=9)\x1b[0;0m [vllm-rbln] \x1b[32mINFO\x1b[0m \x1b[90m07-01 10:00:00\x1b[0m "
        b"\x1b[90m[model_base.py:392]\x1b[0m ",
        b"(EngineCore_DP0 pid=9) 1751364000.000250 9 DEBUG vllm_rbln.x.y ",
    ],
)
def test_heads_of_overlays_colours_and_processes_are_read(head: bytes) -> None:
    (event,), counts = parse(head + b"[BUCKET] request_nums=3 padded_batch_size=4\r\n")
    assert (event.num_seqs, event.bucket, counts.unread) == (3, 4, 0)


@pytest.mark.parametrize(
    "message",
    [
        b"[BUCKET] request_nums=6 padded_batch_size=",
        b"[BUCKET] request_nums=6 padded_batch_size=1",
        b"[BUCKET] request_nums=6 padded_batch_size=8 and more",
        b"[PFX] [ALLOC] REQUEST=r | OB_COUNT=1 OB=[0] | IB_COUNT=3 IB=[1, 2",
        b"[PFX] [ALLOC] REQUEST=r | OB_COUNT=1 OB=[0] | IB_COUNT=3 IB=[1, 2]",
        b"[PFX] [ALLOC] REQUEST=r | OB_COUNT=2 OB=[0] | IB_COUNT=1 IB=[1]",
        b"[PFX] [CACHE-PARTIAL] REQUEST=r | REUSED=1/9 tokens (0.0%) | MISSED=9 tokens (9.0%) "
        b"| REASON=partial_cache_miss",
        b"[PFX] [NEW-KIND] OB=1",
        b"Iteration(3): 0 context requests, 0 context tokens",
    ],
)
def test_a_line_of_ours_that_is_not_whole_is_counted_and_not_guessed(message: bytes) -> None:
    events, counts = parse(b"1751364000.000250 7 INFO vllm_rbln.x " + message + b"\n")
    assert (events, counts.unread, counts.lines) == ([], 1, 1)
    assert message[:6].decode() in counts.unread_samples[0]


@given(log=EITHER, cut=st.integers(min_value=0), pieces=st.integers(1, 997))
def test_a_log_torn_at_its_end_gives_the_events_of_its_whole_lines(log: bytes, cut: int, pieces: int) -> None:
    torn = log[: cut % (len(log) + 1)]
    whole = torn[: torn.rfind(b"\n") + 1]
    events, counts = parse(*(torn[at : at + pieces] for at in range(0, len(torn), pieces)))
    assert events == parse(whole)[0]
    assert counts.tail_bytes == len(torn) - len(whole)


@given(log=EITHER, cut=st.integers(min_value=0))
def test_a_log_torn_at_its_start_gives_the_events_of_its_whole_lines(log: bytes, cut: int) -> None:
    start = cut % (len(log) + 1)
    line_start = log.rfind(b"\n", 0, start) + 1
    line = log[line_start : log.find(b"\n", start) + 1]
    expected = said(parse(log[line_start:])[0])
    if parse(line)[0] and start > line_start:
        # Losing (part of) "(EngineCore pid=7) [vllm-rbln] " costs the process id: the line still says all it said.
        is_told = start - line_start <= optional_head(line)
        first = [(*expected[0][:2], 0, *expected[0][3:])] if is_told else []
        expected = first + expected[1:]
    events = said(parse(log[start:])[0])
    assert events == expected


@given(
    log=EITHER,
    inserts=st.lists(st.tuples(st.integers(min_value=0, max_value=41), st.sampled_from(FOREIGN)), max_size=12),
)
def test_foreign_lines_between_change_no_event(log: bytes, inserts: list[tuple[int, bytes]]) -> None:
    lines = log.split(b"\n")[:-1]
    for at, foreign in sorted(inserts, key=lambda insert: -insert[0]):
        lines.insert(at, foreign)
    events, counts = parse(b"".join(line + b"\n" for line in lines))
    assert said(events) == said(parse(log)[0])
    assert (counts.foreign, counts.unread) == (2 + len(inserts), 0)


@given(log=EITHER, line=st.integers(0, 40), cut=st.integers(1, 400))
def test_a_line_glued_into_another_is_read_and_the_torn_one_is_not(log: bytes, line: int, cut: int) -> None:
    lines = log.split(b"\n")[:-1]
    torn = lines[line]
    cut = min(cut, len(torn) - 1)
    other = b"1751364009.000001 99 INFO vllm_rbln.x [BUCKET] request_nums=7 padded_batch_size=8"
    lines[line : line + 1] = [torn[:cut] + other, torn[cut:]]
    events, _ = parse(b"".join(each + b"\n" for each in lines))
    rest = said(parse(b"".join(each + b"\n" for each in (*lines[:line], *lines[line + 2 :])))[0])
    told = said(events)
    glued = ("BucketEvent", 1_751_364_009_000_001_000, 99, 7, 8)
    assert told.count(glued) == 1
    told.remove(glued)
    # The tail of the torn line is itself whole when only its optional head was cut off.
    is_whole_tail = cut <= optional_head(torn) and bool(parse(torn + b"\n")[0])
    assert len(told) - len(rest) == is_whole_tail


@pytest.mark.parametrize("log", [DEFAULT, PRECISE])
def test_a_line_torn_inside_its_request_id_does_not_take_the_next_of_its_kind_for_the_id(log: bytes) -> None:
    line = next(each for each in log.split(b"\n") if b"[ALLOC] REQUEST=" in each)
    torn = line[: line.index(b"REQUEST=") + len(b"REQUEST=cmpl")]
    assert said(parse(torn + line + b"\n")[0]) == said(parse(line + b"\n")[0])


def test_a_line_without_end_is_dropped_in_constant_memory() -> None:
    block = b"x" * (MAX_LINE_BYTES // 2)
    good = b"1751364000.000250 7 INFO vllm_rbln.x [BUCKET] request_nums=3 padded_batch_size=4\n"
    events, counts = parse(*[block] * 7, b"\n", good)
    assert len(events) == 1
    assert (counts.overlong, counts.lines, counts.foreign) == (1, 2, 1)
    assert events[0].end_offset == 7 * len(block) + 1 + len(good)


def test_the_parser_holds_no_more_for_a_longer_log() -> None:
    short, long = bench_parser(10_000, repeats=1), bench_parser(50_000, repeats=1)
    assert long.peak_bytes < 1.5 * short.peak_bytes
    assert (long.lines, long.events) == (50_000, 42_500)


@pytest.mark.parametrize("log_format", ["default", "precise"])
def test_the_benchmark_log_is_read_without_loss(log_format: str) -> None:
    _, counts = parse(*log_chunks(5_000, log_format))
    assert (counts.lines, counts.unread, counts.foreign) == (5_000, 0, 750)
