"""One stream read whole, in pieces, and as the chunks of an HTTP answer in pieces. All readings must agree.

Streams are drawn: events torn, joined, cut and spelled otherwise in a few places. No socket here.
"""

from __future__ import annotations

import json
import random
from typing import Any

from harness.measure.client.answer import NO_KERNEL_STAMP, ReceivedAnswer
from harness.measure.client.exchange import Exchange
from tests.support.raw_server import CHUNKED_HEAD, chunked

IDS_EVENT = '{"id":"a","choices":[{"index":0,"text":"x","token_ids":%s}]}'
CHAT_EVENT = '{"id":"a","choices":[{"index":0,"delta":{"content":"x"},"token_ids":%s}]}'
BARE_CHAT_EVENT = '{"id":"a","choices":[{"index":0,"delta":{"content":"%s"}}]}'
USAGE_EVENT = '{"id":"a","choices":[],"usage":{"prompt_tokens":%s,"completion_tokens":%s}}'
NUM_PROMPT = 9
# Pieces of text that mean something to one reading or another.
WORDS = (
    *("data: ", "data:", "\n\n", "\n", "\r\n", "\r\n\r\n", "\r", "{", "}", "[", "]", ",", ":", '"', "\\", " "),
    *("[DONE]", '"token_ids":', '"usage":', '"prompt_tokens":', '"completion_tokens":', "1", "-1", "2147483648"),
    *("1e400", "null", "Infinity", "true", '"id":"a"', '"id":"b"', '"choices":', '"error":', ": ping\n\n"),
    *("event: ping\n", "\r\r", "data: ", '"error":null,', "\\ud800", "\u00e9", "\x00", '{"id":"a"},{"id":"a"}'),
    *('{"id":"a","choices":[{"token_ids":[1', "2]}]}", '"delta":{"content":', '"delta":5', '"message":'),
    *('"reasoning":', "data: [DONE]\n\n"),
)


def drawn_stream(draw: random.Random) -> bytes:
    """A stream of some events, torn, joined, cut and spelled otherwise in a few places."""
    ids = [draw.randrange(100_000) for _ in range(draw.randrange(4))]
    event = draw.choice((IDS_EVENT, IDS_EVENT, CHAT_EVENT, BARE_CHAT_EVENT))
    documents = [event % json.dumps([token_id]) for token_id in ids]
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
    assert _contents(_read([body], has_ids=False)) == _contents(_read(_cut(draw, body, 8), has_ids=False)), body
    tolerant = _read([body], is_strict=False)
    assert _contents(_read(_cut(draw, body, 8), is_strict=False)) == _contents(tolerant), body
    whole = _read([body])
    assert _contents(_read(_cut(draw, body, 8))) == _contents(whole), body
    size = 1 + draw.randrange(200)
    chunks = chunked([body[place : place + size] for place in range(0, len(body), size)])
    exchange = Exchange(0, ReceivedAnswer(stream=True), b"")
    for piece in _cut(draw, b"".join((CHUNKED_HEAD, *chunks)), 8):
        exchange.take(1, NO_KERNEL_STAMP, piece)
    assert exchange.is_over, body
    assert not exchange.problem, body
    assert _contents(exchange.close()) == _contents(whole), body
    # What a strict reading takes, a tolerant one takes for the same.
    assert whole.problem or _contents(tolerant) == _contents(whole), body
    return not whole.problem


def _cut(draw: random.Random, data: bytes, most: int) -> list[bytes]:
    places = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(most)))
    pieces = [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]
    return [piece for piece in pieces if piece]


def _contents(answer: ReceivedAnswer) -> tuple[Any, ...]:
    counts = (answer.prompt_tokens, answer.completion_tokens, answer.cached_tokens)
    tokens = [num_tokens for _, _, num_tokens, _ in answer.chunks]
    names = (answer.response_id, answer.finish_reason)
    return bool(answer.problem), answer.token_ids, "".join(answer.texts), counts, *names, tokens


def _read(pieces: list[bytes], *, has_ids: bool = True, is_strict: bool = True) -> ReceivedAnswer:
    answer = ReceivedAnswer(stream=True, needs_token_ids=has_ids, is_strict=is_strict)
    for place, piece in enumerate(pieces):
        answer.feed((place, NO_KERNEL_STAMP, piece))
    answer.close((len(pieces), NO_KERNEL_STAMP, b""))
    return answer
