"""Every other format: production requests by arrival and by ``wait_for``, spans, tables, nested sub-agents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SpecError
from harness.extras.formats.columns import NO_ARRIVAL, NO_TOOL
from harness.extras.formats.weka import APART, NO_LENGTH
from harness.model.traces.account import ReadNotes
from harness.model.traces.importing import import_trace
from harness.model.traces.links import JOINED_LATE, MAY_ASK, OTHER_MODEL, UNKNOWN, kept_tokens
from harness.model.traces.recording import read_trace
from tests.support.sound_traces import SOUND
from tests.support.trace_rows import imported, trace_of

RECORDED = Path(__file__).parents[4] / "shared" / "traces"


def mooncake(at_ms: int, prompt: int, *blocks: int) -> dict[str, Any]:
    return {"timestamp": at_ms, "input_length": prompt, "output_length": 5, "hash_ids": list(blocks)}


def test_mooncake_requests_come_at_their_recorded_arrivals_and_share_whole_blocks_only(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, [mooncake(1000, 1100, 7, 8, 9), mooncake(4000, 1024, 7, 8)])
    assert (trace.head.source_format, trace.head.arrivals, trace.head.block_tokens) == ("mooncake", "recorded", 512)
    assert [recording.start_ns for recording in trace.recordings] == [0, 3 * NS_PER_S]
    first, second = (recording.requests[0] for recording in trace.recordings)
    assert first.blocks == second.blocks, "the third name of the first belongs to a part of a block"
    assert len(first.blocks) == 2


def agentic(name: str, *wait_for: str, **more: Any) -> dict[str, Any]:
    row = {"request_id": name, "input_length": 100, "output_length": 10, "wait_for": list(wait_for), "hash_ids": []}
    return row | {"session_id": name, "timestamp": 0} | more


def test_a_join_waits_for_all_its_predecessors_and_then_for_delay_and_tool(tmp_path: Path) -> None:
    rows = [agentic("a"), agentic("d", "b", "c", delay=100, tool_wait_ms=50), agentic("b", "a"), agentic("c", "a")]
    (recording,) = trace_of(tmp_path, rows).recordings
    assert [one.after for one in recording.requests] == [(), (0,), (0,), (1, 2)]
    assert recording.requests[3].wait_ns == 150 * NS_PER_MS


def test_requests_in_a_circle_and_ids_that_came_before_are_counted_and_left_out(tmp_path: Path) -> None:
    rows = [agentic("a"), agentic("a"), agentic("x", "y"), agentic("y", "x"), agentic("z", "gone")]
    trace = trace_of(tmp_path, rows)
    assert trace.num_requests == 2
    assert trace.head.dropped == {
        "an id that came before": 1,
        "requests that wait for themselves in a circle": 2,
        "waits for a request that is not in the file": 1,
    }


def test_a_negative_instant_is_a_broken_line(tmp_path: Path) -> None:
    for rows in ([mooncake(-5, 600), mooncake(0, 600)], [agentic("a", timestamp=-5), agentic("b")]):
        trace = trace_of(tmp_path, rows)
        assert (trace.num_requests, sum(trace.head.broken.values())) == (1, 1)


def test_a_prompt_with_all_blocks_of_the_turn_before_keeps_its_answer_too_and_else_only_what_both_begin_with() -> None:
    assert kept_tokens((1, 2, 3), (1, 2), 64, streamed=150, prompt=200) == 150
    assert kept_tokens((1, 9), (1, 2), 64, streamed=150, prompt=200) == 64
    assert kept_tokens((), (1, 2), 64, streamed=150, prompt=200) == 0


def weka(t: float, tokens: int, blocks: list[int], **more: Any) -> dict[str, Any]:
    return {"t": t, "type": "n", "in": tokens, "out": 10, "hash_ids": blocks, "api_time": 1.0, "stop": ""} | more


def test_a_weka_session_keeps_its_stream_and_its_parent_waits_for_a_gating_sub_agent(tmp_path: Path) -> None:
    child = {"type": "subagent", "t": 2.0, "agent_id": "k", "status": "completed", "requests": [weka(0.5, 70, [9])]}
    background = {**child, "agent_id": "bg", "status": "async_launched"}
    requests = [
        weka(0.0, 130, [1, 2], stop="tool_use"),
        child,
        background,
        weka(6.0, 260, [1, 2, 3, 4], stop="end_turn"),
        weka(30.0, 100, [1], think_time=20.0, input_types=["text"]),
    ]
    trace = trace_of(tmp_path, [{"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": requests}])
    (recording,) = trace.recordings
    first, gating, apart, joined, compacted = recording.requests
    assert gating.after == apart.after == (0,)
    assert joined.after == (0, 1)
    assert joined.keep_tokens == first.prompt_tokens + first.generate_tokens
    assert joined.wait_ns == 6 * NS_PER_S - int(3.5 * NS_PER_S), "the residual after the child's end"
    assert (compacted.keep_tokens, compacted.wait_kind, compacted.wait_ns) == (64, "none", 20 * NS_PER_S)


@pytest.mark.parametrize("is_absolute", [False, True])
@pytest.mark.parametrize("is_end", [True, False])
def test_a_weka_agent_begins_where_an_answer_of_its_parent_ends_by_whichever_end_it_is_stamped(
    tmp_path: Path, *, is_end: bool, is_absolute: bool
) -> None:
    def agent(name: str, took_s: float) -> dict[str, Any]:
        first_s = 6.0 * is_absolute
        within = [weka(first_s, 70, [9], think_time=0.0), weka(first_s + took_s - 1.5, 90, [9], think_time=1.0)]
        stamps = {"t": 6.0 + took_s * is_end, "duration_ms": 1000 * took_s, "agent_id": name, "status": "completed"}
        return {"type": "subagent", **stamps, "requests": within}

    before, after = weka(0.0, 130, [1, 2], api_time=5.0, stop="tool_use"), weka(60.0, 260, [1, 2, 3, 4])
    requests = [weka(0, 70, [1]), before | {"t": 1.0, "api_time": 4.0}, agent("a", 20.0), agent("b", 30.0), after]
    launched = {"type": "subagent", "t": 61.0, "duration_ms": None, "agent_id": "c", "status": "async_launched"}
    requests += [launched | {"requests": [weka(61.0 * is_absolute, 70, [9])]}, weka(90.0, 300, [1, 2, 3])]
    trace = trace_of(tmp_path, [{"id": "s", "block_size": 64, "requests": requests}])
    found = [(request.after, request.wait_ns / NS_PER_S) for request in trace.recordings[0].requests]
    assert found[2:4] == [((1,), 1.0), ((2,), 1.0)]
    assert found[6:8] == [((1, 3, 5), 60 - (6 + 29.5)), ((6,), 0.0)]
    ended = [label[:2] for label in trace.head.labels if "time is taken as their end" in label]
    assert ended == ["2 "] * is_end, "one that runs apart has no end, and began at its time"
    assert not any("when they began is not known" in label for label in trace.head.labels)


def test_a_weka_agent_that_begins_at_no_answers_end_is_labelled(tmp_path: Path) -> None:
    agent = {"type": "subagent", "t": 40.0, "duration_ms": 9000, "agent_id": "k", "requests": [weka(0.5, 70, [9])]}
    requests = [weka(0.0, 130, [1, 2], stop="tool_use"), agent, weka(60.0, 260, [1, 2, 3, 4])]
    labels = trace_of(tmp_path, [{"id": "s", "block_size": 64, "requests": requests}]).head.labels
    assert any("when they began is not known" in label for label in labels)


@pytest.mark.parametrize(
    ("scope", "model", "keeps", "labels"),
    [
        ("local", "m", [0, 64, 140], set()),
        ("global", "m", [0, 64, 140], set()),
        (None, "m", [0, 0, 140], {APART}),
        ("per_context", "m", [0, 0, 140], {APART}),
        ("local", "n", [0, 64, 140], {OTHER_MODEL}),
    ],
)
def test_a_weka_agent_keeps_blocks_of_its_parent_where_the_file_says_that_names_are_theirs(
    tmp_path: Path, scope: str | None, model: str, keeps: list[int], labels: set[str]
) -> None:
    child = {"type": "subagent", "t": 1.0, "agent_id": "k", "status": "completed"}
    child |= {"requests": [weka(1.0, 64, [1], model=model)]}
    requests = [weka(0.0, 130, [1, 2], model="m", stop="tool_use"), child]
    requests.append(weka(6.0, 260, [1, 2, 3, 4], model="m", think_time=4.0, input_types=["tool_result"]))
    more = {"hash_id_scope": scope} if scope else {}
    trace = trace_of(tmp_path, [{"id": "s", "block_size": 64, "requests": requests} | more])
    assert [one.keep_tokens for one in trace.recordings[0].requests] == keeps
    told = {each for each in (APART, OTHER_MODEL) if f"1 x {each}" in trace.head.labels}
    assert told == labels
    assert f"1 x {MAY_ASK}" in trace.head.labels, "no row says how long its tool ran"


@pytest.mark.parametrize("took_s", [2.0, 20.0, None])
def test_a_weka_agent_that_ran_on_beside_a_call_is_joined_by_a_later_one_and_labelled(
    tmp_path: Path, took_s: float | None
) -> None:
    child = {"type": "subagent", "t": 1.0, "agent_id": "k", "requests": [weka(1.0, 64, [9], api_time=took_s)]}
    requests = [weka(0.0, 130, [1, 2], stop="tool_use"), child]
    requests += [weka(at, 64 * at, [*range(1, 1 + at)], think_time=1.0) for at in (5, 30)]
    trace = trace_of(tmp_path, [{"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": requests}])
    joins = [(0,), (2, 1)] if took_s == 20 else [(0, 1), (2,)]
    assert [one.after for one in trace.recordings[0].requests[2:]] == joins
    assert (f"1 x {JOINED_LATE}" in trace.head.labels) == (took_s == 20)
    assert (f"1 x {NO_LENGTH}" in trace.head.labels) == (took_s is None)


@pytest.mark.parametrize(("names", "kind"), [([1, 2, 60, 61], "none"), ([1, 2, 50, 51, 52], "human")])
def test_a_weka_text_that_begins_another_prompt_than_the_last_may_be_an_agents(
    tmp_path: Path, names: list[int], kind: str
) -> None:
    asked = {"input_types": ["text"], "stop": "end_turn"}
    requests = [weka(0.0, 256, [1, 2, 50, 51], **asked), weka(5.0, 64 * len(names), names, think_time=4.0, **asked)]
    trace = trace_of(tmp_path, [{"id": "s", "block_size": 64, "hash_id_scope": "local", "requests": requests}])
    assert trace.recordings[0].requests[1].wait_kind == kind


@pytest.mark.parametrize(("scope", "names"), [("global", [(0, 1), (0, 2)]), ("local", [(), ()])])
def test_weka_names_that_hold_in_every_trace_are_kept(tmp_path: Path, scope: str, names: list[Any]) -> None:
    rows = [{"id": each, "block_size": 64, "requests": [weka(0.0, 130, [7, ord(each)])]} for each in "ab"]
    trace = trace_of(tmp_path, [row | {"hash_id_scope": scope} for row in rows])
    assert [one.requests[0].blocks for one in trace.recordings] == names


def test_weka_files_of_a_folder_are_sessions_and_flat_agents_and_relative_times_are_told_apart(tmp_path: Path) -> None:
    agent: dict[str, Any] = {"api_time": 6.0, "input_types": ["text"], "stop": "end_turn"}
    flat = [weka(0, 640, [*range(10)], stop="tool_use"), weka(2, 640, [0, 1, *range(50, 58)], **agent)]
    flat += [weka(2.5, 640, [0, 1, *range(60, 68)], **agent), weka(9, 768, [*range(12)], input_types=["tool_result"])]

    def nested(first_s: float) -> list[Any]:
        child = {"type": "subagent", "t": 4.0, "agent_id": "k", "requests": [weka(first_s, 70, [9])]}
        return [weka(0, 130, [1, 2], stop="tool_use"), child, weka(20, 260, [1, 2, 3, 4])]

    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "one.json").write_text(json.dumps({"id": "one", "block_size": 64, "requests": flat}, indent=1))
    two = [{"id": name, "block_size": 64, "requests": nested(first_s)} for name, first_s in (("b", 6.0), ("c", 0.5))]
    (folder / "two.json").write_text("".join(json.dumps(each) + "\n" for each in two))
    one, *others = (trace := imported(folder)).recordings
    assert [request.after for request in one.requests] == [(), (0,), (0,), (1, 2)]
    assert [request.keep_tokens for request in one.requests] == [0, 128, 128, 650]
    assert one.requests[-1].base == 0
    assert [request.wait_kind for request in one.requests] == ["none", "none", "none", "tool"], "no person began them"
    assert f"2 x {UNKNOWN}" in trace.head.labels
    assert [each.requests[1].wait_ns for each in others] == [9 * NS_PER_S, int(3.5 * NS_PER_S)]


def span(name: str, start: float, end: float, prompt: int, **attributes: Any) -> dict[str, Any]:
    return {
        "trace_id": "t",
        "span_id": name,
        "start_time": f"2026-01-01T00:00:{start:09.6f}",
        "end_time": f"2026-01-01T00:00:{end:09.6f}",
        "attributes": {
            "gen_ai.operation.name": "chat",
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.output_tokens": 10,
            **attributes,
        },
    }


def test_parallel_spans_overlap_and_the_next_chat_waits_for_both(tmp_path: Path) -> None:
    spans = [span("a", 0, 1, 100), span("b", 2, 5, 50), span("c", 3, 4, 50), span("d", 5.5, 6, 300)]
    source = tmp_path / "spans.json"
    source.write_text(json.dumps({"spans": spans}))
    (recording,) = imported(source).recordings
    assert [one.after for one in recording.requests] == [(), (0,), (0,), (1, 2)]
    assert [one.wait_ns // NS_PER_MS for one in recording.requests] == [0, 1000, 2000, 500]


def test_a_table_is_a_plan_one_to_one_and_a_broken_row_takes_its_session_with_it(tmp_path: Path) -> None:
    rows = [
        "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms",
        "0,100,0,0,200,10,300",
        "0,100,1,210,40,10,0",
        "1,400,0,0,-5,10,0",
        "1,400,1,0,50,10,0",
        "2,450,0,0,50,10,0",
    ]
    (tmp_path / "in.csv").write_text("\n".join(rows))
    trace = imported(tmp_path / "in.csv")
    recording, later = trace.recordings
    assert (recording.start_ns, later.start_ns) == (0, 350 * NS_PER_MS)
    assert [one.keep_tokens for one in recording.requests] == [0, 210]
    assert recording.requests[1].wait_ns == 300 * NS_PER_MS
    assert trace.head.broken == {"a row without its numbers": 1}


@pytest.mark.parametrize(("arrivals", "num"), [((), 3), (("", ""), 3), (("", "5"), 2), (("0", "5"), 0)])
def test_a_table_without_arrivals_has_them_at_0(tmp_path: Path, arrivals: tuple[str, ...], num: int) -> None:
    rows = ["session_id,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms", "0,0,0,200,10,300"]
    rows += ["0,1,210,40,10,0", "1,0,0,50,10,0"]
    if arrivals:
        cells = ("arrival_time", arrivals[0], arrivals[0], arrivals[1])
        rows = [f"{row},{cell}" for row, cell in zip(rows, cells, strict=True)]
    (tmp_path / "in.csv").write_text("\n".join(rows))
    trace = imported(tmp_path / "in.csv")
    assert trace.head.arrivals == ("together" if num == 3 else "recorded")
    assert sum(one.start_ns for one in trace.recordings) == 5 * NS_PER_MS * (num < 3)
    assert (f"{num} x {NO_ARRIVAL}" in trace.head.labels) == bool(num)
    assert any("made up" in label for label in trace.head.labels) == (num < 3)


@pytest.mark.parametrize("first_ms", [0, 2500])
def test_a_tables_wait_of_0_is_no_tools_and_labelled(tmp_path: Path, first_ms: int) -> None:
    header = "session_id,arrival_time,round_idx,prefix_len,input_len,output_len,tool_wait_after_ms"
    rows = [f"0,0,{place},{100 * place},100,10,{first_ms * (not place):.6f}" for place in range(3)]
    (tmp_path / "in.csv").write_text("\n".join([header, *rows]))
    trace = imported(tmp_path / "in.csv")
    waits = [(one.wait_ns, one.wait_kind, one.is_drawn) for one in trace.recordings[0].requests[1:]]
    assert waits == [(first_ms * NS_PER_MS, "tool" if first_ms else "none", False), (0, "none", False)]
    assert f"{1 if first_ms else 2} x {NO_TOOL}" in trace.head.labels


def test_broken_lines_are_counted_and_named_and_never_end_an_import(tmp_path: Path) -> None:
    trace = trace_of(tmp_path, ["{not json", "[]", mooncake(0, 600, 1), mooncake(5, -600, 1), '"text"'])
    assert trace.num_requests == 1
    assert sum(trace.head.broken.values()) == 4


@pytest.mark.parametrize(
    ("rows", "words"),
    [(["nothing at all"], "is in no known format"), ([mooncake(0, -1)], "no request could be read as mooncake")],
)
def test_a_file_with_nothing_to_read_is_one_clear_line(tmp_path: Path, rows: list[Any], words: str) -> None:
    with pytest.raises(SpecError, match=words):
        trace_of(tmp_path, rows)
    assert not (tmp_path / "out.jsonl").exists()


def test_two_formats_in_one_folder_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(mooncake(0, 600, 1)))
    (tmp_path / "b.jsonl").write_text(json.dumps(agentic("a")))
    with pytest.raises(SpecError, match=r"a\.jsonl is mooncake, b\.jsonl is agentic-mooncake"):
        import_trace([tmp_path], tmp_path / "out", name="t")


def test_a_stray_file_of_another_format_and_files_of_no_format_are_counted(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(mooncake(time, 600, 1)) + "\n" for time in range(20)))
    (tmp_path / "b.jsonl").write_text(json.dumps(agentic("a")))
    (tmp_path / "c.jsonl.xz").write_bytes(b"packed")
    (tmp_path / "notes.md").write_text("text")
    (tmp_path / "copy.jsonl").write_text((tmp_path / "a.jsonl").read_text())
    for name in ("a", "b"):
        (tmp_path / f"agent-{name}.meta.json").write_text('{"agentType": "explore", "description": "x"}')
    (tmp_path / "a.json").write_text('{"agentType": "explore"}')
    import_trace([tmp_path], tmp_path / "out.jsonl", name="t")
    trace = read_trace(tmp_path / "out.jsonl")
    assert trace.num_requests == 20
    assert trace.head.dropped == {
        "files with the keys of agentic-mooncake beside those of mooncake": 1,
        "files ending in .xz: packed: unpack them first": 1,
        "files ending in .md: not of these formats": 1,
        "files ending in .meta.json: what an agent's program keeps of its sub-agents": 2,
        "files that were given twice": 1,
        "files in no known format": 1,
    }


def test_a_sidecar_of_a_sub_agent_is_named_where_the_format_is_given(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "s.jsonl").write_text("".join(f"{line}\n" for line in SOUND["claude"]()))
    (tmp_path / "in" / "agent-a.meta.json").write_text("{}")
    _, notes = import_trace([tmp_path / "in"], tmp_path / "out.jsonl", name="t", kind="claude")
    assert notes.left == {"files ending in .meta.json: what an agent's program keeps of its sub-agents": 1}


def test_files_packed_with_zstd_are_read_and_refused_where_their_end_is_missing(tmp_path: Path) -> None:
    content = pa.compress(json.dumps(mooncake(0, 600, 1)).encode(), codec="zstd", asbytes=True)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl.zst").write_bytes(content)
    assert imported(tmp_path / "in").num_requests == 1
    (tmp_path / "in" / "a.jsonl.zst").write_bytes(content[:-4])
    with pytest.raises(SpecError, match="cannot be read to its end"):
        imported(tmp_path / "in")


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"type": "thread.started", "thread_id": "x"}, "~/.codex/sessions"),
        ({"type": "system", "session_id": "x", "uuid": "y"}, "~/.claude/projects"),
        ({"schema": "dynamo.request", "event_type": "end"}, "agentic-mooncake"),
        ({"session_id": "x", "turns": []}, "agentic-mooncake"),
        ({"first_key": 1, "key of a text": 2}, "its records have the keys first_key, key of a text"),
    ],
)
def test_a_refusal_says_what_a_file_is_and_the_way_that_works(tmp_path: Path, row: Any, words: str) -> None:
    with pytest.raises(SpecError) as refusal:
        trace_of(tmp_path, [row])
    assert words in str(refusal.value)
    assert "--format" not in str(refusal.value)


@pytest.mark.skipif(not RECORDED.is_dir(), reason="the recorded traces are not here")
def test_the_recorded_traces_import_whole(tmp_path: Path) -> None:
    notes = ReadNotes()
    expected = {"mooncake/conversation_trace.jsonl": 12_031, "otel": 54}
    for source, count in expected.items():
        _, notes = import_trace([RECORDED / source], tmp_path / "out.jsonl", name="t")
        assert read_trace(tmp_path / "out.jsonl").num_requests == count
        assert not notes.broken
    assert notes.dropped == {"calls in spans that came before": 3}, (
        "one chain is there twice, its messages written in two ways"
    )
