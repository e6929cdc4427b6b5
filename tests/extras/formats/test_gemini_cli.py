"""Sessions of Gemini CLI: messages that are written again, sessions that are resumed, rewound or compacted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S
from harness.model.traces.account import ReadNotes
from harness.model.traces.calls import BACK, SHIFTED
from harness.model.traces.importing import read_recordings
from harness.model.traces.links import AFTER_SUMMARY, MAY_ASK, UNANSWERED
from harness.model.traces.recording import Recording
from harness.model.traces.values import instant_ns
from tests.support.sound_traces import gemini_session
from tests.support.trace_rows import at

HEADER = {"sessionId": "s", "projectHash": "x", "kind": "main"}


def rows_of(session: str = "s", turns: int = 3, first_s: float = 0.0) -> list[Any]:
    """A session in lines: an answer is written when it has ended, and again with its tools."""
    document = gemini_session(session, turns, first_s)
    rows: list[Any] = [HEADER | {"sessionId": session}]
    for message in document.pop("messages"):
        if "toolCalls" in message:
            rows.append({key: value for key, value in message.items() if key != "toolCalls"})
        rows += [message, {"$set": {"lastUpdated": message["timestamp"]}}]
    return rows


def answers(turns: int) -> list[Any]:
    return [row for row in rows_of("t", turns) if "toolCalls" in row]


def read(folder: Path, rows: list[Any], name: str = "session-s.jsonl") -> tuple[list[Recording], ReadNotes]:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    _, recordings, notes = read_recordings([folder])
    return recordings, notes


def waits_s(recording: Recording) -> list[tuple[float, str]]:
    return [(request.wait_ns / 1e9, request.wait_kind) for request in recording.requests]


def test_a_message_that_is_written_again_is_one_call(tmp_path: Path) -> None:
    (recording,), notes = read(tmp_path, rows_of())
    assert waits_s(recording) == [(0, "none"), (5, "tool"), (5, "tool")]
    assert [request.keep_tokens for request in recording.requests] == [0, 1000, 1000]
    assert [request.generate_tokens for request in recording.requests] == [100, 100, 100], "with its reasoning"
    assert notes.labels == (f"1 x {UNANSWERED}", f"2 x {MAY_ASK}"), "its last result has no answer"


@pytest.mark.parametrize(("said", "labels"), [({"output": "x"}, ()), ({"error": "x"}, (f"1 x {UNANSWERED}",))])
def test_a_sub_agent_that_tells_its_result_has_no_last_input(tmp_path: Path, said: Any, labels: Any) -> None:
    rows, result = rows_of(), [{"functionResponse": {"id": "s-c2", "response": said}}]
    for tool in (tool for row in rows if row.get("id") == "s-a2" for tool in row.get("toolCalls", ())):
        tool |= {"name": "complete_task", "status": "success", "timestamp": at(28), "result": result}
    _, notes = read(tmp_path, [row for row in rows if row.get("id") != "s-r2"])
    assert notes.labels == (*labels, f"2 x {MAY_ASK}")


def test_a_call_that_was_cancelled_or_failed_is_counted_and_the_wait_after_it_unknown(tmp_path: Path) -> None:
    person = {"type": "user", "content": [{"text": "x"}]}
    ends = {"type": "info", "content": "Request cancelled."}, {"type": "error", "content": "x"}
    rows = rows_of(turns=1)
    for place, end in enumerate(ends):
        asked, again = ({"id": f"{place}{name}", **person} for name in "ab")
        start_s = 60 * (place + 1)
        rows += [asked | {"timestamp": at(start_s)}, {"id": f"{place}", "timestamp": at(start_s + 4), **end}]
        rows += [again | {"timestamp": at(start_s + 30)}]
        rows += [answers(1)[0] | {"id": f"more{place}", "timestamp": at(start_s + 34)}]
    _, notes = read(tmp_path, rows)
    assert notes.left == {"calls that were cancelled or failed: the log does not hold them": 2}
    assert "2 x waits that are unknown: a call before theirs was cancelled or failed" in notes.labels
    rows = [row for row in rows_of() if row.get("type") != "user"]
    _, notes = read(tmp_path / "idle", [*rows, {"id": "i", "timestamp": at(90), **ends[0]}])
    assert not notes.left, "nothing was asked for"


@pytest.mark.parametrize(
    ("said", "status", "kind"),
    [
        ("[Operation Cancelled] Reason: User denied execution.", "cancelled", "human"),
        ("[Operation Cancelled] Reason: Operation cancelled by user", "cancelled", "none"),
        ("no such file", "error", "tool"),
    ],
)
@pytest.mark.parametrize("has_tool", [True, False], ids=["in its answer", "in a row of its own"])
def test_a_tool_that_was_refused_was_waited_for_by_a_person(
    tmp_path: Path, said: str, status: str, kind: str, *, has_tool: bool
) -> None:
    rows = rows_of(turns=2)
    result = [{"functionResponse": {"id": "s-c0", "response": {"error": said}}}]
    for row in rows:
        for tool in row.get("toolCalls", ()):
            tool |= {"status": status, "timestamp": at(8), "result": result} if has_tool else {}
    rows = [row for row in rows if not (row.get("id") == "s-r0" and has_tool)]
    rows = [row | {"content": result} if row.get("id") == "s-r0" else row for row in rows]
    (recording,), _ = read(tmp_path, rows)
    assert waits_s(recording)[1:] == [(5, kind if has_tool or kind != "none" else "tool")]


@pytest.mark.parametrize(("status", "has_asked"), [("cancelled", False), ("success", True)])
@pytest.mark.parametrize("is_told", [True, False])
def test_a_notice_behind_tools_of_which_none_ran_tells_of_no_call(
    tmp_path: Path, status: str, *, has_asked: bool, is_told: bool
) -> None:
    tool = {"id": "s-c0", "name": "x", "args": {}, "status": status, "timestamp": at(8)}
    rows = [row | ({"toolCalls": [tool]} if "toolCalls" in row else {}) for row in rows_of(turns=1)]
    rows = [row for row in rows if row.get("id") != "s-r0"]
    notice = {"id": "i", "timestamp": at(8.2), "type": "info", "content": "Request cancelled."}
    person = {"id": "p", "timestamp": at(60), "type": "user", "content": [{"text": "x"}]}
    answer = answers(2)[1] | {"id": "more", "timestamp": at(64)}
    (recording,), notes = read(tmp_path, [*rows, *[notice] * is_told, person, answer])
    last = recording.requests[-1]
    assert (last.is_drawn, last.wait_kind) == (has_asked and is_told, "human")
    assert last.is_drawn or last.wait_ns == 57 * NS_PER_S
    assert sum(notes.left.values()) == (has_asked and is_told)
    # The person asked since then: it was the answer to that which was cancelled.
    (recording,), notes = read(tmp_path, [*rows, person, notice | {"timestamp": at(62)}, answer])
    assert recording.requests[-1].is_drawn


@pytest.mark.parametrize("is_document", [False, True])
@pytest.mark.parametrize(("back_at", "waits"), [("s-r1", [5, None, 5]), ("s-a2", [5, None, 5]), ("tool", [5, None, 5])])
def test_rows_behind_a_clock_that_went_back_keep_their_order_and_one_wait_is_unknown(
    tmp_path: Path, back_at: str, waits: list[float | None], *, is_document: bool
) -> None:
    document, back_s = gemini_session("s", 4, 300.0), 0
    for message in document["messages"]:
        seconds = ((instant_ns(message["timestamp"]) or 0) - (instant_ns(at(0)) or 0)) / 1e9
        back_s = 120 if message["id"] == back_at else back_s
        message["timestamp"] = at(seconds - back_s)
        for tool in message.get("toolCalls", ()):
            back_s = 120 if (back_at, message["id"]) == ("tool", "s-a1") else back_s
            tool |= {"status": "success", "timestamp": at(seconds + 5 - back_s)}
    (recording,), notes = read(tmp_path, [document] if is_document else [HEADER, *document["messages"]])
    assert [None if one.is_drawn else one.wait_ns / 1e9 for one in recording.requests[1:]] == waits
    assert [one.prompt_tokens for one in recording.requests] == [1000, 1200, 1400, 1600]
    assert (notes.assumed[SHIFTED], notes.assumed[f"waits that are unknown: {BACK}"]) == (1, 1)


def test_a_resumed_session_goes_on(tmp_path: Path) -> None:
    resumed = [{key: message[key] for key in ("id", "type", "timestamp")} for message in rows_of() if "id" in message]
    person = {"id": "p", "timestamp": at(60), "type": "user", "content": [{"text": "x"}]}
    answer = answers(1)[0] | {"id": "more", "timestamp": at(64)}
    rows = [*rows_of(), HEADER, {"$set": {"messages": resumed[:1]}}, {"$set": {"messages": resumed}}, person, answer]
    (recording,), notes = read(tmp_path, rows)
    assert waits_s(recording)[-1] == (37, "human")
    assert recording.requests[-1].after == (2,)
    assert not notes.left


def test_a_list_without_an_answer_that_came_before_is_a_compaction(tmp_path: Path) -> None:
    summary = [{"id": "sum", "type": "user", "timestamp": at(40)}, {"id": "ack", "type": "gemini", "timestamp": at(40)}]
    person = {"id": "p", "timestamp": at(60), "type": "user", "content": [{"text": "x"}]}
    answer = answers(2)[1] | {"id": "more", "timestamp": at(64)}
    (recording,), notes = read(tmp_path, [*rows_of(), {"$set": {"messages": summary}}, person, answer])
    assert (recording.requests[-1].prompt_tokens, recording.requests[-1].is_drawn) == (1200, True)
    assert notes.assumed[AFTER_SUMMARY] == 1
    assert notes.left == {"summaries of a conversation: the log does not hold their calls": 1}


@pytest.mark.parametrize("is_told", [True, False])
def test_a_turn_that_was_cancelled_is_taken_back_and_is_no_compaction(tmp_path: Path, *, is_told: bool) -> None:
    kept = [{"id": "env", "type": "user"}, *({"id": name} for name in ("s-u", "s-a0", "s-r0"))]
    told = [{"id": "i", "timestamp": at(40), "type": "info", "content": "Request cancelled."}] * is_told
    person = {"id": "p", "timestamp": at(60), "type": "user", "content": [{"text": "x"}]}
    answer = answers(2)[1] | {"id": "more", "timestamp": at(64)}
    (recording,), notes = read(tmp_path, [*rows_of(), {"$set": {"messages": kept}}, *told, person, answer])
    assert (recording.requests[-1].base, recording.requests[-1].is_drawn) == (0, True)
    assert notes.left == {"calls that were cancelled or failed: the log does not hold them": 1}


@pytest.mark.parametrize("said", ["Please continue.", "System: Potential loop detected. Details: x"])
def test_what_the_program_says_in_a_persons_name_is_no_persons(tmp_path: Path, said: str) -> None:
    told = {"id": "p", "timestamp": at(60), "type": "user", "content": [{"text": said}]}
    rows = [row for row in rows_of(turns=1) if row.get("id") != "s-r0" and "toolCalls" not in row]
    (recording,), _ = read(tmp_path, [*rows, told, answers(2)[1] | {"id": "more", "timestamp": at(64)}])
    assert waits_s(recording)[1:] == [(57, "none")]


def test_what_was_rewound_is_no_compaction(tmp_path: Path) -> None:
    kept = [
        {key: message[key] for key in ("id", "type", "timestamp")} for message in rows_of(turns=2) if "id" in message
    ]
    rows = [*rows_of(), {"$rewindTo": "s-a2"}, {"$set": {"messages": kept}}]
    _, notes = read(tmp_path, rows)
    assert not notes.left


@pytest.mark.parametrize(("back_to", "base", "keep"), [("s-a2", 1, 1000), ("s-r0", 0, 1000), ("s-u", None, 0)])
def test_who_goes_back_goes_on_from_the_call_before_the_message_that_is_named(
    tmp_path: Path, back_to: str, base: int | None, keep: int
) -> None:
    person = {"id": "p", "timestamp": at(60), "type": "user", "content": [{"text": "x"}]}
    first, answer = (row | {"id": f"more{place}"} for place, row in enumerate(answers(2)))
    answer = (first if base is None else answer) | {"id": "more", "timestamp": at(64)}
    (recording,), notes = read(tmp_path, [*rows_of(), {"$rewindTo": back_to}, person, answer])
    last = recording.requests[-1]
    assert (last.base, last.keep_tokens, last.after) == (base, keep, (2,))
    assert (last.wait_kind, last.wait_ns) == ("human", 37 * NS_PER_S), "not the tool's whose result was taken back"
    assert not notes.broken
    (recording,), notes = read(tmp_path, [*rows_of(), {"$rewindTo": "lost"}, person, answer])
    assert recording.requests[-1].is_drawn
    assert notes.broken.total() == 1


@pytest.mark.parametrize("content", [None, 3, [], [None], [{}], [{"functionResponse": None}]])
def test_a_users_message_without_content_is_broken_and_leaves_no_wait_known(tmp_path: Path, content: object) -> None:
    rows = rows_of()
    place = max(place for place, row in enumerate(rows[:-1]) if row.get("type") == "user")
    rows[place] = rows[place] | {"content": content}
    (recording,), notes = read(tmp_path, rows)
    assert notes.broken == {"a message without its id, time or content": 1}
    assert recording.requests[-1].is_drawn
    _, notes = read(tmp_path, [*rows_of(), {"sessionId": "t", "projectHash": "x", "messages": content or 3}])
    assert sum(notes.broken.values()) == 1 or isinstance(content, list)


def test_tools_in_a_message_of_their_own_belong_to_the_answer_before_them(tmp_path: Path) -> None:
    held: list[Any] = []
    rows: list[Any] = []
    for row in rows_of():
        if "toolCalls" in row:
            held += row["toolCalls"]
            row = {"id": "held", "timestamp": at(5), "type": "gemini", "content": "", "toolCalls": list(held)}
        rows.append(row)
    (recording,), notes = read(tmp_path, rows)
    assert waits_s(recording) == [(0, "none"), (5, "tool"), (5, "tool")]
    assert notes.labels == (f"1 x {UNANSWERED}", f"2 x {MAY_ASK}")


def test_a_sub_agent_is_linked_by_its_tool_or_by_its_folder_else_counted(tmp_path: Path) -> None:
    child = [row | {"kind": "subagent"} if "projectHash" in row else row for row in rows_of("k", 1, 4.0)]
    del child[-2:]  # its last result, which came after all
    for name, tool_agent in (("s/k.jsonl", ""), ("other/k.jsonl", "k"), ("other/k.jsonl", "")):
        folder = tmp_path / f"{name[0]}{tool_agent}"
        rows = json.loads(json.dumps(rows_of()).replace('"id": "s-c0"', f'"agentId": "{tool_agent}", "id": "s-c0"', 2))
        read(folder, child, name)
        recordings, notes = read(folder, rows)
        is_linked = name.startswith("s/") or bool(tool_agent)
        assert len(recordings) == 1 + (not is_linked)
        assert any("without a link" in label for label in notes.labels) != is_linked
        if is_linked:
            assert recordings[0].requests[2].after == (0, 1), "its end was waited for"


def test_an_answer_without_counts_is_counted_and_the_wait_after_it_unknown(tmp_path: Path) -> None:
    rows = [
        {key: value for key, value in row.items() if key != "tokens"} if row.get("id") == "s-a1" else row
        for row in rows_of()
    ]
    (recording,), notes = read(tmp_path, rows)
    assert len(recording.requests) == 2
    assert recording.requests[1].is_drawn
    assert notes.left == {"answers without token counts": 1}
    assert str(tmp_path) in notes.first_at["answers without token counts"]


def test_a_message_that_the_program_wrote_in_the_models_name_is_no_answer(tmp_path: Path) -> None:
    rows, parts = rows_of(), [{"text": "Binary content received. Proceeding with analysis.", "thought": True}]
    place = next(place for place, row in enumerate(rows) if row.get("id") == "s-r1") + 1
    rows.insert(
        place, {"id": "x", "timestamp": at(18), "type": "gemini", "content": parts, "thoughts": [], "tokens": None}
    )
    (recording,), notes = read(tmp_path, rows)
    assert waits_s(recording) == [(0, "none"), (5, "tool"), (5, "tool")]
    assert not notes.left


@pytest.mark.parametrize("content", ["x", ""])
def test_an_answer_without_counts_that_is_the_last_leaves_no_input_unanswered(tmp_path: Path, content: str) -> None:
    rows = [row for row in rows_of() if row.get("id") != "s-r2"]
    rows = [row | {"tokens": None, "content": content} if row.get("id") == "s-a2" else row for row in rows]
    (recording,), notes = read(tmp_path, rows)
    assert len(recording.requests) == 2
    assert notes.left == {"answers without token counts": 1}
    assert UNANSWERED not in notes.assumed
    _, notes = read(tmp_path, [*rows, {"id": "p", "timestamp": at(90), "type": "user", "content": "x"}])
    assert notes.assumed[UNANSWERED] == 1
