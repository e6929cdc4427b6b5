"""The client over http and https: what a plan asks for is sent exactly, and what the server does becomes a row."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from hashlib import sha256

import numpy as np
import pytest

from harness.clock import NS_PER_MS, NS_PER_S
from harness.measure.client.null_server import NullServer
from harness.measure.client.run import ReplayEvent, ReplayResult
from harness.measure.records.schema import CHUNKS, REQUESTS
from harness.model.plan.tokens import TokenStreams
from tests.support.raw_server import (
    CHUNKED_HEAD,
    CLOSE,
    HANG,
    RESET,
    Asked,
    RawServer,
    Reply,
    answered,
    chunked,
    events,
    whole,
)
from tests.support.replays import SCHEMES, plan_of, rows_of, run, session

pytestmark = pytest.mark.live


@pytest.fixture(scope="module")
def plain_server() -> Iterator[NullServer]:
    with NullServer() as server:
        yield server


@pytest.mark.parametrize(("scheme", "stream"), [("http", True), ("http", False), ("https", True)])
class TestAWellBehavedServer:
    def test_every_planned_request_is_one_row_and_all_tables_fit_their_schemas(
        self, plain_server: NullServer, scheme: str, stream: bool
    ) -> None:
        result = run(
            plan_of(*(session(index, num_requests=3) for index in range(5))), plain_server, scheme, stream=stream
        )
        assert result.requests.schema == REQUESTS
        assert result.chunks.schema == CHUNKS
        rows = rows_of(result)
        assert [(row["session"], row["request"]) for row in rows] == [(s, r) for s in range(5) for r in range(3)]
        assert {row["status"] for row in rows} == {"ok"}, {row["error"] for row in rows}
        assert all(row["completion_tokens"] == 6 and row["http_status"] == 200 for row in rows)
        assert all(row["prompt_tokens"] == row["planned_prompt_tokens"] for row in rows)
        assert {row["finish_reason"] for row in rows} == {"length"}
        assert sum(result.chunks.to_table()["num_tokens"].to_pylist()) == 5 * 3 * 6

    def test_nothing_is_sent_early_and_stamps_are_in_order(
        self, plain_server: NullServer, scheme: str, stream: bool
    ) -> None:
        plan = plan_of(
            *(
                session(at, num_requests=3, wait_ns=7 * NS_PER_MS + at, start_offset_ns=at * NS_PER_MS)
                for at in range(6)
            )
        )
        result = run(plan, plain_server, scheme, stream=stream)
        rows = rows_of(result)
        done = {(row["session"], row["request"]): row["done_ns"] for row in rows}
        for row in rows:
            before = done.get((row["session"], row["request"] - 1))
            assert row["trigger_ns"] == (result.start_ns if before is None else before)
            offset_ns = row["session"] * NS_PER_MS if before is None else 7 * NS_PER_MS + row["session"]
            assert row["due_ns"] == row["trigger_ns"] + offset_ns
            assert row["due_ns"] <= row["sent_ns"] < row["response_head_ns"] <= row["done_ns"]
        assert result.audit["num_early_sends"] == 0
        for chunk in result.chunks.to_table().to_pylist():
            assert chunk["kernel_ns"] is None or chunk["kernel_ns"] <= chunk["received_ns"]

    def test_rows_carry_the_ids_of_both_sides(self, plain_server: NullServer, scheme: str, stream: bool) -> None:
        rows = rows_of(run(plan_of(session(0), session(1)), plain_server, scheme, stream=stream))
        assert len({row["request_id"] for row in rows}) == len(rows)
        assert all(row["response_id"] == f"cmpl-{row['request_id']}" for row in rows)
        again = run(plan_of(session(0), session(1)), plain_server, scheme, stream=stream)
        assert not {row["request_id"] for row in rows} & {row["request_id"] for row in rows_of(again)}

    def test_a_session_that_follows_starts_when_the_other_completed(
        self, plain_server: NullServer, scheme: str, stream: bool
    ) -> None:
        plan = plan_of(session(0), session(1, after=0, start_offset_ns=3 * NS_PER_MS), session(2, after=1))
        rows = rows_of(run(plan, plain_server, scheme, stream=stream))
        assert rows[2]["trigger_ns"] == rows[1]["done_ns"]
        assert rows[2]["due_ns"] == rows[1]["done_ns"] + 3 * NS_PER_MS
        assert rows[4]["trigger_ns"] == rows[3]["done_ns"]
        assert {row["status"] for row in rows} == {"ok"}

    def test_scaled_time_is_recorded_as_model_time(self, plain_server: NullServer, scheme: str, stream: bool) -> None:
        plan = plan_of(session(0, wait_ns=400 * NS_PER_MS))
        first, second = rows_of(run(plan, plain_server, scheme, stream=stream, scale=20.0))
        assert second["due_ns"] == first["done_ns"] + 400 * NS_PER_MS
        assert second["sent_ns"] >= second["due_ns"]

    def test_events_tell_of_every_final_row(self, plain_server: NullServer, scheme: str, stream: bool) -> None:
        events: list[ReplayEvent] = []
        run(plan_of(session(0), session(1)), plain_server, scheme, stream=stream, on_event=events.append)
        assert sorted((event.session, event.request) for event in events) == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert [event.num_finished for event in events] == [1, 2, 3, 4]

    def test_text_prompts_are_carried_as_text(self, plain_server: NullServer, scheme: str, stream: bool) -> None:
        rows = rows_of(run(plan_of(session(0), session(1), prompt_form="text"), plain_server, scheme, stream=stream))
        assert {row["status"] for row in rows} == {"ok"}, rows
        assert rows[1]["prompt_tokens"] == 40 + 6 + 8


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_replay_can_be_called_where_an_event_loop_runs(plain_server: NullServer, scheme: str) -> None:
    async def cell() -> ReplayResult:
        return run(plan_of(session(0)), plain_server, scheme)

    assert {row["status"] for row in rows_of(asyncio.run(cell()))} == {"ok"}


@pytest.mark.parametrize("scheme", SCHEMES)
class TestPrompts:
    def test_the_servers_ids_are_carried_forward_exactly(self, scheme: str) -> None:
        plan = plan_of(session(0, num_requests=3), session(1, after=0, continues=0, keep_first=30))
        with RawServer(answered) as server:
            result = run(plan, server, scheme)
        asked = {each.fields["request_id"]: each for each in server.asked}
        came = [asked[row["request_id"]] for row in rows_of(result)]
        generated = [each.ids for each in came]
        streams = TokenStreams(plan)
        for request in range(3):
            assert came[request].fields["prompt"] == streams.prompt(0, request, {0: generated[:3]}).tolist()
        assert came[3].fields["prompt"] == streams.prompt(1, 0, {0: generated[:3]}).tolist()
        for row, ids in zip(rows_of(result), generated, strict=True):
            assert row["token_digest"] == sha256(np.asarray(ids, "<i4").tobytes()).hexdigest()

    def test_a_request_asks_for_exactly_the_planned_greedy_tokens(self, scheme: str) -> None:
        with RawServer(answered) as server:
            result = run(plan_of(session(0, num_requests=1)), server, scheme)
        (asked,) = server.asked
        body = {name: value for name, value in asked.fields.items() if name != "prompt"}
        assert body == {
            "model": "null",
            "max_tokens": 6,
            "ignore_eos": True,
            "temperature": 0,
            "seed": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "request_id": rows_of(result)[0]["request_id"],
        }


@pytest.mark.parametrize("scheme", SCHEMES)
class TestAServerThatMisbehaves:
    def test_each_fault_is_a_row_with_a_status_and_other_sessions_go_on(self, scheme: str) -> None:
        faults = {
            0: Reply([], CLOSE),
            1: Reply([CHUNKED_HEAD[:20]], CLOSE),
            2: Reply([CHUNKED_HEAD], RESET),
            3: Reply([whole('{"error": {"message": "engine is dead"}}', status=500)]),
            4: None,
            5: Reply([b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n"], CLOSE),
        }

        def answer(asked: Asked) -> Reply:
            if asked.request or asked.session not in faults:
                return answered(asked)
            return faults[asked.session] or Reply([CHUNKED_HEAD, *chunked(events(asked, ids=asked.ids[1:]))])

        plan = plan_of(*(session(index) for index in range(7)), session(7, after=0), session(8, after=3, continues=3))
        with RawServer(answer) as server:
            result = run(plan, server, scheme)
        rows = {(row["session"], row["request"]): row for row in rows_of(result)}
        broken = ["connection", "connection", "connection", "http_error", "wrong_length", "bad_response"]
        assert [rows[index, 0]["status"] for index in range(9)] == [*broken, "ok", "ok", "not_sent"]
        assert all(rows[index, 0]["error"] for index in faults)
        for index in (*faults, 8):
            assert (rows[index, 1]["status"], rows[index, 1]["sent_ns"]) == ("not_sent", None)
        assert rows[6, 1]["status"] == "ok"
        assert rows[3, 0]["http_status"] == 500
        assert "engine is dead" in rows[3, 0]["error"]
        assert rows[7, 0]["trigger_ns"] == rows[0, 0]["done_ns"]

    def test_an_answer_that_does_not_end_is_a_row_at_its_deadline(self, scheme: str) -> None:
        plan = plan_of(session(0), session(1), session(2, after=0, continues=0))
        with RawServer(lambda asked: Reply([CHUNKED_HEAD[:22]] * asked.session, HANG)) as server:
            rows = rows_of(run(plan, server, scheme, timeout_s=0.5))
        assert [row["status"] for row in rows] == ["timeout", "not_sent"] * 2 + ["not_sent"] * 2
        assert all(row["error"] for row in rows if row["status"] == "timeout")
        late_ns = [row["done_ns"] - row["due_ns"] for row in rows if row["status"] == "timeout"]
        assert min(late_ns) >= NS_PER_S // 2

    def test_no_server_at_all_is_a_connection_row(self, scheme: str) -> None:
        with NullServer() as server:
            pass
        rows = rows_of(run(plan_of(session(0), session(1)), server, scheme))
        assert [row["status"] for row in rows] == ["connection", "not_sent"] * 2

    def test_stopping_early_leaves_a_row_for_everything(self, scheme: str) -> None:
        stop = threading.Event()
        plan = plan_of(
            session(0, wait_ns=NS_PER_S * 3600), session(1), session(2, num_requests=1, start_offset_ns=NS_PER_S)
        )

        with RawServer(lambda asked: Reply([], HANG) if asked.session == 1 else answered(asked)) as server:
            rows = rows_of(run(plan, server, scheme, stop=stop, on_event=lambda _event: stop.set()))
        assert [row["status"] for row in rows] == ["ok", "not_sent", "connection", "not_sent", "not_sent"]
