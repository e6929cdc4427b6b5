"""The epoll client's own parts: absolute timers, trusted kernel stamps, answers in splinters, streams that are cut."""

from __future__ import annotations

import json
import resource
import select
from array import array

import httptools
import numpy as np
import pytest

from harness.clock import NS_PER_MS, NS_PER_S, clock_for, monotonic_ns
from harness.errors import PlanError, SpecError
from harness.live.client.answer import NO_KERNEL_STAMP, Answer
from harness.live.client.kernel_stamps import SAMPLE_INTERVAL_NS, OffsetLog
from harness.live.client.prompts import TextPiece, take_tokens, text_piece
from harness.live.client.rows import BLOCK_CHUNKS, ChunkRows, RequestRows
from harness.live.client.scheduler_slice import MAX_SLICE_NS, SHORT_SLICE_NS, SchedulerSlice
from harness.live.client.timer import DeadlineTimer
from harness.live.client.wire.heads import MAX_KEPT_HEADS, Framing, KnownHeads, read_framing
from harness.live.client.wire.pool import allow_sockets
from harness.plan import Plan, RequestPlan, SessionPlan
from harness.records.schema import CHUNKS

STREAM = (
    b'data: {"id":"cmpl-a","choices":[{"text":"x","token_ids":[5]}]}\n\n'
    b": ping\n\n"
    b'data: {"id":"cmpl-a","choices":[{"text":"yz","token_ids":[6,7],"finish_reason":"length"}]}\n\n'
    b'data: {"id":"cmpl-a","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":8}}}\n\n'
    b"data: [DONE]\n\n"
)


class TestTheTimer:
    def test_it_is_never_early_and_can_be_armed_again(self) -> None:
        timer = DeadlineTimer()
        for _ in range(20):
            deadline_ns = monotonic_ns() + NS_PER_MS
            timer.arm(deadline_ns)
            assert select.select([timer.fd], [], [], 5)[0]
            assert monotonic_ns() >= deadline_ns
        timer.close()

    def test_disarming_clears_a_deadline_that_has_passed(self) -> None:
        timer = DeadlineTimer()
        timer.arm(monotonic_ns() - NS_PER_S)
        assert select.select([timer.fd], [], [], 5)[0]
        timer.clear()
        assert not select.select([timer.fd], [], [], 0)[0]
        timer.close()


def test_a_scheduler_slice_is_given_back() -> None:
    with SchedulerSlice() as first:
        granted = first.ask(SHORT_SLICE_NS)
        assert granted in {None, SHORT_SLICE_NS}
    with SchedulerSlice() as second:
        assert second.ask(10**18) in {None, MAX_SLICE_NS}


def test_more_sessions_than_the_system_allows_files_is_refused_before_anything_is_sent() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard == resource.RLIM_INFINITY:
        pytest.skip("this system has no limit of open files")
    with pytest.raises(SpecError, match="open files"):
        allow_sockets(hard)
    allow_sockets(8)


class TestKernelStamps:
    def log(self, *offsets_ns: int) -> OffsetLog:
        log = OffsetLog()
        log.at_ns = array("q", [place * SAMPLE_INTERVAL_NS for place in range(len(offsets_ns))])
        log.offset_ns = array("q", offsets_ns)
        return log

    def test_a_steady_offset_gives_the_monotonic_instant(self) -> None:
        monotonic, is_trusted = self.log(10**18, 10**18).to_monotonic(np.array([10**18 + 40]), np.array([50]))
        assert monotonic.tolist() == [40]
        assert is_trusted.tolist() == [True]

    def test_stamps_beside_a_clock_step_are_refused_and_later_ones_are_not(self) -> None:
        step_ns = NS_PER_S
        log = self.log(0, 0, step_ns, step_ns)
        received = np.array([SAMPLE_INTERVAL_NS // 2, SAMPLE_INTERVAL_NS * 3 // 2, SAMPLE_INTERVAL_NS * 5 // 2])
        realtime = received - 10 + np.array([0, step_ns, step_ns])
        monotonic, is_trusted = log.to_monotonic(realtime, received)
        assert is_trusted.tolist() == [True, False, True]
        assert monotonic[[0, 2]].tolist() == (received[[0, 2]] - 10).tolist()
        assert log.steps() == [2 * SAMPLE_INTERVAL_NS]

    def test_a_slew_of_the_clock_is_no_step(self) -> None:
        log = self.log(0, 40_000, 80_000)
        assert log.steps() == []

    def test_a_stamp_after_its_own_receive_and_a_missing_one_are_refused(self) -> None:
        _, is_trusted = self.log(0, 0).to_monotonic(np.array([NS_PER_S, -1]), np.array([10, 10]))
        assert is_trusted.tolist() == [False, False]


class TestAnswers:
    @pytest.mark.parametrize("size", [1, 2, 3, 7, 50, 10_000])
    @pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
    def test_a_stream_means_the_same_however_it_is_splintered(self, size: int, newline: bytes) -> None:
        body = STREAM.replace(b"\n", newline)
        answer = Answer(stream=True)
        pieces = [(place, b"", body[place : place + size]) for place in range(0, len(body), size)]
        for piece in pieces:
            answer.feed(piece)
        answer.close(pieces[-1])
        assert answer.problem == ""
        assert answer.token_ids == [5, 6, 7]
        assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 3, 8)
        assert (answer.response_id, answer.finish_reason) == ("cmpl-a", "length")
        assert [num_tokens for _, _, num_tokens, _ in answer.chunks] == [1, 2]

    def test_events_of_one_receive_are_flagged_and_lone_ones_are_not(self) -> None:
        first, *rest = STREAM.split(b"\n\n")
        answer = Answer(stream=True)
        answer.feed((1, b"", first + b"\n\n"))
        answer.feed((2, b"", b"\n\n".join(rest)))
        assert [(received_ns, is_coalesced) for received_ns, _, _, is_coalesced in answer.chunks] == [
            (1, False),
            (2, True),
        ]

    def test_tokens_are_counted_from_ids_and_a_contradiction_is_a_problem(self) -> None:
        usage = {"prompt_tokens": 4, "completion_tokens": 3}
        body = json.dumps({"id": "a", "choices": [{"text": "", "token_ids": [1, 2]}], "usage": usage}).encode()
        answer = Answer(stream=False)
        answer.feed((1, b"", body))
        answer.close((1, b"", body))
        assert answer.problem == "usage says 3 tokens, token_ids hold 2"

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            (b"data: {nonsense\n\n", "not a JSON object"),
            (b"data: [1]\n\n", "not a JSON object"),
            (b'data: {"choices":[{"token_ids":7}]}\n\n', "unexpected shape"),
            (b'data: {"error":{"message":"engine died"}}\n\n', "engine died"),
            (b'data: {"id":"a","choices":[]}\n\n', "without [DONE]"),
        ],
    )
    def test_what_is_no_answer_says_why(self, body: bytes, says: str) -> None:
        answer = Answer(stream=True)
        answer.feed((1, b"", body))
        answer.close((1, b"", b""))
        assert says in answer.problem


