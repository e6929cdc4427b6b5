"""The client under a server that says anything: no exception, and a status for every row.

Answers are drawn: legal ones in every framing and in pieces cut at any byte, and broken ones; over TLS the records are
cut too. ``WIRE_FUZZ_EXAMPLES`` asks for more of them than a test run has time for.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.clock import NS_PER_S, ScaledClock
from harness.measure.client.run import replay_here
from harness.measure.client.target import Endpoint, ReplayResult, Target
from harness.model.plan.model import Plan
from harness.model.spec import ClientSpec
from tests.support.raw_server import CHUNKED_HEAD, CLOSE, KEEP, RESET, Asked, RawServer, Reply, chunked, events
from tests.support.replays import expected_prompts, plan_of, rows_of, session
from tests.support.tls import Served, TlsFront, certificate, trusting

pytestmark = [pytest.mark.live, pytest.mark.same_everywhere]

EXAMPLES = int(os.environ.get("WIRE_FUZZ_EXAMPLES", "60"))
NUM_SESSIONS, NUM_REQUESTS = 2, 3
# What a broken answer says where a legal one says something else.
ODD_WORDS = (
    b"",
    b"0",
    b"-1",
    b"2147483648",
    b"9223372036854775808",
    b"18446744073709551616",
    b"1e400",
    b"Infinity",
    b"null",
    b"[",
    b"]",
    b"[]",
    b"{}",
    b'"',
    b"\\",
    b"\r\n",
    b"\n\n",
    b"\r\n\r\n",
    b"\x00",
    b"\xff\xfe",
    b'"token_ids":[1,2,3]',
    b'"token_ids":[99999999999]',
    b'"token_ids":[' + b"7," * 400 + b"7]",
    b"data: [DONE]\n\n",
    b"0\r\n\r\n",
    b"ffffffffffffffff\r\n",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"Content-Length: 5\r\n",
    b"\\ud800",
    b"1" * 5000,
    b"[" * 400,
)


class Recipe(NamedTuple):
    """How one answer is made of the legal one. cuts: where it is cut into pieces; breaks: (place, length, word)."""

    framing: str
    sizes: list[int]
    extension: bytes
    trailer: bytes
    interim: int
    closes: bool
    cuts: list[int]
    breaks: list[tuple[int, int, bytes]]
    ends_at: int | None
    after: str

    @property
    def is_legal(self) -> bool:
        return not self.breaks and self.ends_at is None


def pieces_of(data: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({cut % len(data) for cut in cuts} - {0}) if data else []
    return [data[begin:end] for begin, end in zip([0, *places], [*places, len(data)], strict=True)]


def reply_to(asked: Asked, recipe: Recipe) -> Reply:
    body = b"".join(events(asked))
    close = b"Connection: close\r\n" if recipe.closes or recipe.framing == "close" else b""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + close
    if recipe.framing == "chunked":
        step = recipe.sizes[0]
        parts = [body[place : place + step] for place in range(0, len(body), step)]
        answer = CHUNKED_HEAD[:-2] + close + b"\r\n"
        answer += b"".join(chunked(parts, extension=recipe.extension, trailer=recipe.trailer))
    elif recipe.framing == "length":
        answer = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    else:
        answer = head + b"\r\n" + body
    data = bytearray(b"HTTP/1.1 100 Continue\r\n\r\n" * recipe.interim + answer)
    for place, length, word in recipe.breaks:
        begin = place % (len(data) + 1)
        data[begin : begin + length] = word
    if recipe.ends_at is not None:
        del data[recipe.ends_at % (len(data) + 1) :]
    # A broken answer may promise more than will come: without an end it would only be waited for.
    after = KEEP if recipe.is_legal and not close else recipe.after
    return Reply(pieces_of(bytes(data), recipe.cuts), after)


def recipes(*, is_broken: bool) -> st.SearchStrategy[Recipe]:
    breaks = st.lists(st.tuples(st.integers(0, 4_000), st.integers(0, 40), st.sampled_from(ODD_WORDS)), max_size=3)
    return st.builds(
        Recipe,
        framing=st.sampled_from(["chunked", "chunked", "length", "close"]),
        sizes=st.lists(st.integers(1, 900), min_size=1, max_size=1),
        extension=st.sampled_from([b"", b"", b";a", b';sum="1;2"']),
        trailer=st.sampled_from([b"", b"", b"X-Sum: 1\r\n", b"A: b\r\nC: 0\r\n"]),
        interim=st.sampled_from([0, 0, 0, 1, 2]),
        closes=st.booleans(),
        cuts=st.lists(st.integers(1, 4_000), max_size=12),
        breaks=breaks if is_broken else st.just([]),
        ends_at=st.one_of(st.none(), st.integers(0, 4_000)) if is_broken else st.none(),
        after=st.sampled_from([CLOSE, RESET]) if is_broken else st.just(CLOSE),
    )


def drawn(*, is_broken: bool) -> st.SearchStrategy[list[Recipe]]:
    return st.lists(recipes(is_broken=is_broken), min_size=6, max_size=6)


def replay_against(made: list[Recipe], tls: dict[str, Any] | None = None) -> tuple[Plan, ReplayResult, list[Asked]]:
    """Two sessions of three requests; made: how each of them is answered, in plan order; tls: how it speaks TLS."""
    plan = plan_of(*(session(index, num_requests=NUM_REQUESTS) for index in range(NUM_SESSIONS)))

    with (
        RawServer(lambda asked: reply_to(asked, made[asked.session * NUM_REQUESTS + asked.request])) as server,
        ExitStack() as stack,
    ):
        front: Served = server
        if tls is not None:
            stack.enter_context(trusting(certificate()))
            front = stack.enter_context(TlsFront(server, certificate(), **tls))
        endpoint = Endpoint(front.host, front.port, is_https=tls is not None)
        target = Target(endpoint, "null", ClientSpec(spin_us=0), ScaledClock(1.0), 5 * NS_PER_S)
        result = replay_here(plan, target, on_event=None, is_stopped=lambda: False)
    return plan, result, sorted(server.asked, key=lambda one: (one.session, one.request))


def fuzz(max_examples: int) -> Any:
    return settings(max_examples=max_examples, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


PIECES = st.sampled_from([0, 1, 3, 100, 1450])


def assert_exact(plan: Plan, result: ReplayResult, asked: list[Asked]) -> None:
    rows = rows_of(result)
    assert {row["status"] for row in rows} == {"ok"}, [row["error"] for row in rows]
    generated = {index: [one.ids for one in asked if one.session == index] for index in range(NUM_SESSIONS)}
    assert [one.fields["prompt"] for one in asked] == expected_prompts(plan, generated)


def assert_rows(result: ReplayResult) -> None:
    for row in rows_of(result):
        assert row["status"] in {"ok", "wrong_length", "bad_response", "http_error", "connection", "not_sent"}, row
        assert row["status"] == "ok" or row["error"]
        assert row["error"].isprintable()


@fuzz(EXAMPLES)
@given(drawn(is_broken=False))
def test_a_legal_answer_is_carried_exactly_however_it_is_framed_and_cut(made: list[Recipe]) -> None:
    assert_exact(*replay_against(made))


@fuzz(EXAMPLES)
@given(drawn(is_broken=True))
def test_a_broken_answer_ends_as_a_row(made: list[Recipe]) -> None:
    assert_rows(replay_against(made)[1])


@fuzz(EXAMPLES // 4)
@given(drawn(is_broken=False), PIECES, st.booleans())
def test_a_legal_answer_over_tls_is_carried_exactly_however_its_records_are_cut(
    made: list[Recipe], piece_bytes: int, closes: bool
) -> None:
    assert_exact(*replay_against(made, {"piece_bytes": piece_bytes, "closes": closes}))


@fuzz(EXAMPLES // 4)
@given(drawn(is_broken=True), PIECES, st.booleans())
def test_a_broken_answer_over_tls_ends_as_a_row(made: list[Recipe], piece_bytes: int, ends: bool) -> None:
    assert_rows(replay_against(made, {"piece_bytes": piece_bytes, "ends": ends})[1])
