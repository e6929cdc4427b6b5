"""Claude Code's files: a message counts once over all files, and a placeholder is no length of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S
from harness.model.traces.calls import ATTEMPTS, BACK, LATE, REJECTED, SUMMARY
from harness.model.traces.claude import INTERRUPTED
from harness.model.traces.links import ALLOWED, CACHE_LEFT_OUT, MAY_ASK, MISSING, REPEATED, UNANSWERED
from harness.model.traces.recording import CACHE_GONE, NO_CACHE, TraceFile, describe_trace, open_trace
from tests.support.sound_traces import claude_rows, qwen_rows
from tests.support.trace_rows import SECRET, assistant, at, imported, result, text, tool, user, written

RESUMED_S = 1000.0


def resumed(
    before: Iterable[Any], session: str, turns: int, first_s: float, *, keeps_rows: bool = True
) -> Iterator[Any]:
    """A resumed session's file: a copy of the earlier rows under its own id, then its own."""
    for row in before:
        yield row | {"sessionId": session} | ({} if keeps_rows else {"uuid": f"{session}-{row['uuid']}"})
    yield from claude_rows(session, turns, first_s)


@pytest.mark.parametrize("keeps_rows", [True, False])
def test_a_resumed_copy_and_a_copy_of_it_count_each_message_once_in_any_order(tmp_path: Path, keeps_rows: bool) -> None:
    first = list(claude_rows("a", 4))
    second = list(resumed(first, "b", 3, RESUMED_S, keeps_rows=keeps_rows))
    third = list(resumed(second, "c", 2, 2 * RESUMED_S, keeps_rows=keeps_rows))
    paths = [written(tmp_path, rows, name) for name, rows in (("x", first), ("y", second), ("z", third))]
    for files in permutations(paths):
        trace = imported(*files)
        assert (len(trace.recordings), trace.num_requests) == (1, 4 + 3 + 2)
        assert sum(trace.head.dropped.values()) == 4 + 7
    assert imported(paths[2]).num_requests == 9, "alone, the last file is the whole conversation"


def test_a_copy_that_keeps_the_sessions_id_is_gone_on_from_too(tmp_path: Path) -> None:
    first = list(claude_rows("a", 4))
    own = list(claude_rows("b", 3, RESUMED_S))
    own[0] |= {"parentUuid": first[-1]["uuid"]}
    paths = [written(tmp_path, first, "x"), written(tmp_path, [*first, *own], "y")]
    for files in (paths, paths[::-1], paths[1:]):
        (recording,) = imported(*files).recordings
        assert [request.after for request in recording.requests] == [(), *((place,) for place in range(6))]


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("cached", [(0, 0, 0), (0, 510, 100), (0, None, None)])
def test_a_resumed_copy_says_of_its_cache_what_its_rows_in_one_file_say(
    tmp_path: Path, name: str, cached: tuple[Any, ...]
) -> None:
    rows = list(claude_rows("a"))
    for row in (row for row in rows if row["type"] == "assistant"):
        turn = int(row["uuid"][-1])
        counts = {"cache_read_input_tokens": cached[turn]}
        row["message"]["usage"] |= {"input_tokens": 1000 + 500 * turn, "cache_creation_input_tokens": 0} | counts
    whole = imported(written(tmp_path, rows, "whole"))
    copies = imported(
        written(tmp_path, rows[:7], "x"), written(tmp_path, [row | {"sessionId": name} for row in rows], "y")
    )
    assert copies.head.labels == whole.head.labels
    assert [one.requests for one in copies.recordings] == [one.requests for one in whole.recordings]


@pytest.mark.parametrize("rows_of", [claude_rows, qwen_rows])
def test_a_row_of_another_session_is_of_that_and_the_wait_behind_it_is_not_known(
    tmp_path: Path, rows_of: Callable[..., Iterator[Any]]
) -> None:
    trace = imported(written(tmp_path, [*rows_of("a"), *rows_of("b", 3, 100.0)]))
    assert [len(one.requests) for one in trace.recordings] == [3, 3]
    labels = [label for label in trace.head.labels if MAY_ASK not in label]
    assert labels == [f"2 x {UNANSWERED}"], "sessions one after another are sessions of their own"
    rows = [row | {"parentUuid": before["uuid"]} for before, row in pairwise([{"uuid": ""}, *rows_of("a")])]
    foreign = [
        row | ({"sessionId": "b"} if (row["type"], row["uuid"][-1]) == ("assistant", "1") else {}) for row in rows
    ]
    trace = imported(written(tmp_path, foreign))
    (recording,) = trace.recordings
    assert [one.after for one in recording.requests] == [(), (0,), (0,)], "the row goes on from the session's call"
    assert max(recording.requests, key=lambda one: one.prompt_tokens).is_drawn
    assert "1 x waits that are unknown: a row before theirs is of another session" in trace.head.labels


