"""An answer means the same however its bytes arrive, and what is no answer says why."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest

from harness.measure.client.answer import MAX_ERROR_BYTES, NO_KERNEL_STAMP, ReceivedAnswer
from harness.measure.client.exchange import Exchange
from tests.support.readings import drawn_stream, read_in_every_way

# More inputs than a test run has time for, where this asks for them.
EXAMPLES = int(os.environ.get("ANSWER_EXAMPLES", "3000"))


STREAM = (
    b'data: {"id":"cmpl-a","choices":[{"text":"x","token_ids":[5]}]}\n\n'
    b": ping\n\n"
    b'data: {"id":"cmpl-a","choices":[{"text":"yz","token_ids":[6,7],"finish_reason":"length"}]}\n\n'
    b'data: {"id":"cmpl-a","choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":8}}}\n\n'
    b"data: [DONE]\n\n"
)


def received(*pieces: bytes, stream: bool = True, **options: bool) -> ReceivedAnswer:
    """An answer that came in these pieces, one after another, and ended."""
    answer = ReceivedAnswer(stream=stream, **options)
    for place, piece in enumerate(pieces, start=1):
        answer.feed((place, -1, piece))
    answer.close((len(pieces), -1, b""))
    return answer


class TestAnswers:
    @pytest.mark.parametrize(
        "choice", [{"text": "to be"}, {"message": {"content": "to be"}}, {"delta": {"content": "to be"}}]
    )
    def test_a_text_is_kept_for_the_next_prompt_from_each_kind_of_choice(self, choice: dict[str, Any]) -> None:
        usage = {"prompt_tokens": 4, "completion_tokens": 2}
        body = json.dumps({"id": "a", "choices": [{**choice, "finish_reason": "length"}], "usage": usage}).encode()
        answer = received(body, stream=False, needs_token_ids=False)
        assert (answer.problem, answer.texts, answer.num_tokens) == ("", ["to be"], 2)
        assert answer.finish_reason == "length"

    def test_an_event_and_an_error_without_end_are_kept_up_to_a_limit(self) -> None:
        answer = ReceivedAnswer(stream=True)
        for place in range(6):
            answer.feed((place, b"", b"data: " + b"x" * (1 << 20)))
        assert answer.problem == "the answer is too long"
        refused = Exchange(0, ReceivedAnswer(stream=True), b"")
        refused.take(1, NO_KERNEL_STAMP, b"HTTP/1.1 500 Oh\r\n\r\n" + b"e" * (1 << 20))
        assert len(refused.error_body) == MAX_ERROR_BYTES == 64 << 10

    def test_events_of_one_receive_are_flagged_and_lone_ones_are_not(self) -> None:
        first, *rest = STREAM.split(b"\n\n")
        answer = received(first + b"\n\n", b"\n\n".join(rest))
        assert [(received_ns, is_coalesced) for received_ns, _, _, is_coalesced in answer.chunks] == [
            (1, False),
            (2, True),
        ]


def chat_events(*deltas: dict[str, object], completion_tokens: int) -> bytes:
    """A chat's stream without token ids; its first event opens the message."""
    opening = {"role": "assistant", "content": ""}
    events = [{"id": "chatcmpl-a", "choices": [{"index": 0, "delta": delta}]} for delta in (opening, *deltas)]
    usage = {"prompt_tokens": 9, "completion_tokens": completion_tokens}
    events.append({"id": "chatcmpl-a", "choices": [], "usage": usage})
    return b"".join(b"data: %b\n\n" % json.dumps(event).encode() for event in events) + b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("deltas", "completion_tokens", "tokens_of_chunks"),
    [
        (({"content": " a"}, {"content": " b"}), 2, [0, 1, 1]),
        # Several tokens of a chunk are shared out by letters.
        (({"content": " a b"}, {"content": " c"}), 3, [0, 1, 2]),
        (({"content": " abc def ghi"}, {"content": " c"}), 12, [0, 9, 3]),
        # More chunks than tokens have no instants of tokens.
        (({"content": " a"}, {"content": " b"}, {"content": "c"}), 2, [0, 0, 0, 0]),
        # Reasoning counts as tokens, and is not carried.
        (({"reasoning_content": "hm"}, {"content": " a"}), 2, [0, 1, 1]),
    ],
)
def test_the_text_of_a_chat_is_carried_and_its_tokens_are_those_of_usage(
    deltas: tuple[dict[str, object], ...], completion_tokens: int, tokens_of_chunks: list[int]
) -> None:
    answer = received(chat_events(*deltas, completion_tokens=completion_tokens), needs_token_ids=False)
    assert answer.problem == ""
    assert "".join(answer.texts) == "".join(str(delta.get("content", "")) for delta in deltas)
    assert (answer.response_id, answer.num_tokens, answer.prompt_tokens) == ("chatcmpl-a", completion_tokens, 9)
    assert [num_tokens for _, _, num_tokens, _ in answer.chunks] == tokens_of_chunks


