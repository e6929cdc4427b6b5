"""Whatever a server does wrong with an answer ends as its catalogue says, with both clients."""

from __future__ import annotations

import pytest

from tests.support.misbehaviours import CATALOGUE, ENDLESS, Misbehaviour
from tests.support.raw_server import CHUNKED_HEAD, Asked, RawServer, Reply, chunked, events
from tests.support.replays import plan_of, rows_of, run, session

pytestmark = pytest.mark.live


@pytest.mark.parametrize("client", ["epoll", "aiohttp"])
@pytest.mark.parametrize("wrong", CATALOGUE, ids=lambda one: one.name)
def test_a_misbehaviour_ends_as_its_catalogue_says(wrong: Misbehaviour, client: str) -> None:
    def answer(asked: Asked) -> Reply:
        if (asked.session, asked.request) == (0, 0):
            return wrong.answer(asked)
        return Reply([CHUNKED_HEAD, *chunked(events(asked))])

    with RawServer(answer) as server:
        rows = rows_of(run(plan_of(session(0), session(1)), server, client, timeout_s=20))
    assert rows[0]["status"] == wrong.status, rows[0]["error"]
    assert wrong.says in rows[0]["error"]
    assert rows[0]["error"].isprintable()
    assert (wrong.status == "ok") == bool(wrong.why)
    assert {row["status"] for row in rows[2:]} == {"ok"}
    if wrong.status != "ok":
        assert rows[1]["status"] == "not_sent"
        assert rows[0]["error"]


@pytest.mark.parametrize("client", ["epoll", "aiohttp"])
def test_answers_without_end_all_end_at_the_deadline_or_before(client: str) -> None:
    with RawServer(lambda asked: ENDLESS[asked.session].answer(asked)) as server:
        sessions = (session(place, num_requests=1) for place in range(len(ENDLESS)))
        rows = rows_of(run(plan_of(*sessions), server, client, timeout_s=0.5))
    for wrong, row in zip(ENDLESS, rows, strict=True):
        assert row["status"] in ({wrong.status} if wrong.status else {"timeout", "bad_response", "connection"}), wrong
        assert row["error"]
        assert row["error"].isprintable()
