"""Every way to read an answer gives the same: event by event, several receives at once, and the compiled loop's own.

``ANSWER_EXAMPLES`` asks for more inputs than a test run has time for.
"""

from __future__ import annotations

import json
import os
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.live.client.answer import NO_KERNEL_STAMP, Answer, parse_each
from harness.live.client.wire.chunks import OVER
from harness.live.client.wire.reading import hold_to, ids_text
from tests.support.scanned import Scanned, chunked

EXAMPLES = int(os.environ.get("ANSWER_EXAMPLES", "40000"))
IDS_EVENT = '{"id":"a","choices":[{"index":0,"text":"x","token_ids":%s}]}'
USAGE_EVENT = '{"id":"a","choices":[],"usage":{"prompt_tokens":%s,"completion_tokens":%s}}'
NUM_PROMPT = 9
# Pieces of text that mean something to one reading or another.
WORDS = (
    "data: ", "data:", "\n\n", "\n", "\r\n", "\r\n\r\n", "\r", "{", "}", "[", "]", ",", ":", '"', "\\", " ", "[DONE]",
    '"token_ids":', '"usage":', '"prompt_tokens":', '"completion_tokens":', "1", "-1", "2147483648", "1e400", "null",
    "Infinity", "true", '"id":"a"', '"id":"b"', '"choices":', '"error":', ": ping\n\n", "\\ud800", "\u00e9", "\x00",
    '{"id":"a"},{"id":"a"}', '{"id":"a","choices":[{"token_ids":[1', '2]}]}', "data: [DONE]\n\n",
)  # fmt: skip


def drawn_stream(draw: random.Random) -> bytes:
    """A stream of some events, torn, joined, cut and spelled otherwise in a few places."""
    ids = [draw.randrange(100_000) for _ in range(draw.randrange(4))]
    documents = [IDS_EVENT % json.dumps([token_id]) for token_id in ids]
    documents.append(USAGE_EVENT % (NUM_PROMPT, len(ids)))
    text = "".join(f"data: {document}\n\n" for document in documents) + "data: [DONE]\n\n"
    for _ in range(draw.choice((0, 1, 1, 2, 3, 6))):
        place = draw.randrange(len(text) + 1)
        how = draw.randrange(5)
        if how == 0:  # torn: what belonged together becomes two events
            text = f"{text[:place]}\n\ndata: {text[place:]}"
        elif how == 1:  # joined: what were two events becomes one
            text = text[:place] + text[place:].replace(draw.choice(("\n\ndata: ", "}\n\ndata: {", "\n\n")), ",", 1)
        elif how == 2:
            text = text[:place] + draw.choice(WORDS) + text[place:]
        elif how == 3:
            text = text[:place] + text[place + draw.randrange(12) :]
        else:
            begin = draw.randrange(len(text) + 1)
            text = text[:place] + text[begin : begin + draw.randrange(80)] + text[place:]
    return text.encode()


def cut(draw: random.Random, data: bytes, most: int) -> list[bytes]:
    places = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(most)))
    pieces = [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]
    return [piece for piece in pieces if piece]


def said(answer: Answer) -> tuple[Any, ...]:
    counts = (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens)
    tokens = [num_tokens for _, _, num_tokens, _ in answer.chunks]
    return bool(answer.problem), answer.token_ids, counts, answer.response_id, answer.finish_reason, tokens


def read_one_by_one(pieces: list[bytes]) -> Answer:
    answer = Answer(stream=True)
    for place, piece in enumerate(pieces):
        answer.feed((place, NO_KERNEL_STAMP, piece))
    answer.close((len(pieces), NO_KERNEL_STAMP, b""))
    return answer


def read_at_once(pieces: list[bytes], num_at_once: int) -> Answer:
    answer = Answer(stream=True)
    for place in range(0, len(pieces), num_at_once):
        block = pieces[place : place + num_at_once]
        answer.feed_many(b"".join(block), [(place, NO_KERNEL_STAMP, 0)] * len(block))
    answer.close((len(pieces), NO_KERNEL_STAMP, b""))
    return answer


def check_readings(draw: random.Random, scanned: Scanned) -> bool:
    """One drawn stream, read in every way; whether it was an answer without a problem."""
    body = drawn_stream(draw)
    pieces = cut(draw, body, 8)
    whole = read_one_by_one([body])
    for other in (read_one_by_one(pieces), read_at_once(pieces, 1 + draw.randrange(8)), read_at_once([body], 1)):
        assert said(other) == said(whole), body
    scanned.begin()
    wire = chunked(body, [1 + draw.randrange(200)], b"")
    for piece in cut(draw, wire, 4):
        scanned.take(piece)
    state = scanned.state
    assert state.chunk_mode == OVER, body
    has_counts = state.prompt_tokens == NUM_PROMPT and state.completion_tokens == state.num_ids
    if state.has_done and has_counts and not state.is_odd and not whole.problem:
        # The loop would have gone on. What the parsers read is the same, or it fails the request.
        is_same = scanned.ids == ids_text(whole.token_ids)
        hold_to(whole, scanned.ids)
        assert is_same == (not whole.problem), body
    return not whole.problem


def test_all_readings_of_a_stream_agree() -> None:
    draw, scanned = random.Random(EXAMPLES), Scanned()
    num_answers = sum(check_readings(draw, scanned) for _ in range(EXAMPLES))
    # Neither all of them are broken, nor none.
    assert EXAMPLES // 20 < num_answers < EXAMPLES * 19 // 20


@pytest.mark.parametrize(
    "events",
    [
        # Joined by commas, the first two would be one document and the third would be two: as many as events.
        [b'{"id":"a","choices":[{"token_ids":[1', b"2]}]}", b'{"id":"a","choices":[]},{"id":"a","choices":[]}'],
        [b'{"a":"', b'"}', b"{},{}"],
        [b"{},{}", b'{"a":[1', b"2]}"],
    ],
)
def test_events_torn_into_each_other_are_no_documents(events: list[bytes]) -> None:
    assert json.loads(b"[%b]" % b",".join(events))
    assert parse_each(events) is None
    answer = Answer(stream=True)
    answer.feed_many(b"".join(b"data: %b\n\n" % event for event in events), [(0, NO_KERNEL_STAMP, len(events))])
    assert "not a JSON object" in answer.problem


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text(st.sampled_from('{}[],:"\\ a1'), max_size=8), min_size=1, max_size=6))
def test_texts_are_read_together_exactly_when_each_is_json_by_itself(texts: list[str]) -> None:
    def is_json(text: str) -> bool:
        try:
            json.loads(text)
        except ValueError:
            return False
        return True

    documents = parse_each([text.encode() for text in texts])
    assert (documents is not None) == all(map(is_json, texts))
    assert documents is None or documents == [json.loads(text) for text in texts]
