"""LMCache's agentic traces: what prompts share is found by their messages, within a session and between sessions."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SpecError
from harness.extras.formats.lmcache import DELTA, FIRST, STARTS, UNHELD
from harness.model.traces.links import CONTRADICTED
from tests.support.sound_traces import lmcache_rows
from tests.support.trace_rows import imported, trace_of, written

SYSTEM = {"role": "system", "content": "rules " * 2000}


def rows(*sessions: str) -> list[Any]:
    """Calls of sessions that share a long system prompt."""
    return [row | {"input": [SYSTEM, *row["input"]]} for session in sessions for row in lmcache_rows(session)]


def test_a_prompt_keeps_the_call_before_and_shares_whole_blocks_with_other_sessions(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, rows("a", "b"))
    first, second = trace.recordings
    assert (trace.head.source_format, trace.head.block_tokens) == ("lmcache", 512)
    assert [one.wait_ns // NS_PER_MS for one in first.requests] == [0, 500, 1000]
    for before, after in pairwise(first.requests):
        assert after.keep_tokens == before.prompt_tokens + before.generate_tokens
    shared = [mine == theirs for mine, theirs in zip(first.requests[0].blocks, second.requests[0].blocks, strict=True)]
    assert shared.count(True) == 5, "12,000 characters of system prompt are 5 whole blocks of 2,048"
    assert any("estimated from characters" in label for label in trace.head.labels)


def test_rows_of_parquet_are_the_rows_of_json_lines_and_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    lines, table = written(tmp_path, rows("a", "b")), tmp_path / "in.parquet"
    pq.write_table(pa.Table.from_pylist(rows("a", "b")), table)
    assert imported(table).recordings == imported(lines).recordings
    table.write_bytes(table.read_bytes()[:-40])
    with pytest.raises(SpecError, match="cannot be read as Parquet"):
        imported(table)


@pytest.mark.parametrize("message", ["x", None, 3, ["x"]])
def test_a_call_with_a_message_that_is_no_object_is_broken(tmp_path: Path, message: object) -> None:
    first, second, third = rows("a")
    head = trace_of(tmp_path, [first, second | {"input": [message, *second["input"]]}, third]).head
    assert head.broken == {"a call without its session, messages or output length": 1}


@pytest.mark.parametrize(("role", "kind"), [("tool", "tool"), ("user", "none")])
def test_a_gap_is_a_tools_only_where_a_tools_message_ends_it(tmp_path: Path, role: str, kind: str) -> None:
    first, second, third = rows("a")
    third["input"][-1]["role"] = role
    [recording] = trace_of(tmp_path, [first, second, third]).recordings
    assert recording.requests[2].wait_kind == kind


def test_a_first_call_that_holds_answers_says_that_calls_are_missing(tmp_path: Path) -> None:
    label = "1 x calls whose messages hold answers of calls that are missing"
    assert [label in trace_of(tmp_path, rows("a")[first:]).head.labels for first in (0, 1)] == [False, True]


def test_a_gap_that_is_longer_than_the_time_between_the_calls_is_labelled(tmp_path: Path) -> None:
    stamped = [row | {"session_timestamp": 4.0 * place} for place, row in enumerate(rows("a"))]
    assert not any(CONTRADICTED in label for label in trace_of(tmp_path, stamped).head.labels)
    stamped[1]["pre_gap"] = 5.0
    assert f"1 x {CONTRADICTED}" in trace_of(tmp_path, stamped).head.labels


def test_without_gaps_the_time_between_calls_is_taken_or_a_wait_is_drawn(tmp_path: Path) -> None:
    bare = [{key: value for key, value in row.items() if key != "pre_gap"} for row in rows("a")]
    for given, label in (([], "waits drawn from"), ([0, 4, 9], "gaps between calls")):
        timed = [row | ({"session_timestamp": given[place]} if given else {}) for place, row in enumerate(bare)]
        trace = trace_of(tmp_path, timed)
        assert any(label in each for each in trace.head.labels)
        if given:
            assert [one.wait_ns // NS_PER_MS for one in trace.recordings[0].requests] == [0, 4000, 5000]


def test_the_delay_of_aiperfs_rows_is_the_wait(tmp_path: Path) -> None:
    delays = ({}, {"delay": 4503.5}, {"delay": 19_978})
    given = [
        {"session_id": "a", "messages": row["input"], "output_length": 60} | delay
        for row, delay in zip(rows("a"), delays, strict=True)
    ]
    for first_ms in (0, 3000):
        given[0] |= {"delay": first_ms}
        (recording,) = (trace := trace_of(tmp_path, given)).recordings
        assert [one.wait_ns / NS_PER_MS for one in recording.requests] == [0, 4503.5, 19_978]
        assert (f"1 x {FIRST}" in trace.head.labels) == bool(first_ms)


def test_rows_of_new_messages_only_go_on_from_what_came_before(tmp_path: Path) -> None:
    def row(length: int, **more: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "x" * length}]
        return {"session_id": "s", "message_mode": "delta", "messages": messages, "output_length": 500, **more}

    trace = trace_of(tmp_path, [row(1000, timestamp=7000), row(400, delay=2000), row(400, delay=2000)])
    (recording,) = trace.recordings
    first, second, third = recording.requests
    assert [one.keep_tokens for one in recording.requests] == [0, first.prompt_tokens + 500, second.prompt_tokens + 500]
    assert third.prompt_tokens - third.keep_tokens == second.prompt_tokens - second.keep_tokens
    assert [one.wait_ns / NS_PER_S for one in recording.requests] == [0, 2, 2]
    assert f"3 x {DELTA}" in trace.head.labels


def test_instants_of_rows_say_the_gaps_where_no_delay_does(tmp_path: Path) -> None:
    asked = [{"role": "user", "content": "x" * 400}]
    more = [*asked, {"role": "assistant", "content": "y" * 100}, {"role": "user", "content": "z" * 100}]
    rows = [
        {"session_id": "s", "messages": messages, "output_length": 50, "timestamp": instant}
        for messages, instant in ((more, 2000), (asked, 0))
    ]
    (recording,) = (trace := trace_of(tmp_path, rows)).recordings
    assert [(one.wait_ns / NS_PER_S, one.is_drawn) for one in recording.requests] == [(0, False), (2, False)]
    later = trace_of(tmp_path, [*rows, rows[1] | {"session_id": "t", "timestamp": 2500}])
    assert [f"1 x {STARTS}" in each.head.labels for each in (trace, later)] == [False, True]


def message(role: str, letter: str, length: int) -> dict[str, str]:
    return {"role": role, "content": letter * length}


def test_a_conversation_that_was_summarised_stays_in_the_order_of_its_rows(tmp_path: Path) -> None:
    asked = [message("system", "s", 400), message("user", "u", 200)]
    longer = [*asked, message("assistant", "a", 120), message("tool", "t", 800)]
    summary = [asked[0], message("user", "m", 120)]
    given = [(asked, None), (longer, 1.25), (summary, 0.05)]
    rows = [{"session_id": "s", "input": each, "output_length": 9, "pre_gap": gap} for each, gap in given]
    trace = trace_of(tmp_path, rows)
    requests = trace.recordings[0].requests
    assert [one.wait_ns / NS_PER_S for one in requests] == [0, 1.25, 0.05]
    assert requests[1].keep_tokens == requests[0].prompt_tokens + 9
    assert 0 < requests[2].keep_tokens < requests[2].prompt_tokens, "the system's message stays"
    assert not any("out of order" in label for label in trace.head.labels)
    shuffled = trace_of(tmp_path, [rows[1], rows[0]])
    assert "1 x calls of a session out of order: sorted by how much came before" in shuffled.head.labels
    assert [one.prompt_tokens for one in shuffled.recordings[0].requests] == [one.prompt_tokens for one in requests[:2]]


@pytest.mark.parametrize("role", ["assistant", "user"])
def test_an_answer_is_kept_only_where_a_message_holds_it(tmp_path: Path, role: str) -> None:
    asked = [message("system", "s", 400), message("user", "u", 200)]
    more = [*asked, message(role, "a", 1200), message("user", "v", 160)]
    rows = [{"session_id": "s", "input": each, "output_length": 300, "pre_gap": 1.5} for each in (asked, more, more)]
    trace = trace_of(tmp_path, [rows[0], rows[1], rows[2] | {"pre_gap": 2.5}])
    first, second, again = trace.recordings[0].requests
    assert second.keep_tokens == first.prompt_tokens + 300 * (role == "assistant")
    new = {"assistant": more[3:], "user": more[2:]}[role]
    assert second.prompt_tokens - second.keep_tokens == sum(-(-len(json.dumps(each)) // 4) for each in new)
    assert again.prompt_tokens == again.keep_tokens == second.prompt_tokens, "asked once more, without its answer"
    assert f"{1 + (role == 'user')} x {UNHELD}" in trace.head.labels


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_an_image_is_no_text_and_is_labelled(tmp_path: Path, kind: str) -> None:
    def prompt(content: str) -> Any:
        source = {"type": "base64", "media_type": "image/png", "data": content}
        image = {"type": "image", "source": source}
        if kind == "openai":
            image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
        return [{"role": "user", "content": [{"type": "text", "text": "x" * 200}, image]}]

    rows = [
        {"session_id": name, "input": prompt(letter * 8000 + "=="), "output_length": 9} for name, letter in ("aQ", "bR")
    ]
    trace = trace_of(tmp_path, rows)
    assert all(each.requests[0].prompt_tokens < 150 for each in trace.recordings)
    assert "2 x images and other files in prompts: their tokens are not known, and left out" in trace.head.labels
