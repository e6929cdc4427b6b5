"""An answer means the same however its bytes arrive, and what is no answer says why."""

from __future__ import annotations

import json
import os
import random

import pytest

from harness.client.answer import Answer
from tests.support.readings import drawn_stream, read_in_every_way

# More inputs than a test run has time for, where this asks for them.
EXAMPLES = int(os.environ.get("ANSWER_EXAMPLES", "12000"))


STREAM = (
    b'data: {"id":"cmpl-a","choices":[{"text":"x","token_ids":[5]}]}\n\n'
    b": ping\n\n"
    b'data: {"id":"cmpl-a","choices":[{"text":"yz","token_ids":[6,7],"finish_reason":"length"}]}\n\n'
    b'data: {"id":"cmpl-a","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":8}}}\n\n'
    b"data: [DONE]\n\n"
)


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


def chat_events(*deltas: dict[str, object], completion_tokens: int) -> bytes:
    """A chat's stream without token ids; its first event opens the message."""
    opening = {"role": "assistant", "content": ""}
    events = [{"id": "chatcmpl-a", "choices": [{"index": 0, "delta": delta}]} for delta in (opening, *deltas)]
    usage = {"prompt_tokens": 9, "completion_tokens": completion_tokens}
    events.append({"id": "chatcmpl-a", "choices": [], "usage": usage})
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


def read_chat(body: bytes, *, stream: bool = True) -> Answer:
    answer = Answer(stream=stream, needs_token_ids=False)
    answer.feed((5, 5, body))
    answer.close((5, 5, body))
    assert answer.problem == ""
    return answer


def test_the_text_of_a_chat_is_carried_and_its_tokens_are_those_of_usage() -> None:
    answer = read_chat(chat_events({"content": " a"}, {"content": " b"}, completion_tokens=2))
    assert "".join(answer.texts) == " a b"
    assert (answer.response_id, answer.num_tokens, answer.prompt_tokens) == ("chatcmpl-a", 2, 9)
    assert [num_tokens for _, _, num_tokens, _ in answer.chunks] == [0, 1, 1]


def test_chunks_that_are_not_one_token_each_have_no_instants_of_tokens() -> None:
    answer = read_chat(chat_events({"content": " a b"}, {"content": " c"}, completion_tokens=3))
    assert answer.num_tokens == 3
    assert {num_tokens for _, _, num_tokens, _ in answer.chunks} == {0}


def test_reasoning_of_a_chat_counts_as_tokens_and_is_not_carried() -> None:
    answer = read_chat(chat_events({"reasoning_content": "hm"}, {"content": " a"}, completion_tokens=2))
    assert "".join(answer.texts) == " a"
    assert [num_tokens for _, _, num_tokens, _ in answer.chunks] == [0, 1, 1]


def test_a_whole_chat_answer_is_read_without_a_stream() -> None:
    choice = {"index": 0, "message": {"role": "assistant", "content": " a b"}, "finish_reason": "length"}
    usage = {"prompt_tokens": 9, "completion_tokens": 2}
    body = json.dumps({"id": "chatcmpl-a", "choices": [choice], "usage": usage}).encode()
    answer = read_chat(body, stream=False)
    assert ("".join(answer.texts), answer.num_tokens, answer.finish_reason) == (" a b", 2, "length")


def test_all_readings_of_a_stream_agree() -> None:
    draw = random.Random(EXAMPLES)
    num_answers = sum(read_in_every_way(drawn_stream(draw), draw) for _ in range(EXAMPLES))
    # Neither all of them are broken, nor none.
    assert EXAMPLES // 20 < num_answers < EXAMPLES * 19 // 20


def test_events_torn_into_each_other_are_no_documents() -> None:
    # Joined by a comma, the two would be one document.
    answer = Answer(stream=True)
    answer.feed((1, -1, b'data: {"id":"a","choices":[{"token_ids":[1\n\ndata: 2]}]}\n\n'))
    assert "not a JSON object" in answer.problem
