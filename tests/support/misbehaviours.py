"""What a server may do wrong with one answer, as data: how it answers, what becomes of the request, and why.

Each entry is tried over http and https. ``refused``: the request fails with that status and those words.
``harmless``: it counts, for the reason that stands there.
"""

from __future__ import annotations

import gzip
from collections.abc import Callable
from typing import NamedTuple

from tests.support.raw_server import CHUNKED_HEAD, CLOSE, HANG, KEEP, RESET, Asked, Reply, chunked, endless, events

Answering = Callable[[Asked], Reply]


class Misbehaviour(NamedTuple):
    """One way to answer. status: of the row; says: part of its error; why: where it is harmless."""

    name: str
    answer: Answering
    status: str = "bad_response"
    says: str = ""
    why: str = ""


def streamed(parts: list[bytes]) -> Reply:
    return Reply([CHUNKED_HEAD, *chunked(parts)])


def edited(old: str, new: str, *, count: int = -1) -> Answering:
    """The legal stream with one text in place of another; {ids} stands for the first id in both."""

    def answer(asked: Asked) -> Reply:
        first = str(asked.ids[0])
        body = b"".join(events(asked)).decode()
        changed = body.replace(old.replace("{id}", first), new.replace("{id}", first), count)
        assert changed != body
        return streamed([changed.encode("utf-8", "surrogatepass")])

    return answer


def rearranged(change: Callable[[list[bytes]], list[bytes]]) -> Answering:
    return lambda asked: streamed(change(events(asked)))


def with_head(head: bytes, *, after: str = CLOSE, body: Callable[[bytes], bytes] = bytes) -> Answering:
    """The legal stream behind another head; %d in it stands for the length.

    after: KEEP where the head promises it, or the next request meets a connection that is just being closed.
    """

    def answer(asked: Asked) -> Reply:
        sent = body(b"".join(events(asked)))
        return Reply([head.replace(b"%d", b"%d" % len(sent)) + sent], after)

    return answer


def with_more_than_counted(after: str) -> Answering:
    def answer(asked: Asked) -> Reply:
        sent = b"".join(events(asked))
        return Reply([COUNTED.replace(b"%d", b"%d" % len(sent)) + sent + b"more"], after)

    return answer


def twice(after: str) -> Answering:
    """The legal answer and, in the same breath, the same again."""

    def answer(asked: Asked) -> Reply:
        whole = b"".join([CHUNKED_HEAD, *chunked(events(asked))])
        return Reply([whole + whole], after)

    return answer


def interim_first(head: bytes) -> Answering:
    return lambda asked: Reply([head + b"".join([CHUNKED_HEAD, *chunked(events(asked))])], KEEP)


def in_chunks(change: Callable[[bytes], bytes], after: str = CLOSE, trailer: bytes = b"") -> Answering:
    """The legal stream with each of its chunks changed, and a trailer."""
    return lambda asked: Reply([CHUNKED_HEAD, *map(change, chunked(events(asked), trailer=trailer))], after)


DONE = b"data: [DONE]\n\n"
COUNTED = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n"
FLOOD = b"HTTP/1.1 200 OK\r\n" + b"".join(b"X-%i: y\r\n" % i for i in range(20_000)) + b"\r\n"
SAME_WORK = "the tokens are exactly those that were planned; another word than length is a finding of the run"

