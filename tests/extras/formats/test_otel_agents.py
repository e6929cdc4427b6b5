"""Agents within agents, turns of a person, and the coats that spans come in."""

from __future__ import annotations

import json
from base64 import b64decode
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.extras.formats.otel_spans import LABELS
from harness.model.traces.base import ONE_PAGE
from harness.model.traces.links import (
    ADDED_REASONING,
    ALLOWED,
    AS_PART,
    BY_MESSAGES,
    GAPS,
    HELD_REASONING,
    PARTLY,
    UNAWAITED,
    UNEXPLAINED,
    UNKNOWN,
    UNSHOWN,
)
from harness.model.traces.recording import ANEW, NO_CACHE, TraceFile, describe_trace, open_trace
from tests.support.trace_rows import imported, trace_of, written

START_S = 1_790_000_000
TRACE, OTHER = "0af7651916cd43dd8448eb211c80319c", "0af7651916cd43dd8448eb211c80319d"
SHORT_TURNS = (("a", TRACE), ("b", OTHER))


def span(name: str, parent: str, begin_s: float, end_s: float, operation: str, trace: str = TRACE, **more: Any) -> Any:
    return {
        "trace_id": trace,
        "span_id": name * 16,
        "parent_span_id": parent * 16,
        "start_ns": round((START_S + begin_s) * NS_PER_S),
        "end_ns": round((START_S + end_s) * NS_PER_S),
        "attributes": {"gen_ai.operation.name": operation, **more},
    }


def chat(
    name: str, parent: str, begin_s: float, prompt: int, cached: int | None, trace: str = TRACE, **more: Any
) -> Any:
    counts = {"gen_ai.request.model": "m", "gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": 40}
    counts |= {} if cached is None else {"gen_ai.usage.cache_read.input_tokens": cached}
    return span(name, parent, begin_s, begin_s + 1, more.pop("operation", "chat"), trace, **counts, **more)


def delegating(operation: str = "chat") -> list[Any]:
    """An agent whose tool runs two others at once, each of two calls."""
    rows = [
        span("a", "", 0, 20, "invoke_agent"),
        chat("b", "a", 0, 500, 0, operation=operation),
        span("c", "a", 1, 11.5, "execute_tool"),
        chat("d", "a", 12, 700, 512, operation=operation),
    ]
    for agent, first, second in (("1", "2", "3"), ("4", "5", "6")):
        rows.append(span(agent, "c", 1.5, 11, "invoke_agent"))
        rows.append(chat(first, agent, 2, 300, 0, operation=operation, **{"gen_ai.conversation.id": agent}))
        rows.append(span("78"[agent == "4"], agent, 3, 9, "execute_tool"))
        rows.append(chat(second, agent, 10, 400, 256, operation=operation, **{"gen_ai.conversation.id": agent}))
    return rows


def said(trace: TraceFile, label: str) -> bool:
    return any(each.partition(" x ")[2] == label for each in trace.head.labels)


@pytest.mark.parametrize(("name", "is_said"), [("main", False), ("other", True)])
def test_an_agent_of_another_name_that_runs_later_in_the_trace_is_labelled(
    tmp_path: Path, name: str, is_said: bool
) -> None:
    rows = [
        span("a", "", 0, 10, "invoke_agent", **{"gen_ai.agent.name": "main"}),
        chat("b", "a", 0, 500, 0),
        span("c", "", 600, 620, "invoke_agent", **{"gen_ai.agent.name": name}),
        chat("d", "c", 601, 700, 0),
    ]
    assert said(trace_of(tmp_path, [{"spans": rows}]), LABELS["following"]) == is_said


def test_a_short_name_of_a_conversation_in_two_files_is_labelled(tmp_path: Path) -> None:
    turns = [chat(name, "", 0, 500, 0, trace, **{"gen_ai.conversation.id": "7"}) for name, trace in SHORT_TURNS]
    trace = trace_of(tmp_path, *([{"spans": [turn]}] for turn in turns))
    assert len(trace.recordings) == 2
    assert f"1 x {LABELS['short_names']}" in trace.head.labels


