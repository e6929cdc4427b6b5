"""Recordings of the kinds that people post, written by hand with their truth: each is read right, or labelled."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_S
from harness.errors import SpecError
from harness.extras.formats.otel_spans import LABELS
from harness.extras.formats.weka import GAPS, PART_NAMED, ROUNDED
from harness.model.traces.account import ReadNotes
from harness.model.traces.links import ALLOWED, CONTRADICTED, HELD, LAST_BLOCK, UNANSWERED, WHOLE
from harness.model.traces.recording import NO_CACHE, TraceFile
from harness.model.traces.values import instant_ns
from tests.support.sound_traces import SOUND
from tests.support.trace_rows import assistant, at, imported, result, text, tool, trace_of, user, written

TRACE = "0af7651916cd43dd8448eb211c80319c"


def calls(trace: TraceFile) -> list[tuple[int, int, int, float]]:
    """(prompt, kept, answer, wait in s, -1 for one that is drawn) of every request."""
    requests = (one for recording in trace.recordings for one in recording.requests)
    waits = ((one, -1 if one.is_drawn else one.wait_ns / NS_PER_S) for one in requests)
    return [(one.prompt_tokens, one.keep_tokens, one.generate_tokens, wait_s) for one, wait_s in waits]


def span(place: int, start_s: float, end_s: float, attributes: dict[str, Any], parent: int = 0) -> dict[str, Any]:
    ids = {"trace_id": TRACE, "span_id": f"{place:016x}", "parent_span_id": f"{parent:016x}" if parent else ""}
    return ids | {"start_time": at(start_s), "end_time": at(end_s), "attributes": attributes}


def spans_of(prompt: str, answer: str, cached: str, **more: str) -> list[dict[str, Any]]:
    """Two calls, the second 5 s after the first, with counts by these names."""
    counts = ({prompt: 1000, answer: 50, cached: 0}, {prompt: 1200, answer: 50, cached: 1000})
    return [span(2, 0, 3, counts[0] | more), span(4, 8, 20, counts[1] | more)]


@pytest.mark.parametrize(
    "rows",
    [
        spans_of("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.usage.details.cache_read_tokens"),
        spans_of("gen_ai.usage.prompt_tokens", "gen_ai.usage.completion_tokens", "gen_ai.usage.cached_input_tokens"),
        spans_of("ai.usage.promptTokens", "ai.usage.completionTokens", "ai.usage.cachedInputTokens"),
        spans_of("ai.usage.inputTokens", "ai.usage.outputTokens", "ai.usage.cachedInputTokens"),
        spans_of("ai.usage.inputTokens", "ai.usage.outputTokens", "ai.usage.inputTokenDetails.cacheReadTokens"),
        spans_of("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.usage.input_tokens.cached"),
        spans_of(
            "llm.token_count.prompt",
            "llm.token_count.completion",
            "llm.token_count.prompt_details.cache_read",
            **{"openinference.span.kind": "LLM"},
        ),
        spans_of(
            "llm.usage.prompt_tokens",
            "llm.usage.completion_tokens",
            "llm.usage.cache_read_input_tokens",
            **{"llm.request.type": "chat"},
        ),
    ],
)
def test_counts_of_spans_are_read_by_any_convention(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    agent = {"ai.usage.promptTokens": 2200, "ai.usage.completionTokens": 100}
    around = [span(1, 0, 20, agent), *(row | {"parent_span_id": f"{1:016x}"} for row in rows)]
    trace = imported(written(tmp_path, [*around, span(3, 3, 8, {"gen_ai.operation.name": "execute_tool"}, 1)]))
    assert calls(trace) == [(1000, 0, 50, 0.0), (1200, 1000, 50, 5.0)]
    assert trace.head.dropped == {LABELS["sums"]: 1}


def test_a_provider_that_counts_its_cache_apart_has_whole_prompts_and_a_label(tmp_path: Path) -> None:
    usage = {"gen_ai.usage.prompt_tokens": 20, "gen_ai.usage.completion_tokens": 50, "llm.request.type": "chat"}
    cache = ("gen_ai.usage.cache_read_input_tokens", "gen_ai.usage.cache_creation_input_tokens")
    rows = [
        span(turn + 1, 10 * turn, 10 * turn + 3, usage | {cache[0]: read, cache[1]: 500})
        for turn, read in enumerate((0, 520, 1040))
    ]
    trace = imported(written(tmp_path, rows))
    assert [call[:2] for call in calls(trace)] == [(520, 0), (1040, 520), (1560, 1040)]
    assert any("added" in label for label in trace.head.labels)


def test_traces_that_name_a_session_are_one_conversation_and_else_cached_tokens_are_labelled(tmp_path: Path) -> None:
    rows = spans_of("llm.token_count.prompt", "llm.token_count.completion", "llm.token_count.prompt_details.cache_read")
    rows[1]["trace_id"] = TRACE[::-1]
    apart = imported(written(tmp_path, rows))
    assert sorted(calls(apart)) == [(1000, 0, 50, 0.0), (1200, 0, 50, 0.0)]
    assert any("cached tokens of a first call" in label for label in apart.head.labels)
    for row in rows:
        row["attributes"]["session.id"] = "chat-7"
    together = imported(written(tmp_path, rows))
    assert calls(together) == [(1000, 0, 50, 0.0), (1200, 1000, 50, 5.0)]
    assert not any("cached tokens of a first call" in label for label in together.head.labels)


def test_a_call_that_failed_is_dropped_and_the_wait_ends_where_it_began(tmp_path: Path) -> None:
    first, second = spans_of("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.usage.cached_tokens")
    failed = span(3, 4, 7, {"gen_ai.operation.name": "chat", "error.type": "429"}) | {"status": {"code": "ERROR"}}
    trace = imported(written(tmp_path, [first, failed, second]))
    assert calls(trace)[1] == (1200, 1000, 50, 1.0)
    assert trace.head.dropped == {LABELS["failed"]: 1}


def test_a_side_chain_and_a_compaction_of_claude(tmp_path: Path) -> None:
    main, side = {"sessionId": "s1"}, {"sessionId": "s1", "isSidechain": True, "agentId": "k1"}
    rows = [
        user(0, **main, uuid="u1"),
        assistant("m1", 3, (10, 500, 0, 400), text(), tool("t1"), uuid="a1", requestId="r1", **main),
        user(3.5, **side, uuid="k-u"),
        assistant("k-m1", 5, (10, 300, 0, 60), text(), tool("kt"), uuid="k-a", requestId="k1", **side),
        result("kt", 6.5) | side | {"uuid": "k-r"},
        assistant("k-m2", 8, (10, 100, 310, 30), text(), uuid="k-b", requestId="k2", **side),
        result("t1", 8.5, "k1") | main | {"uuid": "r1"},
        assistant("m2", 11, (10, 500, 510, 90), text(), uuid="a2", requestId="r2", **main),
        {"type": "system", "subtype": "compact_boundary", "uuid": "c1", "timestamp": at(31), **main},
        user(31.1, isCompactSummary=True, uuid="u2", **main),
        user(35, uuid="u3", **main),
        assistant("m3", 39, (10, 700, 0, 50), text(), uuid="a3", requestId="r3", **main),
    ]
    trace = imported(written(tmp_path, rows))
    of_main, of_side = (
        [(510, 0, 400, 0.0), (1020, 510, 90, 0.5), (710, 0, 50, -1)],
        [(310, 0, 60, 0.5), (420, 310, 30, 1.5)],
    )
    assert sorted(calls(trace)) == sorted(of_main + of_side)
    assert trace.head.dropped == {"summaries of a conversation: the log does not hold their calls": 1}


def codex(rows: Iterable[tuple[float, str, Any]]) -> list[dict[str, Any]]:
    return [{"timestamp": at(seconds), "type": kind, "payload": payload} for seconds, kind, payload in rows]


def count(prompt: int, cached: int, answer: int, total: int) -> dict[str, Any]:
    usage = {"input_tokens": prompt, "cached_input_tokens": cached, "output_tokens": answer}
    return {"type": "token_count", "info": {"last_token_usage": usage, "total_token_usage": {"total_tokens": total}}}


def test_a_compaction_of_codex_that_only_a_token_count_tells_is_a_call_and_labelled(tmp_path: Path) -> None:
    rows = codex(
        [
            (0, "session_meta", {"id": "c", "cli_version": "0.46.0"}),
            (0.2, "event_msg", {"type": "user_message"}),
            (3, "response_item", {"type": "function_call", "name": "shell", "call_id": "1"}),
            (3.1, "event_msg", count(1000, 0, 80, 1080)),
            (7, "response_item", {"type": "function_call_output", "call_id": "1"}),
            (9, "response_item", {"type": "message", "role": "assistant"}),
            (9.1, "event_msg", count(1200, 1000, 60, 2340)),
            (29, "event_msg", {"type": "task_started"}),
            (33, "event_msg", count(1300, 1200, 300, 3940)),
            (33.1, "compacted", {"message": "x"}),
            (50, "event_msg", {"type": "user_message"}),
            (52, "response_item", {"type": "message", "role": "assistant"}),
            (52.1, "event_msg", count(600, 0, 40, 4580)),
        ]
    )
    trace = imported(written(tmp_path, rows))
    assert calls(trace) == [(1000, 0, 80, 0.0), (1200, 1000, 60, 4.0), (1300, 1200, 300, 20.0), (600, 0, 40, 17.0)]
    assert any("as of a compaction" in label for label in trace.head.labels)


def test_steps_of_atif_without_cached_tokens_or_times_of_tools_are_labelled(tmp_path: Path) -> None:
    steps = [
        {"step_id": 1, "source": "user", "timestamp": at(0)},
        {
            "step_id": 2,
            "source": "agent",
            "timestamp": at(4),
            "metrics": {"prompt_tokens": 900, "completion_tokens": 50},
        },
        {
            "step_id": 3,
            "source": "agent",
            "timestamp": at(12),
            "metrics": {"prompt_tokens": 1100, "completion_tokens": 60},
        },
    ]
    sums = {"final_metrics": {"total_prompt_tokens": 2500, "total_completion_tokens": 110}}
    document = {"schema_version": "ATIF-v1.4", "session_id": "z", "agent": {"name": "a"}, "steps": steps} | sums
    trace = imported(written(tmp_path, [document]))
    assert calls(trace) == [(900, 0, 50, 0.0), (1100, 950, 60, 8.0)]
    for word in ("no cached tokens", "gaps between answers", "2500 stated, 2000 counted"):
        assert any(word in label for label in trace.head.labels), word


@pytest.mark.parametrize("unit", [1, 1000])
def test_arrivals_of_mooncake_in_another_unit_are_labelled(tmp_path: Path, unit: int) -> None:
    rows = [
        {"timestamp": 2.5 * unit * row, "input_length": 1000, "output_length": 30, "hash_ids": [0, row + 1]}
        for row in range(10)
    ]
    labels = imported(written(tmp_path, rows)).head.labels
    assert any("--time-unit" in label for label in labels) == (unit == 1)


def test_spans_of_vllm_are_calls_of_a_service(tmp_path: Path) -> None:
    counts = {"gen_ai.response.model": "m", "gen_ai.request.id": "r", "gen_ai.latency.e2e": 1.5}
    rows = [
        span(
            turn,
            2 * turn,
            2 * turn + 1.5,
            counts | {"gen_ai.usage.prompt_tokens": 100, "gen_ai.usage.completion_tokens": 20},
        )
        | {"trace_id": f"{turn:032x}"}
        for turn in (1, 2, 3)
    ]
    trace = imported(written(tmp_path, rows))
    assert [recording.start_ns // NS_PER_S for recording in trace.recordings] == [0, 2, 4]
    assert calls(trace) == [(100, 0, 20, 0.0)] * 3
    assert any(label.startswith("3 x traces of one call each") for label in trace.head.labels)


def test_two_spans_of_one_call_side_by_side_are_labelled(tmp_path: Path) -> None:
    counts = {"gen_ai.operation.name": "chat", "gen_ai.usage.input_tokens": 100, "gen_ai.usage.output_tokens": 20}
    trace = imported(written(tmp_path, [span(1, 0, 3, counts), span(2, 0.1, 2.9, counts)]))
    assert any("they may be one call, instrumented twice" in label for label in trace.head.labels)


FOREIGN: dict[str, Any] = {
    "langsmith": {"id": "1", "run_type": "llm", "start_time": at(0), "end_time": at(3), "prompt_tokens": 9},
    "langfuse": {"id": "1", "traceId": "t", "type": "GENERATION", "startTime": at(0), "usage": {"input": 9}},
    "aiperf's results": {"metadata": {"session_num": 0}, "metrics": {"input_sequence_length": {"value": 550}}},
    "aiperf's texts": {"session_id": "a", "text_input": "x", "output_length": 20, "delay": 500},
    "opencode's storage": {"id": "msg_1", "sessionID": "ses_1", "role": "assistant", "modelID": "m"},
}
ZIPKIN = {"traceId": "a" * 16, "id": "1" * 16, "timestamp": 1, "duration": 2, "localEndpoint": {"serviceName": "s"}}


@pytest.mark.parametrize("name", FOREIGN)
def test_exports_without_a_reader_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match=r"which no reader exists for|is in no known format") as refusal:
        imported(written(tmp_path, [FOREIGN[name]]))
    assert "--format" not in str(refusal.value)
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("document", [[ZIPKIN], [[ZIPKIN], [ZIPKIN]]], ids=["a trace", "a list of traces"])
def test_spans_of_zipkin_are_named_with_the_way_that_works(tmp_path: Path, document: list[Any]) -> None:
    path = tmp_path / "traces.json"
    path.write_text(json.dumps(document))
    with pytest.raises(SpecError, match=r"is spans of Zipkin, which no reader exists for.*as OTLP"):
        imported(path)


def test_a_folder_without_a_trace_says_what_lies_there(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").write_text("INFO started\n")
    with pytest.raises(SpecError, match=r"no trace file is there \(1 files ending in .log"):
        imported(tmp_path)


def test_a_reader_that_counts_no_rows_labels_its_requests() -> None:
    notes = ReadNotes()
    notes.check(3)
    assert notes.labels == ("3 x requests of a reader that counts no rows: what it passed over is not known",)


def test_a_weka_prompt_whose_last_name_is_of_a_part_of_a_block_has_its_stated_count(tmp_path: Path) -> None:
    requests = [
        {"t": 0.0, "type": "n", "in": 1010, "out": 20, "hash_ids": [*range(16)], "api_time": 1.0, "stop": "tool_use"},
        {"t": 5.0, "type": "n", "in": 1040, "out": 20, "hash_ids": [*range(15), 99], "api_time": 1.0, "stop": ""},
    ]
    trace = trace_of(tmp_path, [{"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": requests}])
    (recording,) = trace.recordings
    assert [(one.prompt_tokens, one.keep_tokens) for one in recording.requests] == [(1010, 0), (1040, 1030)]
    assert f"1 x {PART_NAMED}: 1010 stated, 1024 counted" in trace.head.labels


@pytest.mark.parametrize(
    ("more", "is_labelled"),
    [
        ({"think_time": 1.0}, False),
        ({"think_time": 3.0}, True),
        ({"think_time": 0.3}, True),
        ({"api_time": None, "think_time": 1.0}, False),
        ({"api_time": -1.0, "think_time": 1.0}, False),
        ({"api_time": None, "think_time": 6.0}, True),
        ({}, False),
    ],
)
def test_a_weka_wait_that_is_not_what_its_instants_leave_is_labelled(
    tmp_path: Path, more: dict[str, Any], is_labelled: bool
) -> None:
    common = {"type": "n", "in": 1024, "out": 20, "hash_ids": [*range(16)], "stop": "tool_use"}
    requests = [{"t": 0.0, "api_time": 4.0} | common | more, {"t": 5.0} | common | more]
    trace = trace_of(tmp_path, [{"id": "s", "block_size": 64, "requests": requests}])
    assert trace.recordings[0].requests[1].wait_ns == round(more.get("think_time", 1.0) * NS_PER_S)
    assert any(CONTRADICTED in label for label in trace.head.labels) == is_labelled


@pytest.mark.parametrize(
    ("first", "second", "keep", "label"),
    [
        ((1040, [*range(16)]), (1200, [*range(18)]), 1060, WHOLE),
        ((1040, [*range(16)]), (1200, [*range(15), 90, 91, 92]), 960, LAST_BLOCK),
        ((1040, [*range(16)]), (1050, [*range(15), 90]), 960, ""),  # it did not grow by the answer: it was edited
        ((1040, [*range(16)]), (1200, [*range(14), *range(90, 94)]), 896, ""),
        ((50, []), (1200, [*range(18)]), 70, NO_CACHE),
    ],
)
@pytest.mark.parametrize("form", ["weka", "agentic-mooncake"])
def test_what_blocks_do_not_say_of_a_prompt_that_grew_is_labelled(
    tmp_path: Path, form: str, first: tuple[int, list[int]], second: tuple[int, list[int]], keep: int, label: str
) -> None:
    rows: list[dict[str, Any]] = []
    for place, (prompt, names) in enumerate((first, second)):
        weka = {"t": 10.0 * place, "type": "n", "in": prompt, "out": 20, "hash_ids": names, "api_time": 1.0}
        wait = {"wait_for": ["0"], "delay": 100} if place else {"wait_for": []}
        sizes = {"input_length": prompt, "output_length": 20, "hash_ids": names}
        rows.append(weka if form == "weka" else {"request_id": f"{place}", "session_id": "s"} | sizes | wait)
    rows = [{"id": "s", "block_size": 64, "requests": rows}] if form == "weka" else rows
    trace = trace_of(tmp_path, rows, block_tokens=64)
    assert trace.recordings[0].requests[1].keep_tokens == keep
    told = [each for each in (LAST_BLOCK, NO_CACHE, WHOLE) if f"1 x {each}" in trace.head.labels]
    assert told == ([label] if label else [])


@pytest.mark.parametrize("spent", [None, -1.0, "4 s"])
def test_a_weka_answer_without_a_length_leaves_a_gap_that_is_labelled(tmp_path: Path, spent: object) -> None:
    common = {"type": "n", "in": 1024, "out": 20, "hash_ids": [*range(16)], "stop": "tool_use", "api_time": spent}
    trace = trace_of(tmp_path, [{"id": "s", "block_size": 64, "requests": [{"t": 0.0} | common, {"t": 5.0} | common]}])
    assert trace.recordings[0].requests[1].wait_ns == 5 * NS_PER_S
    assert f"1 x {GAPS}" in trace.head.labels


def test_weka_agents_without_an_id_are_told_apart_by_what_they_hold(tmp_path: Path) -> None:
    def call(at_s: float, stop: str) -> dict[str, Any]:
        return {"t": at_s, "type": "n", "in": 128, "out": 20, "hash_ids": [1, 2], "api_time": 1.0, "stop": stop}

    one, other = ({"t": 2.0, "type": "subagent", "requests": [call(at_s, "end_turn")]} for at_s in (2.0, 4.0))
    rows = [call(0.0, "tool_use"), one, other, one, call(9.0, "tool_use")]
    trace = trace_of(tmp_path, [{"id": "s", "block_size": 64, "requests": rows}])
    assert trace.num_requests == 4
    assert sum(trace.head.dropped.values()) == 1
    assert f"1 x {UNANSWERED}" in trace.head.labels, "the last call asked for a tool"


@pytest.mark.parametrize("names", ["1, 2", {"1": 2}, 3])
@pytest.mark.parametrize("kind", ["weka", "mooncake", "bailian", "agentic-mooncake"])
def test_names_of_blocks_that_are_no_list_break_their_row(tmp_path: Path, kind: str, names: object) -> None:
    lines = [json.loads(line) for line in SOUND[kind]()]
    (lines[0]["requests"] if kind == "weka" else lines)[2]["hash_ids"] = names
    assert sum(trace_of(tmp_path, lines).head.broken.values()) == 1


@pytest.mark.parametrize(("stop", "num"), [("tool_use", 0), ("end_turn", 0), ("", 1), (None, 1), ("max_tokens", 1)])
def test_a_weka_wait_after_a_stop_that_names_nobody_is_labelled(tmp_path: Path, stop: str | None, num: int) -> None:
    (line, _) = [json.loads(line) for line in SOUND["weka"]()]
    line["requests"][0]["stop"] = stop
    labels = trace_of(tmp_path, [line]).head.labels
    assert sum("do not show to be a tool's or a person's" in label for label in labels) == num


@pytest.mark.parametrize(
    ("more", "num_broken", "wait_s"),
    [({"delay": []}, 1, None), ({"delay": {}}, 1, None), ({"delay": None, "delay_ms": 900}, 0, 0.9)],
)
def test_a_delay_of_dynamo_is_the_first_that_is_given(
    tmp_path: Path, more: dict[str, Any], num_broken: int, wait_s: float | None
) -> None:
    rows = [json.loads(line) for line in SOUND["agentic-mooncake"]()]
    rows[2] |= more
    trace = trace_of(tmp_path, rows)
    assert sum(trace.head.broken.values()) == num_broken
    assert wait_s is None or trace.recordings[0].requests[2].wait_ns == wait_s * NS_PER_S


@pytest.mark.parametrize("more", [{"wait_for": "0-0"}, {"prefix_reset": "yes"}])
def test_links_of_dynamo_of_another_type_break_their_row(tmp_path: Path, more: dict[str, Any]) -> None:
    rows = [json.loads(line) for line in SOUND["agentic-mooncake"]()]
    rows[1] |= more
    assert sum(trace_of(tmp_path, rows).head.broken.values()) == 1


def test_a_conversation_whose_id_is_a_number_is_one(tmp_path: Path) -> None:
    rows = spans_of("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.usage.cache_read.input_tokens")
    for row in rows:
        row |= {"trace_id": row["span_id"] * 2}
        row["attributes"] |= {"gen_ai.operation.name": "chat", "gen_ai.conversation.id": 7}
    assert len(trace_of(tmp_path, rows).recordings) == 1


def test_a_weka_agent_without_requests_is_counted_and_a_time_that_is_no_number_leaves_a_gap(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = [
        {"t": 0.0, "type": "n", "in": 1024, "out": 20, "hash_ids": [*range(16)], "api_time": "1 s", "stop": "tool_use"},
        {"t": 2.0, "type": "subagent", "agent_id": "a", "requests": []},
        {"t": 5.0, "type": "n", "in": 1088, "out": 20, "hash_ids": [*range(17)], "api_time": 1.0, "stop": ""},
    ]
    head = trace_of(tmp_path, [{"id": "s", "block_size": 64, "requests": requests}]).head
    assert head.dropped == {"a sub-agent that was there before, too deep, or without requests": 1}
    assert f"1 x {GAPS}" in head.labels


@pytest.mark.parametrize("is_otlp", [True, False])
@pytest.mark.parametrize("name", ["human approval", "run"])
def test_a_span_whose_name_speaks_of_a_person_leaves_the_wait_for_its_tool_without_a_kind(
    tmp_path: Path, name: str, *, is_otlp: bool
) -> None:
    first, second = spans_of("gen_ai.usage.input_tokens", "gen_ai.usage.output_tokens", "gen_ai.usage.cached_tokens")
    first["attributes"] |= {"gen_ai.response.finish_reasons": ["stop", "cancelled"], "gen_ai.request.choice.count": 2}
    spans = [first, span(3, 3, 8, {"gen_ai.operation.name": "execute_tool"}), span(5, 3, 7, {}, 3) | {"name": name}]
    rows = [*spans, second] if not is_otlp else [{"resourceSpans": [otlp(each) for each in (*spans, second)]}]
    trace = imported(written(tmp_path, rows))
    assert [one.wait_kind for one in trace.recordings[0].requests] == ["none", "tool" if name == "run" else "none"]
    assert (f"1 x {ALLOWED}" in trace.head.labels) == (name != "run")
    assert "1 x rows with a value that is not known here: finish cancelled" in trace.head.labels
    assert f"1 x {LABELS['several']}" in trace.head.labels


def otlp(flat: dict[str, Any]) -> dict[str, Any]:
    """Its resource of OTLP JSON."""

    def value(given: Any) -> dict[str, Any]:
        if isinstance(given, list):
            return {"arrayValue": {"values": [value(each) for each in given]}}
        return {"intValue": str(given)} if isinstance(given, int) else {"stringValue": given}

    names = {"traceId": "trace_id", "spanId": "span_id", "parentSpanId": "parent_span_id", "name": "name"}
    times = {f"{name}TimeUnixNano": str(instant_ns(flat[f"{name}_time"])) for name in ("start", "end")}
    attributes = [{"key": key, "value": value(given)} for key, given in flat["attributes"].items()]
    made = {key: flat[name] for key, name in names.items() if name in flat} | times | {"attributes": attributes}
    return {"scopeSpans": [{"spans": [made]}]}


def test_weka_instants_in_whole_seconds_are_those_of_one_agent_whose_calls_repeat_each_other(tmp_path: Path) -> None:
    times = {"type": "s", "model": "m", "stop": "tool_use", "out": 10}
    rows = [
        times | {"t": 0, "api_time": 2.6, "in": 128, "hash_ids": [1, 2]},
        times | {"t": 2, "api_time": 1.0, "in": 192, "hash_ids": [1, 2, 3], "think_time": 0},
        times | {"t": 9, "api_time": 1.0, "in": 256, "hash_ids": [1, 2, 3, 4], "think_time": 6},
    ]
    trace = trace_of(tmp_path, [{"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": rows}])
    assert [one.base for one in trace.recordings[0].requests] == [None, 0, 1]
    assert f"1 x {ROUNDED}" in trace.head.labels


def test_blocks_that_a_call_under_way_names_are_not_kept_and_labelled(tmp_path: Path) -> None:
    call = {"type": "s", "model": "m", "in": 640, "out": 10, "stop": "tool_use", "api_time": 5.0}
    agents = [
        {"type": "subagent", "agent_id": name, "t": 5.5 + late_s, "status": "completed", "requests": [first]}
        for name, late_s, first in (
            ("a", 0, call | {"t": 5.5, "hash_ids": [*range(1, 11)]}),
            ("b", 1, call | {"t": 6.5, "hash_ids": [*range(1, 10), 11]}),
        )
    ]
    rows = [call | {"t": 0, "hash_ids": [*range(20, 30)]}, *agents]
    trace = trace_of(tmp_path, [{"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": rows}])
    assert [one.keep_tokens for one in trace.recordings[0].requests] == [0, 0, 0]
    assert f"9 x {HELD}" in trace.head.labels
