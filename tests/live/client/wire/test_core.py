"""The compiled loop of the epoll client reads on the wire what parsers read later, and they have the last word."""

from __future__ import annotations

from typing import Any

import numba
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.clock import NS_PER_MS, ScaledClock
from harness.live.audit.nullserver import NullServer, NullServerConfig
from harness.live.client.answer import NO_KERNEL_STAMP, Answer
from harness.live.client.wire import chunks, deadlines
from harness.live.client.wire.layout import registers_at
from harness.live.client.wire.reading import ids_text
from harness.live.client.wire.tables import SharedTables
from tests.support.replays import plan_of, rows_of, run, session
from tests.support.scanned import ROOM, Scanned, chunked


@numba.njit
def clock_and_back(address: int, instant_ns: int) -> tuple[int, int]:
    reg = registers_at(address, 0)
    return deadlines.to_clock_ns(reg, instant_ns), deadlines.to_monotonic_ns(reg, instant_ns)


@numba.njit
def push(address: int, at_ns: int, kind: int, row: int) -> None:
    deadlines.push(registers_at(address, 0), at_ns, kind, row)


@numba.njit
def pop(address: int) -> None:
    deadlines.pop(registers_at(address, 0))


def event(ids: list[int], text: str, newline: str, *, with_prompt_ids: bool, spaced: bool) -> str:
    space = " " if spaced else ""
    quoted = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    prompt_ids = f'"prompt_token_ids":{space}[1,2,3],' if with_prompt_ids else '"prompt_token_ids":null,'
    listed = f",{space}".join(map(str, ids))
    choice = f'{{"index":0,"text":"{quoted}",{prompt_ids}"token_ids":{space}[{listed}],"finish_reason":null}}'
    return f'data: {{"id":"cmpl-1","choices":[{choice}]}}{newline}{newline}'


TEXTS = st.one_of(
    st.text(st.characters(min_codepoint=32, max_codepoint=0x2FF), max_size=12),
    st.sampled_from(['"token_ids":[7,8]', "data: [DONE]", '"usage":{"prompt_tokens":3}', "]}\n\n", "\\", '"']),
)
EVENTS = st.lists(
    st.tuples(st.lists(st.integers(0, 151_935), max_size=5), TEXTS, st.booleans(), st.booleans()), max_size=6
)


@settings(max_examples=300)
@given(
    EVENTS,
    st.sampled_from(["\n", "\r\n"]),
    st.lists(st.integers(1, 90), min_size=1, max_size=4),
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.sampled_from([b"", b";name=value"]),
    st.booleans(),
)
def test_the_loop_reads_the_ids_counts_and_end_that_the_parsers_read(
    events: list[tuple[list[int], str, bool, bool]],
    newline: str,
    chunk_sizes: list[int],
    receive_sizes: list[int],
    extension: bytes,
    has_comment: bool,
) -> None:
    num_ids = sum(len(ids) for ids, *_ in events)
    stream = "".join(
        event(ids, text, newline, with_prompt_ids=with_prompt_ids, spaced=spaced)
        for ids, text, with_prompt_ids, spaced in events
    )
    if has_comment:
        stream += f": ping{newline}{newline}"
    usage = f'{{"prompt_tokens":9,"total_tokens":{9 + num_ids},"completion_tokens":{num_ids}}}'
    stream += f'data: {{"id":"cmpl-1","choices":[],"usage":{usage}}}{newline}{newline}data: [DONE]{newline}{newline}'
    body = stream.encode()
    answer = Answer(True)
    answer.feed((1, NO_KERNEL_STAMP, body))
    scanned = Scanned()
    wire = chunked(body, chunk_sizes, extension)
    place = turn = 0
    while place < len(wire):
        assert scanned.state.chunk_mode < chunks.OVER
        size = receive_sizes[turn % len(receive_sizes)]
        scanned.take(wire[place : place + size])
        place += size
        turn += 1
    state = scanned.state
    assert state.chunk_mode == chunks.OVER
    assert scanned.num_used == len(wire)
    assert state.is_odd == 0
    assert (state.num_ids, scanned.ids) == (len(answer.token_ids), ids_text(answer.token_ids))
    assert state.prompt_tokens == answer.prompt_tokens
    assert state.completion_tokens == answer.completion_tokens
    assert state.has_done == 1
    assert state.num_events == len(events) + 2 + has_comment


@pytest.mark.parametrize(
    ("wire", "mode"),
    [
        (b"5\r\nhello\r\n0\r\n\r\nHTTP", chunks.OVER),
        (b"5\r\nhello\r\n0\r\nTrailer: x\r\n\r\n", chunks.ODD),
        (b"5\r\nhelloX", chunks.ODD),
        (b"zz\r\n", chunks.ODD),
        (b"fffffffffffff\r\n", chunks.ODD),
    ],
)
def test_what_is_no_plain_chunked_body_is_left_to_the_http_parser(wire: bytes, mode: int) -> None:
    scanned = Scanned()
    scanned.take(wire)
    assert scanned.state.chunk_mode == mode
    assert scanned.num_used <= len(wire)


@pytest.mark.parametrize("ids", [b"[1,-2]", b"[1.5]", b'["a"]', b"[99999999999]", b"[true]"])
def test_ids_that_are_no_token_ids_are_left_to_the_json_parser(ids: bytes) -> None:
    scanned = Scanned()
    scanned.take(chunked(b'data: {"choices":[{"token_ids":' + ids + b"}]}\n\n", [400], b""))
    assert scanned.state.is_odd == 1