def test_two_sessions_resumed_from_one_begin_with_its_stream(tmp_path: Path) -> None:
    first = list(claude_rows("a", 2))
    files = [written(tmp_path, first, "a")]
    files += [
        written(tmp_path, resumed(first, name, 1, RESUMED_S * start), name) for start, name in ((1, "b"), (2, "c"))
    ]
    (recording,) = imported(*files).recordings
    assert [request.after for request in recording.requests] == [(), (0,), (1,), (1,)]


def test_a_sub_agent_copied_with_its_session_counts_once_and_stays_with_its_parent(tmp_path: Path) -> None:
    side = {"isSidechain": True, "agentId": "kid"}

    def rows(session: str) -> list[Any]:
        mine = {"sessionId": session}
        return [
            user(0.0, **mine),
            assistant("a", 1.0, (10, 1000, 0, 40), tool("t1"), **mine),
            user(1.5, **side, **mine),
            assistant("k", 4.0, (10, 300, 0, 50), text(), **side, **mine),
            result("t1", 4.75, agent="kid") | mine,
            assistant("b", 7.0, (2, 100, 1010, 30), text(), **mine),
        ]

    alone = imported(written(tmp_path, rows("old"), "old"))
    both = imported(written(tmp_path, rows("old"), "old"), written(tmp_path, rows("new"), "new"))
    assert [one.requests for one in both.recordings] == [one.requests for one in alone.recordings]
    assert both.head.dropped == {
        "calls that were read before: copied into a resumed or forked session, or given twice": 3
    }


def answered(output: int, *parts: dict[str, Any]) -> list[Any]:
    return [user(0.0), assistant("a", 2.0, (10, 1000, 0, output), *parts), user(9.0)]


LONG = {"type": "text", "text": "word " * 400}
WRITE = {"type": "tool_use", "id": "t", "name": "Write", "input": {"content": "word " * 400}}


@pytest.mark.parametrize("output", [0, 1, 2, 8, 30])
@pytest.mark.parametrize("part", [LONG, WRITE, {"type": "thinking", "thinking": "word " * 400}])
def test_a_placeholder_beside_a_long_answer_is_estimated_and_labelled(
    tmp_path: Path, output: int, part: dict[str, Any]
) -> None:
    trace = imported(written(tmp_path, answered(output, part)))
    assert 500 <= trace.recordings[0].requests[0].generate_tokens <= 510
    assert trace.head.labels[1:] == (
        "1 x output tokens estimated from characters, 4 to a token: the recording has a placeholder",
    )


def test_a_count_that_can_be_of_its_answer_is_kept(tmp_path: Path) -> None:
    for output, part in ((400, LONG), (250, WRITE), (3, {"type": "text", "text": "Done."})):
        trace = imported(written(tmp_path, answered(output, part)))
        assert trace.recordings[0].requests[0].generate_tokens == output
        assert not [label for label in trace.head.labels if "estimated" in label]


def test_answers_of_one_token_stay_and_short_ones_that_call_a_tool_are_labelled(tmp_path: Path) -> None:
    done = {"type": "text", "text": "Ok"}
    for output, part, is_labelled in ((1, done, False), (2, tool("t"), True), (3, tool("t"), False)):
        trace = imported(written(tmp_path, [*answered(output, part), result("t", 10.0)]))
        assert trace.recordings[0].requests[0].generate_tokens == output
        assert any("likely placeholders" in label for label in trace.head.labels) == is_labelled


@pytest.mark.parametrize(("turns", "are_known"), [(20, False), (50, True)])
def test_waits_are_unknown_where_more_than_a_hundredth_of_the_rows_is_of_unknown_types(
    tmp_path: Path, turns: int, are_known: bool
) -> None:
    rows = list(claude_rows("a", turns))
    trace = imported(written(tmp_path, [*rows, rows[-1] | {"type": "from_tomorrow", "uuid": "x"}]))
    assert len(rows) == 3 * turns + 1
    assert {request.is_drawn for request in trace.recordings[0].requests[1:]} == {not are_known}


