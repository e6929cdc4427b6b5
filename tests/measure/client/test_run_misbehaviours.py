"""Whatever a server does wrong with an answer ends as its catalogue says, with TLS and without."""

from __future__ import annotations

import pytest

from harness.clock import NS_PER_MS
from harness.measure.client.answer import scan_json
from tests.support.misbehaviours import CATALOGUE, ENDLESS, Misbehaviour
from tests.support.raw_server import CHUNKED_HEAD, CLOSE, RESET, Asked, RawServer, Reply, answered, chunked, events
from tests.support.replays import SCHEMES, plan_of, rows_of, run, session

pytestmark = pytest.mark.live
GOOD = Misbehaviour("none", answered, "ok", why="it is legal")


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_misbehaviour_ends_as_its_catalogue_says_and_other_sessions_go_on(scheme: str) -> None:
    def answer(asked: Asked) -> Reply:
        if asked.request == 0 and asked.session < len(CATALOGUE):
            return CATALOGUE[asked.session].answer(asked)
        return answered(asked)

    with RawServer(answer) as server:
        rows = rows_of(run(plan_of(*(session(place) for place in range(len(CATALOGUE) + 1))), server, scheme))
    for wrong, row, next_row in zip([*CATALOGUE, GOOD], rows[::2], rows[1::2], strict=True):
        assert row["status"] == wrong.status, (wrong.name, row["error"])
        assert wrong.says in row["error"], wrong.name
        assert row["error"].isprintable(), wrong.name
        assert (wrong.status == "ok") == bool(wrong.why), wrong.name
        assert next_row["status"] == ("ok" if wrong.status == "ok" else "not_sent"), (wrong.name, next_row["error"])
        assert wrong.status == "ok" or row["error"], wrong.name


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("after", [CLOSE, RESET])
@pytest.mark.parametrize("wait_ms", [0, 1, 20])
def test_a_whole_answer_whose_connection_closes_unannounced_costs_no_request(
    wait_ms: int, after: str, scheme: str
) -> None:
    with RawServer(lambda asked: Reply([b"".join([CHUNKED_HEAD, *chunked(events(asked))])], after)) as server:
        sessions = (session(place, num_requests=4, wait_ns=wait_ms * NS_PER_MS) for place in range(4))
        rows = rows_of(run(plan_of(*sessions), server, scheme))
    assert {row["status"] for row in rows} == {"ok"}, [row["error"] for row in rows]
    assert len(server.asked) == len(rows), "no request was read twice"


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_request_goes_out_again_once_and_only_after_a_whole_answer(scheme: str) -> None:
    with RawServer(lambda asked: answered(asked) if asked.request == 0 else Reply([], CLOSE)) as server:
        rows = rows_of(run(plan_of(session(0)), server, scheme))
    assert [row["status"] for row in rows] == ["ok", "connection"]
    assert [asked.request for asked in server.asked] == [0, 1, 1]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_answers_without_end_all_end_at_the_deadline_or_before(scheme: str) -> None:
    with RawServer(lambda asked: ENDLESS[asked.session].answer(asked)) as server:
        sessions = (session(place, num_requests=1) for place in range(len(ENDLESS)))
        rows = rows_of(run(plan_of(*sessions), server, scheme, timeout_s=0.2))
    for wrong, row in zip(ENDLESS, rows, strict=True):
        assert row["status"] in ({wrong.status} if wrong.status else {"timeout", "bad_response", "connection"}), wrong
        assert row["error"]
        assert row["error"].isprintable()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_a_parser_raises_for_one_answer_fails_that_request_alone(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail_for_one(text: bytes) -> object:
        if b"poison" in text:
            raise OverflowError("Python int too large to convert to C int")
        return scan_json(text)

    monkeypatch.setattr("harness.measure.client.answer.scan_json", fail_for_one)

    def answer(asked: Asked) -> Reply:
        parts = events(asked)
        if (asked.session, asked.request) == (0, 0):
            parts[2] = parts[2].replace(b" x", b"poison")
        return Reply([CHUNKED_HEAD, *chunked(parts)])

    with RawServer(answer) as server:
        rows = rows_of(run(plan_of(session(0), session(1)), server, scheme))
    assert rows[0]["status"] == "bad_response"
    assert "OverflowError: Python int too large" in rows[0]["error"]
    assert {row["status"] for row in rows[2:]} == {"ok"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_tolerated_is_counted_once_for_each_answer(scheme: str) -> None:
    def answer(asked: Asked) -> Reply:
        parts = [part.replace(b'"id"', b'"error": null, "id"') for part in events(asked)]
        if asked.session:
            parts = [part.replace(b'"id": "cmpl-', b'"id": "%d-' % place) for place, part in enumerate(parts)]
        return Reply([CHUNKED_HEAD, *chunked(parts[:-1] if asked.request else parts)])

    with RawServer(answer) as server:
        result = run(plan_of(session(0), session(1)), server, scheme, is_strict=False)
    assert {row["status"] for row in rows_of(result)} == {"ok"}, rows_of(result)[0]["error"]
    assert result.audit["tolerated"] == {"error-null": 4, "id-changes": 2, "done-missing": 2}