def test_all_readings_of_a_stream_agree() -> None:
    draw = random.Random(EXAMPLES)
    num_answers = sum(read_in_every_way(drawn_stream(draw), draw) for _ in range(EXAMPLES))
    # Neither all of them are broken, nor none.
    assert EXAMPLES // 20 < num_answers < EXAMPLES * 19 // 20


def event(**fields: object) -> bytes:
    return b"data: %b\n\n" % json.dumps(fields).encode()


def chunk(token_id: int, **fields: object) -> bytes:
    return event(**{"id": "cmpl-a", "choices": [{"text": "x", "token_ids": [token_id]}], **fields})


USAGE = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
END = event(id="cmpl-a", choices=[{"text": "", "finish_reason": "length"}])
COUNTS = event(id="cmpl-a", choices=[], usage=USAGE)
DONE = b"data: [DONE]\n\n"
USUAL = [chunk(5), chunk(6), END, COUNTS, DONE]
# Each with the codes of what is tolerated.
OTHER_SERVERS = {
    "as vLLM answers": (USUAL, ()),
    "comments": ([b": ping\n\n", *USUAL, b": bye\n\n"], ()),
    "an id of each chunk": ([chunk(5), chunk(6, id="cmpl-b"), END, COUNTS, DONE], ("id-changes",)),
    "no id at first": ([chunk(5, id=None), *USUAL[1:]], ("id-absent",)),
    "an empty id in a first event of filters": ([event(id="", choices=[], filters=[]), *USUAL], ("id-absent",)),
    "an id that is an object": ([chunk(5, id={}), *USUAL[1:]], ("id-not-text",)),
    "error null": ([chunk(5, error=None), *USUAL[1:]], ("error-null",)),
    "usage null and empty": ([chunk(5, usage=None), chunk(6, usage={}), END, COUNTS, DONE], ()),
    "usage twice": (
        [chunk(5), chunk(6), END, event(id="cmpl-a", usage={"prompt_tokens": 9, "completion_tokens": 2}), COUNTS, DONE],
        ("usage-repeated",),
    ),
    "usage that forgets the cached tokens": (
        [chunk(5), chunk(6), END, COUNTS, event(id="cmpl-a", usage={"prompt_tokens": 9, "completion_tokens": 2}), DONE],
        (),
    ),
    "usage that grows": (
        [chunk(5, usage={**USAGE, "completion_tokens": 1}), chunk(6, usage=USAGE), END, COUNTS, DONE],
        ("usage-repeated",),
    ),
    "usage without prompt tokens": ([chunk(5, usage={"completion_tokens": 1}), *USUAL[1:]], ()),
    "usage without choices": ([chunk(5), chunk(6), END, event(id="cmpl-a", usage=USAGE), DONE], ()),
    "no [DONE]": (USUAL[:-1], ("done-missing",)),
    "[DONE] twice": ([*USUAL, DONE], ("done-repeated",)),
    "no space behind the colon": ([part.replace(b"data: ", b"data:") for part in USUAL], ()),
    "named events": ([b"event: ping\ndata: {}\n\n", *USUAL], ("event-named", "event-without-answer")),
    "answers in named events": ([b"event: chunk\n" + part for part in USUAL], ("event-named",)),
    "events named message": ([b"event: message\n" + part for part in USUAL], ()),
    "retry and id of the stream": ([b"retry: 3000\nid: 7\n\n", b"id: 8\n" + USUAL[0], *USUAL[1:]], ()),
    "keep-alives as data": ([b"data: : PROCESSING\n\n", b"data:\n\n", *USUAL], ("event-without-answer",)),
    "a document in two lines": ([USUAL[0].replace(b", ", b",\ndata: ", 1), *USUAL[1:]], ()),
    "documents without an empty line between": ([b"".join(USUAL).replace(b"\n\n", b"\n")], ()),
    "a byte order mark": ([b"\xef\xbb\xbf" + USUAL[0], *USUAL[1:]], ()),
    "CR": ([part.replace(b"\n", b"\r") for part in USUAL], ("line-ends",)),
    "CR LF": ([part.replace(b"\n", b"\r\n") for part in USUAL], ()),
    "all three line ends": (
        [part.replace(b"\n\n", b"\r\n\r" if place % 2 else b"\n\r\n") for place, part in enumerate(USUAL)],
        ("line-ends",),
    ),
    "a role alone": ([event(id="cmpl-a", choices=[{"delta": {"role": "assistant", "content": ""}}]), *USUAL], ()),
}