def test_side_chains_without_a_link_run_as_sessions_of_their_own(tmp_path: Path) -> None:
    def side(name: str, at_s: float) -> list[Any]:
        more = {"isSidechain": True}
        return [
            user(at_s, uuid=f"{name}-1", **more),
            assistant(name, at_s + 1, (10, 300, 0, 50), text(), uuid=f"{name}-2", parentUuid=f"{name}-1", **more),
            user(at_s + 2, uuid=f"{name}-3", parentUuid=f"{name}-2", **more),
            assistant(
                f"{name}'", at_s + 3, (10, 100, 300, 50), text(), uuid=f"{name}-4", parentUuid=f"{name}-3", **more
            ),
        ]

    rows = [user(0.0), assistant("a", 1.0, (10, 1000, 0, 40), text()), *side("x", 2), *side("y", 6)]
    trace = imported(written(tmp_path, rows))
    assert sorted(len(recording.requests) for recording in trace.recordings) == [1, 2, 2]
    assert trace.head.labels == ("2 x agents without a link run as sessions of their own",)


def test_usage_that_grows_from_row_to_row_of_a_message_counts_once_and_last(tmp_path: Path) -> None:
    rows = [user(0.0), *(assistant("a", 1.0 + n, (10, 1000, 0, 3**n), LONG | {"text": "x" * n}) for n in range(1, 6))]
    trace = imported(written(tmp_path, rows))
    assert [request.generate_tokens for request in trace.recordings[0].requests] == [3**5]
    assert not trace.head.labels


@pytest.mark.parametrize("message", [None, "x", {"role": "user"}, {"content": []}, {"content": 3}])
def test_a_users_row_without_its_message_is_broken_and_leaves_no_wait_known(tmp_path: Path, message: object) -> None:
    rows = [json.loads(json.dumps(row)) for row in claude_rows("s")]
    rows[3]["message"] = message
    trace = imported(written(tmp_path, rows))
    assert trace.head.broken == {"a user's row without its message": 1}
    assert trace.recordings[0].requests[1].is_drawn


def test_rows_without_the_id_of_their_session_are_labelled(tmp_path: Path) -> None:
    rows = [json.loads(json.dumps(row)) for row in claude_rows("s")]
    del rows[3]["sessionId"]
    labels = imported(written(tmp_path, rows)).head.labels
    assert "1 x rows that name no session: taken as of that of their file" in labels


def test_rows_of_one_message_without_the_id_of_their_request_are_one_call(tmp_path: Path) -> None:
    rows = [json.loads(json.dumps(row)) for row in claude_rows("s")]
    whole = imported(written(tmp_path, rows)).recordings
    for place in (1, 5):  # the first row of an answer, or the second
        del rows[place]["requestId"]
    assert imported(written(tmp_path, rows)).recordings == whole


def test_answers_of_a_gateway_that_share_one_id_are_told_apart_by_their_requests(tmp_path: Path) -> None:
    rows = list(claude_rows("a", 3))
    for row in rows:
        if row["type"] == "assistant":
            row["message"]["id"] = "msg"
    assert imported(written(tmp_path, rows)).num_requests == 3


def waits_of(trace: TraceFile) -> list[tuple[str, float]]:
    return [(one.wait_kind, one.wait_ns / NS_PER_S) for one in trace.recordings[0].requests]


@pytest.mark.parametrize("is_list", [False, True])
@pytest.mark.parametrize("asks", ["AskUserQuestion", "ExitPlanMode", "exit_plan_mode", REJECTED[0]])
def test_a_tool_that_asks_a_person_or_is_not_allowed_is_a_wait_for_a_person(
    tmp_path: Path, asks: str, *, is_list: bool
) -> None:
    content = [{"type": "text", "text": asks}] if is_list else asks
    first, second = (assistant(name, at_s, (10, 0, 0, 50), tool(name)) for name, at_s in (("a", 3.0), ("b", 66.0)))
    first["message"]["content"][0]["name"] = asks
    rows = [
        user(0.0),
        first,
        user(63.0, [{"type": "tool_result", "tool_use_id": "a", "content": content}]),
        second,
        result("b", 68.0),
        assistant("c", 70.0, (10, 0, 0, 50), text()),
    ]
    assert waits_of(imported(written(tmp_path, rows))) == [("none", 0), ("human", 60), ("tool", 2)]