CATALOGUE = (
    Misbehaviour("[DONE] twice", rearranged(lambda e: [*e, DONE]), says="after [DONE]"),
    Misbehaviour("[DONE] first", rearranged(lambda e: [DONE, *e]), says="after [DONE]"),
    Misbehaviour("an event after [DONE]", rearranged(lambda e: [*e, e[0]]), says="after [DONE]"),
    Misbehaviour("no [DONE]", rearranged(lambda e: e[:-1]), says="without [DONE]"),
    Misbehaviour(
        "usage wrong, then right",
        edited(
            '"choices": [], "usage"',
            '"choices": [], "usage": {"prompt_tokens": 1, '
            '"completion_tokens": 6}}\n\ndata: {"id": "cmpl-x", "choices": [], "usage"',
        ),
        says="unexpected shape",
    ),
    Misbehaviour("usage a fraction", edited('"completion_tokens": 6', '"completion_tokens": 6.0'), says="usage counts"),
    Misbehaviour("usage negative", edited('"completion_tokens": 6', '"completion_tokens": -6'), says="usage counts"),
    Misbehaviour("usage true", edited('"completion_tokens": 6', '"completion_tokens": true'), says="usage counts"),
    Misbehaviour(
        "usage of 2^31", edited('"completion_tokens": 6', '"completion_tokens": 2147483648'), says="usage counts"
    ),
    Misbehaviour(
        "usage of 2^63", edited('"prompt_tokens": 40', '"prompt_tokens": 9223372036854775808'), says="usage counts"
    ),
    Misbehaviour("usage 1e400", edited('"prompt_tokens": 40', '"prompt_tokens": 1e400'), says="usage counts"),
    Misbehaviour(
        "usage Infinity", edited('"prompt_tokens": 40', '"prompt_tokens": Infinity'), says="not a JSON object"
    ),
    Misbehaviour("no usage", rearranged(lambda e: [*e[:-2], DONE]), says="no usage"),
    Misbehaviour(
        "more cached than prompt",
        edited('"prompt_tokens": 40', '"prompt_tokens": 40, "prompt_tokens_details": {"cached_tokens": 41}'),
        says="cached",
    ),
    Misbehaviour("token id 2^31", edited("[{id}]", "[2147483648]"), says="not all token ids"),
    Misbehaviour("token id 2^63", edited("[{id}]", "[9223372036854775808]"), says="not all token ids"),
    Misbehaviour("token id -1", edited("[{id}]", "[-1]"), says="not all token ids"),
    Misbehaviour("token id 1e400", edited("[{id}]", "[1e400]"), says="not all token ids"),
    Misbehaviour("token id of 5000 digits", edited("[{id}]", f"[{'9' * 5000}]"), says="not a JSON object"),
    Misbehaviour("token ids as text", edited("[{id}]", '"{id}"'), says="token_ids are not a list"),
    Misbehaviour("token ids as an object", edited("[{id}]", '{"0": {id}}'), says="token_ids are not a list"),
    Misbehaviour("token ids null", edited('"token_ids": [{id}]', '"token_ids": null'), says="no token_ids"),
    Misbehaviour("id null", edited('"id": "cmpl-', '"id": null, "was": "'), says="is not a name"),
    Misbehaviour("id an object", edited('"id": "cmpl-', '"id": {}, "was": "'), says="is not a name"),
    Misbehaviour("id changes", edited('"id": "cmpl-', '"id": "other-', count=1), says="after"),
    Misbehaviour("id of 1 MB", edited('"id": "cmpl-', f'"id": "{"x" * (1 << 20)}'), says="is not a name"),
    Misbehaviour("two choices", edited('"choices": [{', '"choices": [{"index": 0}, {'), says="one choice"),
    Misbehaviour("choice index 1", edited('"index": 0', '"index": 1'), says="one choice"),
    Misbehaviour("a lone surrogate", edited('" x"', '"\\ud800"'), says="not a JSON object"),
    Misbehaviour("depth 100,000", edited('" x"', "[" * 100_000), says="not a JSON object"),
    Misbehaviour("two events torn into each other", edited(", ", "\n\ndata: ", count=1), says="not a JSON object"),
    Misbehaviour(
        "markup and escapes in an error",
        rearranged(lambda e: [e[0], b'data: {"error": {"message": "[/x] \\u001b[2J [type=missing]"}}\n\n']),
        says=r"[/x] \x1b[2J [type=missing]",
    ),
    Misbehaviour(
        "status 101", with_head(b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"), says="not HTTP"
    ),
    Misbehaviour(
        "status 204", with_head(b"HTTP/1.1 204 No Content\r\n\r\n", body=lambda _: b"", after=KEEP), status="http_error"
    ),
    Misbehaviour(
        "gzip",
        with_head(
            b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n", body=gzip.compress, after=KEEP
        ),
        says="compressed",
    ),
    Misbehaviour("20,000 headers", with_head(FLOOD), says="not HTTP"),
    Misbehaviour(
        "a header of 1 MB", with_head(b"HTTP/1.1 200 OK\r\nX: " + b"y" * (1 << 20) + b"\r\n\r\n"), says="not HTTP"
    ),
    Misbehaviour("bytes after Content-Length", with_more_than_counted(CLOSE), says="not HTTP"),
    Misbehaviour("bytes after Content-Length, kept open", with_more_than_counted(KEEP), says="not HTTP"),
    Misbehaviour("Content-Length of 2^64", with_head(COUNTED.replace(b"%d", b"%d" % (1 << 64))), says="not HTTP"),
    Misbehaviour("two answers", twice(KEEP), says="not HTTP"),
    Misbehaviour("two answers, then the end", twice(CLOSE), says="not HTTP"),
    Misbehaviour("an answer before the answer", interim_first(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")),
    Misbehaviour("a bare LF in the head", with_head(COUNTED.replace(b"\r\n", b"\n"), after=KEEP), says="not HTTP"),
    Misbehaviour("a bare LF behind a chunk", in_chunks(lambda it: it.replace(b"\r\n", b"\n")), says="not HTTP"),
    Misbehaviour(
        "a chunk size with a space", in_chunks(lambda chunk: chunk.replace(b"\r\n", b" \r\n", 1)), says="not HTTP"
    ),
    Misbehaviour(
        "Content-Length and chunks",
        with_head(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nTransfer-Encoding: chunked\r\n\r\n"),
        says="not HTTP",
    ),
    Misbehaviour(
        "two Content-Lengths", with_head(b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\nContent-Length: %d\r\n\r\n")
    ),
    Misbehaviour("a negative Content-Length", with_head(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n")),
    Misbehaviour("HTTP/9.9", with_head(COUNTED.replace(b"1.1", b"9.9")), says="not HTTP"),
    Misbehaviour(
        "a head that folds", with_head(COUNTED.replace(b"OK", b"OK\r\nX: a\r\n b"), after=KEEP), says="not HTTP"
    ),
    *(
        Misbehaviour(f"Content-Length of {size}", with_head(COUNTED.replace(b"%d", b"%d" % size)), status="connection")
        for size in (1 << 63, (1 << 64) - 2, (1 << 64) - 1)
    ),
    Misbehaviour("stop at the exact length", edited('"length"', '"stop"'), status="ok", why=SAME_WORK),
    Misbehaviour("no finish reason", edited('"length"', "null"), status="ok", why=SAME_WORK),
    Misbehaviour("an unknown finish reason", edited('"length"', '"tired"'), status="ok", why=SAME_WORK),
    Misbehaviour("a finish reason of another kind", edited('"length"', '{"why": []}'), status="ok", why=SAME_WORK),
    Misbehaviour(
        "100 Continue before it",
        interim_first(b"HTTP/1.1 100 Continue\r\n\r\n"),
        status="ok",
        why="legal HTTP; the answer follows",
    ),
    Misbehaviour(
        "a trailer", in_chunks(bytes, KEEP, b"A: b\r\n"), status="ok", why="legal HTTP, read by the full parser"
    ),
    Misbehaviour(
        "comments between events",
        rearranged(lambda e: [b": ping\n\n", *e[:1], b": ping\n\n", *e[1:]]),
        status="ok",
        why="the form of an event stream allows them",
    ),
    Misbehaviour(
        "Content-Length on a stream", with_head(COUNTED, after=KEEP), status="ok", why="legal HTTP; the end is known"
    ),
)


def begun(first: bytes, num_events: int, after: str) -> Answering:
    """The first bytes, so many events of the legal stream, and no end."""
    return lambda asked: Reply([first, *chunked(events(asked))[:num_events]], after)


def a_chunk_alone(asked: Asked) -> Reply:
    return Reply([CHUNKED_HEAD, b"ffff\r\n", events(asked)[0]], HANG)


def without_end(first: bytes, again: bytes, every_s: float = 0.0) -> Answering:
    """A head, then the same for ever."""
    return lambda _asked: Reply(endless(first, again, every_s))


MANY = 1 << 18
OPEN_HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
TOKEN = b'data: {"id":"cmpl-x","choices":[{"index":0,"text":" x","token_ids":[1000],"finish_reason":null}]}\n\n'
# Ended by the deadline of the request, or by what no answer may exceed, whichever comes first.
ENDLESS = (
    Misbehaviour("no answer", begun(b"", 0, HANG), status="timeout"),
    Misbehaviour("half a head", begun(b"HTTP/1.1 200", 0, HANG), status="timeout"),
    Misbehaviour("a head alone", begun(CHUNKED_HEAD, 0, HANG), status="timeout"),
    Misbehaviour("a chunk alone", a_chunk_alone, "timeout"),
    Misbehaviour("half an event", begun(CHUNKED_HEAD, 1, HANG), "timeout"),
    Misbehaviour("reset in the middle", begun(CHUNKED_HEAD, 2, RESET), ""),
    Misbehaviour("one byte of a head each 20 ms", without_end(b"HTTP/1.1 200 OK\r\nX: ", b"y", every_s=0.02), ""),
    Misbehaviour("a comment each 20 ms", without_end(OPEN_HEAD, b": ping\n\n", every_s=0.02), ""),
    Misbehaviour("a token each 20 ms", without_end(OPEN_HEAD, TOKEN, every_s=0.02), ""),
    Misbehaviour("headers without end", without_end(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n" * 40_000), ""),
    Misbehaviour("a header without end", without_end(b"HTTP/1.1 200 OK\r\nX: ", b"y" * MANY), ""),
    Misbehaviour("comments without end", without_end(OPEN_HEAD, b": ping\n\n" * 30_000), ""),
    Misbehaviour("a comment without end", without_end(OPEN_HEAD, b":" * MANY), ""),
    Misbehaviour("an event without end", without_end(OPEN_HEAD, b"data: " + b"x" * MANY), ""),
    Misbehaviour("tokens without end", without_end(OPEN_HEAD, TOKEN * 2_000), ""),
    Misbehaviour("empty lines without end", without_end(OPEN_HEAD, b"\n" * MANY), ""),
    Misbehaviour("an error text without end", without_end(b"HTTP/1.1 500 Oh\r\n\r\n", b"e" * MANY), ""),
    Misbehaviour("chunks of one byte without end", without_end(CHUNKED_HEAD, b"1\r\n:\r\n" * 30_000), ""),
    Misbehaviour("100 Continue without end", without_end(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 9_000), ""),
)
