"""Body and headers of a request hold its own values, with TLS and without."""

from __future__ import annotations

import json

import pytest

from harness.errors import SpecError
from harness.measure.client.prompts import RequestOptions, request_values
from harness.model.spec import RequestSpec
from harness.secrets import without_secrets
from tests.support.raw_server import CHUNKED_HEAD, Asked, RawServer, Reply, chunked, events
from tests.support.replays import SCHEMES, plan_of, rows_of, run, session

VALUES = request_values(3, 1, ("abcd-3", "abcd-3-1"), 2_500_000_000, (100, 20))
LAST = request_values(3, 2, ("abcd-3", "abcd-3-2"), None, (100, 20))


def body_of(spec: RequestSpec, values: object = VALUES) -> dict[str, object]:
    return json.loads(b"{" + RequestOptions(spec).body(lambda: values)[1:] + b"}")


def test_a_placeholder_alone_is_a_value_and_within_a_text_its_words() -> None:
    spec = RequestSpec(
        extra_body={
            "hold_s": "{expected_wait_s}",
            "route": {"name": "s{session}-t{turn}", "of": ["{session_id}", "{{session}}", 7]},
        }
    )
    assert body_of(spec) == {"hold_s": 2.5, "route": {"name": "s3-t1", "of": ["abcd-3", "{session}", 7]}}
    assert body_of(spec, LAST)["hold_s"] is None


def test_a_header_without_a_value_is_left_out_and_a_variable_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RequestSpec(headers={"x-hold": "{expected_wait_ms}", "x-api-key": "{env:GATE_KEY}"})
    monkeypatch.delenv("GATE_KEY", raising=False)
    with pytest.raises(SpecError, match="no usable text in GATE_KEY"):
        RequestOptions(spec)
    monkeypatch.setenv("GATE_KEY", "sk-gate-1")
    options = RequestOptions(spec)
    assert options.headers(lambda: VALUES) == {"x-hold": "2500.0", "x-api-key": "sk-gate-1"}
    assert options.headers(lambda: LAST) == {"x-api-key": "sk-gate-1"}
    assert without_secrets("key sk-gate-1") == "key redacted"


@pytest.mark.live
def test_the_parts_of_a_session_have_one_name_and_say_when_the_next_part_begins() -> None:
    seen: list[Asked] = []

    def answer(asked: Asked) -> Reply:
        seen.append(asked)
        return Reply([CHUNKED_HEAD, *chunked(events(asked))])

    request = RequestSpec(extra_body={"keep_kv_ms": "{expected_wait_ms}", "name": "{session_id}"})
    goes_on = session(2, after=0, continues=0, start_offset_ns=7_000_000, keep_first=46, num_requests=1)
    with RawServer(answer) as server:
        rows = rows_of(run(plan_of(session(0, num_requests=1), session(1), goes_on), server, request=request))
    assert {row["status"] for row in rows} == {"ok"}, rows[0]["error"]
    told = {(each.session, each.request): (each.fields["name"][-1], each.fields["keep_kv_ms"]) for each in seen}
    assert told == {(0, 0): ("0", 7.0), (1, 0): ("1", 0.0), (1, 1): ("1", None), (2, 0): ("0", None)}


@pytest.mark.live
@pytest.mark.parametrize("own", [{}, {"X-Session-Token": "s{session}"}])
def test_a_routers_token_goes_back_with_the_next_request_of_its_session_alone(own: dict[str, str]) -> None:
    seen: dict[tuple[int, int], str | None] = {}

    def answer(asked: Asked) -> Reply:
        seen[asked.session, asked.request] = asked.header("x-session-token")
        # The second answer of a session has none: the first stays.
        line = b"" if asked.request else b"X-Session-Token: pod-%d==\r\n" % asked.session
        head = CHUNKED_HEAD.replace(b"\r\nContent-Type", b"\r\n" + line + b"Content-Type")
        return Reply([head, *chunked(events(asked))])

    goes_on = session(2, after=0, continues=0, keep_first=60, num_requests=1)
    with RawServer(answer) as server:
        plan = plan_of(session(0), session(1, num_requests=3), goes_on)
        rows = rows_of(run(plan, server, request=RequestSpec(headers=own)))
    assert {row["status"] for row in rows} == {"ok"}, [row["error"] for row in rows]
    if own:
        assert seen == {key: f"s{key[0]}" for key in seen}
    else:
        first, then = {(0, 0): None, (1, 0): None}, {(0, 1): "pod-0==", (1, 1): "pod-1==", (1, 2): "pod-1=="}
        assert seen == {**first, **then, (2, 0): "pod-0=="}


@pytest.mark.live
@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_request_carries_what_its_workload_names(scheme: str) -> None:
    seen: list[Asked] = []

    def answer(asked: Asked) -> Reply:
        seen.append(asked)
        return Reply([CHUNKED_HEAD, *chunked(events(asked))])

    request = RequestSpec(
        max_completion_tokens=True,
        temperature=0.7,
        extra_body={"turn": "{turn}", "keep": True},
        headers={"x-session": "{session_id}"},
    )
    with RawServer(answer) as server:
        rows = rows_of(run(plan_of(session(0), session(1)), server, scheme, request=request))
    assert {row["status"] for row in rows} == {"ok"}, rows[0]["error"]
    for asked in seen:
        assert (asked.fields["turn"], asked.fields["keep"]) == (asked.request, True)
        assert asked.fields["temperature"] == 0.7
        assert "max_tokens" not in asked.fields
        assert asked.fields["max_completion_tokens"] > 0