@pytest.mark.parametrize("size", [1, 2, 7, 10_000])
@pytest.mark.parametrize("name", OTHER_SERVERS)
def test_what_other_servers_answer_is_read_where_nothing_depends_on_it(name: str, size: int) -> None:
    parts, tolerated = OTHER_SERVERS[name]
    body = b"".join(parts)
    answer = received(*(body[place : place + size] for place in range(0, len(body), size)), is_strict=False)
    assert answer.problem == ""
    assert (answer.token_ids, answer.num_tokens, answer.finish_reason) == ([5, 6], 2, "length")
    assert (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens) == (9, 2, 8)
    assert answer.response_id == "cmpl-a"
    assert answer.tolerated == set(tolerated)


@pytest.mark.parametrize(
    ("response_id", "taken", "code"), [(7, "7", "id-not-text"), (None, "", "id-absent"), ([], "", "id-not-text")]
)
def test_an_answer_that_nothing_joins_needs_no_id(response_id: object, taken: str, code: str) -> None:
    parts = [event(**{**json.loads(part[6:]), "id": response_id}) for part in USUAL[:-1]]
    answer = received(*parts, DONE, is_strict=False)
    assert (answer.problem, answer.response_id, answer.tolerated) == ("", taken, {code})


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        (USUAL[:2], "without a finish reason: it may be cut off"),
        ([chunk(5, usage=USAGE), chunk(6)], "without a finish reason: it may be cut off"),
        (USUAL[:3], "without usage: it may be cut off"),
        ([*USUAL[:3], COUNTS[: len(COUNTS) // 2]], "not a JSON object"),
        ([USUAL[0], END, COUNTS], "usage says 2 tokens, token_ids hold 1"),
        ([USUAL[0], *USUAL[2:]], "usage says 2 tokens, token_ids hold 1"),
        ([b"data: [1]\n\n"], "not a JSON object"),
        ([b'data: {"choices":[{"token_ids":7}]}\n\n'], "unexpected shape"),
        ([USUAL[0], b'event: error\ndata: {"message": "overloaded"}\n\n'], "overloaded"),
        ([USUAL[0], event(error={"message": "engine died"})], "engine died"),
        ([USUAL[0], event(object="error", message="engine died", code=500)], "engine died"),
        ([USUAL[0], event(detail="engine died")], "engine died"),
        ([*USUAL, chunk(7)], "after [DONE]"),
    ],
)
def test_a_tolerant_reading_takes_no_part_of_an_answer_for_the_whole(parts: list[bytes], says: str) -> None:
    assert says in received(*parts, is_strict=False).problem


@pytest.mark.parametrize(
    "body",
    [
        b'{"object":"error","message":"engine is not ready","code":503}',
        b'{"detail":"engine is not ready"}',
        b'{"error":{"message":"engine is not ready"}}',
    ],
)
@pytest.mark.parametrize("stream", [True, False])
def test_an_error_with_status_200_is_told_in_the_servers_words(body: bytes, stream: bool) -> None:
    assert "engine is not ready" in received(body, stream=stream).problem
