"""A question to a server ends within its deadline and its size, and what went wrong is a word in the reply."""

from __future__ import annotations

import gc
import gzip
import threading
from collections.abc import Iterator

import pytest

from harness.measure.client.answer import Answer
from harness.measure.client.exchange import Exchange
from harness.measure.client.target import Endpoint
from harness.measure.server.ask import HTTP_OK, NO_ANSWER, ask
from harness.measure.server.process import free_port
from tests.support.raw_server import CLOSE, HANG, KEEP, RESET, Asked, RawServer, Reply

pytestmark = pytest.mark.live
HEAD = b"HTTP/1.1 200 OK\r\n"


def dripping() -> Iterator[bytes]:
    yield HEAD + b"Content-Length: 100000\r\n\r\n"
    while True:
        threading.Event().wait(0.02)
        yield b"x"


def endless() -> Iterator[bytes]:
    yield HEAD + b"\r\n"
    while True:
        yield bytes(1 << 20)


def flooding() -> Iterator[bytes]:
    yield HEAD
    while True:
        yield b"X-More: " + b"y" * 4_000 + b"\r\n"


def whole(body: bytes, *headers: bytes) -> bytes:
    return HEAD + b"".join(b"%b\r\n" % one for one in headers) + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(dripping()), "TimeoutError"),
        (Reply([], HANG), "TimeoutError"),
        (Reply([HEAD], HANG), "TimeoutError"),
        (Reply(endless()), "TooLong"),
        (Reply(flooding()), "the head does not end"),
        (Reply([HEAD + b"Content-Length: 1099511627776\r\n\r\nabc"], CLOSE), "in the middle"),
        (Reply([HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n"], CLOSE), "not HTTP"),
        (Reply([whole(gzip.compress(bytes(1 << 20)), b"Content-Encoding: gzip")]), "compressed"),
        (Reply([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], CLOSE), "not HTTP"),
        (Reply([b"SSH-2.0-OpenSSH\r\n\r\n"], CLOSE), "not HTTP"),
        (Reply([], CLOSE), "closed before an answer"),
        (Reply([HEAD], RESET), "Connection"),
        (Reply([HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"], CLOSE), "in the middle"),
    ],
)
def test_a_server_that_misbehaves_is_a_word_in_the_reply_within_the_deadline(reply: Reply, says: str) -> None:
    with RawServer(lambda _asked: reply) as server:
        answer = ask(Endpoint(server.host, server.port), "/metrics", deadline_s=1.0)
    assert (answer.status, answer.body) == (NO_ANSWER, b"")
    assert says in answer.error


@pytest.mark.parametrize(
    "pieces",
    [
        [whole(b"hello")],
        [HEAD + b"\r\n", b"hel", b"lo"],
        [HEAD + b"Transfer-Encoding: chunked\r\n\r\n3\r\nhel\r\n2;a=b\r\nlo\r\n0\r\nTrailer: 1\r\n\r\n"],
        [b"HTTP/1.1 100 Continue\r\n\r\n", whole(b"hello")],
        [whole(b"hello", b"Content-Encoding: identity")],
    ],
)
@pytest.mark.parametrize("after", [CLOSE, KEEP])
def test_every_framing_of_an_answer_is_understood(pieces: list[bytes], after: str) -> None:
    ends_at_close = pieces[0] == HEAD + b"\r\n"
    with RawServer(lambda _asked: Reply(pieces, CLOSE if ends_at_close else after)) as server:
        answer = ask(Endpoint(server.host, server.port), "/health", deadline_s=10.0)
    assert answer == (HTTP_OK, b"hello", "")


def test_json_of_any_depth_and_size_of_number_is_no_exception() -> None:
    bodies = iter(
        [b"[" * 100_000, b'{"a":1e999}', b'{"a":' + b"9" * 5000 + b"}", b'{"a":"\\ud800"}', b'{"version":"1"}']
    )

    def reply(_asked: Asked) -> Reply:
        return Reply([whole(next(bodies))])

    with RawServer(reply) as server:
        read = [ask(Endpoint(server.host, server.port), "/version", deadline_s=10.0).json() for _ in range(5)]
    assert read[0] is read[2] is read[3] is None
    assert read[4] == {"version": "1"}


def test_no_server_and_no_such_host_are_words_too() -> None:
    assert ask(Endpoint("127.0.0.1", free_port()), "/", deadline_s=5.0).error.startswith("ConnectionRefusedError")
    assert ask(Endpoint("no host", 80), "/", deadline_s=5.0).error


def test_an_answer_is_freed_at_once_while_a_replay_collects_no_cycles() -> None:
    held = 0
    with RawServer(lambda _asked: Reply([whole(bytes(64))])) as server:
        gc.collect()
        gc.disable()
        try:
            ask(Endpoint(server.host, server.port), "/metrics", deadline_s=1.0)
            held = sum(isinstance(item, Exchange | Answer) for item in gc.get_objects())
        finally:
            gc.enable()
    assert held == 0
