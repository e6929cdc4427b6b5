"""Requests that wait for others: sessions with delays, ids that two files share, rows that say no time at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_MS
from harness.errors import SpecError
from harness.extras.formats.agentic import AT_INSTANT, BESIDE, BOTH, FIRST, LOST, UNDATED
from harness.model.traces.links import PARTLY, WHOLE
from harness.model.traces.recording import TraceFile
from tests.support.trace_rows import imported, written


def row(prompt: int, **more: Any) -> dict[str, Any]:
    return {"input_length": prompt, "output_length": 40} | more


def test_rows_of_a_session_with_delays_follow_one_another(tmp_path: Path) -> None:
    rows = [
        row(600, session_id="a", timestamp=0, hash_ids=[1, 2], branches=[]),
        row(600, session_id="b", timestamp=9000, hash_ids=[1, 3]),
        row(1100, session_id="a", delay=2000, hash_ids=[1, 2, 4]),
        row(1700, session_id="b", delay=500, hash_ids=[1, 3, 5, 6]),
    ]
    trace = imported(written(tmp_path, rows))
    assert (trace.head.source_format, trace.head.arrivals, len(trace.recordings)) == ("agentic-mooncake", "recorded", 2)
    assert [one.requests[1].wait_ns // NS_PER_MS for one in trace.recordings] == [2000, 500]
    assert [one.start_ns // NS_PER_MS for one in trace.recordings] == [0, 9000]
    assert [one.requests[1].keep_tokens for one in trace.recordings] == [640, 640], (
        "all whole blocks come again, so the answer does"
    )
    assert trace.head.labels == (
        f"2 x {WHOLE}",
        "2 x rows of a session whose input_length is taken to count their whole prompt",
        "2 x waits by delay taken as for a person, as AIPerf does",
        "4 x rows whose last block name is of a part of a block: it is left out",
    )
    assert [one.requests[1].wait_kind for one in trace.recordings] == ["human", "human"]


def test_rows_that_count_only_what_is_new_get_the_rows_before_in_front(tmp_path: Path) -> None:
    rows = [
        row(600, session_id="a", timestamp=0, hash_ids=[1, 2]),
        row(100, session_id="a", delay=10, hash_ids=[7]),
        row(50, session_id="a", delay=10, hash_ids=[8]),
    ]
    trace = imported(written(tmp_path, rows), block_tokens=512)
    assert [one.prompt_tokens for one in trace.recordings[0].requests] == [600, 740, 830]
    assert [one.keep_tokens for one in trace.recordings[0].requests] == [0, 640, 780]
    label, *_ = trace.head.labels
    assert (
        label
        == "2 x rows of a session whose input_length is taken to count what is new after the row before, as AIPerf does"
    )


def test_a_request_that_runs_beside_the_one_before_it_in_its_session_keeps_none_of_it_and_is_labelled(
    tmp_path: Path,
) -> None:
    rows = [
        row(600 + 600 * (name > "a"), request_id=name, session_id="s", wait_for=["a"] * (name > "a")) for name in "abc"
    ]
    trace = imported(written(tmp_path, rows), block_tokens=512)
    assert [one.keep_tokens for one in trace.recordings[0].requests] == [0, 640, 0]
    assert f"1 x {BESIDE}" in trace.head.labels


def test_a_file_whose_first_row_waits_for_nothing_is_recognised(tmp_path: Path) -> None:
    first = row(600, request_id="a", timestamp=0, hash_ids=[1, 2])
    rows = [
        first,
        row(1200, request_id="b", session_id="a", wait_for=["a"], delay=5, timestamp=900, hash_ids=[1, 2, 3]),
    ]
    trace = imported(written(tmp_path, rows))
    assert trace.head.source_format == "agentic-mooncake"
    (recording,) = trace.recordings
    assert (recording.requests[1].after, recording.requests[1].wait_kind) == ((0,), "none")
    for tool_ms, kind, stated in ((3, "none", "3 stated, 8 counted"), (6, "tool", "6 stated, 11 counted")):
        rows[1] |= {"tool_wait_ms": tool_ms}
        trace = imported(written(tmp_path, rows))
        assert trace.recordings[0].requests[1].wait_kind == kind
        assert f"1 x {PARTLY}: {stated}" in trace.head.labels
    bare = [{key: value for key, value in each.items() if key != "request_id"} for each in (rows[0], rows[0])]
    bare[1] |= {"session_id": "s", "delay": 4, "timestamp": 5000}
    assert imported(written(tmp_path, bare)).head.source_format == "agentic-mooncake"


def test_rows_that_say_no_time_get_drawn_waits_and_the_same_ones_each_time(tmp_path: Path) -> None:
    def again(rows: list[Any], **options: Any) -> TraceFile:
        return imported(written(tmp_path, rows), lengths="whole", **options)

    rows = [row(600 + 700 * turn, session_id="a") for turn in range(6)]
    waits = [[one.wait_ns for one in again(rows).recordings[0].requests] for _ in range(2)]
    assert waits[0] == waits[1]
    assert len(set(waits[0])) == 6
    assert all(one.is_drawn for one in again(rows).recordings[0].requests[1:])
    labels = again(rows).head.labels
    assert "5 x waits drawn from tracelab-v0.0.2: the recording does not say them (--waits)" in labels
    with pytest.raises(SpecError, match="nowhere"):
        again(rows, waits="nowhere")


def test_lengths_that_grow_without_names_are_refused_until_the_person_says_what_they_count(tmp_path: Path) -> None:
    rows = [row(300, session_id="a", timestamp=0), *(row(each, session_id="a", delay=5) for each in (500, 900))]
    with pytest.raises(SpecError, match="--lengths new, or --lengths whole"):
        imported(written(tmp_path, rows))
    for lengths, prompts in (("new", [300, 840, 1780]), ("whole", [300, 500, 900])):
        trace = imported(written(tmp_path, rows), lengths=lengths)
        assert [one.prompt_tokens for one in trace.recordings[0].requests] == prompts
        assert any("as --lengths says" in label for label in trace.head.labels)


def test_two_files_may_use_the_same_ids_and_a_file_given_twice_adds_nothing(tmp_path: Path) -> None:
    first = [row(600, request_id="0", wait_for=[]), row(1300, request_id="1", wait_for=["0"], delay=5)]
    other = [each | {"input_length": each["input_length"] + 7} for each in first]
    trace = imported(written(tmp_path, first, "a"), written(tmp_path, other, "b"))
    assert (trace.num_requests, len(trace.recordings)) == (4, 2)
    assert not trace.head.dropped
    again = imported(
        written(tmp_path, first, "a"), written(tmp_path, [*first, row(9, request_id="2", wait_for=["1"])], "b")
    )
    assert (again.num_requests, len(again.recordings)) == (3, 1)
    assert again.head.dropped == {"rows that another file holds already": 2}


def test_a_delay_that_is_null_is_none_and_labelled(tmp_path: Path) -> None:
    rows = [row(600, request_id="1", timestamp=0), row(700, request_id="2", wait_for=["1"], delay=None)]
    labels = imported(written(tmp_path, rows)).head.labels
    assert "1 x requests that wait for others and have no delay: taken to start at once" in labels


@pytest.mark.parametrize(
    ("first", "second", "label", "starts_s"),
    [
        ({"timestamp": 9000}, {"delay": 2000}, None, [0, 0]),
        ({"timestamp": 9000, "delay": 3000}, {"delay": 2000}, FIRST, [0, 0]),
        ({"timestamp": 9000, "tool_wait_ms": 3000}, {"delay": 2000}, FIRST, [0, 0]),
        ({}, {"delay": 2000}, UNDATED, [0, 0]),
        ({"timestamp": 9000}, {"delay": 2000, "timestamp": 19_000}, BOTH, [0, 0]),
        ({"timestamp": 9000}, {"output_length": None}, LOST, [0, 0]),
        ({"timestamp": 5000}, {"delay": 2000}, None, [0, 4]),
    ],
)
def test_a_session_begins_at_its_instant_and_what_else_its_rows_say_is_labelled(
    tmp_path: Path, first: dict[str, Any], second: dict[str, Any], label: str | None, starts_s: list[int]
) -> None:
    rows = [row(600, session_id="a") | first, row(90, session_id="a") | second]
    trace = imported(written(tmp_path, [row(700, session_id="b", timestamp=9000), *rows]))
    assert sorted(one.start_ns // NS_PER_MS for one in trace.recordings) == [1000 * each for each in starts_s]
    assert all(one.requests[0].wait_ns == 0 for one in trace.recordings)
    assert [request.wait_ns // NS_PER_MS for one in trace.recordings for request in one.requests[1:]] == (
        [] if label == LOST else [2000]
    )
    told = {each for each in (BOTH, FIRST, LOST, UNDATED) if any(each in found for found in trace.head.labels)}
    assert told == ({label} if label else set())


def test_two_files_that_number_their_blocks_anew_share_nothing(tmp_path: Path) -> None:
    def blocks(*others: int) -> list[tuple[int, ...]]:
        one = [row(1024, request_id="0", wait_for=[], hash_ids=[0, 1])]
        other = [row(1030, request_id="0", wait_for=[], hash_ids=[*others, 2])]
        trace = imported(written(tmp_path, one, "a"), written(tmp_path, other, "b"), block_tokens=512)
        assert any("files whose block names are taken as" in label for label in trace.head.labels)
        return [each.requests[0].blocks for each in trace.recordings]

    (mine, theirs), (first, second) = blocks(0, 1), blocks(1)
    assert not set(mine) & set(theirs)
    assert set(first) & set(second), "names that go on from another file's are the same"


def test_turns_with_instants_and_no_delay_start_at_their_instants(tmp_path: Path) -> None:
    rows = [row(600, session_id="a", timestamp=at) for at in (0, 4000, 2000)]
    trace = imported(written(tmp_path, rows))
    starts_ms = sorted(one.start_ns // NS_PER_MS for one in trace.recordings)
    assert starts_ms == [0, 2000, 4000]
    assert f"2 x {AT_INSTANT}" in trace.head.labels
    (recording,) = imported(written(tmp_path, rows), lengths="new").recordings
    assert [one.prompt_tokens for one in recording.requests] == [600, 1240, 1880]


def test_turns_with_instants_whose_names_are_all_new_are_one_conversation(tmp_path: Path) -> None:
    rows = [row(1024, session_id="a", timestamp=0, hash_ids=[1, 2])]
    rows += [row(512, session_id="a", timestamp=9000, hash_ids=[3])]
    (recording,) = imported(written(tmp_path, rows)).recordings
    last = recording.requests[1]
    assert (last.prompt_tokens, last.keep_tokens, last.wait_ns // NS_PER_MS) == (1576, 1064, 9000)
    assert (last.after, last.wait_kind) == ((0,), "none")
    assert len(imported(written(tmp_path, rows), lengths="whole").recordings) == 2
    rows[1] |= {"input_length": 1536, "hash_ids": [1, 2, 3]}
    assert len(imported(written(tmp_path, rows)).recordings) == 2, "whole prompts start at their instants"


def test_a_text_for_a_prompt_is_counted_by_its_characters_and_labelled(tmp_path: Path) -> None:
    rows = [row(600, session_id="a", timestamp=0), row(0, session_id="a", delay=2000, text_input="word " * 80)]
    del rows[1]["input_length"]
    trace = imported(written(tmp_path, rows))
    assert [one.prompt_tokens for one in trace.recordings[0].requests] == [600, 600 + 40 + 100]
    assert any("text_input" in label for label in trace.head.labels)


def test_another_block_size_is_refused_here_too(tmp_path: Path) -> None:
    rows = [row(2048, request_id=str(place), wait_for=[], hash_ids=list(range(32))) for place in range(3)]
    with pytest.raises(SpecError, match="blocks of 64 tokens fit every row"):
        imported(written(tmp_path, rows))
    assert imported(written(tmp_path, rows), block_tokens=64).head.block_tokens == 64


def test_rows_of_a_version_that_is_not_read_are_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"`dependencies` .Dynamo's version 2.*wait_for"):
        imported(written(tmp_path, [row(640, request_id="a", dependencies=[])]))