def test_ids_beyond_the_room_of_a_session_are_not_written() -> None:
    scanned = Scanned()
    ids = b",".join([b"123456"] * ROOM)
    scanned.take(chunked(b'data: {"choices":[{"token_ids":[' + ids + b"]}]}\n\n", [10**6], b""))
    assert scanned.state.is_odd == 1
    assert scanned.session.used_bytes <= ROOM


@given(st.floats(0.01, 500.0), st.integers(0, 10**16))
def test_the_loop_converts_instants_as_the_clock_does(scale: float, instant_ns: int) -> None:
    clock = ScaledClock(scale)
    tables = SharedTables(1, 1)
    tables.reg.clock_numerator, tables.reg.clock_denominator = clock.ratio
    assert clock_and_back(tables.address, instant_ns) == (
        clock.from_monotonic_ns(instant_ns),
        clock.to_monotonic_ns(instant_ns),
    )


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 1)), max_size=60))
def test_deadlines_come_in_order_of_time_then_kind_then_row(entries: list[tuple[int, int]]) -> None:
    tables = SharedTables(1, 64)
    wanted = [(at_ns, kind, row) for row, (at_ns, kind) in enumerate(entries)]
    for entry in wanted:
        push(tables.address, *entry)
    seen: list[tuple[int, ...]] = []
    while tables.reg.num_deadlines:
        first = tables.deadlines[0]
        seen.append((first.at_ns, first.kind, first.row))
        pop(tables.address)
    assert seen == sorted(wanted)


@pytest.mark.live
class TestAgainstAServer:
    @pytest.mark.parametrize("stream", [True, False])
    def test_a_document_that_is_no_json_ends_its_session_though_the_loop_had_gone_on(self, stream: bool) -> None:
        with NullServer(NullServerConfig(faults={"0-0": "broken_document"})) as server:
            result = run(
                plan_of(session(0, num_requests=3), session(1, num_requests=3)), server, "epoll", stream=stream
            )
        rows = rows_of(result)
        assert rows[0]["status"] == "bad_response"
        assert "not a JSON object" in rows[0]["error"]
        # Without a wait the next requests may leave, and be answered, before the first answer is read through.
        for row in rows[1:3]:
            was_sent, was_answered = row["sent_ns"] is not None, row["http_status"] is not None
            assert row["status"] == ("not_sent" if not was_sent else "bad_response" if was_answered else "connection")
            assert row["error"]
        assert {row["status"] for row in rows[3:]} == {"ok"}

    def test_after_a_wait_nothing_more_of_that_session_is_sent(self) -> None:
        plan = plan_of(session(0, num_requests=3, wait_ns=100 * NS_PER_MS))
        with NullServer(NullServerConfig(faults={"0-0": "broken_document"})) as server:
            rows = rows_of(run(plan, server, "epoll"))
        assert [row["status"] for row in rows] == ["bad_response", "not_sent", "not_sent"]
        assert [row["sent_ns"] is None for row in rows] == [False, True, True]

    def test_more_answers_than_the_ring_holds_are_all_read(self) -> None:
        sessions = [session(index, num_requests=2, generate_tokens=900) for index in range(40)]
        with NullServer(NullServerConfig(keeps_stamps=False)) as server:
            result = run(plan_of(*sessions), server, "epoll", timeout_s=60)
        rows = rows_of(result)
        assert {(row["status"], row["completion_tokens"]) for row in rows} == {("ok", 900)}
        assert result.chunks.num_rows == 40 * 2 * 900
        assert sum(result.chunks["num_tokens"].to_pylist()) == 40 * 2 * 900

    def test_a_request_larger_than_the_kernel_takes_at_once_arrives_whole(self) -> None:
        plan = plan_of(session(0, prompt_tokens=900_000), session(1))
        with NullServer() as server:
            rows = rows_of(run(plan, server, "epoll", timeout_s=60))
        assert {row["status"] for row in rows} == {"ok"}
        assert rows[1]["prompt_tokens"] == 900_000 + 6 + 8

    def test_a_head_that_differs_in_every_answer_is_understood(self) -> None:
        # Bodies of many lengths make as many heads, more than are remembered.
        sessions = [session(index, num_requests=1, generate_tokens=1 + index * 5) for index in range(60)]
        with NullServer(NullServerConfig(framing="length")) as server:
            rows = rows_of(run(plan_of(*sessions), server, "epoll", stream=False))
        assert [row["completion_tokens"] for row in rows] == [1 + index * 5 for index in range(60)]
        assert {row["status"] for row in rows} == {"ok"}

    def test_records_are_the_same_whatever_the_interpreter_is_given_time_for(self) -> None:
        """Without waits the loop runs ahead of the interpreter; with them it never does."""
        tables: list[list[tuple[Any, ...]]] = []
        for wait_ns in (0, 60 * NS_PER_MS):
            plan = plan_of(*(session(index, num_requests=4, wait_ns=wait_ns) for index in range(8)))
            with NullServer() as server:
                rows = rows_of(run(plan, server, "epoll"))
            tables.append([(row["status"], row["prompt_tokens"], row["completion_tokens"]) for row in rows])
            assert all(row["due_ns"] == row["trigger_ns"] + (wait_ns if row["request"] else 0) for row in rows)
        assert tables[0] == tables[1]