def test_who_stops_an_answer_and_writes_again_is_waited_for(tmp_path: Path) -> None:
    first, last = (assistant(name, at_s, (10, 0, 0, 50), tool(name)) for name, at_s in (("a", 3.0), ("b", 72.0)))
    stopped = user(9.0, [{"type": "text", "text": "[Request interrupted by user]"}])
    rows = [user(0.0), first, result("a", 8.0), stopped, user(69.0), last]
    assert waits_of(imported(written(tmp_path, rows))) == [("none", 0), ("human", 66)]


SYSTEMS = [{"type": "text", "text": "<system-reminder>"}, {"type": "text", "text": SECRET}]


@pytest.mark.parametrize(
    ("said", "origin", "waited"),
    [
        *((SECRET, *each) for each in (("task-notification", "tool"), ("human", "human"), ("peer", "none"))),
        (SECRET, "cron", "none"),
        # What a program writes without an origin is no person's.
        ("<task-notification>\n</task-notification>", "", "tool"),
        ('<teammate-message teammate_id="x">\n</teammate-message>', "", "none"),
        ("Stop hook feedback:\nx", "", "none"),
        (SYSTEMS, "", "human"),
    ],
)
def test_a_message_is_of_a_person_a_tool_or_nobody_as_its_origin_or_its_words_say(
    tmp_path: Path, said: Any, origin: str, waited: str
) -> None:
    first, last = (assistant(name, at_s, (10, 0, 0, 50), text()) for name, at_s in (("a", 3.0), ("b", 66.0)))
    told = user(63.0, said, **({"origin": {"kind": origin}} if origin else {}))
    trace = imported(written(tmp_path, [user(0.0), first, told, last]))
    assert waits_of(trace) == [("none", 0), (waited, 60)]
    assert not trace.recordings[0].requests[-1].is_drawn


def test_a_call_that_failed_is_counted_and_the_wait_after_it_is_drawn_from_those_for_persons(tmp_path: Path) -> None:
    error = assistant("e", 40.0, (0, 0, 0, 0), text()) | {"isApiErrorMessage": True}
    error["message"]["model"] = "<synthetic>"
    rows = [user(0.0), assistant("a", 4.0, (10, 0, 0, 50), text())]
    rows += [user(64.0), error, user(100.0), assistant("b", 104.0, (90, 0, 0, 50), text())]
    trace = imported(written(tmp_path, rows))
    (reason,) = trace.head.dropped
    assert reason.startswith("calls that failed")
    last = trace.recordings[0].requests[-1]
    assert (last.wait_kind, last.is_drawn) == ("human", True)
    assert any("drawn as if for a tool, likely far too short" in label for label in trace.head.labels)
    rows += [user(134.0), assistant("c", 138.0, (190, 0, 0, 50), text())]
    trace = imported(written(tmp_path, rows))
    assert waits_of(trace)[1:] == [("human", 30), ("human", 30)]
    assert not any("for a tool" in label or "tracelab" in label for label in trace.head.labels)
    labels = imported(written(tmp_path, [*rows[:3], error | {"timestamp": at(80.0)}])).head.labels
    assert not any(UNANSWERED in label for label in labels), "the call that failed is counted"


def test_a_prompt_that_grew_with_less_cached_says_that_the_ceilings_are_the_providers(tmp_path: Path) -> None:
    rows = [user(0.0), assistant("a", 3.0, (10, 9990, 0, 50), text())]
    rows += [user(1800.0), assistant("b", 1804.0, (10, 10_190, 0, 50), text())]
    rows += [user(1860.0), assistant("c", 1864.0, (10, 190, 10_200, 50), text())]
    (label,) = [label for label in imported(written(tmp_path, rows)).head.labels if label.endswith(CACHE_GONE)]
    assert label.startswith("1 x prompts that grew, with less cached than the one before left behind")
    with open_trace(tmp_path / "out.jsonl") as reader:
        assert describe_trace(reader)["endless cache"].endswith("by the provider's cache")


def passes(*kinds: tuple[str, tuple[int, int, int, int]]) -> list[dict[str, Any]]:
    return [{"type": kind, **assistant("", 0, usage)["message"]["usage"]} for kind, usage in kinds]


