"""A question to a server ends within its deadline and its size, and what went wrong is a word in the reply."""

from __future__ import annotations

import gzip

import pytest

from harness.measure.client.target import Endpoint
from harness.measure.server.ask import HTTP_OK, NO_ANSWER, ask, ask_metrics, ask_url, asking_process, next_call_ns
from harness.measure.server.ask import Reply as Answer
from tests.support.forked_children import started_anew
from tests.support.processes import NO_PORT, WITHIN_S, commands_of_children
from tests.support.raw_server import CLOSE, HANG, KEEP, RESET, Asked, RawServer, Reply, endless, whole

pytestmark = pytest.mark.live
HEAD = b"HTTP/1.1 200 OK\r\n"


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (Reply(endless(HEAD + b"\r\n", bytes(1 << 20))), "TooLong"),
        (Reply(endless(HEAD, b"X-More: " + b"y" * 4_000 + b"\r\n")), "buffer too long"),
        (Reply([HEAD + b"Content-Length: 1099511627776\r\n\r\nabc"], CLOSE), "without sending complete"),
        (Reply([HEAD + b"Content-Length: 99999999999999999999999\r\n\r\n"], CLOSE), "bad Content-Length"),
        (Reply([whole(gzip.compress(bytes(1 << 20)), b"Content-Encoding: gzip")]), "compressed"),
        (
            Reply([b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"], CLOSE),
            "RemoteProtocolError",
        ),
        (Reply([b"SSH-2.0-OpenSSH\r\n\r\n"], CLOSE), "illegal status line"),
        (Reply([], CLOSE), "disconnected without sending a response"),
        (Reply([HEAD], RESET), "Connection"),
        (Reply([HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\nab"], CLOSE), "incomplete chunked read"),
    ],
)
def test_a_server_that_misbehaves_is_a_word_in_the_reply(reply: Reply, says: str) -> None:
    with RawServer(lambda _asked: reply) as server:
        answer = ask(Endpoint(server.host, server.port), "/metrics", deadline_s=WITHIN_S)
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
        answer = ask(Endpoint(server.host, server.port), "/health", deadline_s=WITHIN_S)
    assert answer == Answer(HTTP_OK, b"hello")


def test_json_of_any_depth_and_size_of_number_is_no_exception() -> None:
    bodies = iter(
        [b"[" * 100_000, b'{"a":1e999}', b'{"a":' + b"9" * 5000 + b"}", b'{"a":"\\ud800"}', b'{"version":"1"}']
    )
    with RawServer(lambda _asked: Reply([whole(next(bodies))])) as server:
        read = [ask(Endpoint(server.host, server.port), "/version", deadline_s=WITHIN_S).json() for _ in range(5)]
    assert read[0] is read[2] is read[3] is None
    assert read[4] == {"version": "1"}


def test_no_server_and_no_such_host_are_words_too() -> None:
    assert ask(Endpoint("127.0.0.1", NO_PORT), "/", deadline_s=WITHIN_S).error.startswith("ConnectionRefusedError")
    assert ask(Endpoint("no host", 80), "/", deadline_s=WITHIN_S).error


@pytest.mark.parametrize(
    "reply",
    [
        Reply([], HANG),
        Reply([HEAD], HANG),
        Reply(endless(HEAD + b"Content-Length: 100000\r\n\r\n", b"x", every_s=0.02)),
        Reply(endless(HEAD, b"X-More: y\r\n", every_s=0.02)),
        Reply(endless(HEAD + b"\r\n", b"x", every_s=0.02)),
    ],
)
def test_a_server_that_does_not_come_to_an_end_is_cut_off_wherever_it_is(reply: Reply) -> None:
    with RawServer(lambda _asked: reply) as server:
        answer = ask(Endpoint(server.host, server.port), "/metrics", deadline_s=0.5)
    assert (answer.status, answer.body) == (NO_ANSWER, b"")
    # Of a server that says nothing at all, the socket's own limit may come first.
    assert answer.error in ("TimeoutError: no whole answer within the limit", "TimeoutError: timed out")


def test_no_redirect_is_followed_and_no_proxy_or_password_of_the_environment_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    moved = Reply([b"HTTP/1.1 302 Found\r\nLocation: /other\r\nContent-Length: 0\r\n\r\n"])
    with RawServer(lambda _asked: moved) as server:
        answer = ask(Endpoint(server.host, server.port), "/metrics", deadline_s=WITHIN_S)
    assert answer == Answer(302, b"")
    assert [asked.path for asked in server.asked] == ["/metrics"]


def test_metrics_are_read_where_the_same_server_redirects_to_and_another_server_gets_no_key() -> None:
    def answer(asked: Asked) -> Reply:
        head = b"HTTP/1.1 307 Temporary Redirect\r\nContent-Length: 0\r\nLocation: "
        places = {"/metrics": b"/metrics/", "/away": b"http://127.0.0.1:1/metrics"}
        place = places.get(asked.path)
        return Reply([whole(b"up 1") if place is None else head + place + b"\r\n\r\n"])

    with RawServer(answer) as server:
        reply, place = ask_metrics(f"{server.url}/metrics", deadline_s=WITHIN_S)
        away, _ = ask_metrics(f"{server.url}/away", deadline_s=WITHIN_S, headers={"Authorization": "Bearer k"})
    assert (reply.status, reply.body, place) == (HTTP_OK, b"up 1", f"{server.url}/metrics/")
    assert (away.status, away.error) == (307, "status 307, a redirect to http://127.0.0.1:1/metrics")


def test_a_key_that_is_no_header_is_in_no_error() -> None:
    with RawServer(lambda _asked: Reply([whole(b"")])) as server:
        url = f"{server.url}/health"
        answer = ask_url(url, deadline_s=WITHIN_S, headers={"Authorization": "Bearer sk\nsecret"})
        assert (
            ask_url(url, deadline_s=WITHIN_S, headers={"Authorization": "Bearer sk-ends-in-a-space "}).status == HTTP_OK
        )
    assert answer.status == NO_ANSWER
    assert "secret" not in answer.error


def test_another_process_asks_as_this_one_does_and_its_death_is_a_word_too() -> None:
    bodies = iter([whole(b"one"), whole(b"two")])
    with (
        started_anew(),
        RawServer(lambda _asked: Reply([next(bodies)])) as server,
        asking_process(f"{server.url}/metrics", {"X-Key": "1"}) as get,
    ):
        assert [get(WITHIN_S), get(WITHIN_S)] == [Answer(HTTP_OK, b"one"), Answer(HTTP_OK, b"two")]
        (process,) = (child for child, command in commands_of_children() if "answer_requests" in command)
        process.kill()
        assert get(WITHIN_S) == Answer(NO_ANSWER, b"", "ChildProcessError: the process that asks has ended")
    assert [asked.path for asked in server.asked] == ["/metrics"] * 2


def test_random_gaps_keep_step_with_nothing_periodic_and_stay_near_the_interval() -> None:
    gaps = [next_call_ns(0, 0, 1000, has_random_gaps=True) for _ in range(50)]
    assert all(500 <= gap <= 1500 for gap in gaps)
    assert len(set(gaps)) > 20
    assert next_call_ns(0, 2500, 1000, has_random_gaps=False) == 3000
