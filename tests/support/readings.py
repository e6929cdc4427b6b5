"""Every way to read a stream: event by event, several receives at once, by the compiled loop. All of them must agree.

Streams are drawn: events torn, joined, cut and spelled otherwise in a few places. No socket here.
Next: ``test_answer_readings`` reads some in every test run, ``tests.doors`` as many as it has time for.
"""

from __future__ import annotations

import json
import random
from functools import cache
from itertools import pairwise
from typing import Any

from harness.live.client.answer import NO_KERNEL_STAMP, Answer
from harness.live.client.wire.chunks import OVER
from harness.live.client.wire.reading import hold_to, ids_text
from tests.support.scanned import Scanned, chunked

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


def read_in_every_way(body: bytes, draw: random.Random) -> bool:
    """One stream, read in every way, cut where ``draw`` says; whether it was an answer without a problem.

    Raises AssertionError where two readings differ.
    """
    pieces = _cut(draw, body, 8)
    whole = _read_one_by_one([body])
    for other in (_read_one_by_one(pieces), _read_at_once(pieces, 1 + draw.randrange(8)), _read_at_once([body], 1)):
        assert _said(other) == _said(whole), body
    scanned = _scanned()
    scanned.begin()
    wire = chunked(body, [1 + draw.randrange(200)], b"")
    for piece in _cut(draw, wire, 4):
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


@cache
def _scanned() -> Scanned:
    return Scanned()


def _cut(draw: random.Random, data: bytes, most: int) -> list[bytes]:
    places = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(most)))
    pieces = [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]
    return [piece for piece in pieces if piece]


def _said(answer: Answer) -> tuple[Any, ...]:
    counts = (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens)
    tokens = [num_tokens for _, _, num_tokens, _ in answer.chunks]
    return bool(answer.problem), answer.token_ids, counts, answer.response_id, answer.finish_reason, tokens


def _read_one_by_one(pieces: list[bytes]) -> Answer:
    answer = Answer(stream=True)
    for place, piece in enumerate(pieces):
        answer.feed((place, NO_KERNEL_STAMP, piece))
    answer.close((len(pieces), NO_KERNEL_STAMP, b""))
    return answer


def _read_at_once(pieces: list[bytes], num_at_once: int) -> Answer:
    answer = Answer(stream=True)
    for place in range(0, len(pieces), num_at_once):
        block = pieces[place : place + num_at_once]
        ended = [b"".join(pieces[: place + count]).count(b"\n\n") for count in range(len(block) + 1)]
        counts = [after - before for before, after in pairwise(ended)]
        answer.feed_many(b"".join(block), [(place, NO_KERNEL_STAMP, count) for count in counts])
    answer.close((len(pieces), NO_KERNEL_STAMP, b""))
    return answer