ADVISED = passes(
    ("message", (300, 0, 1000, 100)), ("advisor_message", (1400, 0, 0, 400)), ("message", (200, 0, 1300, 200))
)


@pytest.mark.parametrize(
    ("iterations", "usage", "prompts", "labels"),
    [
        (passes(("message", (300, 0, 1000, 100))), (300, 0, 1000, 100), [1300], 0),
        (ADVISED, (500, 0, 2300, 300), [1300, 1500], 0),  # the session's model alone is in the sums
        (ADVISED, (1900, 0, 2300, 700), [1300, 1500], 0),  # or all models are
        (ADVISED, (300, 0, 1000, 300), [1300, 1500], 0),  # or the input of the first pass alone
        (ADVISED, (7, 0, 0, 7), [1300, 1500], 1),
        (
            passes(("compaction", (9000, 0, 1000, 900)), ("message", (2000, 0, 0, 100))),
            (11_000, 0, 1000, 1000),
            [10_000, 2000],
            0,
        ),
        (
            passes(("message", (300, 0, 1000, 9)), ("fallback_message", (1300, 0, 0, 90))),
            (1600, 0, 1000, 99),
            [1300],
            0,
        ),
        (passes(("a_type_to_come", (1, 0, 0, 1)), ("message", (300, 0, 1000, 9))), (301, 0, 1000, 10), [1300], 0),
    ],
)
def test_passes_of_an_answer_are_calls_and_another_models_are_dropped_and_counted(
    tmp_path: Path, iterations: list[Any], usage: tuple[int, int, int, int], prompts: list[int], labels: int
) -> None:
    answer = assistant("b", 12.0, usage, tool("t"))
    answer["message"]["usage"]["iterations"] = iterations
    rows = [user(0.0), assistant("a", 3.0, (1000, 0, 0, 100), tool("s")), result("s", 8.0), answer, result("t", 20.0)]
    trace = imported(written(tmp_path, [*rows, assistant("c", 22.0, (1700, 0, 0, 100), text())]))
    requests = trace.recordings[0].requests
    assert [one.prompt_tokens for one in requests] == [1000, *prompts, 1700]
    num_others = sum(one["type"] not in ("message", "compaction") for one in iterations)
    assert sum(trace.head.dropped.values()) == num_others
    assert [one.is_drawn for one in requests] == [False, False, *[True] * (len(prompts) - 1), False]
    assert (requests[1].wait_ns, requests[-1].wait_ns) == (5 * NS_PER_S, 8 * NS_PER_S)
    assert sum("not the sum of its passes" in label for label in trace.head.labels) == labels


def test_a_pass_without_sound_counts_leaves_no_wait_known(tmp_path: Path) -> None:
    answer = assistant("b", 12.0, (300, 0, 1000, 100), tool("t"))
    answer["message"]["usage"]["iterations"] = [{"type": "message", "input_tokens": "many"}]
    rows = [
        user(0.0),
        assistant("a", 3.0, (1000, 0, 0, 100), text()),
        answer,
        assistant("c", 22.0, (9, 0, 0, 9), text()),
    ]
    trace = imported(written(tmp_path, rows))
    assert trace.head.broken == {"an assistant row without its id or usage": 1}
    assert trace.recordings[0].requests[1].is_drawn


@pytest.mark.parametrize("trigger", ["auto", "manual"])
@pytest.mark.parametrize("asked_s", [None, 55.0])
def test_the_wait_around_a_summary_is_not_known(tmp_path: Path, trigger: str, asked_s: float | None) -> None:
    boundary = user(50) | {"type": "system", "subtype": "compact_boundary", "compactMetadata": {"trigger": trigger}}
    rows = [
        user(0),
        assistant("m1", 5, (10, 0, 0, 9), tool("t")),
        result("t", 8),
        boundary,
        user(50.1, isCompactSummary=True),
        *([] if asked_s is None else [user(asked_s)]),
        assistant("m2", 56, (20, 0, 10, 9), text()),
    ]
    trace = imported(written(tmp_path, rows))
    request = trace.recordings[0].requests[1]
    assert (request.wait_kind, request.is_drawn) == ("tool" if asked_s is None else "human", True)
    assert any("unknown: a summary was made before theirs" in label for label in trace.head.labels)


