"""Claude Code's files: a message counts once over all files, and a placeholder is no length of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_logs import assistant, result, text, tool, user
from tests.support.sound_traces import claude_rows
from tests.support.trace_rows import imported, written

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
    assert trace.head.labels == (
        "1 x output tokens estimated from characters, 4 to a token: the recording has a placeholder",
    )


def test_a_count_that_can_be_of_its_answer_is_kept(tmp_path: Path) -> None:
    for output, part in ((400, LONG), (250, WRITE), (3, {"type": "text", "text": "Done."})):
        trace = imported(written(tmp_path, answered(output, part)))
        assert trace.recordings[0].requests[0].generate_tokens == output
        assert not [label for label in trace.head.labels if "estimated" in label]


def test_usage_that_grows_from_row_to_row_of_a_message_counts_once_and_last(tmp_path: Path) -> None:
    rows = [user(0.0), *(assistant("a", 1.0 + n, (10, 1000, 0, 3**n), LONG | {"text": "x" * n}) for n in range(1, 6))]
    trace = imported(written(tmp_path, rows))
    assert [request.generate_tokens for request in trace.recordings[0].requests] == [3**5]
    assert not trace.head.labels


def test_answers_of_a_gateway_that_share_one_id_are_told_apart_by_their_requests(tmp_path: Path) -> None:
    rows = list(claude_rows("a", 3))
    for row in rows:
        if row["type"] == "assistant":
            row["message"]["id"] = "msg"
    assert imported(written(tmp_path, rows)).num_requests == 3