class TestStreamsOfIds:
    def test_a_prompt_keeps_whole_pieces_as_they_are_and_cuts_only_the_last(self) -> None:
        pieces = [text_piece([1, 22, 333]), text_piece([4, 5])]
        assert take_tokens(pieces, 5, where="") == pieces
        assert take_tokens(pieces, 4, where="")[1] == TextPiece(1, b"4")
        assert take_tokens(pieces, 3, where="") == pieces[:1]
        assert take_tokens(pieces, 2, where="") == [TextPiece(2, b"1,22")]
        assert take_tokens(pieces, 0, where="") == []

    def test_keeping_more_than_there_is_is_refused(self) -> None:
        with pytest.raises(PlanError, match="2 tokens shorter"):
            take_tokens([text_piece([1])], 3, where="session 0")


def head(*lines: str, status: str = "HTTP/1.1 200 OK") -> bytes:
    return "".join(f"{line}\r\n" for line in (status, *lines, "")).encode()


class TestHeads:
    def test_a_plain_head_says_how_its_body_ends(self) -> None:
        assert read_framing(head("Content-Length: 12")) == Framing(200, 12, True)
        assert read_framing(head("transfer-encoding: Chunked", "connection: close")) == Framing(200, 0, False)
        assert read_framing(head("Content-Length: 3", status="HTTP/1.1 500 Oh")) == Framing(500, 3, True)

    @pytest.mark.parametrize(
        "lines",
        [
            (),
            ("Content-Length: 0",),
            ("Transfer-Encoding: gzip, chunked",),
            ("Content-Length: 3", "Transfer-Encoding: chunked"),
            ("Content-Length: 3", "Connection: upgrade"),
        ],
    )
    def test_an_unusual_one_is_left_to_the_full_parser(self, lines: tuple[str, ...]) -> None:
        try:
            assert read_framing(head(*lines)) is None
        except httptools.HttpParserError:
            assert len(lines) == 2

    def test_so_are_interim_answers_and_old_versions(self) -> None:
        assert read_framing(head(status="HTTP/1.1 100 Continue")) is None
        assert read_framing(head("Content-Length: 3", status="HTTP/1.0 200 OK")) is None

    def test_the_memory_of_heads_is_bounded(self) -> None:
        known = KnownHeads()
        for length in range(1, 1000):
            assert known.framing(head(f"Content-Length: {length}")) == Framing(200, length, True)
        assert known.num_kept <= MAX_KEPT_HEADS


class TestChunkRows:
    def filled(self, num_chunks: int) -> tuple[Plan, RequestRows, ChunkRows]:
        sessions = tuple(
            SessionPlan(index, 0, None, None, (RequestPlan(0, 4, num_chunks, 0),) * 2) for index in range(2)
        )
        plan = Plan("test", 7, 0, "as-drawn", 0, (1000, 60_000), sessions)
        rows, chunks = RequestRows(plan), ChunkRows()
        for row in (2, 0, 3, 1):  # as they happen to end, not as they were planned
            stamps = [(row * 10**6 + place, NO_KERNEL_STAMP, place % 3, place % 2 == 0) for place in range(num_chunks)]
            chunks.extend(row, stamps)
            chunks.spill()
        return plan, rows, chunks

    @pytest.mark.parametrize("num_chunks", [1, 5_000, 20_000])
    def test_rows_that_waited_on_disk_make_the_same_table(self, num_chunks: int) -> None:
        _, rows, chunks = self.filled(num_chunks)
        assert (chunks.num_spilled > 0) == (4 * num_chunks > BLOCK_CHUNKS)
        table = chunks.to_table(rows, clock_for(1.0), None)
        assert table.schema == CHUNKS
        expected = [(row // 2, row % 2, place) for row in range(4) for place in range(num_chunks)]
        assert (
            list(zip(*(table[name].to_pylist() for name in ("session", "request", "chunk")), strict=True)) == expected
        )
        assert table["received_ns"].to_pylist() == [
            row * 10**6 + place for row in range(4) for place in range(num_chunks)
        ]
        assert table["num_tokens"].to_pylist() == [place % 3 for _ in range(4) for place in range(num_chunks)]
        assert table["kernel_ns"].null_count == 4 * num_chunks

    def test_memory_holds_no_more_than_a_block_and_one_request(self) -> None:
        _, _, chunks = self.filled(BLOCK_CHUNKS)
        assert chunks.num_spilled == 4 * BLOCK_CHUNKS
        chunks.close()