def test_a_summary_and_calls_that_failed_count_once_where_a_fork_copied_them(tmp_path: Path) -> None:
    error = assistant("e", 59, (0, 0, 0, 0), text()) | {"isApiErrorMessage": True}
    attempt = user(57) | {"type": "system", "subtype": "api_error", "retryAttempt": 1}
    boundary = user(50) | {"type": "system", "subtype": "compact_boundary"}
    rows = [user(0), assistant("m1", 5, (10, 0, 0, 9), text()), boundary, user(55), attempt, error]
    rows = [row | {"uuid": f"row{place}"} for place, row in enumerate(rows)]
    copy = [row | {"sessionId": "fork"} for row in (*rows, user(90, uuid="u"))]
    copy.append(assistant("m2", 95, (20, 0, 10, 9), text(), uuid="a") | {"sessionId": "fork"})
    trace = imported(written(tmp_path, rows), written(tmp_path, copy, "fork"))
    failed = "calls that failed, after all tries: the program tells their error"
    assert trace.head.dropped == {SUMMARY: 1, failed: 1, REPEATED: 2}
    assert f"1 x {ATTEMPTS}" in trace.head.labels


@pytest.mark.parametrize("name", ["cache_creation_input_tokens", "cache_read_input_tokens"])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_prompt_that_counts_one_side_of_the_cache_alone_may_be_too_short(
    tmp_path: Path, name: str, is_there: bool
) -> None:
    rows = [json.loads(json.dumps(row)) for row in claude_rows("s")]
    for row in rows[4:6]:
        row["message"]["usage"][name] = None
        if not is_there:
            del row["message"]["usage"][name]
    assert f"1 x {CACHE_LEFT_OUT}" in imported(written(tmp_path, rows)).head.labels
    rows[4]["message"]["usage"]["input_tokens"] = rows[5]["message"]["usage"]["input_tokens"] = None
    assert imported(written(tmp_path, rows)).head.broken == {"an assistant row without its id or usage": 2}


def test_a_null_count_of_the_cache_is_no_zero(tmp_path: Path) -> None:
    row = assistant("b", 10.0, (1200, 0, 0, 50), tool("b"))
    row["message"]["usage"]["cache_read_input_tokens"] = None
    rows = [user(0.0), assistant("a", 2.0, (10, 990, 0, 100), tool("a")), result("a", 9.0), row, result("b", 12.0)]
    rows.append(assistant("c", 14.0, (10, 190, 1200, 50), text()))
    trace = imported(written(tmp_path, rows))
    assert [one.keep_tokens for one in trace.recordings[0].requests] == [0, 1100, 1200]
    assert f"1 x {NO_CACHE}" in trace.head.labels


@pytest.mark.parametrize("cached", [None, 700])
def test_who_goes_back_in_a_conversation_goes_on_from_the_call_there(tmp_path: Path, cached: int | None) -> None:
    turns = [("a", 1000), ("b", 1500), ("c", 1300)]
    rows: list[Any] = []
    for place, (name, prompt) in enumerate(turns):
        answer = assistant(name, 20.0 * place + 3, (prompt, 0, 0, 100), text(), uuid=name, parentUuid=f"u{name}")
        usage = answer["message"]["usage"]
        usage["cache_read_input_tokens"] = usage["cache_creation_input_tokens"] = None
        if name == "c" and cached:
            usage |= {"input_tokens": prompt - cached, "cache_read_input_tokens": cached}
        above = ("", "a", "pass")[place]
        rows += [user(20.0 * place, uuid=f"u{name}", parentUuid=above or None), answer]
        rows += [{"type": "system", "uuid": "pass", "parentUuid": "a", "timestamp": at(4.0)}] * (not place)
    (recording,) = imported(written(tmp_path, rows)).recordings
    assert [(one.base, one.keep_tokens) for one in recording.requests] == [(None, 0), (0, 1100), (0, cached or 1100)]
    assert [one.after for one in recording.requests] == [(), (0,), (1,)]


@pytest.mark.parametrize(("row", "num_missing"), [("a-0", 0), ("of another file", 1)])
def test_a_conversation_that_goes_on_after_a_summary_of_another_file_is_labelled(
    tmp_path: Path, row: str, num_missing: int
) -> None:
    rows = [each | {"uuid": f"a-{place}"} for place, each in enumerate(claude_rows("a", 2))]
    boundary = {"type": "system", "subtype": "compact_boundary", "uuid": "b", "parentUuid": None}
    rows.insert(3, rows[2] | boundary | {"logicalParentUuid": row})
    labels = [label for label in imported(written(tmp_path, rows)).head.labels if "rows are missing" in label]
    assert len(labels) == num_missing


