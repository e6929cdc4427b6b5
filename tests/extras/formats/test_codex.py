"""Codex's files: what a fork repeats counts once, with its parent there or not, and a count told twice is no call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S
from harness.extras.formats.codex import LABELS
from harness.model.traces.calls import BACK, PAST_SUMMARY
from harness.model.traces.links import (
    AFTER_SUMMARY,
    BY_SUMS,
    CUT,
    FORKED,
    MAY_ASK,
    MISSING,
    NEAR,
    OVER,
    REPEATED,
    UNEXPLAINED,
    UNKNOWN,
    UNLINKED,
)
from harness.model.traces.recording import NO_CACHE
from tests.support.sound_traces import codex_count, codex_rows
from tests.support.trace_rows import at, imported, written

FORK_S = 400.0
SPAWN = {"source": {"subagent": {"thread_spawn": {"parent_thread_id": "par"}}}}
FORKS = ({"forked_from_id": "par"}, SPAWN, {"parent_thread_id": "par"}, {})


def own_rows(turns: int, total: int, first_s: float = FORK_S) -> list[Any]:
    """Calls that a fork makes itself, after so many tokens."""
    rows: list[Any] = []
    for turn in range(turns):
        usage = (5000 + 200 * turn, 4000, 100, 20)
        total += usage[0] + usage[2]
        start = first_s + 10 * turn
        rows += [
            {"timestamp": at(start + 3), "type": "response_item", "payload": {"type": "reasoning"}},
            {"timestamp": at(start + 3.2), "type": "event_msg", "payload": codex_count(usage, total)},
            {"timestamp": at(start + 8), "type": "event_msg", "payload": {"type": "user_message"}},
        ]
    return rows


def total_of(turns: int) -> int:
    return sum(1100 + 200 * turn for turn in range(turns))


def fork(turns: int, meta: Any, *, stamp_s: float | None = FORK_S, own: int = 2, name: str = "child") -> list[Any]:
    """A fork's file: its parent's rows, stamped anew (None: with their own times), then its own."""
    first, *repeated = codex_rows(name, turns, meta=meta, stamp_s=stamp_s)
    return [first | {"timestamp": at(FORK_S)}, *repeated, *own_rows(own, total_of(turns))]


@pytest.mark.parametrize("meta", FORKS)
@pytest.mark.parametrize("stamp_s", [FORK_S, None])
def test_a_fork_counts_its_own_calls_and_goes_on_from_its_parents_last(
    tmp_path: Path, meta: Any, stamp_s: float | None
) -> None:
    parent = written(tmp_path, codex_rows("par", 5), "b")
    rows, is_agent = fork(4, meta, stamp_s=stamp_s), "parent" in str(meta)
    rows[-6:-6] = [{"timestamp": at(FORK_S + 1), "type": "event_msg", "payload": {"type": "user_message"}}] * is_agent
    trace = imported(written(tmp_path, rows, "a"), parent)
    (recording,) = trace.recordings
    assert trace.num_requests == 5 + 2
    assert sum(trace.head.dropped.values()) == 4
    lengths = [request.prompt_tokens for request in recording.requests]
    place = lengths.index(5000)
    # A sub-agent begins when its parent's last call has ended, a fork where it was forked: after the fourth call.
    assert recording.requests[place].after == (
        lengths.index(1800 if "par" in str(meta) and "fork" not in str(meta) else 1600),
    )
    assert recording.requests[place].keep_tokens == 1600 + 80, "its prompt and what is visible of its answer"
    # An agent was started at its file's first instant, by no person; a fork's first input is a copy, stamped anew.
    assert recording.requests[place].is_drawn == (not is_agent)
    assert not is_agent or recording.requests[place].wait_ns > 300 * NS_PER_S
    assert recording.requests[place].wait_kind == ("none" if is_agent else "tool")


@pytest.mark.parametrize("meta", FORKS)
def test_without_its_parent_the_burst_at_a_forks_start_is_dropped_and_counted(tmp_path: Path, meta: Any) -> None:
    trace = imported(written(tmp_path, fork(4, meta), "a"))
    assert trace.num_requests == 2
    assert trace.head.dropped == {
        "calls of a parent session that is not among the files, repeated at the start of a fork": 4
    }
    assert not any(request.wait_ns == 0 for request in trace.recordings[0].requests[1:])


def test_a_spawned_thread_without_a_file_is_counted_and_a_review_names_no_parent(tmp_path: Path) -> None:
    rows = list(codex_rows("par", 2))
    rows[2]["payload"]["name"] = "spawn_agent"
    review = codex_rows("review", 2, 100, meta={"source": {"subagent": "review"}})
    trace = imported(written(tmp_path, rows, "a"), written(tmp_path, review, "b"))
    assert trace.head.dropped == {MISSING: 1}
    assert f"1 x {UNLINKED}" in trace.head.labels


def test_agents_of_equal_counts_are_each_read_and_linked_by_the_row_that_tells_of_their_start(tmp_path: Path) -> None:
    meta, asked, call, *rest = codex_rows("par", 2)
    call["payload"]["name"] = "spawn_agent"
    told = {"type": "sub_agent_activity", "kind": "started", "event_id": "0"}
    started = [
        {"timestamp": at(3.1), "type": "event_msg", "payload": told | {"agent_thread_id": name}} for name in ("x", "y")
    ]
    agents = [written(tmp_path, codex_rows(name, 2, 4 + place / 2, SPAWN), name) for place, name in enumerate("xy")]
    trace = imported(written(tmp_path, [meta, asked, call, *started, *rest]), *agents)
    assert (len(trace.recordings), trace.num_requests) == (1, 6)
    assert not trace.head.dropped
    assert not any(label.endswith((NEAR, UNLINKED)) for label in trace.head.labels)


def test_a_fork_of_a_fork_repeats_both_and_counts_neither(tmp_path: Path) -> None:
    meta = {"forked_from_id": "child"}
    later = 300.0
    grandchild = [
        {**row, "timestamp": at(FORK_S + later)} for row in fork(4, meta, own=2, name="grandchild")
    ] + own_rows(1, 70_000, FORK_S + later)
    files = [
        written(tmp_path, codex_rows("par", 5), "par"),
        written(tmp_path, fork(4, {"forked_from_id": "par"}), "child"),
        written(tmp_path, grandchild, "grandchild"),
    ]
    assert imported(*files).num_requests == 5 + 2 + 1
    assert len(imported(*files).recordings) == 1
    assert imported(*files[1:]).num_requests == 2 + 1
    assert imported(files[2]).num_requests == 1


def test_a_second_session_meta_says_that_a_file_repeats_another_session(tmp_path: Path) -> None:
    parent_meta = {"timestamp": at(FORK_S), "type": "session_meta", "payload": {"id": "par"}}
    first, *rest = fork(1, {})
    trace = imported(written(tmp_path, [first, parent_meta, *rest], "a"))
    assert trace.num_requests == 2, "one repeated call is no burst, but the file says that it is a fork"


def test_what_a_fork_repeats_without_token_counts_is_not_taken_into_its_own_call(tmp_path: Path) -> None:
    rows = fork(4, {"forked_from_id": "par"})
    silent = [row for place, row in enumerate(rows) if place > 14 or row["payload"].get("type") != "token_count"]
    trace = imported(written(tmp_path, silent, "a"))
    assert trace.num_requests == 2
    assert trace.head.dropped


def test_sessions_that_only_look_alike_are_kept_apart(tmp_path: Path) -> None:
    files = [written(tmp_path, codex_rows(name, 3, first_s=1000 * place), name) for place, name in enumerate("xyz")]
    trace = imported(*files)
    assert (len(trace.recordings), trace.num_requests) == (3, 9), "the same counts at other times are other calls"
    assert not trace.head.dropped


def test_a_session_whose_rows_all_have_one_time_is_kept_and_labelled(tmp_path: Path) -> None:
    trace = imported(written(tmp_path, codex_rows("x", 3, stamp_s=5.0), "x"))
    assert trace.num_requests == 3
    assert "2 x waits that are unknown: all calls of their session have the same time" in trace.head.labels
    assert all(request.is_drawn for request in trace.recordings[0].requests[1:])


def test_a_count_that_is_told_again_within_the_next_call_does_not_end_it(tmp_path: Path) -> None:
    rows = list(codex_rows("x", 2))
    again = rows[3] | {"timestamp": at(13.2)}
    trace = imported(written(tmp_path, [*rows[:6], again, *rows[6:]], "x"))
    assert [request.prompt_tokens for request in trace.recordings[0].requests] == [1000, 1200]


@pytest.mark.parametrize("has_numbers", [True, False])
@pytest.mark.parametrize("back_s", [20.0, 90.0])
def test_where_the_clock_was_set_back_rows_keep_the_order_of_their_numbers_or_of_the_file(
    tmp_path: Path, back_s: float, *, has_numbers: bool
) -> None:
    rows = [*list(codex_rows("a", 4, 100.0))[:8], *list(codex_rows("a", 4, 100.0 - back_s))[8:]]
    rows = [row | ({"ordinal": place} if has_numbers else {}) for place, row in enumerate(rows)]
    trace = imported(written(tmp_path, rows, "a"))
    (recording,) = trace.recordings
    assert [one.prompt_tokens for one in recording.requests] == [1000, 1200, 1400, 1600]
    assert [one.wait_ns / NS_PER_S for one in recording.requests if not one.is_drawn] == [0, 5, 5]
    assert f"1 x waits that are unknown: {BACK}" in trace.head.labels
    assert not any("running totals" in label for label in trace.head.labels)


def test_a_result_that_is_stamped_before_its_call_is_there_and_the_clock_is_what_is_wrong(tmp_path: Path) -> None:
    rows = list(codex_rows("a", 4))[:-1]
    rows[7] |= {"timestamp": at(11.0)}  # its call is stamped at 13 s, and the row behind it at 23 s
    trace = imported(written(tmp_path, rows))
    assert [one.is_drawn for one in trace.recordings[0].requests] == [False, True, True, False]
    assert f"2 x waits that are unknown: {BACK}" in trace.head.labels
    assert not any("missing" in label for label in trace.head.labels)


def test_input_that_leaves_out_the_cache_by_the_sum_of_its_count_holds_it(tmp_path: Path) -> None:
    rows = list(codex_rows("x"))
    for row in rows:
        if row["payload"].get("type") == "token_count":
            usage = row["payload"]["info"]["last_token_usage"]
            usage["total_tokens"] = sum(usage.values()) - usage["reasoning_output_tokens"]
    trace = imported(written(tmp_path, rows, "x"))
    assert [one.prompt_tokens for one in trace.recordings[0].requests] == [1000, 2200, 2400]
    assert f"3 x {BY_SUMS}" in trace.head.labels


@pytest.mark.parametrize("is_null", [True, False])
def test_a_call_that_does_not_count_its_cached_tokens_has_no_zero_of_them(tmp_path: Path, is_null: bool) -> None:
    rows = list(codex_rows("x"))
    usage = rows[6]["payload"]["info"]["last_token_usage"]
    del usage["cached_input_tokens"]
    usage |= {"cached_input_tokens": None} if is_null else {}
    trace = imported(written(tmp_path, rows, "x"))
    assert [one.keep_tokens for one in trace.recordings[0].requests] == [0, 1080, 1000]
    assert f"1 x {NO_CACHE}" in trace.head.labels


def test_calls_that_the_totals_count_and_the_file_lacks_are_labelled(tmp_path: Path) -> None:
    rows = list(codex_rows("x", 4))
    trace = imported(written(tmp_path, [*rows[:5], *rows[8:]], "x"))
    assert trace.num_requests == 3
    assert any("running totals" in label for label in trace.head.labels)


def one_turn(call: Any, *between: Any) -> list[Any]:
    """A call of a tool by its first row, rows of these types at these seconds, and the last call at 74 s."""
    rows = [(0.0, "event_msg", {"type": "user_message"}), (3.0, "response_item", call)]
    rows += [(3.5, "event_msg", codex_count((1000, 0, 100, 0), 1100))]
    rows += [
        (at_s, form, {"type": kind, "call_id": "c", "output": "".join(said)}) for at_s, form, kind, *said in between
    ]
    rows += [
        (74.0, "response_item", {"type": "reasoning"}),
        (74.5, "event_msg", codex_count((1500, 1000, 100, 0), 2700)),
    ]
    return [{"timestamp": at(at_s), "type": form, "payload": payload} for at_s, form, payload in rows]


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        ('<codex_internal_context source="goal">\nx</codex_internal_context>', "none"),
        ('<hook_prompt hook_run_id="x">x</hook_prompt>', "none"),
        ("<subagent_notification>\n{}\n</subagent_notification>", "tool"),
        ("x", "human"),
    ],
)
def test_what_the_program_writes_in_a_persons_name_is_no_persons(tmp_path: Path, said: str, kind: str) -> None:
    message = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": said}]}
    rows = one_turn({"type": "message", "role": "assistant"})
    rows[3:3] = [
        {"timestamp": at(63.0), "type": "event_msg", "payload": {"type": "task_started"}},
        {"timestamp": at(63.0), "type": "response_item", "payload": message},
    ]
    trace = imported(written(tmp_path, rows, "a"))
    assert [(one.wait_kind, one.wait_ns // NS_PER_S) for one in trace.recordings[0].requests[1:]] == [(kind, 60)]
    assert any(UNKNOWN in label for label in trace.head.labels) == (kind == "none")


RUN = {"type": "function_call", "call_id": "c", "name": "exec_command"}
RESULT = (8.0, "response_item", "function_call_output")


@pytest.mark.parametrize(("cached", "keep"), [(1000, 1000), (1060, 1060), (1100, 1100), (1101, 1040)])
def test_reasoning_stays_in_the_next_prompt_where_its_cached_tokens_show_it(
    tmp_path: Path, cached: int, keep: int
) -> None:
    rows = one_turn(RUN, RESULT)
    rows[2]["payload"] = codex_count((1000, 0, 100, 60), 1100)
    rows[-1]["payload"] = codex_count((1500, cached, 100, 0), 2700)
    trace = imported(written(tmp_path, rows, "a"))
    assert trace.recordings[0].requests[1].keep_tokens == keep
    cut = f"1 x {CUT}: {cached} stated, {keep} counted"
    assert [label for label in trace.head.labels if CUT in label] == [cut] * (cached != keep)


CREATE = 'exec_command failed for `rm x`: CreateProcess { message: "Rejected(\\"rejected by user\\")" }'
REFUSALS = (
    *("exec command rejected by user", CREATE, "user rejected MCP tool call", "Error: user cancelled MCP tool call"),
    'Wall time: 60 seconds\nOutput:\n[{"type":"text","text":"user rejected MCP tool call"}]',
)


@pytest.mark.parametrize(
    ("call", "between", "kind", "wait_s"),
    [
        (RUN, [RESULT], "tool", 5),
        (RUN | {"name": "request_user_input"}, [(63.0, *RESULT[1:])], "human", 60),
        *((RUN, [(63.0, *RESULT[1:], said)], "human", 60) for said in REFUSALS),
        (RUN, [(63.0, *RESULT[1:], "the user rejected MCP tool call of before: done")], "tool", 60),
        # What a program without a person refuses by itself.
        (RUN, [(3.2, *RESULT[1:], "user cancelled MCP tool call")], "tool", 0.2),
        # A message that came while the tool ran waits for the tool; so does what a program writes beside its result.
        (RUN, [RESULT, (8.1, "event_msg", "user_message")], "tool", 5.1),
        (RUN, [(5.0, "event_msg", "user_message"), RESULT], "tool", 5),
    ],
)
def test_a_call_waited_for_the_tool_or_the_person_that_took_longer(
    tmp_path: Path, call: Any, between: list[Any], kind: str, wait_s: float
) -> None:
    trace = imported(written(tmp_path, one_turn(call, *between), "a"))
    last = trace.recordings[0].requests[-1]
    assert (last.wait_kind, last.wait_ns) == (kind, wait_s * NS_PER_S)
    assert (trace.num_requests, sum(trace.head.dropped.values())) == (2, 0)


@pytest.mark.parametrize("again", [[], [(8.5, "event_msg", codex_count((1000, 0, 100, 0), 1100))]])
def test_a_call_without_a_token_count_in_the_middle_is_counted_and_the_wait_after_it_unknown(
    tmp_path: Path, again: list[Any]
) -> None:
    tool = {"type": "function_call", "call_id": "d", "name": "f"}
    uncounted = [(8.0, "response_item", {"type": "function_call_output", "call_id": "c"}), *again]
    uncounted += [(12.0, "response_item", tool), (20.0, "response_item", tool | {"type": "function_call_output"})]
    rows = one_turn(RUN)
    rows[3:3] = [{"timestamp": at(at_s), "type": form, "payload": payload} for at_s, form, payload in uncounted]
    trace = imported(written(tmp_path, rows, "a"))
    assert [one.prompt_tokens for one in trace.recordings[0].requests] == [1000, 1500]
    assert trace.head.dropped == {LABELS["uncounted"]: 1}
    assert trace.recordings[0].requests[1].is_drawn


def test_the_wait_after_a_call_that_a_person_stopped_is_not_known(tmp_path: Path) -> None:
    between = [RESULT, (10.0, "response_item", "reasoning"), (11.0, "event_msg", "turn_aborted")]
    trace = imported(written(tmp_path, one_turn(RUN, *between, (71.0, "event_msg", "user_message")), "a"))
    assert trace.recordings[0].requests[-1].is_drawn
    assert "1 x waits that are unknown: a call before theirs has no token count" in trace.head.labels
    assert (trace.num_requests, sum(trace.head.dropped.values())) == (2, 1)


@pytest.mark.parametrize(
    ("between", "num_left"),
    [
        ([RESULT, (20.0, "event_msg", "user_message")], 1),  # with Codex's own message that says so
        ([(20.0, "event_msg", "user_message")], 0),  # the tool ran until then, and gave nothing back
        ([(20.0, *RESULT[1:])], 0),
    ],
)
def test_a_person_who_stops_a_call_before_its_first_output_leaves_one_that_no_row_holds(
    tmp_path: Path, between: list[Any], num_left: int
) -> None:
    between = [*between, (20.0, "event_msg", "turn_aborted"), (50.0, "event_msg", "user_message")]
    trace = imported(written(tmp_path, one_turn(RUN, *between), "a"))
    said = "calls that were cancelled or failed: the log does not hold them"
    assert trace.head.dropped == ({said: num_left} if num_left else {})
    assert trace.recordings[0].requests[-1].is_drawn == bool(num_left)


@pytest.mark.parametrize("is_input_first", [True, False])
@pytest.mark.parametrize("told", [{}, {"type": "item_completed", "item": {"type": "ExitedReviewMode"}}])
@pytest.mark.parametrize("more", [[], [(34.1, "event_msg", "agent_message")]])
def test_what_codex_itself_writes_of_a_review_is_no_call_and_its_time_no_persons(
    tmp_path: Path, more: list[Any], told: Any, *, is_input_first: bool
) -> None:
    review = [(34.0, "response_item", "message"), (34.0, "event_msg", "exited_review_mode")]
    between = [(14.0, "event_msg", "entered_review_mode"), *(review if is_input_first else review[::-1]), *more]
    rows = one_turn({"type": "reasoning"}, *between, (34.1, "response_item", "message"))
    roles = iter(("user", "assistant"))
    for row in rows:
        row["payload"] |= {"role": next(roles)} if row["payload"]["type"] == "message" else {}
        row["payload"] |= told if row["payload"]["type"] == "exited_review_mode" else {}
    ended = imported(written(tmp_path, rows[:-2], "a"))
    assert (ended.num_requests, ended.head.dropped, ended.head.labels) == (1, {MISSING: 1}, ())
    asked = {"timestamp": at(64.0), "type": "event_msg", "payload": {"type": "user_message"}}
    trace = imported(written(tmp_path, [*rows[:-2], asked, *rows[-2:]], "a"))
    assert (trace.head.dropped, trace.recordings[0].requests[1].is_drawn) == ({MISSING: 1}, True)
    assert "1 x waits that are unknown: a review was made before theirs" in trace.head.labels


@pytest.mark.parametrize(
    "form", [{"type": "user_message"}, {"type": "item_completed", "item": {"type": "UserMessage"}}]
)
@pytest.mark.parametrize(("num_turns", "base"), [(1, 3), (2, 1), (3, None), (9, None)])
def test_turns_that_were_rolled_back_are_not_gone_on_from(
    tmp_path: Path, form: Any, num_turns: int, base: int | None
) -> None:
    rows = [row for row in codex_rows("s", 6) if row["payload"].get("type") != "user_message"]
    counts = [place for place, row in enumerate(rows) if row["payload"].get("type") == "token_count"]
    for after in (3, 1):
        seconds = rows[counts[after]]["timestamp"]
        rows.insert(counts[after] + 1, {"timestamp": seconds, "type": "event_msg", "payload": form})
    rows.insert(1, rows[1] | {"type": "event_msg", "payload": form})
    back = {"timestamp": at(90), "type": "event_msg", "payload": {"type": "thread_rolled_back", "num_turns": num_turns}}
    count = codex_count((5000, 0 if base is None else 1000, 100, 20), total_of(6) + 5100)
    rows += [back, back | {"timestamp": at(95), "payload": form}, back | {"timestamp": at(99), "payload": count}]
    trace = imported(written(tmp_path, rows))
    last = trace.recordings[0].requests[-1]
    assert (last.base, last.wait_kind) == (base, "human")


@pytest.mark.parametrize("is_count_first", [True, False])
@pytest.mark.parametrize(("ended_s", "num_left"), [(40.0, 1), (3.6, 0)])
def test_a_compaction_that_no_count_tells_is_counted_as_left_out(
    tmp_path: Path, ended_s: float, num_left: int, *, is_count_first: bool
) -> None:
    rows = one_turn(RUN, RESULT)
    again = codex_count((0, 0, 0, 0), 1100)
    compacted = [
        {"timestamp": at(ended_s), "type": "compacted", "payload": {}},
        {"timestamp": at(ended_s), "type": "event_msg", "payload": again},
    ]
    place = 4 if num_left else 3
    compacted = compacted[::-1] if is_count_first else compacted
    trace = imported(written(tmp_path, [*rows[:place], *compacted, *rows[place:]], "a"))
    assert sum(trace.head.dropped.values()) == num_left
    assert trace.recordings[0].requests[1].is_drawn == bool(num_left), "the wait for the result was the summary's"
    assert f"1 x {AFTER_SUMMARY}" in trace.head.labels


@pytest.mark.parametrize("told_s", [40.02, 42.0])
def test_a_compaction_whose_call_has_a_count_left_no_call_out(tmp_path: Path, told_s: float) -> None:
    rows = one_turn(RUN, RESULT)
    rows[-1]["payload"] = codex_count((500, 300, 100, 0), 2850)
    again = codex_count((0, 0, 0, 0), 2250)
    summary = [
        {"timestamp": at(40.0), "type": "event_msg", "payload": codex_count((1100, 1000, 50, 0), 2250)},
        {"timestamp": at(told_s), "type": "event_msg", "payload": again},
        {"timestamp": at(told_s + 0.1), "type": "compacted", "payload": {}},
        {"timestamp": at(73.0), "type": "event_msg", "payload": again},  # with the limits of rate, told once more
    ]
    trace = imported(written(tmp_path, [*rows[:4], *summary, *rows[4:]], "a"))
    assert [one.prompt_tokens for one in trace.recordings[0].requests] == [1000, 1100, 500]
    assert not trace.head.dropped
    assert f"1 x {AFTER_SUMMARY}" in trace.head.labels


@pytest.mark.parametrize(
    ("output", "kind"),
    [
        ("Chunk ID: y\nWall time: 1.5000 seconds\nProcess exited with code 0\nOutput:\nx", "none"),
        ([{"type": "input_text", "text": "Wall time: 1.5000 seconds\nOutput:\nx"}], "none"),
        ('{"output":"x","metadata":{"exit_code":0,"duration_seconds":1.5}}', "none"),
        ("Exit code: 0\nWall time: 4.3 seconds\nOutput:\nx", "tool"),
        ("Output:\nx\nWall time: 1.5000 seconds\n", "tool"),
    ],
)
def test_a_tool_that_ran_much_shorter_than_its_wait_may_have_waited_for_an_approval(
    tmp_path: Path, output: object, kind: str
) -> None:
    rows = list(codex_rows("x", 2))
    rows[4]["payload"]["output"] = output  # 4.5 s after the answer before it
    trace = imported(written(tmp_path, rows))
    (recording,) = trace.recordings
    assert [(one.wait_kind, one.is_drawn) for one in recording.requests] == [("none", False), (kind, False)]
    assert recording.requests[1].wait_ns == 5 * NS_PER_S
    assert (f"1 x {UNEXPLAINED}" in trace.head.labels) == (kind == "none")


def test_a_call_that_failed_and_a_way_back_past_a_summary_are_labelled(tmp_path: Path) -> None:
    def event(seconds: float, **payload: Any) -> Any:
        return {"timestamp": at(seconds), "type": "event_msg", "payload": payload}

    rows = list(codex_rows("one", 3))[:-1]
    failed = [event(70, type="user_message"), event(99, type="error"), event(200, type="user_message")]
    trace = imported(written(tmp_path, [*rows, *failed, *own_rows(1, total_of(3), 200.0)[:2]]))
    assert trace.recordings[0].requests[-1].is_drawn
    assert trace.head.dropped == {"calls that were cancelled or failed: the log does not hold them": 1}
    compacted = {"timestamp": at(75), "type": "compacted", "payload": {}}
    back = event(290, type="thread_rolled_back", num_turns=2)
    first, second = (own_rows(1, total_of(3) + 5100 * place, 100.0 + 100 * place)[:2] for place in (1, 2))
    asked = [event(seconds, type="user_message") for seconds in (70, 200, 300)]
    middle = own_rows(1, total_of(3), 71.0)[:2]
    trace = imported(
        written(tmp_path, [*rows, asked[0], *middle, compacted, asked[1], *first, back, asked[2], *second])
    )
    assert f"1 x {PAST_SUMMARY}" in trace.head.labels


@pytest.mark.parametrize("policy", ["never", "on-request"])
def test_where_no_approval_is_asked_for_no_wait_may_be_one(tmp_path: Path, policy: str) -> None:
    first, *rows = codex_rows("one", 2)
    context = {"timestamp": at(0), "type": "turn_context", "payload": {"approval_policy": policy}}
    labels = imported(written(tmp_path, [first, context, *rows])).head.labels
    assert (f"1 x {MAY_ASK}" in labels) == (policy != "never")


@pytest.mark.parametrize(("cut", "base", "wait_s"), [(7, 1, 37), (None, 3, 17)])
def test_a_fork_without_copies_goes_on_from_where_it_says_or_is_labelled(
    tmp_path: Path, cut: int | None, base: int, wait_s: int
) -> None:
    parent = [row | {"ordinal": place} for place, row in enumerate(codex_rows("par", 4))]
    meta = {"forked_from_id": "par", "history_base": {"thread_id": "par", "end_ordinal_exclusive": cut or 0}}
    began = {"timestamp": at(50), "type": "session_meta", "payload": {"id": "child", **meta}}
    asked = {"timestamp": at(50), "type": "event_msg", "payload": {"type": "user_message"}}
    rows = [began, asked, *own_rows(1, total_of(4), 50)[:2]]
    trace = imported(written(tmp_path, parent, "par"), written(tmp_path, rows, "child"))
    (own,) = (one for one in trace.recordings[0].requests if one.prompt_tokens == 5000)
    before = trace.recordings[0].requests[own.after[0]]
    assert (before.prompt_tokens, own.wait_ns // NS_PER_S, own.wait_kind) == (1000 + 200 * base, wait_s, "human")
    assert (f"1 x {FORKED}" in trace.head.labels) == (cut is None)


def test_a_wait_over_a_tool_that_a_person_interrupted_is_nobodys(tmp_path: Path) -> None:
    rows = list(codex_rows("s", 1))[:-1]
    stopped = {"type": "function_call_output", "call_id": "0", "output": "aborted by user"}
    rows += [
        {"timestamp": at(20), "type": "event_msg", "payload": {"type": "turn_aborted", "reason": "interrupted"}},
        {"timestamp": at(20), "type": "response_item", "payload": stopped},
        {"timestamp": at(20), "type": "response_item", "payload": {"type": "message", "role": "user"}},
        {"timestamp": at(50), "type": "event_msg", "payload": {"type": "task_started"}},
        {"timestamp": at(55), "type": "response_item", "payload": {"type": "reasoning"}},
        {"timestamp": at(55), "type": "event_msg", "payload": codex_count((1300, 1000, 100, 20), 2500)},
    ]
    trace = imported(written(tmp_path, rows))
    (_, second) = trace.recordings[0].requests
    assert (second.wait_kind, second.wait_ns // NS_PER_S) == ("none", 47)
    assert f"1 x {OVER}" in trace.head.labels


def test_a_fork_without_its_parents_records_of_usage_repeats_it_and_the_result_of_a_spawn_names_it(
    tmp_path: Path,
) -> None:
    rows: list[Any] = []
    for row in codex_rows("par", 5):
        if usage := row["payload"].get("info", {}).get("last_token_usage"):
            payload = {"response_id": str(len(rows)), "usage": usage}
            rows.append({**row, "type": "token_usage_record", "payload": payload})
        rows.append(row)
    (call,) = [row["payload"] for row in rows if row["payload"].get("name") and row["payload"]["call_id"] == "3"]
    call["name"], rows[-1]["payload"]["output"] = "spawn_agent", ""
    rows[-5]["payload"]["output"] = '{"agent_id": "child"}'
    trace = imported(written(tmp_path, rows, "b"), written(tmp_path, fork(4, SPAWN), "a"))
    assert trace.head.dropped == {REPEATED: 4}
    assert trace.recordings[0].requests[4].after == (3,)
    assert not any("agents" in label for label in trace.head.labels)


def test_a_review_whose_agent_is_read_is_joined_and_what_came_behind_it_was_a_persons(tmp_path: Path) -> None:
    (meta, *rows), more = [*codex_rows("par", 1)][:-1], [*codex_rows("par", 5)][-3:-1]
    told = ((10, "task_started"), (10, "entered_review_mode"), (30, "exited_review_mode"), (42, "user_message"))
    rows += [{"timestamp": at(at_s), "type": "event_msg", "payload": {"type": kind}} for at_s, kind in told]
    agent = {"source": {"subagent": "review"}, "parent_thread_id": "par"}
    begun, own = [*codex_rows("child", 1, meta=agent, first_s=10)][:2], own_rows(2, 0, 10)[:-1]
    paths = [written(tmp_path, [meta, *rows, *more], "b"), written(tmp_path, [*begun, *own], "a")]
    trace = imported(*paths)
    waits = [(one.after, one.wait_kind) for one in trace.recordings[0].requests]
    assert waits == [((), "none"), ((0,), "human"), ((1,), "human"), ((0, 2), "human")]
    assert not trace.head.dropped
