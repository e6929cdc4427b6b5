"""ATIF: steps with one time or none, copied context, sub-agents, and steps that no model call stands behind."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.clock import NS_PER_S
from harness.extras.formats.atif import NOT_THERE
from harness.extras.formats.trajectories import NO_TIME, UNSTATED
from harness.model.traces.importing import read_recordings
from harness.model.traces.links import ALLOWED, GAPS, MAY_ASK, OVER, UNKNOWN, UNLINKED
from harness.model.traces.recording import NO_CACHE
from tests.support.sound_traces import atif_document
from tests.support.trace_rows import at, trace_of


def test_a_trajectory_becomes_calls_that_keep_what_was_cached(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [atif_document("s")])
    (recording,) = trace.recordings
    assert trace.head.source_format == "atif"
    assert [one.prompt_tokens for one in recording.requests] == [1000, 1300, 1600]
    assert [one.keep_tokens for one in recording.requests] == [0, 1000, 1000]
    assert [one.wait_ns // NS_PER_S for one in recording.requests] == [0, 10, 10]
    assert trace.head.labels == (f"2 x {MAY_ASK}", f"2 x {GAPS}")


def test_a_person_is_waited_for_from_the_answer_to_the_message(tmp_path: Path) -> None:
    document = atif_document("s", 2)
    document["steps"].insert(2, {"step_id": 2, "source": "user", "timestamp": at(9), "message": "x"})
    trace = trace_of(tmp_path, [document])
    last = trace.recordings[0].requests[1]
    assert (last.wait_kind, last.wait_ns // NS_PER_S) == ("human", 6)
    assert not trace.head.labels


@pytest.mark.parametrize(("system_s", "kind"), [(None, "human"), (4, "human"), (9, "none")])
def test_a_message_that_a_program_writes_beside_its_own_notice_is_no_persons(
    tmp_path: Path, system_s: int | None, kind: str
) -> None:
    document = atif_document("s", 2)
    written = [("system", system_s), ("user", 9)] if system_s else [("user", 9)]
    document["steps"][2:2] = [{"step_id": 2, "source": source, "timestamp": at(when)} for source, when in written]
    document["steps"].insert(0, {"step_id": 0, "source": "system", "timestamp": at(0)})
    trace = trace_of(tmp_path, [document])
    last = trace.recordings[0].requests[1]
    assert (last.wait_kind, last.wait_ns // NS_PER_S) == (kind, 6)
    assert (f"1 x {UNKNOWN}" in trace.head.labels) == (kind == "none")


def test_steps_without_times_get_drawn_waits_and_without_cached_tokens_the_conversation_before(tmp_path: Path) -> None:
    document = atif_document("s")
    for step in document["steps"]:
        del step["timestamp"]
        step.get("metrics", {}).pop("cached_tokens", None)
    trace = trace_of(tmp_path, [document])
    assert all(one.wait_ns > 0 for one in trace.recordings[0].requests[1:])
    assert [one.keep_tokens for one in trace.recordings[0].requests] == [0, 1100, 1400]
    assert trace.head.labels == (
        "2 x prompts taken to begin with the whole conversation before: no cached tokens are given",
        "2 x waits drawn from tracelab-v0.0.2: the recording does not say them (--waits)",
        "2 x waits that are unknown: the recording has no times",
    )


@pytest.mark.parametrize("stamp", [None, at(1)])
def test_a_step_without_a_time_or_before_the_one_above_it_leaves_the_other_waits_known(
    tmp_path: Path, stamp: str | None
) -> None:
    document = atif_document("s", 5)
    document["steps"][3] |= {"timestamp": stamp}
    trace = trace_of(tmp_path, [document])
    requests = trace.recordings[0].requests
    assert [one.is_drawn for one in requests] == [False, False, True, True, False]
    assert [one.wait_ns // NS_PER_S for one in requests if not one.is_drawn] == [0, 10, 10]
    assert f"2 x waits that are unknown: {NO_TIME}" in trace.head.labels


@pytest.mark.parametrize("source", ["agent", "system"])
def test_a_sub_agent_is_known_by_its_session_or_its_file(tmp_path: Path, source: str) -> None:
    parent, child = atif_document("s"), atif_document("k", 1, 4)
    reference = {"session_id": "k", "trajectory_path": "1.json"}
    if source == "system":
        parent["steps"].insert(2, {"step_id": 2, "source": source, "timestamp": at(9)})
    parent["steps"][2 if source == "system" else 1]["observation"] = {
        "results": [{"subagent_trajectory_ref": [reference]}]
    }
    child["trajectory_id"] = "t"
    paths = [tmp_path / f"{place}.json" for place in (0, 1)]
    for path, document in zip(paths, (parent, child), strict=True):
        path.write_text(json.dumps(document))
    _, (recording,), notes = read_recordings(paths)
    assert sorted(len(one.after) for one in recording.requests) == [0, 1, 1, 2]
    assert not notes.left


def test_a_continuation_counts_its_own_steps_only(tmp_path: Path) -> None:
    whole, first = atif_document("s-cont-1", 5), atif_document("s", 3)
    marked = json.loads(json.dumps(whole))
    for step in marked["steps"][:4]:
        step["is_copied_context"] = True
    for later in (whole, marked):
        trace = trace_of(tmp_path, [first], [later])
        assert trace.num_requests == 5
        assert sum(trace.head.dropped.values()) >= 3


def test_what_is_no_call_makes_no_request(tmp_path: Path) -> None:
    document = atif_document("s", 4)
    document["steps"][2]["llm_call_count"] = 0
    del document["steps"][3]["metrics"]
    trace = trace_of(tmp_path, [document])
    assert trace.num_requests == 2
    assert trace.head.dropped == {"answers without token counts": 1}


def test_a_sub_agent_within_the_document_waits_for_its_step_and_is_waited_for(tmp_path: Path) -> None:
    document = atif_document("s", 2)
    reference = {"results": [{"subagent_trajectory_ref": [{"trajectory_id": "kid"}]}]}
    document["steps"][1]["observation"] = reference
    document["subagent_trajectories"] = [atif_document("kid", 1, first_s=4) | {"trajectory_id": "kid"}]
    (recording,) = trace_of(tmp_path, [document]).recordings
    assert [one.after for one in recording.requests] == [(), (0,), (0, 1)]
    assert [one.wait_ns // NS_PER_S for one in recording.requests] == [0, 1, 6]


@pytest.mark.parametrize(
    ("untimed", "is_drawn", "label"),
    [
        ((), [False, False, False, False], ""),
        ((2,), [False, False, True, True], f"2 x waits that are unknown: {NO_TIME}"),
        ((1,), [False, True, True, False], f"2 x waits that are unknown: {NO_TIME}"),
        ((0, 1, 2), [False, True, True, True], "3 x waits that are unknown: the recording has no times"),
    ],
)
def test_what_waits_for_a_sub_agent_whose_last_step_has_no_time_waits_unknown_long(
    tmp_path: Path, untimed: tuple[int, ...], is_drawn: list[bool], label: str
) -> None:
    document, kid = atif_document("s", 2), atif_document("kid", 2, first_s=4) | {"trajectory_id": "kid"}
    document["steps"][1]["observation"] = {"results": [{"subagent_trajectory_ref": [{"trajectory_id": "kid"}]}]}
    document["steps"][2]["timestamp"] = at(60)
    for place in untimed:
        kid["steps"][place]["timestamp"] = None
    trace = trace_of(tmp_path, [document | {"subagent_trajectories": [kid]}])
    requests = trace.recordings[0].requests
    assert [one.after for one in requests] == [(), (0,), (1,), (0, 2)]
    assert [one.is_drawn for one in requests] == is_drawn
    assert [each for each in trace.head.labels if "unknown" in each] == [label] * bool(label)


@pytest.mark.parametrize("is_embedded", [True, False])
@pytest.mark.parametrize(("stated", "is_said"), [(2300, False), (3300, False), (3301, True)])
def test_a_stated_sum_may_hold_the_calls_of_sub_agents(
    tmp_path: Path, stated: int, *, is_said: bool, is_embedded: bool
) -> None:
    document, kid = atif_document("s", 2), atif_document("kid", 1, first_s=4) | {"trajectory_id": "kid"}
    reference = {"trajectory_id": "kid"} if is_embedded else {"trajectory_path": "in-1.jsonl"}
    document["steps"][1]["observation"] = {"results": [{"subagent_trajectory_ref": [reference]}]}
    document["final_metrics"] = {"total_prompt_tokens": stated}
    files = [[document | {"subagent_trajectories": [kid]}]] if is_embedded else [[document], [kid]]
    trace = trace_of(tmp_path, *files)
    assert trace.num_requests == 3
    assert any("3301 stated, 2300 counted" in label for label in trace.head.labels) == is_said
    assert any(UNSTATED in label for label in trace.head.labels) == is_said


def test_null_counts_are_absent_and_no_number_is_broken(tmp_path: Path) -> None:
    document = atif_document("s", 4)
    nothing = dict.fromkeys(("prompt_tokens", "completion_tokens", "cached_tokens"))
    document["steps"][2]["metrics"] = nothing | {"cost_usd": 0.01}
    document["steps"][3]["metrics"]["cached_tokens"] = None
    document["steps"][4]["metrics"]["completion_tokens"] = None
    document["final_metrics"] = {"total_prompt_tokens": None, "total_cached_tokens": None}
    trace = trace_of(tmp_path, [document])
    assert [one.prompt_tokens for one in trace.recordings[0].requests] == [1000, 1600]
    assert (trace.head.dropped, trace.head.broken) == ({"answers without token counts": 2}, {})
    assert any(label.endswith(NO_CACHE) for label in trace.head.labels)
    document["steps"][2]["metrics"]["prompt_tokens"] = "many"
    assert trace_of(tmp_path, [document]).head.broken == {"an answer with a count that is no number of tokens": 1}


@pytest.mark.parametrize("has_times", [True, False])
def test_a_trajectory_goes_on_in_the_file_that_it_names(tmp_path: Path, has_times: bool) -> None:
    begun, more = atif_document("s", 2), atif_document("t", 4)
    begun["continued_trajectory_ref"] = "in-0.jsonl"  # which is read before it
    for step in more["steps"][:3]:
        step["is_copied_context"] = True
    for step in () if has_times else (*begun["steps"], *more["steps"]):
        del step["timestamp"]
    trace = trace_of(tmp_path, [more], [begun])
    (recording,) = trace.recordings
    assert [one.prompt_tokens for one in recording.requests] == [1000, 1300, 1600, 1900]
    assert [one.after for one in recording.requests] == [(), (0,), (1,), (2,)]
    assert [one.keep_tokens for one in recording.requests] == [0, 1000, 1000, 1000]
    assert [one.is_drawn for one in recording.requests] == [False, *[not has_times] * 3]
    assert (f"3 x {GAPS}" in trace.head.labels) == has_times
    handed = {"step_id": 4, "source": "user", "timestamp": at(22), "message": "x"}
    asked = trace_of(tmp_path, [more | {"steps": [*more["steps"][:3], handed, *more["steps"][3:]]}], [begun])
    assert [one.wait_kind for one in asked.recordings[0].requests] == ["none", "tool", "none", "tool"]
    both = [
        each | {"session_id": "s"} for each in (begun, more | {"steps": [*more["steps"][:3], handed, more["steps"][3]]})
    ]
    named = trace_of(tmp_path / "named", [both[1]], [both[0]])
    assert [one.wait_kind for one in named.recordings[0].requests] == ["none", "tool", "none"]
    # It may count on from what went before, and name an agent before its first call.
    started = {"results": [{"subagent_trajectory_ref": [{"session_id": "kid"}]}]}
    handed |= {"source": "system", "observation": started}
    more |= {"steps": [*more["steps"][:3], handed, *more["steps"][3:]], "final_metrics": {"total_prompt_tokens": 5800}}
    joined = trace_of(tmp_path, [more], [begun], [atif_document("kid", 1, first_s=15)]) if has_times else asked
    assert has_times == any(len(one.after) > 1 for one in joined.recordings[0].requests)
    assert not any(UNSTATED in label or label.endswith(UNLINKED) for label in joined.head.labels)
    alone = trace_of(tmp_path / "alone", [begun | {"continued_trajectory_ref": "another.json"}])
    assert [f"1 x {NOT_THERE}" in each.head.labels for each in (trace, alone)] == [False, True]


def test_a_wait_behind_a_tool_that_asks_a_person_has_no_kind(tmp_path: Path) -> None:
    document = atif_document("s")
    document["steps"][1]["tool_calls"] = [{"tool_call_id": "c", "function_name": "ask_user", "arguments": {}}]
    trace = trace_of(tmp_path, [document])
    assert [one.wait_kind for one in trace.recordings[0].requests] == ["none", "none", "tool"]
    assert f"1 x {ALLOWED}" in trace.head.labels


def test_a_wait_over_a_compaction_is_nobodys_and_one_without_a_tool_is_not_taken_as_a_tools(tmp_path: Path) -> None:
    document = atif_document("s", 3)
    del document["steps"][1]["tool_calls"]
    note = {"step_id": 3, "source": "system", "timestamp": at(20), "message": "x"}
    summary = {"observation": {"results": [{"content": "x"}]}, "extra": {"context_management": {"type": "compaction"}}}
    for more, labels in ((summary, {f"1 x {UNKNOWN}", f"1 x {OVER}"}), ({}, {f"2 x {UNKNOWN}"})):
        steps = [*document["steps"][:3], note | more, *document["steps"][3:]]
        trace = trace_of(tmp_path, [document | {"steps": steps}])
        assert [one.wait_kind for one in trace.recordings[0].requests] == ["none", "none", "none"]
        assert labels < {*trace.head.labels}
    # Agents that the program's own step names made a summary.
    agents = {"observation": {"results": [{"subagent_trajectory_ref": [{"session_id": "kid"}]}]}}
    steps = [*document["steps"][:3], note | agents | {"timestamp": at(24)}, *document["steps"][3:]]
    trace = trace_of(tmp_path, [document | {"steps": steps}], [atif_document("kid", 1, first_s=15)])
    assert f"1 x {OVER}" in trace.head.labels


def test_sub_agents_of_one_document_with_equal_steps_are_different_calls(tmp_path: Path) -> None:
    document = atif_document("s", 2)
    children = [atif_document("c", 1) | {"trajectory_id": name} for name in "ab"]
    trace = trace_of(tmp_path, [document | {"subagent_trajectories": children}])
    assert trace.num_requests == 4