@pytest.mark.parametrize("back_s", [20.0, 90.0])
def test_where_the_clock_was_set_back_the_chain_of_rows_says_their_order(tmp_path: Path, back_s: float) -> None:
    rows = [*list(claude_rows("a", 4, 100.0))[:6], *list(claude_rows("a", 4, 100.0 - back_s))[6:]]
    rows[1:] = [row | {"parentUuid": before["uuid"]} for before, row in pairwise(rows)]
    trace = imported(written(tmp_path, rows))
    requests = trace.recordings[0].requests
    assert [one.keep_tokens for one in requests] == [510 * turn for turn in range(4)]
    assert [one.wait_ns / NS_PER_S for one in requests if not one.is_drawn] == [0, 4, 4]
    assert f"1 x waits that are unknown: {BACK}" in trace.head.labels


@pytest.mark.parametrize(
    "path", ["subtype", "message.stop_reason", "toolUseResult.interrupted", "message.content.type"]
)
def test_a_wait_over_what_a_reader_does_not_know_is_of_no_kind_and_labelled(tmp_path: Path, path: str) -> None:
    answer, came = assistant("a", 3, (10, 500, 0, 400), tool("t"), uuid="a"), result("t", 8) | {"uuid": "r"}
    notice = {"type": "system", "uuid": "s", "timestamp": at(9), "sessionId": came["sessionId"], "subtype": "held"}
    answer["message"] |= {"stop_reason": "held" if path == "message.stop_reason" else "tool_use"}
    came |= {"toolUseResult": {"interrupted": "held"}} if path == "toolUseResult.interrupted" else {}
    came["message"]["content"] += [{"type": "held"}] * (path == "message.content.type")
    rows = [user(0), answer, came, *[notice] * (path == "subtype")]
    after = [assistant("b", 12, (10, 500, 510, 90), tool("v"), uuid="b"), result("v", 20) | {"uuid": "q"}]
    trace = imported(written(tmp_path, [*rows, *after, assistant("c", 23, (10, 500, 1020, 90), text(), uuid="c")]))
    waits = [(request.wait_kind, request.wait_ns // NS_PER_S) for request in trace.recordings[0].requests]
    assert waits == [("none", 0), ("none", 5), ("tool", 8)]
    assert f"1 x rows with a value that is not known here: {path} held" in trace.head.labels


@pytest.mark.parametrize("mode", ["default", "bypassPermissions", ""])
def test_a_wait_for_a_tool_without_a_time_may_be_an_approval_unless_none_is_asked_for(
    tmp_path: Path, mode: str
) -> None:
    more = {"permissionMode": mode} if mode else {}
    rows = [user(0, **more), assistant("a", 3, (10, 500, 0, 400), tool("t"), uuid="a"), result("t", 63) | {"uuid": "r"}]
    trace = imported(written(tmp_path, [*rows, assistant("b", 66, (10, 500, 510, 90), text(), uuid="b")]))
    assert (f"1 x {MAY_ASK}" in trace.head.labels) == (mode != "bypassPermissions")


def test_an_answer_that_a_person_interrupts_is_labelled(tmp_path: Path) -> None:
    stop = user(9, [{"type": "text", "text": "[Request interrupted by user]"}], uuid="i")
    rows = [user(0), assistant("a", 3, (10, 500, 0, 400), text(), uuid="a"), stop, user(40, uuid="u")]
    trace = imported(written(tmp_path, [*rows, assistant("b", 43, (10, 500, 510, 90), text(), uuid="b")]))
    assert trace.head.labels == (f"1 x {INTERRUPTED}",)
    with open_trace(tmp_path / "out.jsonl") as reader:
        assert describe_trace(reader)["forks, joins"] == "0 and 0 requests", "nothing says that it was left"
    copy = [row | {"sessionId": "fork"} for row in (*rows, stop | {"uuid": "own"})]
    forked = imported(written(tmp_path, rows), written(tmp_path, copy, "fork"))
    assert f"2 x {INTERRUPTED}" in forked.head.labels, "its own, and no copy"


def test_a_wait_for_a_sub_agent_whose_last_call_has_no_counts_is_unknown(tmp_path: Path) -> None:
    side = {"sessionId": "s", "isSidechain": True, "agentId": "k"}
    failed = assistant("x", 30, (0, 0, 0, 0), text(), uuid="k-x", isApiErrorMessage=True) | side
    agent = [user(4) | side | {"uuid": "k-u"}, assistant("k", 6, (10, 300, 0, 60), text(), uuid="k-a") | side]
    for more in ([], [user(20) | side | {"uuid": "k-v"}, failed]):
        rows = [
            user(0),
            assistant("a", 3, (10, 500, 0, 400), tool("t"), uuid="a"),
            result("t", 60, "k") | {"uuid": "r"},
        ]
        rows += [assistant("b", 63, (10, 500, 510, 90), text(), uuid="b")]
        trace = imported(written(tmp_path, [row | {"sessionId": "s"} for row in rows] + agent + more))
        (recording,) = trace.recordings
        last = next(request for request in recording.requests if request.prompt_tokens == 1020)
        assert last.is_drawn == bool(more)


@pytest.mark.parametrize("name", ["mcp__chat__ask_human", "Bash"])
def test_a_tool_whose_name_speaks_of_a_person_may_have_asked_one(tmp_path: Path, name: str) -> None:
    answer = assistant("a", 3, (10, 500, 0, 400), tool("t") | {"name": name}, uuid="a")
    rows = [user(0, permissionMode="bypassPermissions"), answer, result("t", 63) | {"uuid": "r"}]
    trace = imported(written(tmp_path, [*rows, assistant("b", 66, (10, 500, 510, 90), text(), uuid="b")]))
    is_asking = name != "Bash"
    assert trace.recordings[0].requests[1].wait_kind == ("none" if is_asking else "tool")
    assert trace.head.labels == (f"1 x {ALLOWED}",) * is_asking


def test_what_the_program_adds_after_a_result_ends_the_wait_and_an_agent_without_a_file_is_counted(
    tmp_path: Path,
) -> None:
    mode = {"permissionMode": "bypassPermissions"}
    rows = [user(0, **mode), assistant("a", 3, (10, 500, 0, 400), tool("t"), uuid="a"), result("t", 8) | {"uuid": "r"}]
    rows[2]["toolUseResult"] = {"totalTokens": 900}
    rows += [user(38) | {"type": "attachment", "uuid": "h", "attachment": {"type": "hook_success"}}]
    trace = imported(written(tmp_path, [*rows, assistant("b", 41, (10, 500, 510, 90), text(), uuid="b")]))
    last = trace.recordings[0].requests[1]
    assert (last.wait_kind, last.wait_ns) == ("none", 35 * NS_PER_S)
    assert f"1 x {LATE}" in trace.head.labels
    assert trace.head.dropped == {MISSING: 1}


@pytest.mark.parametrize(("asked_s", "result_s", "waits"), [(30, None, [27, 5]), (9, 8, [6, 0])])
def test_a_summary_in_a_file_of_its_own_is_a_call_of_its_conversation(
    tmp_path: Path, asked_s: int, result_s: int | None, waits: list[int]
) -> None:
    boundary = user(20 + asked_s) | {"type": "system", "subtype": "compact_boundary"}
    used = [tool("c")] if result_s else [text()]
    rows = [user(0), assistant("a", 3, (1000, 0, 0, 50), *used), boundary]
    rows[2:2] = [result("c", result_s)] if result_s else []
    rows += [user(20 + asked_s, isCompactSummary=True), *([] if result_s else [user(15 + asked_s + 10)])]
    rows.append(assistant("b", 60 + asked_s, (300, 0, 0, 50), text()))
    aside = {"isSidechain": True, "agentId": "acompact-1"}
    summary = [user(asked_s, **aside), assistant("s", asked_s + 20, (1100, 0, 0, 90), text(), **aside)]
    paths = [written(tmp_path, rows, "s"), written(tmp_path, summary, "s/subagents/agent-acompact-1")]
    trace = imported(*paths)
    (recording,) = trace.recordings
    assert [one.prompt_tokens for one in recording.requests] == [1000, 1100, 300]
    assert [one.wait_ns // NS_PER_S for one in recording.requests[1:]] == waits
    assert [one.wait_kind for one in recording.requests[1:]] == (["tool", "none"] if result_s else ["human", "human"])
    assert not trace.head.dropped
