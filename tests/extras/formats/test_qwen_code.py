"""Sessions of Qwen Code: compactions, news of background agents, forks, and sub-agents in files of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S
from harness.extras.formats.qwen_code import BESIDE
from harness.model.traces.account import ReadNotes
from harness.model.traces.calls import AT_ONCE, ATTEMPTS
from harness.model.traces.importing import detect, read_recordings
from harness.model.traces.links import AFTER_SUMMARY, ALLOWED, MAY_ASK, NEAR, STARTED, UNANSWERED
from harness.model.traces.recording import Recording
from tests.support.sound_traces import qwen_rows
from tests.support.trace_rows import at


def read(folder: Path, **files: list[Any]) -> tuple[list[Recording], ReadNotes]:
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert detect(folder / f"{name}.jsonl") == "qwen-code"
    _, recordings, notes = read_recordings([folder])
    return recordings, notes


def system(subtype: str, seconds: float, name: str = "x") -> Any:
    stamp = {"timestamp": at(seconds), "sessionId": "s", "uuid": f"s-{name}"}
    return {**stamp, "type": "system", "subtype": subtype, "systemPayload": {}}


def test_a_compaction_begins_a_fresh_prompt_and_state_is_passed_over(tmp_path: Path) -> None:
    rows = list(qwen_rows("s"))
    rows[3:3] = [system("chat_compression", 9), system("ui_telemetry", 9, "y")]
    (recording,), notes = read(tmp_path, s=rows)
    assert [request.keep_tokens for request in recording.requests] == [0, 1000, 1000]
    assert [request.is_drawn for request in recording.requests] == [False, True, False]
    assert notes.assumed[AFTER_SUMMARY] == 1
    assert notes.left == {"summaries of a conversation: the log does not hold their calls": 1}
    assert notes.passed.total() == 1


def told(seconds: float, name: str) -> Any:
    """What its telemetry tells of an answer."""
    counts = {"input_token_count": 1150, "output_token_count": 50, "cached_content_token_count": 1000}
    event = {"event.name": "qwen-code.api_response", **counts, "thoughts_token_count": 0, "total_token_count": 1200}
    return system("ui_telemetry", seconds, name) | {"systemPayload": {"uiEvent": event}}


def test_the_call_that_compacts_is_read_from_its_telemetry(tmp_path: Path) -> None:
    rows = list(qwen_rows("s"))
    rows[3:3] = [told(10, "t"), system("chat_compression", 10)]
    (recording,), notes = read(tmp_path, s=rows)
    assert [request.prompt_tokens for request in recording.requests] == [1000, 1150, 1200, 1400]
    assert [request.keep_tokens for request in recording.requests] == [0, 1000, 1000, 1000]
    assert notes.assumed[AFTER_SUMMARY] == 1
    assert [request.wait_ns for request in recording.requests[1:3]] == [5_000_000_000, 0]
    assert [request.wait_kind for request in recording.requests[1:3]] == ["tool", "none"]
    assert not notes.left


def test_a_summary_that_a_persons_command_asked_for_waited_for_that_person(tmp_path: Path) -> None:
    command = system("slash_command", 40, "c") | {"systemPayload": {"phase": "invocation", "rawCommand": "/compress"}}
    rows = [*list(qwen_rows("s"))[:2], command, told(50, "t"), system("chat_compression", 50)]
    (recording,), notes = read(tmp_path, s=rows)
    assert [(one.wait_kind, one.wait_ns // NS_PER_S) for one in recording.requests] == [("none", 0), ("human", 37)]
    assert not notes.labels or notes.labels == (f"1 x {UNANSWERED}",)


def test_a_call_that_only_telemetry_tells_of_is_counted(tmp_path: Path) -> None:
    rows = list(qwen_rows("s"))
    rows[1:1] = [told(3, "t")]
    rows[4:4] = [told(9, "title")]
    rows[5:5] = [told(13, "v")]
    (recording,), notes = read(tmp_path, s=rows)
    assert len(recording.requests) == 3
    assert notes.left == {BESIDE: 1}


def failed(seconds: float, name: str, **more: Any) -> Any:
    """What its telemetry tells of an attempt that failed."""
    event = {"event.name": "qwen-code.api_error", "status_code": 429} | more
    return system("ui_telemetry", seconds, name) | {"systemPayload": {"uiEvent": event}}


def test_attempts_that_failed_are_counted_and_a_call_that_a_person_tries_again_too(tmp_path: Path) -> None:
    rows = list(qwen_rows("s", 2))
    rows[3:3] = [failed(9, "f"), failed(10, "g")]  # behind the first tool's result
    (recording,), notes = read(tmp_path, s=rows)
    assert [(one.wait_kind, one.is_drawn) for one in recording.requests] == [("none", False), ("tool", False)]
    assert (notes.assumed[ATTEMPTS], notes.left) == (2, {})
    again = {"type": "user", "sessionId": "s", "timestamp": at(12), "message": {"parts": [{"text": "x"}]}}
    for more, is_failed in (([again], True), ([again | {"subtype": "cron"}], False), ([], False)):
        (recording,), notes = read(tmp_path, s=[*rows[:5], *more, *rows[5:]])
        assert recording.requests[1].is_drawn == is_failed
        assert sum(notes.left.values()) == is_failed
    _, notes = read(tmp_path, s=[*rows[:3], failed(9, "f", subagent_id="k"), again, *rows[5:]])
    assert not notes.left, "its sub-agent's"


def test_a_summary_and_a_call_beside_that_a_fork_copied_count_once(tmp_path: Path) -> None:
    rows = list(qwen_rows("s"))
    rows[3:3] = [system("chat_compression", 9), told(9.5, "title"), failed(9.6, "f"), told(12.5, "v")]
    copies = [row | {"sessionId": "f", "forkedFrom": {"sessionId": "s"}} for row in rows[:8]]
    own = [row | {"uuid": f"own{place}"} for place, row in enumerate(qwen_rows("f", 1, 50.0))]
    _, notes = read(tmp_path, a=[*copies, *own], s=rows)
    assert notes.left == {"summaries of a conversation: the log does not hold their calls": 1, BESIDE: 1}
    assert notes.assumed[ATTEMPTS] == 1


@pytest.mark.parametrize("is_said", [True, False])
def test_a_tool_that_was_refused_was_waited_for_by_a_person(tmp_path: Path, *, is_said: bool) -> None:
    rows = list(qwen_rows("s"))
    rows[2]["toolCallResult"] = {"status": "success" if is_said else "cancelled"}
    for part in rows[2]["message"]["parts"]:
        said = "[Operation Cancelled] Reason: User did not allow tool call"
        part["functionResponse"]["response"] = {"error": said} if is_said else {"output": "x"}
    for more in ([], [{"type": "user", "sessionId": "s", "timestamp": at(9), "message": {"parts": [{"text": "x"}]}}]):
        (recording,), notes = read(tmp_path, s=[*rows[:3], *more, *rows[3:]])
        assert [request.wait_kind for request in recording.requests[1:]] == ["human" if is_said else "none", "tool"]
        assert notes.assumed[ALLOWED] == (not is_said)
        assert not notes.assumed[AT_ONCE]


@pytest.mark.parametrize(
    ("decision", "tool", "kind"),
    [
        *((decision, "x", "none") for decision in ("accept", "modify", "reject")),
        *(("auto_accept", "x", "tool"), (None, "x", "tool"), ("accept", "of an agent", "tool")),
    ],
)
def test_a_tool_that_a_person_was_asked_to_allow_leaves_whose_the_wait_was_unknown(
    tmp_path: Path, decision: str | None, tool: str, kind: str
) -> None:
    for place in (2, 3):  # telemetry may stand before or behind the tool's result
        rows = list(qwen_rows("s"))
        event = {"event.name": "qwen-code.tool_call", "function_name": tool, "duration_ms": 4000, "decision": decision}
        rows.insert(place, system("ui_telemetry", 8, "d") | {"systemPayload": {"uiEvent": event}})
        (recording,), notes = read(tmp_path, s=rows)
        waits = [(one.wait_kind, one.wait_ns // NS_PER_S) for one in recording.requests[1:]]
        assert waits == [(kind, 5), ("tool", 5)]
        assert notes.assumed[ALLOWED] == (kind == "none")


def test_a_person_may_have_been_asked_to_allow_an_agents_tool_of_which_no_telemetry_tells(tmp_path: Path) -> None:
    more = {"isSidechain": True, "agentId": "k", "sessionId": "s"}
    child = [{**row, **more} for row in qwen_rows("k", 2, 4.0)][:-1]
    _, notes = read(tmp_path, child=child, s=list(qwen_rows("s")))
    assert notes.assumed[MAY_ASK] == 1


def test_a_row_of_an_unknown_kind_makes_the_waits_unknown(tmp_path: Path) -> None:
    rows = list(qwen_rows("s"))
    rows.insert(3, system("a_new_kind", 9))
    (recording,), notes = read(tmp_path, s=rows)
    assert recording.requests[1].is_drawn
    assert notes.unknown == {"a_new_kind": 1}


def test_a_fork_goes_on_from_the_last_call_that_it_copied(tmp_path: Path) -> None:
    copies = [row | {"sessionId": "f", "forkedFrom": {"sessionId": "s"}} for row in qwen_rows("s", 2)]
    own = [row | {"uuid": f"own{place}"} for place, row in enumerate(qwen_rows("f", 1, 50.0))]
    (recording,), notes = read(tmp_path, a=[*copies, *own], s=list(qwen_rows("s")))
    assert notes.dropped.total() == 2
    assert recording.requests[2].after == (1,)
    assert recording.requests[2].wait_ns == 37_000_000_000


def test_a_sub_agent_is_forked_from_its_parent_and_joined(tmp_path: Path) -> None:
    more = {"isSidechain": True, "agentId": "k", "sessionId": "s"}
    child = [{**row, **more} for row in qwen_rows("k", 1, 4.0)][:2]
    tool = [{**child[1], "uuid": "k-tool", "timestamp": at(7.5), "message": {"parts": [{"functionCall": {"id": "c"}}]}}]
    del tool[0]["usageMetadata"]
    (recording,), notes = read(tmp_path, child=[*child, *tool], s=list(qwen_rows("s")))
    assert [request.after for request in recording.requests] == [(), (0,), (0, 1), (2,)]
    assert notes.labels == (f"1 x {NEAR}", f"1 x {UNANSWERED}", f"1 x {STARTED}")


@pytest.mark.parametrize("num_tools", [1, 2])
@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_agents_answer_that_only_calls_tools_is_a_call_without_counts(
    tmp_path: Path, place: int, num_tools: int
) -> None:
    child = [row | {"isSidechain": True, "agentId": "k", "sessionId": "s"} for row in qwen_rows("k", 3, 4.0)][:6]
    answer = child.pop(2 * place - 1)  # at its instant stand rows of its tools alone, as older releases write them
    parts = (
        {"functionCall": {"id": f"c{place - 1}" if not each else "more", "name": "x", "args": "y" * 9_000}}
        for each in range(num_tools)
    )
    bare = [answer | {"uuid": f"k-{each}", "message": {"parts": [part]}} for each, part in enumerate(parts)]
    child[2 * place - 1 : 2 * place - 1] = [{key: row[key] for key in row if key != "usageMetadata"} for row in bare]
    (recording,), notes = read(tmp_path, child=child, s=list(qwen_rows("s")))
    assert notes.dropped == {"answers without token counts": 1}
    unknown = [request.is_drawn for request in recording.requests if request.prompt_tokens in (1000, 1200, 1400)]
    assert len(recording.requests) == 5
    assert sum(unknown) == (place < 3)
    assert {request.generate_tokens for request in recording.requests} == {100}, "no other answer has its characters"
    assert notes.assumed[UNANSWERED] == 1, "the parent's alone"


def test_an_agent_of_an_agent_is_started_by_the_one_that_asked_for_it(tmp_path: Path) -> None:
    side = {"isSidechain": True, "sessionId": "s"}
    rows = list(qwen_rows("s", 2))
    rows[1]["message"]["parts"][-1]["functionCall"]["name"] = "agent"  # from 3 to 8 s
    child = [row | side | {"agentId": "k"} for row in qwen_rows("k", 1, 3.1)][:3]  # its call ends at 6.1 s
    child[1]["message"]["parts"][-1]["functionCall"]["name"] = "agent"
    inner = [row | side | {"agentId": "n"} for row in qwen_rows("n", 1, 6.2)][:2]
    (recording,), notes = read(tmp_path, child=child, inner=inner, s=rows)
    assert [request.after for request in recording.requests][:3] == [(), (0,), (1,)]
    assert not notes.left


def test_the_news_of_a_background_agent_is_no_person(tmp_path: Path) -> None:
    rows = list(qwen_rows("s"))
    del rows[3]
    stamp = {"timestamp": at(9), "sessionId": "s", "uuid": "s-n", "type": "user"}
    rows.insert(3, {**stamp, "subtype": "notification", "message": {"parts": [{"text": "x"}]}})
    (recording,), _ = read(tmp_path, s=rows)
    assert recording.requests[1].wait_kind == "tool"


def test_the_news_of_a_background_agent_names_the_call_that_started_it(tmp_path: Path) -> None:
    rows = list(qwen_rows("s", 2))
    rows[1]["message"]["parts"][-1]["functionCall"]["name"] = "agent"
    task = {"taskId": "k", "kind": "agent", "toolUseId": rows[1]["message"]["parts"][-1]["functionCall"]["id"]}
    news = {"timestamp": at(9), "sessionId": "s", "uuid": "s-n", "type": "user", "subtype": "notification"}
    news |= {"message": {"parts": [{"text": "x"}]}, "systemPayload": {"backgroundTask": task}}
    child = [row | {"isSidechain": True, "agentId": "k", "sessionId": "s"} for row in qwen_rows("k", 1, 3.1)]
    for more, is_near in (([], True), ([news], False)):
        recordings, notes = read(tmp_path, child=child, s=[*rows[:3], *more, *rows[3:]])
        assert len(recordings) == 1
        assert bool(notes.assumed[NEAR]) == is_near


@pytest.mark.parametrize(
    "said",
    [{"subtype": "cron"}, {"subtype": "notification", "systemPayload": {"backgroundTask": {"kind": "peer"}}}],
)
def test_a_schedule_or_another_session_is_no_person_and_no_tool(tmp_path: Path, said: Any) -> None:
    rows = list(qwen_rows("s"))
    del rows[2], rows[1]["message"]["parts"][1]  # an answer that calls no tool
    stamp = {"timestamp": at(9), "sessionId": "s", "uuid": "s-n", "type": "user"}
    rows.insert(2, {**stamp, **said, "message": {"parts": [{"text": "x"}]}})
    (recording,), _ = read(tmp_path, s=rows)
    assert [(one.wait_kind, one.wait_ns // NS_PER_S, one.is_drawn) for one in recording.requests[1:]] == [
        ("none", 6, False),
        ("tool", 5, False),
    ]


def test_telemetry_may_stand_before_or_behind_the_row_of_its_answer(tmp_path: Path) -> None:
    for place in (1, 2):
        rows = list(qwen_rows("s"))
        event = told(3, "t")
        event["systemPayload"]["uiEvent"] |= {
            "input_token_count": 1000,
            "output_token_count": 100,
            "cached_content_token_count": 0,
            "thoughts_token_count": 20,
            "total_token_count": 1100,
        }
        rows.insert(place, event)
        (recording,), notes = read(tmp_path, s=rows)
        assert len(recording.requests) == 3
        assert not notes.left