def test_ids_in_base64_are_those_in_hex_and_a_conversation_over_two_clocks_is_labelled(tmp_path: Path) -> None:
    conversation = {"gen_ai.conversation.id": "conv_5j66UpCpwteGg4YSxUnt7lPY"}
    traces = ("YotJ2W3N6XpDDdT1l3BYmQ==", b64decode("xER0A41FnkDkcUr++nv42g==").hex())
    for names, is_apart in ((traces, False), (("1", "2"), True)):
        both = zip((0, 90), names, strict=True)
        turns = [chat("a", "", at_s, 500, 0, name, **conversation) | {"span_id": "yW0keuzglss="} for at_s, name in both]
        trace = trace_of(tmp_path, *([{"spans": [turn]}] for turn in reversed(turns)))
        ((first, second),) = (each.requests for each in trace.recordings)
        assert (first.after, second.wait_ns // NS_PER_S == 89) == ((), not is_apart)
        assert any(LABELS["other_clock"] in label for label in trace.head.labels) == is_apart


@pytest.mark.parametrize(("name", "is_said"), [("x", True), ("ask for approval", False)])
def test_a_long_span_within_a_tools_and_a_call_of_an_unknown_operation_are_labelled(
    tmp_path: Path, name: str, *, is_said: bool
) -> None:
    rows = [
        chat("a", "", 0, 500, 0, operation="respond"),
        span("b", "", 2, 9, "execute_tool"),
        span("c", "b", 3, 8, "") | {"name": name},
        chat("d", "", 9, 600, 500, **{"gen_ai.prompt.0.role": "user", "gen_ai.approval": "x", "mine": "x"}),
    ]
    trace = trace_of(tmp_path, [{"spans": rows}])
    (strange,) = (each for each in trace.head.labels if "not known here" in each)
    assert strange.endswith("attribute gen_ai.approval")
    assert said(trace, LABELS["unnamed"])
    assert said(trace, LABELS["inside"]) == is_said


def test_a_span_that_comes_again_with_another_end_is_no_second_call(tmp_path: Path) -> None:
    first = chat("a", "", 0, 500, 0)
    trace = trace_of(
        tmp_path, [{"spans": [first, first | {"end_ns": first["end_ns"] + 1}, chat("b", "", 5, 600, 500)]}]
    )
    assert trace.num_requests == 2
    assert trace.head.dropped == {LABELS["other_values"]: 1}


def test_links_of_spans_without_a_parent_are_counted(tmp_path: Path) -> None:
    link = {"traceId": OTHER, "spanId": "b" * 16}
    rows = [chat("a", "", 0, 500, 0) | {"links": [link]}, chat("b", "a", 3, 600, 500) | {"links": [link]}]
    assert f"1 x {LABELS['linked']}" in trace_of(tmp_path, [{"spans": rows}]).head.labels
    jaeger: dict[str, Any] = {"traceID": TRACE, "spanID": "c" * 16, "startTime": 1, "duration": 5, "processID": "p"}
    jaeger["references"] = [{"refType": "FOLLOWS_FROM", "traceID": TRACE, "spanID": "b" * 16}]
    counts = {"gen_ai.request.model": "m", "gen_ai.usage.input_tokens": 500, "gen_ai.usage.output_tokens": 40}
    jaeger["tags"] = [{"key": key, "value": value} for key, value in counts.items()]
    assert (
        f"1 x {LABELS['linked']}"
        in trace_of(tmp_path, [{"data": [{"spans": [jaeger], "processes": {"p": {}}}]}]).head.labels
    )


@pytest.mark.parametrize("operation", ["chat", "acompletion"])
def test_agents_that_a_tool_runs_at_once_fork_and_join_and_wait_for_nobody_else(tmp_path: Path, operation: str) -> None:
    (recording,) = trace_of(tmp_path, [{"spans": delegating(operation)}]).recordings
    assert [one.after for one in recording.requests] == [(), (0,), (1,), (0,), (3,), (0, 2, 4)]
    assert [one.wait_ns for one in recording.requests] == [0, *[NS_PER_S, 7 * NS_PER_S] * 2, NS_PER_S]
    assert [one.base for one in recording.requests] == [None, None, 1, None, 3, 0]


def test_without_the_span_of_the_agent_its_calls_are_said_to_have_no_link(tmp_path: Path) -> None:
    rows = [row for row in delegating() if row["span_id"][0] != "c"]
    assert said(trace_of(tmp_path, [{"spans": rows}]), LABELS["orphans"])


def test_a_wait_is_a_tools_where_one_ran_a_persons_before_a_new_root_and_else_not_known(tmp_path: Path) -> None:
    more = {"gen_ai.conversation.id": "0af76519-16cd-43dd-8448-eb211c803100"}
    rows = [
        span("a", "", 0, 12, "invoke_agent"),
        chat("b", "a", 0, 500, 0, **more),
        span("c", "a", 1, 4, "a_new_kind_of_tool"),
        span("d", "a", 1, 5, "execute_tool"),
        chat("e", "a", 5, 600, 512, **more),
        chat("f", "a", 8, 700, 512, **more),
        span("9", "a", 9, 9.5, "execute_tool"),  # as of a tool that gives the final answer
        span("1", "", 20, 30, "invoke_agent", OTHER),
        chat("2", "1", 20, 800, 640, OTHER, **more),
    ]
    trace = trace_of(tmp_path, [{"spans": rows}])
    (recording,) = trace.recordings
    assert [one.wait_kind for one in recording.requests] == ["none", "tool", "none", "human"]
    assert not any(one.is_drawn for one in recording.requests)
    assert said(trace, UNKNOWN)
    flat = [row | {"parent_span_id": ""} for row in rows if row["span_id"][0] in "be"]
    assert said(trace_of(tmp_path, [{"spans": flat}]), UNSHOWN)


def test_traces_whose_messages_go_on_from_an_earlier_one_are_turns_of_one_session(tmp_path: Path) -> None:
    def messages(count: int) -> dict[str, str]:
        return {f"llm.input_messages.{place}.message.content": f"text {place}" for place in range(count)}

    rows = [chat("b", "", 0, 500, 0, **messages(2)), chat("2", "", 9, 600, 512, OTHER, **messages(4))]
    trace = trace_of(tmp_path, [{"spans": rows}])
    (recording,) = trace.recordings
    assert (recording.requests[1].base, recording.requests[1].keep_tokens) == (0, 512)
    assert said(trace, LABELS["joined"])
    for row in rows:
        del row["attributes"]["gen_ai.usage.cache_read.input_tokens"]
    uncounted = trace_of(tmp_path, [{"spans": rows}])
    assert uncounted.recordings[0].requests[1].keep_tokens == 540
    assert said(uncounted, BY_MESSAGES)
    rows[1]["attributes"]["llm.input_messages.0.message.content"] = "another text"
    assert len(trace_of(tmp_path, [{"spans": rows}]).recordings) == 2


def typed(values: dict[str, Any]) -> list[Any]:
    kind = {str: "stringValue", int: "intValue", float: "doubleValue"}
    return [{"key": key, "value": {kind[type(value)]: value}} for key, value in values.items()]


def in_coats(rows: list[Any]) -> dict[str, Any]:
    otlp = [
        {
            "traceId": row["trace_id"],
            "spanId": row["span_id"],
            "parentSpanId": row["parent_span_id"],
            "startTimeUnixNano": row["start_ns"],
            "endTimeUnixNano": row["end_ns"],
            "attributes": typed(row["attributes"]),
        }
        for row in rows
    ]
    resource_spans = [{"resource": {}, "scopeSpans": [{"spans": otlp}]}]
    jaeger = [
        {
            "traceID": row["trace_id"],
            "spanID": row["span_id"],
            "references": [{"refType": "CHILD_OF", "traceID": row["trace_id"], "spanID": row["parent_span_id"]}],
            "startTime": row["start_ns"] // 1000,
            "duration": (row["end_ns"] - row["start_ns"]) // 1000,
            "tags": [{"key": key, "type": "x", "value": value} for key, value in row["attributes"].items()],
            "processID": "p1",
        }
        for row in rows
    ]
    context = [
        {
            "context": {"trace_id": f"0x{row['trace_id']}", "span_id": f"0x{row['span_id']}"},
            "parent_id": f"0x{row['parent_span_id']}" if row["parent_span_id"] else None,
            **{name: row[name] for name in ("start_ns", "end_ns", "attributes")},
        }
        for row in rows
    ]
    # Phoenix moves an OpenInference kind out of the attributes, and writes UNKNOWN where there is none.
    kinds = {"chat": "LLM", "execute_tool": "TOOL", "invoke_agent": "AGENT"}
    phoenix = [
        each
        | {"span_kind": kinds.get(each["attributes"]["gen_ai.operation.name"], "UNKNOWN")}
        | {"attributes": {key: value for key, value in each["attributes"].items() if value not in kinds}}
        for each in context
    ]
    processes = {"p1": {"serviceName": "agent", "tags": []}}
    return {
        "tempo": {"trace": {"resourceSpans": resource_spans}},
        "jaeger": {"data": [{"traceID": TRACE, "spans": jaeger, "processes": processes}], "total": 0, "errors": None},
        "download": {"data": [{"traceID": TRACE, "spans": jaeger, "processes": processes}], "errors": []},
        "download of one trace": {"data": [{"traceID": TRACE, "spans": jaeger, "processes": processes}]},
        "phoenix": {"data": phoenix, "next_cursor": None},
        "console": {"spans": context},
    }


@pytest.mark.parametrize("coat", ["tempo", "jaeger", "download", "download of one trace", "phoenix", "console"])
def test_every_coat_of_the_same_spans_gives_the_same_calls(tmp_path: Path, coat: str) -> None:
    rows = delegating()
    plain = trace_of(tmp_path, [{"spans": rows}]).recordings
    other = trace_of(tmp_path, [in_coats(rows)[coat]]).recordings
    assert [one.requests for one in other] == [one.requests for one in plain]


@pytest.mark.parametrize(("cursor", "is_said"), [(None, False), ("U3BhbjoyMA==", True)])
@pytest.mark.parametrize("is_in_line", [False, True])
def test_a_page_of_spans_that_names_another_one_is_labelled(
    tmp_path: Path, cursor: str | None, is_said: bool, is_in_line: bool
) -> None:
    page = in_coats(delegating())["phoenix"] | {"next_cursor": cursor}
    rows = [*delegating(), {"next_cursor": cursor}] if is_in_line else [page]
    assert said(trace_of(tmp_path, rows), ONE_PAGE) == is_said


def test_a_cycle_of_an_agents_loop_is_known_and_no_call(tmp_path: Path) -> None:
    rows = [span("a", "", 0, 20, "invoke_agent"), span("b", "a", 0, 9, "execute_event_loop_cycle")]
    trace = trace_of(tmp_path, [{"spans": [*rows, chat("c", "b", 0, 500, 0), chat("d", "a", 5, 600, 512)]}])
    assert trace.head.rows == {"calls": 2, "parts of calls": 0, "passed over": 2, "broken": 0, "unknown": 0}


@pytest.mark.parametrize(
    ("decision", "kind"),
    [("", "tool"), ("auto_accept", "tool"), ("accept", "none"), ("modify", "none"), ("reject", "human")],
)
def test_records_of_logs_are_calls_tools_and_prompts_of_a_person(tmp_path: Path, decision: str, kind: str) -> None:
    def record(end_s: float, event: str, **more: Any) -> Any:
        attributes = {"event.name": f"gemini_cli.{event}", "session.id": "one", **more}
        return {"timeUnixNano": str(round((START_S + end_s) * NS_PER_S)), "attributes": typed(attributes)}

    def answer(end_s: float, prompt: int, cached: int, thoughts: int = 10) -> Any:
        counts = {"input_token_count": prompt, "output_token_count": 40, "cached_content_token_count": cached}
        counts |= {"thoughts_token_count": thoughts, "total_token_count": prompt + 40 + thoughts}
        return record(end_s, "api_response", model="m", duration_ms=1000, **counts)

    rows = [
        record(0, "user_prompt"),
        answer(1, 500, 0),
        record(4, "tool_call", duration_ms=2900, decision=decision),
        answer(6, 600, 512),
        record(10, "user_prompt"),
        answer(11.5, 700, 640),
    ]
    trace = trace_of(tmp_path, [{"resourceLogs": [{"scopeLogs": [{"logRecords": rows}]}]}])
    (recording,) = trace.recordings
    assert [one.generate_tokens for one in recording.requests] == [50, 50, 50], "the sum says that thoughts are apart"
    assert [(one.wait_kind, one.wait_ns / NS_PER_S) for one in recording.requests[1:]] == [(kind, 4), ("human", 4.5)]
    assert (f"1 x {ALLOWED}" in trace.head.labels) == (kind == "none")


@pytest.mark.parametrize("apart_ns", [0, 60_000, -1_000_000])
@pytest.mark.parametrize("has_requests", [True, False])
def test_a_second_record_of_a_request_or_of_its_answer_is_no_second_call(
    tmp_path: Path, apart_ns: int, has_requests: bool
) -> None:
    def record(end_s: float, event: str, more_ns: int = 0, **more: Any) -> Any:
        attributes = {"event.name": event, "session.id": "one", **more}
        return {"timeUnixNano": str(round((START_S + end_s) * NS_PER_S) + more_ns), "attributes": typed(attributes)}

    def details(end_s: float, **more: Any) -> Any:
        names = {"gen_ai.operation.name": "generate_content", "gen_ai.request.model": "m"}
        return record(end_s, "gen_ai.client.inference.operation.details", apart_ns, **names, **more)

    def call(end_s: float, prompt: int, output: int, thoughts: int) -> list[Any]:
        asked = [record(end_s - 1, "gemini_cli.api_request", model="m"), details(end_s - 1)]
        counts = {"input_token_count": prompt, "output_token_count": output, "thoughts_token_count": thoughts}
        counts |= {"total_token_count": prompt + output + thoughts, "duration_ms": 1000}
        told = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.output_tokens": output}
        told |= {"gen_ai.output.messages": json.dumps([{"parts": [{"content": "word " * 400}]}]), "id": f"r{end_s}"}
        answer = [record(end_s, "gemini_cli.api_response", **counts), details(end_s, **told)]
        return asked * has_requests + answer

    # Two calls at once with one prompt, whose answers differ.
    rows = [*call(1, 500, 40, 300), *call(4, 900, 60, 0), *call(4.2, 900, 70, 0)]
    trace = trace_of(tmp_path, [{"resourceLogs": [{"scopeLogs": [{"logRecords": rows}]}]}])
    lengths = [(one.prompt_tokens, one.generate_tokens) for one in trace.recordings[0].requests]
    assert lengths == [(500, 340), (900, 60), (900, 70)]
    assert trace.head.dropped == {LABELS["logged"]: 3}
    assert trace.head.rows["passed over"] == 6 * has_requests
    assert not trace.head.broken
    assert trace.recordings[0].requests[1].wait_ns == 2 * NS_PER_S
    alone = trace_of(tmp_path, [{"resourceLogs": [{"scopeLogs": [{"logRecords": rows[-1:]}]}]}])
    assert [one.prompt_tokens for one in alone.recordings[0].requests] == [900], "where it is all that is told"


COUNTS = ("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.usage.cache_read.input_tokens")


@pytest.mark.parametrize(("has_counts", "why"), [(True, LABELS["within"]), (False, LABELS["wraps"])])
def test_a_client_and_its_server_that_count_a_little_apart_tell_of_one_call(
    tmp_path: Path, has_counts: bool, why: str
) -> None:
    rows: list[Any] = []
    for client, server, begin_s, prompt in (("a", "1", 0, 1000), ("b", "2", 7, 1300)):
        more = {"gen_ai.conversation.id": TRACE}
        client_row = chat(client, "", begin_s, prompt, prompt - 300, **more)
        server_row = chat(server, client, begin_s + 0.25, prompt + 3, None, operation="")
        server_row["end_ns"] = client_row["end_ns"]
        for name in () if has_counts else COUNTS:
            del client_row["attributes"][name]
        rows += [client_row, server_row]
    trace = trace_of(tmp_path, [{"spans": rows}])
    (recording,) = trace.recordings
    assert recording.requests[1].wait_ns / NS_PER_S == pytest.approx(6 if has_counts else 6.25)
    assert [one.wait_kind for one in recording.requests] == ["none", "tool"]
    assert (trace.head.dropped, trace.head.broken) == ({why: 2}, {})


@pytest.mark.parametrize("operation", ["chat", ""])
def test_a_chat_with_the_counts_of_those_within_it_is_a_sum_and_dropped(tmp_path: Path, operation: str) -> None:
    outer = chat("a", "", 0, 1100, 512, operation=operation)
    outer["attributes"]["gen_ai.usage.output_tokens"] = 80
    outer["end_ns"] += 9 * NS_PER_S
    rows = [outer, chat("b", "a", 0, 500, 0), chat("c", "a", 5, 600, 512)]
    trace = trace_of(tmp_path, [{"spans": rows}])
    assert [one.prompt_tokens for one in trace.recordings[0].requests] == [500, 600]
    assert trace.head.dropped == {LABELS["sums"]: 1}


def test_a_tool_that_ends_before_the_agent_that_it_started_is_no_join(tmp_path: Path) -> None:
    rows = [
        span("a", "", 0, 40, "invoke_agent"),
        chat("b", "a", 0, 500, 0),
        span("c", "a", 1, 1.5, "execute_tool"),
        span("1", "c", 1.25, 12, "invoke_agent"),
        chat("2", "1", 1.5, 300, 0),
        chat("d", "a", 2, 600, 512),
        span("e", "a", 3, 13, "execute_tool"),
        chat("f", "a", 13, 700, 640),
    ]
    rows[4]["end_ns"] += 9 * NS_PER_S
    trace = trace_of(tmp_path, [{"spans": rows}])
    (recording,) = trace.recordings
    assert [one.after for one in recording.requests] == [(), (0,), (0,), (2,)]
    assert recording.requests[-1].wait_ns == 10 * NS_PER_S
    assert said(trace, UNAWAITED)


def test_an_agent_after_another_does_not_go_on_from_its_prompt(tmp_path: Path) -> None:
    rows = [span("a", "", 0, 40, "invoke_workflow")]
    for agent, first, second, begin_s in (("1", "2", "3", 0), ("4", "5", "6", 10)):
        named = {"gen_ai.agent.name": f"agent {agent}"}
        rows.append(span(agent, "a", begin_s, begin_s + 9, "invoke_agent", **named))
        rows += [chat(first, agent, begin_s, 500 + 100 * begin_s, None)]
        rows += [chat(second, agent, begin_s + 4, 600 + 100 * begin_s, None)]
    (recording,) = trace_of(tmp_path, [{"spans": rows}]).recordings
    assert [one.base for one in recording.requests] == [None, 0, None, 2]


def test_failed_calls_without_tokens_are_dropped_and_those_with_counts_are_said(tmp_path: Path) -> None:
    rows = [chat("a", "", 0, 500, 0), chat("b", "", 2, 0, 0), chat("c", "", 4, 600, 0), chat("d", "", 6, 600, 512)]
    for row in rows[1:3]:
        row["attributes"] |= {"error.type": "timeout"}
    rows[1]["attributes"]["gen_ai.usage.output_tokens"] = 0
    trace = trace_of(tmp_path, [{"spans": rows}])
    assert [one.wait_ns / NS_PER_S for one in trace.recordings[0].requests] == [0, 1, 1]
    assert trace.head.dropped == {LABELS["failed"]: 1}
    assert said(trace, LABELS["failed_with_counts"])
    assert not trace.head.broken


@pytest.mark.parametrize("other_ends_s", [5, 8, 11])
def test_attempts_within_one_span_waited_for_nothing_that_ended_after_the_first(
    tmp_path: Path, other_ends_s: float
) -> None:
    """Two branches at once, of which one is tried twice."""
    failed = chat("b", "e", 4.3, 0, None) | {"attributes": {"gen_ai.operation.name": "chat", "error.type": "429"}}
    rows = [
        span("d", "", 0, 31, "invoke_agent"),
        chat("1", "d", 3, 1000, None),
        span("e", "d", 4.2, 29.9, "chain"),
        chat("2", "d", 4.2, 1100, None) | {"end_ns": round((START_S + other_ends_s) * NS_PER_S)},
        failed,
        chat("3", "e", 12, 1200, None),
        chat("4", "d", 30, 2600, None),
    ]
    (recording,) = trace_of(tmp_path, [{"spans": rows}]).recordings
    assert [one.after for one in recording.requests] == [(), (0,), (0,), (1, 2)]
    assert recording.requests[2].wait_ns / NS_PER_S == pytest.approx(0.3)


@pytest.mark.parametrize("program", ["gemini_cli", "qwen-code"])
@pytest.mark.parametrize("asked_again", [False, True])
def test_a_call_that_a_log_says_failed_ends_the_wait_unless_more_was_asked_after_it(
    tmp_path: Path, program: str, asked_again: bool
) -> None:
    def record(end_s: float, event: str, **more: Any) -> Any:
        attributes = {"event.name": f"{program}.{event}", "session.id": "one", **more}
        return {"timeUnixNano": str(round((START_S + end_s) * NS_PER_S)), "attributes": typed(attributes)}

    counts = {"output_token_count": 40, "duration_ms": 1000}
    asked = [record(70, "user_prompt")] * asked_again
    rows = [
        record(2, "api_response", input_token_count=500, **counts),
        record(32, "user_prompt"),
        record(32.1, "api_request", model="m"),
        record(34, "api_error", duration_ms=1900, status_code=503, model="m"),
        *asked,
        record(80, "api_response", input_token_count=600, **counts),
    ]
    trace = trace_of(tmp_path, [{"resourceLogs": [{"scopeLogs": [{"logRecords": rows}]}]}])
    last = trace.recordings[0].requests[-1]
    assert (last.wait_kind, last.is_drawn) == ("human", asked_again)
    assert asked_again or last.wait_ns / NS_PER_S == 30.1
    assert trace.head.dropped == {LABELS["failed"]: 1}
    assert not trace.head.rows["unknown"]
    assert said(trace, f"waits that are unknown: {LABELS['asked_again']}") == asked_again


@pytest.mark.parametrize("name", ["gen_ai.tool.name", "ai.toolCall.name"])
def test_a_span_with_the_name_of_a_tool_is_a_tools_without_an_operation(tmp_path: Path, name: str) -> None:
    tool = span("b", "", 1, 5, "", **{name: "shell"})
    trace = trace_of(tmp_path, [{"spans": [chat("a", "", 0, 500, 0), tool, chat("c", "", 5, 600, 512)]}])
    assert not said(trace, UNSHOWN)


OF_LANGFUSE = {
    "langfuse.observation.type": "generation",
    "langfuse.observation.model.name": "m",
    "langfuse.observation.usage_details": '{"input": 90, "output": 7, "input_cached_tokens": 64, "total": 97}',
}
OF_MLFLOW = {
    "mlflow.spanType": '"CHAT_MODEL"',
    "mlflow.chat.tokenUsage": '{"input_tokens":90,"output_tokens":7,"cache_read_input_tokens":64,"total_tokens":97}',
}


@pytest.mark.parametrize(
    ("names", "counted", "label"),
    [
        ({"gen_ai.usage.cache_write.input_tokens": 900}, (1400, 0, 40), ""),
        ({"gen_ai.usage.input_token_details": "{'cache_read': 128, 'audio': 0}"}, (500, 128, 40), AS_PART),
        ({"gen_ai.usage.experimental.reasoning_tokens": 76}, (500, 0, 116), ADDED_REASONING),
        ({"gen_ai.usage.details.thoughts_tokens": 30}, (500, 0, 40), HELD_REASONING),
        ({"gen_ai.usage.thinking_tokens": 30}, (500, 0, 40), "gen_ai.usage.thinking_tokens: not read"),
        ({"langsmith.trace.session_id": "p", "thread.id": 7}, (500, 0, 40), "attribute langsmith.trace.session_id"),
        (OF_LANGFUSE, (90, 64, 7), ""),
        (OF_MLFLOW, (90, 64, 7), ""),
    ],
)
def test_counts_and_sessions_by_the_names_of_programs_are_read_or_labelled(
    tmp_path: Path, names: dict[str, Any], counted: tuple[int, int, int], label: str
) -> None:
    row = chat("a", "", 0, 500, None, **names)
    if counted[0] == 90:
        row["attributes"] = names
    first = chat("b", "", -9, 1400, 0)
    trace = trace_of(tmp_path, [{"spans": [first, row]}])
    last = trace.recordings[0].requests[-1]
    assert (last.prompt_tokens, last.keep_tokens, last.generate_tokens) == counted
    assert any(each.endswith(label) for each in trace.head.labels)
    assert label or not any("known here" in each or "taken as a part" in each for each in trace.head.labels)


@pytest.mark.parametrize("name", ["traceloop.association.properties.thread_id", "langsmith.metadata.session_id"])
def test_traces_of_a_conversation_by_the_name_of_a_program_are_turns_taken_as_a_persons(
    tmp_path: Path, name: str
) -> None:
    turns = [
        row
        for at_s, trace in ((0, TRACE), (30, OTHER))
        for row in (span("a", "", at_s, at_s + 5, "agent", trace), chat("b", "a", at_s, 500, 0, trace, **{name: TRACE}))
    ]
    trace = trace_of(tmp_path, [{"spans": turns}])
    (recording,) = trace.recordings
    assert [one.wait_kind for one in recording.requests] == ["none", "human"]
    assert said(trace, LABELS["rooted"])


@pytest.mark.parametrize(
    ("rows", "num_requests", "label"),
    [
        ([chat("a", "", 0, 500, 0), chat("b", "a", 0.2, 900, 0)], 2, "nested"),
        ([chat("a", "", 0, 500, 0, operation=""), span("t", "a", 1, 9, "tool"), chat("b", "t", 2, 90, 0)], 2, "open"),
        ([span("a", "", 0, 9, "agent"), chat("b", "a", -2, 500, 0)], 1, "skewed"),
    ],
)
def test_calls_around_others_and_before_their_parents_are_kept_and_labelled(
    tmp_path: Path, rows: list[Any], num_requests: int, label: str
) -> None:
    rows[0]["end_ns"] = (START_S + 10) * NS_PER_S
    trace = trace_of(tmp_path, [{"spans": rows}])
    assert trace.num_requests == num_requests
    assert said(trace, LABELS[label])


def test_spans_that_lost_attributes_to_a_limit_are_labelled(tmp_path: Path) -> None:
    coats = in_coats(delegating())
    coats["tempo"]["trace"]["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["droppedAttributesCount"] = 3
    lost = {"key": "otel.dropped_attributes_count", "value": 3}
    coats["jaeger"]["data"][0]["spans"][0]["tags"].append(lost)
    for coat, is_said in (("tempo", True), ("jaeger", True), ("console", False)):
        assert said(trace_of(tmp_path, [coats[coat]]), LABELS["cut"]) == is_said


def test_records_without_a_duration_are_said_to_have_waits_that_hold_their_own_time(tmp_path: Path) -> None:
    rows = [chat("a", "", 0, 500, 0), chat("b", "", 4, 600, 512)]
    assert not said(trace_of(tmp_path, [{"spans": rows}]), GAPS)
    records = [
        {"timeUnixNano": row["end_ns"], "eventName": "details", "attributes": typed(row["attributes"])} for row in rows
    ]
    trace = trace_of(tmp_path, [{"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}])
    assert said(trace, GAPS)


@pytest.mark.parametrize("ids", [(), ("traceId", "spanId"), ("traceId",)])
def test_a_call_that_a_span_and_a_record_of_a_log_tell_counts_once(tmp_path: Path, ids: tuple[str, ...]) -> None:
    rows = [chat("a", "", 0, 500, 0), chat("b", "", 4, 600, 512), chat("c", "", 4.2, 600, 512)]
    plain = trace_of(tmp_path, [{"spans": rows}])
    named = {"traceId": "trace_id", "spanId": "span_id"}
    records = [
        {"timeUnixNano": row["end_ns"] + 50_000_000, "attributes": typed(row["attributes"])}
        | {name: row[named[name]] for name in ids}
        for row in rows
    ]
    both = trace_of(tmp_path, [{"spans": rows}, {"resourceLogs": [{"scopeLogs": [{"logRecords": records}]}]}])
    assert [one.requests for one in both.recordings] == [one.requests for one in plain.recordings]
    assert both.head.dropped == {LABELS["logged"]: 3}
    logs = {"resourceLogs": [{"scopeLogs": [{"logRecords": records * 2}]}]}
    assert sum(trace_of(tmp_path, [logs]).head.dropped.values()) == 3, "a record that stands twice"


def ceiling(folder: Path) -> str:
    with open_trace(folder / "out.jsonl") as reader:
        return describe_trace(reader)["endless cache"]


def test_a_ceiling_of_calls_without_any_before_them_is_not_known(tmp_path: Path) -> None:
    trace_of(tmp_path, [{"spans": [chat("a", "", 0, 500, None), chat("b", "", 4, 600, None, OTHER)]}])
    assert ceiling(tmp_path) == "ceiling not known: no call follows another, no block is named"


def test_only_prompts_that_were_taken_to_go_on_are_said_to_and_the_ceiling_says_how_many(tmp_path: Path) -> None:
    rows = [
        chat(name, "", begin_s, 500 + 100 * begin_s, None if begin_s in (4, 8) else 256, **{"gen_ai.agent.name": agent})
        for name, begin_s, agent in (("a", 0, "x"), ("b", 2, "x"), ("c", 4, "x"), ("d", 6, "x"), ("e", 8, "y"))
    ]
    rows += [chat("f", "", 10, 900, 256, **{"gen_ai.agent.name": "y"})]
    trace = trace_of(tmp_path, [{"spans": rows}])
    assert {f"1 x {NO_CACHE}", f"1 x {ANEW}"} <= {*trace.head.labels}
    assert ceiling(tmp_path).endswith("of prompt tokens (2 of 5 prompts assumed)")


def test_zeros_of_a_call_after_several_at_once_stay_zeros(tmp_path: Path) -> None:
    rows = [chat("a", "", 0, 500, 0), chat("b", "", 0.25, 500, 0), chat("c", "", 3, 900, 0)]
    trace = trace_of(tmp_path, [{"spans": rows}])
    assert [one.keep_tokens for one in trace.recordings[0].requests] == [0, 0, 0]
    assert not said(trace, NO_CACHE)


def test_indented_objects_one_after_another_are_read_and_a_rest_is_counted(tmp_path: Path) -> None:
    rows = [chat("a", "", 0, 500, 0), chat("b", "", 4, 600, 512)]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(json.dumps(row, indent=4) for row in rows) + "\n{ cut off")
    head = imported(path).head
    assert (head.rows["calls"], head.broken) == (2, {"no JSON object": 1})


def test_telemetry_of_gemini_cli_points_to_the_sessions_own_logs(tmp_path: Path) -> None:
    path = tmp_path / "telemetry.log"
    path.write_text(2 * json.dumps({"hrTime": [1, 2], "attributes": {"event.name": "x"}}, indent=2))
    with pytest.raises(SpecError, match=r"telemetry of Gemini CLI or Qwen Code.*~/.gemini/tmp"):
        imported(path)


def test_events_of_claude_code_point_to_its_sessions(tmp_path: Path) -> None:
    def record(event: str, **more: Any) -> Any:
        attributes = typed({"event.name": event, "session.id": "one", **more})
        return {"timeUnixNano": str(START_S * NS_PER_S), "attributes": attributes}

    others = [record(each) for each in ("user_prompt", "tool_decision", "tool_result", "hook_start", "hook_end") * 2]
    counts = {"input_tokens": "10", "output_tokens": "40", "cache_read_tokens": "500", "duration_ms": "900"}
    rows = [*others, record("api_request", **counts)]
    path = written(tmp_path, [{"resourceLogs": [{"scopeLogs": [{"logRecords": rows}]}]}])
    with pytest.raises(SpecError, match=r"1 x calls in events of Claude Code: .*~/.claude/projects"):
        imported(path)


def test_spans_of_codex_point_to_its_sessions(tmp_path: Path) -> None:
    row = chat("a", "", 0, 500, 0, operation="", **{"codex.usage.total_tokens": 540})
    with pytest.raises(SpecError, match=r"1 x calls in spans of Codex.*~/.codex/sessions"):
        trace_of(tmp_path, [{"spans": [row]}])


def test_a_call_that_stays_open_around_its_tool_ended_where_the_tool_began(tmp_path: Path) -> None:
    rows = [
        span("a", "", 0, 30, "invoke_agent"),
        chat("b", "a", 0, 500, 0) | {"end_ns": (START_S + 24) * NS_PER_S},
        span("c", "b", 5, 23, "execute_tool"),
        chat("d", "a", 24, 700, 512),
    ]
    trace = trace_of(tmp_path, rows)
    waits = [(each.wait_kind, each.wait_ns) for each in trace.recordings[0].requests]
    assert waits[1] == ("tool", 19 * NS_PER_S)
    assert said(trace, LABELS["open"])


@pytest.mark.parametrize(("ends_s", "beside_s", "wait_s"), [(23, None, 19), (20, None, 4), (23, 3, 1)])
def test_a_call_that_streams_while_a_tool_beside_its_span_runs_is_waited_behind_for_that_tool(
    tmp_path: Path, ends_s: int, beside_s: int | None, wait_s: int
) -> None:
    rows = [
        span("a", "", 0, 30, ""),
        chat("b", "a", 0, 500, 0) | {"end_ns": (START_S + ends_s) * NS_PER_S},
        span("c", "a", 5, 22.5, "execute_tool"),
        *([chat("e", "a", beside_s, 400, 0)] if beside_s else []),
        chat("d", "a", 24, 700, 512),
    ]
    trace = trace_of(tmp_path, rows)
    last = trace.recordings[0].requests[-1]
    assert last.wait_ns == wait_s * NS_PER_S
    assert said(trace, LABELS["open"]) == (wait_s == 19)
    assert not said(trace, UNSHOWN)


def test_calls_that_a_client_and_its_proxy_both_record_are_labelled(tmp_path: Path) -> None:
    def of(service: str, row: Any) -> Any:
        return row | {"resource_attributes": {"service.name": service}}

    rows = [
        of("client", chat("a", "", 0, 500, 0)),
        of("proxy", chat("b", "", 0.25, 500, 0, OTHER) | {"end_ns": round((START_S + 0.75) * NS_PER_S)}),
        of("client", chat("c", "", 9, 500, 0)),
    ]
    assert said(trace_of(tmp_path, rows), LABELS["twice"])
    assert not said(trace_of(tmp_path, rows[::2]), LABELS["twice"])


CONVERSATION = {"gen_ai.conversation.id": "0af76519-16cd-43dd-8448-eb211c803100"}


@pytest.mark.parametrize(
    ("reason", "around", "kind"),
    [("", "invoke_agent", "human"), ("stop", "", "human"), ('["end_turn"]', "", "human"), ("tool_calls", "", "none")],
)
def test_a_root_span_after_a_run_that_ended_begins_a_turn_of_a_person(
    tmp_path: Path, reason: str, around: str, kind: str
) -> None:
    """The second root is a call by itself, as of a program that calls no agent for it."""
    ended = {"gen_ai.response.finish_reasons": reason} if reason else {}
    rows = [chat("b", "a" if around else "", 0, 500, 0, **CONVERSATION, **ended)]
    rows += [span("a", "", 0, 2, around)] if around else []
    rows += [chat("c", "", 9, 700, 512, OTHER, **CONVERSATION), span("d", "", 20, 21, "execute_tool", OTHER)]
    trace = trace_of(tmp_path, [{"spans": rows}])
    (recording,) = trace.recordings
    assert (recording.requests[1].wait_kind, recording.requests[1].wait_ns) == (kind, 8 * NS_PER_S)
    assert said(trace, UNKNOWN) == (kind == "none")


@pytest.mark.parametrize(("asked_until_s", "next_s", "kind"), [(3.0, 5.5, "tool"), (11.0, 12, "human")])
def test_a_tool_that_asks_a_person_is_a_persons_wait_unless_a_tool_beside_it_ends_later(
    tmp_path: Path, asked_until_s: float, next_s: float, kind: str
) -> None:
    rows = [
        span("a", "", 0, 20, "invoke_agent"),
        chat("b", "a", 0, 500, 0),
        span("c", "a", 1, asked_until_s, "execute_tool", **{"gen_ai.tool.name": "ask_user"}),
        span("d", "a", 1, 5, "execute_tool", **{"gen_ai.tool.name": "task"}),
        span("1", "d", 1.5, 5, "invoke_agent"),
        chat("2", "1", 2, 300, 0),
        chat("e", "a", next_s, 700, 512),
    ]
    (recording,) = trace_of(tmp_path, [{"spans": rows}]).recordings
    assert recording.requests[-1].after == (0, 1)
    assert recording.requests[-1].wait_kind == kind


@pytest.mark.parametrize("names", ["AB", "AA"])
def test_agents_at_once_that_no_call_started_do_not_wait_for_one_another(tmp_path: Path, names: str) -> None:
    rows = [
        span("1", "", 0, 20, "invoke_workflow"),
        span("2", "1", 0, 19, "invoke_agent", **{"gen_ai.agent.name": names[0]}),
        span("3", "1", 0, 19, "invoke_agent", **{"gen_ai.agent.name": names[1]}),
        span("9", "2", 0, 1, "plan"),
        chat("a", "9", 0, 500, 0),
        span("8", "2", 1, 2, "search_memory"),
        span("b", "2", 1, 5, "execute_tool"),
        chat("c", "2", 5, 700, 512),
        chat("d", "3", 0.5, 300, 0),
        span("e", "3", 1.5, 9, "execute_tool"),
        chat("f", "3", 9, 400, 256),
    ]
    trace = trace_of(tmp_path, [{"spans": rows}])
    assert [[one.prompt_tokens for one in each.requests] for each in trace.recordings] == [[500, 700], [300, 400]]
    assert [each.requests[1].wait_ns / NS_PER_S for each in trace.recordings] == [4, 7.5]
    assert [each.requests[1].wait_kind for each in trace.recordings] == ["tool", "tool"]
    assert said(trace, LABELS["apart"])
    assert not any("unknown" in label for label in trace.head.labels)


@pytest.mark.parametrize(
    ("begin_s", "end_s", "beside", "kind", "label"),
    [
        (1, 4, (), "none", UNEXPLAINED),
        (58, 61, (), "none", UNEXPLAINED),
        (1, 59, (), "tool", PARTLY),
        (1, 25, (1, 25), "none", UNEXPLAINED),  # two at once are no longer than one
        (1, 80, (), "none", UNKNOWN),  # goes on while the next call is made
    ],
)
def test_a_tool_that_ran_much_shorter_than_its_wait_may_have_waited_for_an_approval(
    tmp_path: Path, begin_s: float, end_s: float, beside: tuple[float, ...], kind: str, label: str
) -> None:
    rows = [span("a", "", 0, 90, "invoke_agent"), chat("b", "a", 0, 500, 0), chat("d", "a", 61, 700, 512)]
    rows += [span("e", "a", *beside, "execute_tool")] if beside else []
    trace = trace_of(tmp_path, [*rows, span("c", "a", begin_s, end_s, "execute_tool")])
    assert [(one.wait_kind, one.wait_ns // NS_PER_S) for one in trace.recordings[0].requests] == [
        ("none", 0),
        (kind, 60),
    ]
    assert any(label in each for each in trace.head.labels)


def test_agents_that_a_workflow_starts_at_once_are_followed_by_no_tool(tmp_path: Path) -> None:
    agents = [
        row
        for at_s, name, inner in ((2, "c", "d"), (2.5, "e", "f"))
        for row in (span(name, "a", at_s, at_s + 2, "invoke_agent"), chat(inner, name, at_s, 300, 0))
    ]
    rows = [span("a", "", 0, 9, "invoke_workflow"), chat("b", "a", 0, 500, 0), *agents, chat("9", "a", 4, 900, 512)]
    trace = trace_of(tmp_path, [{"spans": rows}])
    last = trace.recordings[0].requests[-1]
    assert (len(last.after), last.wait_kind, last.wait_ns / NS_PER_S) == (3, "tool", 0.5)
    assert said(trace, UNSHOWN)
    assert said(trace, LABELS["started"])


def test_a_sub_agent_whose_first_call_failed_began_with_that_call(tmp_path: Path) -> None:
    failed = chat("e", "d", 2.3, 300, None) | {"status": {"code": 2}}
    failed["attributes"] = {"gen_ai.operation.name": "chat", "error.type": "429"}
    rows = [
        span("a", "", 0, 20, "invoke_agent"),
        chat("b", "a", 0, 500, 0),
        span("c", "a", 2, 9, "execute_tool"),
        span("d", "c", 2, 9, "invoke_agent"),
        failed,
        chat("f", "d", 6, 300, 0),
    ]
    trace = trace_of(tmp_path, [{"spans": rows}])
    assert [one.wait_ns / NS_PER_S for one in trace.recordings[0].requests] == [0, 1.3]


def test_spans_of_claude_code_have_counts_without_a_prefix_and_say_who_was_asked(tmp_path: Path) -> None:
    def row(name: str, parent: str, begin_s: float, end_s: float, kind: str, **more: Any) -> Any:
        return span(name, parent, begin_s, end_s, "") | {"attributes": {"span.type": kind, **more}}

    counts = {"gen_ai.request.model": "m", "input_tokens": 2, "output_tokens": 50, "cache_creation_tokens": 100}
    calls = [
        row(name, "a", at_s, at_s + 1, "llm_request", **counts, cache_read_tokens=cached)
        for name, at_s, cached in (("b", 1, 1000), ("f", 22, 1102))
    ]
    tools = [
        row("c", "a", 2, 22, "tool", tool_name="Bash"),
        row("d", "c", 2, 20, "tool.blocked_on_user", decision="accept"),
        row("e", "c", 20, 22, "tool.execution"),
    ]
    trace = trace_of(tmp_path, [{"spans": [row("a", "", 0, 30, "interaction"), *calls, *tools]}])
    (_, second) = trace.recordings[0].requests
    assert (second.prompt_tokens, second.wait_kind, second.wait_ns // NS_PER_S) == (1204, "none", 20)
    assert said(trace, ALLOWED)
    assert not any("by a name that is not known" in label for label in trace.head.labels)
