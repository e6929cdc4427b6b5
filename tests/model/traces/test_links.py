"""Who called whom, whose a wait was, and what a count counts: decided in one place, or said not to be known."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S
from harness.model.traces.calls import AT_ONCE, REJECTED
from harness.model.traces.importing import import_trace
from harness.model.traces.links import (
    ADDED_REASONING,
    AFTER_SUMMARY,
    AGAIN,
    FIRST_CACHED,
    IN_TURN,
    LIKELY,
    MAY_ASK,
    NO_READING,
    OUT_OF_ORDER,
    SHARED,
    STARTED,
    TO_AGENT,
    UNANSWERED,
    UNAWAITED,
    UNLINKED,
)
from harness.model.traces.recording import NO_CACHE, RecordedRequest, TraceFile, describe_trace, open_trace, read_trace
from tests.support.sound_traces import claude_rows, codex_rows, opencode_session
from tests.support.trace_rows import assistant, at, result, text, tool, user


def imported(folder: Path, files: Mapping[str, Iterable[Any]]) -> TraceFile:
    """The trace of files by name, each of JSON lines."""
    for name, rows in files.items():
        path = folder / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    import_trace([folder / "in"], folder / "out.jsonl", name="t")
    return read_trace(folder / "out.jsonl")


def requests_of(trace: TraceFile) -> tuple[RecordedRequest, ...]:
    (recording,) = trace.recordings
    return recording.requests


def said(trace: TraceFile, label: str) -> bool:
    return any(each.partition(" x ")[2] == label for each in trace.head.labels)


def agent_rows(agent: str, first_s: float, cached: int = 0) -> list[Any]:
    side = {"isSidechain": True, "agentId": agent, "sessionId": "s"}
    return [
        user(first_s, **side),
        assistant(f"{agent}-0", first_s + 2, (10, 300 - cached, cached, 50), text(), tool(agent), **side),
        result(agent, first_s + 4) | side,
        assistant(f"{agent}-1", first_s + 6, (10, 60, 310, 50), text(), **side),
    ]


def woken_parent(*agents_news_s: float) -> list[Any]:
    mine = {"sessionId": "s"}
    news = [user(seconds, origin={"kind": "task-notification"}, **mine) for seconds in agents_news_s]
    return [
        user(0, **mine),
        assistant("m0", 2, (10, 990, 0, 100), text(), tool("t"), **mine),
        result("t", 2.2) | mine,
        assistant("m1", 4, (10, 190, 1000, 100), text(), **mine),
        *news,
        assistant("m2", 63, (10, 190, 1200, 100), text(), **mine),
    ]


def test_agents_in_a_folder_below_are_their_sessions_and_the_news_of_their_end_is_a_join(tmp_path: Path) -> None:
    below = {f"s/subagents/workflows/w/agent-{name}.jsonl": agent_rows(name, 3) for name in ("a", "b", "c")}
    trace = imported(tmp_path, {"s.jsonl": woken_parent(60), **below})
    *_, last = requests_of(trace)
    assert len(last.after) == 4
    assert (last.wait_ns, last.wait_kind, last.keep_tokens) == (51 * NS_PER_S, "tool", 1200)
    assert not said(trace, UNLINKED)


def test_agents_whose_session_is_not_among_the_files_are_counted(tmp_path: Path) -> None:
    trace = imported(tmp_path, {f"agent-{name}.jsonl": agent_rows(name, 3) for name in ("a", "b")})
    assert len(trace.recordings) == 2
    assert f"2 x {UNLINKED}" in trace.head.labels


@pytest.mark.parametrize(("first_s", "num_recordings", "label"), [(30, 1, LIKELY), (400, 2, UNLINKED)])
def test_an_agent_that_begins_while_no_tool_runs_is_labelled_and_after_its_parents_end_runs_by_itself(
    tmp_path: Path, first_s: float, num_recordings: int, label: str
) -> None:
    files = {"s.jsonl": woken_parent(60), "s/subagents/agent-a.jsonl": agent_rows("a", first_s)}
    trace = imported(tmp_path, files)
    assert len(trace.recordings) == num_recordings
    assert f"1 x {label}" in trace.head.labels


@pytest.mark.parametrize("asks", [True, False])
def test_an_agent_that_a_later_tool_asks_again_ends_twice_and_its_message_is_no_persons(
    tmp_path: Path, asks: bool
) -> None:
    side = {"isSidechain": True, "agentId": "a", "sessionId": "s"}
    more = [user(14.1, **side), assistant("a-2", 20, (10, 60, 370, 50), text(), **side)]
    mine = {"sessionId": "s"}
    rows = [
        user(0, **mine),
        assistant("m0", 2, (10, 990, 0, 100), text(), tool("t"), **mine),
        result("t", 2.2, "a") | mine,
        user(11, origin={"kind": "task-notification"}, **mine),
        assistant("m1", 14, (10, 190, 1000, 100), text(), *[tool("u")][: int(asks)], **mine),
        *([result("u", 14.2) | mine] if asks else []),
        *([assistant("m2", 17, (10, 190, 1200, 100), text(), **mine)] if asks else []),
        user(22, origin={"kind": "task-notification"}, **mine),
        assistant("m3", 24, (10, 190, 1400, 100), text(), **mine),
    ]
    if not asks:  # the message comes long after the parent's answer
        more[0]["timestamp"], more[1]["timestamp"] = at(18), at(20)
    trace = imported(tmp_path, {"s.jsonl": rows, "s/subagents/agent-a.jsonl": [*agent_rows("a", 3), *more]})
    requests = {one.prompt_tokens: one for one in requests_of(trace)}
    places = {one.prompt_tokens: place for place, one in enumerate(requests_of(trace))}
    again = requests[440]
    assert said(trace, AGAIN) == asks
    assert said(trace, TO_AGENT) != asks
    if asks:
        assert set(requests[1200].after) == {places[1000], places[380]}, "the news of its first end is a join"
        assert (again.after, again.wait_kind, again.wait_ns) == ((places[1200],), "tool", NS_PER_S // 10)
        assert (again.base, again.keep_tokens) == (places[380], 370)
        assert set(requests[1600].after) == {places[1400], places[440]}
    else:
        assert (again.after, again.wait_kind) == ((places[380],), "human")


def test_an_opencode_task_that_goes_on_with_a_session_is_waited_for_each_time(tmp_path: Path) -> None:
    parent, child = opencode_session("p"), opencode_session("k", 2, 4)
    for turn in (0, 1):  # tasks from 3 to 8 s, and from 13 to 18 s
        parent["messages"][turn + 1]["parts"][2]["state"]["metadata"] = {"sessionId": "k"}
    first, *later = child["messages"][1:]
    first["parts"] = [{"type": "text", "time": {"end": first["info"]["time"]["created"] + 3000}}]
    child["messages"] = [child["messages"][0], first, child["messages"][0], *later]
    child["messages"][2] = {"info": {"role": "user", "time": later[0]["info"]["time"]}, "parts": [{"type": "text"}]}
    later[0]["parts"] = first["parts"] and [{"type": "text", "time": {"end": first["info"]["time"]["created"] + 13000}}]
    trace = imported(tmp_path, {"p.json": [parent], "k.json": [child]})
    assert sorted(len(one.after) for one in requests_of(trace)) == [0, 1, 1, 2, 2]
    assert {one.wait_kind for one in requests_of(trace)} == {"none", "tool"}
    assert not trace.head.dropped


def test_the_words_of_an_opencode_tools_call_are_of_its_answer(tmp_path: Path) -> None:
    session = opencode_session("p")
    for message in session["messages"][1:]:
        message["parts"][1]["time"]["end"] -= 1000
    session["messages"][2]["parts"][2]["state"]["error"] = f"{REJECTED[1]} to use this tool"
    session["messages"][2]["parts"].append({"type": "retry", "attempt": 1})
    trace = imported(tmp_path, {"p.json": [session]})
    waits = [(one.wait_kind, one.wait_ns // NS_PER_S) for one in requests_of(trace)]
    assert waits == [("none", 0), ("tool", 7), ("human", 7)]
    assert said(trace, "attempts that failed, left out")


def test_a_clock_that_goes_back_within_a_session_is_labelled(tmp_path: Path) -> None:
    session = opencode_session("p")
    session["messages"][1:] = [session["messages"][place] for place in (1, 3, 2)]
    assert f"1 x {OUT_OF_ORDER}" in imported(tmp_path, {"p.json": [session]}).head.labels


@pytest.mark.parametrize(("second_s", "is_in_turn"), [(3.0, False), (9.5, True)])
def test_agents_of_one_call_run_at_once_or_one_after_another(tmp_path: Path, second_s: float, is_in_turn: bool) -> None:
    mine = {"sessionId": "s"}
    parent = [
        user(0, **mine),
        assistant("m0", 2, (10, 990, 0, 100), tool("t"), **mine),
        result("t", 30) | mine,
        assistant("m1", 33, (10, 190, 1000, 100), text(), **mine),
    ]
    files = {"s.jsonl": parent, "agent-a.jsonl": agent_rows("a", 3), "agent-b.jsonl": agent_rows("b", second_s)}
    trace = imported(tmp_path, files)
    requests = requests_of(trace)
    assert said(trace, IN_TURN) == is_in_turn
    assert requests[3].after == ((2,) if is_in_turn else (0,))
    assert requests[-1].after == ((0, 4) if is_in_turn else (0, 2, 4))


def test_what_the_cache_held_of_an_agents_first_prompt_is_likely_of_a_prompt_before_it(tmp_path: Path) -> None:
    trace = imported(tmp_path, {"s.jsonl": woken_parent(60), "agent-a.jsonl": agent_rows("a", 5, cached=200)})
    assert said(trace, SHARED)
    assert [one.keep_tokens for one in requests_of(trace)] == [0, 1000, 200, 310, 1200]


def test_what_the_cache_held_after_a_summary_is_likely_of_the_prompt_before_it(tmp_path: Path) -> None:
    session = opencode_session("p")
    session["messages"][2]["info"]["summary"] = True
    trace = imported(tmp_path, {"p.json": [session]})
    assert requests_of(trace)[-1].keep_tokens == 1000
    assert f"1 x {AFTER_SUMMARY}" in trace.head.labels


def test_a_program_that_goes_on_by_itself_before_and_behind_a_summary_waits_for_nobody(tmp_path: Path) -> None:
    session = opencode_session("p")
    messages = session["messages"]
    for message in messages[1:3]:
        message["parts"] = [part for part in message["parts"] if part["type"] != "tool"]
    messages[2]["info"]["summary"] = True
    for place, asks in ((3, {"type": "text", "synthetic": True}), (2, {"type": "compaction", "auto": True})):
        created = messages[place]["info"]["time"]["created"]
        messages.insert(place, {"info": {"role": "user", "time": {"created": created - 1}}, "parts": [asks]})
    assert [one.wait_kind for one in requests_of(imported(tmp_path, {"p.json": [session]}))] == ["none"] * 3


def test_cached_tokens_of_a_first_call_are_said_to_be_of_something_else(tmp_path: Path) -> None:
    assert said(imported(tmp_path, {"s.jsonl": list(claude_rows("s"))[4:]}), FIRST_CACHED)


@pytest.mark.parametrize("cached", [0, None, "absent"])
def test_a_file_without_a_cached_token_keeps_what_its_prompts_show_and_its_ceilings_are_not_known(
    tmp_path: Path, cached: Any
) -> None:
    rows = [json.loads(json.dumps(row)) for row in claude_rows("s")]
    for place, row in enumerate(row for row in rows if row["type"] == "assistant"):
        usage = row["message"]["usage"]
        usage |= {"input_tokens": 1000 + 500 * (place // 2), "cache_creation_input_tokens": cached}
        usage["cache_read_input_tokens"] = cached
        if cached == "absent":
            del usage["cache_creation_input_tokens"], usage["cache_read_input_tokens"]
    trace = imported(tmp_path, {"s.jsonl": rows})
    assert trace.head.labels == (f"1 x {UNANSWERED}", f"2 x {NO_CACHE}", f"2 x {MAY_ASK}")
    assert [one.keep_tokens for one in requests_of(trace)] == [0, 1400, 1900]
    with open_trace(tmp_path / "out.jsonl") as reader:
        assert describe_trace(reader)["turn before"].startswith("ceiling not known")


def test_a_conversation_that_ends_with_an_input_says_that_a_call_may_be_missing(tmp_path: Path) -> None:
    rows = [row | {"uuid": f"s-{place}"} for place, row in enumerate(claude_rows("s"))]
    rows[1:] = [row | {"parentUuid": before["uuid"]} for before, row in pairwise(rows)]
    assert f"1 x {UNANSWERED}" in imported(tmp_path, {"s.jsonl": rows[:7]}).head.labels
    assert not said(imported(tmp_path, {"s.jsonl": rows[:6]}), UNANSWERED)
    resumed = [row | {"sessionId": "t"} for row in rows[:9]]
    assert not said(imported(tmp_path, {"s.jsonl": rows[:7], "t.jsonl": resumed}), UNANSWERED), "the copy goes on"


def test_zeros_beside_prompts_that_do_not_grow_by_their_answers_are_zeros(tmp_path: Path) -> None:
    rows = [
        json.loads(json.dumps(row).replace('"cached_input_tokens": 1000', '"cached_input_tokens": 0'))
        for row in codex_rows("s")
    ]
    for row in rows:
        if row["payload"].get("type") == "token_count":
            row["payload"]["info"]["last_token_usage"]["input_tokens"] = 700
    assert not said(imported(tmp_path, {"rollout.jsonl": rows}), NO_CACHE)


@pytest.mark.parametrize(("is_input_whole", "is_output_whole"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_the_sums_that_calls_state_say_what_input_and_output_hold(
    tmp_path: Path, is_input_whole: int, is_output_whole: int
) -> None:
    session = json.loads(json.dumps(opencode_session("s")))
    answers = [message["info"]["tokens"] for message in session["messages"] if message["info"]["role"] == "assistant"]
    whole = []
    for tokens in answers:
        held = tokens["cache"]["read"] + tokens["cache"]["write"]
        whole.append((tokens["input"] + held, tokens["output"] + tokens["reasoning"]))
        tokens["total"] = sum(whole[-1])
        tokens["input"] += held * is_input_whole
        tokens["output"] += tokens["reasoning"] * is_output_whole
    session["info"].pop("tokens", None)
    trace = imported(tmp_path, {"s.json": [session]})
    assert [(one.prompt_tokens, one.generate_tokens) for one in requests_of(trace)] == whole
    answers[-1]["total"] += 7
    assert said(imported(tmp_path, {"s.json": [session]}), NO_READING)
    for tokens in answers:
        del tokens["total"]
    assert said(imported(tmp_path, {"s.json": [session]}), ADDED_REASONING)


def event(seconds: float, source: str, kind: str, **more: Any) -> Any:
    return {"id": f"{seconds}", "timestamp": at(seconds), "source": source, "kind": kind, **more}


def test_openhands_sub_agents_lie_in_folders_of_their_parent_and_condensers_answers_are_nobodys_history(
    tmp_path: Path,
) -> None:
    def conversation(at_folder: str, first_s: float, names: str) -> dict[str, Iterable[Any]]:
        counts = {"r": (5000, 0), "k": (3000, 0), "c": (900, 0), "s": (5200, 4800)}
        usages = [
            {
                "response_id": name,
                "prompt_tokens": counts[name][0],
                "completion_tokens": 50,
                "cache_read_tokens": counts[name][1],
            }
            for name in names
        ]
        state = {"id": at_folder, "agent": {}, "stats": {"usage_to_metrics": {"agent": {"token_usages": usages}}}}
        events = [event(first_s, "user", "MessageEvent")]
        for place, name in enumerate(names):
            events.append(event(first_s + 2 + 10 * place, "agent", "ActionEvent", llm_response_id=name))
            events.append(event(first_s + 9 + 10 * place, "environment", "ObservationEvent"))
        files = {f"{at_folder}/events/event-{place}.json": [each] for place, each in enumerate(events)}
        return {f"{at_folder}/base_state.json": [state], **files}

    files = conversation("conv", 0, "rcs") | conversation("conv/subagents/kid", 3, "k")
    requests = requests_of(imported(tmp_path, files))
    assert [one.after for one in requests] == [(), (0,), (0, 1), (2,)]
    assert (requests[-1].base, requests[-1].keep_tokens) == (0, 4800)


@pytest.mark.parametrize(("answered_s", "is_one_row"), [(5.0, False), (30.0, False), (9.2, True), (30.0, True)])
def test_of_a_question_and_a_sub_agent_the_one_that_came_last_was_waited_for(
    tmp_path: Path, answered_s: float, is_one_row: bool
) -> None:
    question = tool("q") | {"name": "AskUserQuestion"}
    task, answer = result("t", answered_s if is_one_row else 9.2, "a"), result("q", answered_s)
    if is_one_row:
        task["message"]["content"] += answer["message"]["content"]
    rows = [
        user(0),
        assistant("m0", 2, (10, 990, 0, 100), text(), tool("t"), question),
        task,
        *([] if is_one_row else [answer]),
        assistant("m1", 32, (10, 190, 1000, 100), text()),
    ]
    trace = imported(tmp_path, {"s.jsonl": [row | {"sessionId": "s"} for row in [*rows, *agent_rows("a", 3)]]})
    last = max(requests_of(trace), key=lambda one: len(one.after))
    waited_s = max(9.2, answered_s) - 9
    assert (len(last.after), last.wait_ns) == (2, round(waited_s * NS_PER_S))
    assert last.wait_kind == ("human" if answered_s > 9.2 else "tool")
    assert said(trace, AT_ONCE) == is_one_row


def test_an_agent_in_the_background_is_not_waited_for_by_the_tool_beside_it(tmp_path: Path) -> None:
    rows = [
        user(0),
        assistant("m0", 2, (10, 990, 0, 100), text(), tool("t"), tool("slow")),
        result("t", 2.1, "a"),
        result("slow", 30),
        assistant("m1", 32, (10, 190, 1000, 100), text()),
    ]
    trace = imported(tmp_path, {"s.jsonl": [row | {"sessionId": "s"} for row in [*rows, *agent_rows("a", 3)]]})
    assert [one.after for one in requests_of(trace)] == [(), (0,), (1,), (0,)]
    assert said(trace, UNAWAITED)


def test_an_opencode_answer_of_several_calls_is_each_of_them(tmp_path: Path) -> None:
    each, apart = opencode_session("p", 2), opencode_session("p", 2)
    for session in (each, apart):
        for message in session["messages"][1:]:
            message["parts"][-1]["tokens"] = message["info"]["tokens"]
    first, last = each["messages"].pop(1), each["messages"][-1]
    last["parts"] = [*first["parts"], *last["parts"]]
    last["info"]["time"] = {"created": first["info"]["time"]["created"], "completed": last["info"]["time"]["completed"]}
    one, other = (
        requests_of(imported(tmp_path / "a", {"p.json": [each]})),
        requests_of(imported(tmp_path / "b", {"p.json": [apart]})),
    )
    assert [request._replace(wait_ns=0) for request in one] == [request._replace(wait_ns=0) for request in other]
    assert [request.wait_ns // NS_PER_S for request in one] == [0, 5], "the second was asked for as the tool had ended"


def test_a_plug_in_that_refuses_an_opencode_tool_in_a_persons_words_is_no_person(tmp_path: Path) -> None:
    session = opencode_session("p")
    state = session["messages"][2]["parts"][2]["state"]
    state |= {
        "error": f"{REJECTED[1]} to use this tool",
        "time": {"start": state["time"]["end"] - 5, "end": state["time"]["end"]},
    }
    kinds = [one.wait_kind for one in requests_of(imported(tmp_path, {"p.json": [session]}))]
    assert kinds == ["none", "tool", "tool"]


@pytest.mark.parametrize("is_persons", [True, False])
def test_an_agent_that_a_person_started_began_with_their_wait_and_else_it_is_labelled(
    tmp_path: Path, *, is_persons: bool
) -> None:
    meta = {"source": {"subagent": "review"}, "parent_thread_id": "s"}
    turn = {"timestamp": at(33), "type": "event_msg", "payload": {"type": "task_started"}}
    rows, agents = [*codex_rows("s", 5)], json.dumps([*codex_rows("k", 1, 34, meta)]).replace("1000", "900")
    rows = [*rows[:4], *([turn] if is_persons else []), *rows[-3:-1]]
    trace = imported(tmp_path, {"s.jsonl": rows, "k.jsonl": json.loads(agents)})
    agent = requests_of(trace)[1]
    assert (agent.after, agent.wait_kind, agent.wait_ns // NS_PER_S) == ((0,), "human" if is_persons else "none", 31)
    assert said(trace, STARTED) != is_persons


@pytest.mark.parametrize("is_task", [True, False])
def test_a_tool_that_a_person_ran_in_opencode_is_no_call_and_leaves_the_wait_the_persons(
    tmp_path: Path, *, is_task: bool
) -> None:
    parent, child, after = opencode_session("p", 1), opencode_session("k", 1, 40), opencode_session("x", 1, 60)
    asked, answer = opencode_session("p", 1, 39)["messages"]
    asked["parts"] = [{"type": "subtask"} if is_task else {"type": "text", "synthetic": True}]
    (ran,) = [part for part in answer["parts"] if part["type"] == "tool"]
    ran |= {"tool": "task" if is_task else "bash", "callID": "t"}
    ran["state"]["time"]["end"] += 10_000
    ran["state"] |= {"metadata": {"sessionId": "k"}} if is_task else {}
    answer["info"]["tokens"], answer["parts"] = {"input": 0, "output": 0}, [ran]
    if is_task:
        after["messages"][0]["parts"][0]["synthetic"] = True
    parent["messages"] += [asked, answer, *after["messages"]]
    trace = imported(tmp_path, {"p.json": [parent], **({"k.json": [child]} if is_task else {})})
    *_, agent, last = requests_of(trace)
    assert [(one.wait_kind, one.wait_ns // NS_PER_S) for one in (agent, last)] == (
        [("human", 37), ("tool", 17)] if is_task else [("none", 0), ("human", 57)]
    )
    assert last.after == ((0, 1) if is_task else (0,))
    assert not trace.head.dropped
