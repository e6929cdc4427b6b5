"""Spans as flat documents and as OTLP JSON, in one document or in lines; what stands twice counts once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.clock import NS_PER_MS, NS_PER_S
from harness.model.spec import ExperimentSpec
from harness.model.traces.recording import TraceFile
from harness.present.export.formats import named_format, write_runs
from harness.runner import run_experiment
from tests.support.sound_traces import spans
from tests.support.trace_rows import imported

START_NS = 1_772_359_200_000_000_000


def content(trace: TraceFile) -> list[tuple[object, ...]]:
    return sorted((one.start_ns, one.requests) for one in trace.recordings)


def otlp(flat: list[dict[str, Any]], scope: str = "scopeSpans", *, as_text: bool = True) -> dict[str, Any]:
    """Flat spans as one OTLP document."""

    def value(what: Any) -> dict[str, Any]:
        if isinstance(what, int):
            return {"intValue": str(what) if as_text else what}
        return {"stringValue": what}

    rows = []
    for place, span in enumerate(flat):
        start, end = (START_NS + (100 * (place // 3) + 10 * (place % 3) + extra) * NS_PER_S for extra in (0, 3))
        rows.append(
            {
                "traceId": span["trace_id"],
                "spanId": span["span_id"],
                "startTimeUnixNano": str(start) if as_text else start,
                "endTimeUnixNano": str(end) if as_text else end,
                "attributes": [{"key": key, "value": value(what)} for key, what in span["attributes"].items()],
            }
        )
    resource = {"attributes": [{"key": "service.name", "value": {"stringValue": "agent"}}]}
    return {"resourceSpans": [{"resource": resource, scope: [{"scope": {"name": "x"}, "spans": rows}]}]}


def in_lines(document: dict[str, Any]) -> list[dict[str, Any]]:
    """A document with one span a line, as the collector's file exporter may write it."""
    (resource_spans,) = document["resourceSpans"]
    (scope_spans,) = resource_spans["scopeSpans"]
    return [
        {"resourceSpans": [resource_spans | {"scopeSpans": [scope_spans | {"spans": [span]}]}]}
        for span in scope_spans["spans"]
    ]


def test_one_document_lines_and_rotated_files_of_otlp_are_the_same_recordings(tmp_path: Path) -> None:
    flat = tmp_path / "flat.json"
    flat.write_text(json.dumps({"spans": list(spans())}))
    document = otlp(list(spans()))
    lines = [json.dumps(line) + "\n" for line in in_lines(document)]
    forms = {
        "one.json": json.dumps(document),
        "pretty.json": json.dumps(document, indent=1),
        "numbers.json": json.dumps(otlp(list(spans()), as_text=False)),
        "old.json": json.dumps(otlp(list(spans()), "instrumentationLibrarySpans")),
        "lines.jsonl": "".join(lines),
        "reversed.jsonl": "".join(lines[::-1]),
    }
    for name, form in forms.items():
        (tmp_path / name).write_text(form)
        trace = imported(tmp_path / name)
        assert trace.head.source_format == "otel"
        assert content(trace) == content(imported(flat))
        said = ("no cached tokens are given", "taken as a tool's: nothing in the files shows a tool in them")
        assert all(any(word in label for word in said) for label in trace.head.labels)
    (tmp_path / "first.jsonl").write_text("".join(lines[:2]))
    (tmp_path / "second.jsonl").write_text("".join(lines[2:]))
    assert content(imported(tmp_path / "second.jsonl", tmp_path / "first.jsonl")) == content(imported(flat))


def test_spans_that_stand_twice_and_spans_around_the_same_call_count_once(tmp_path: Path) -> None:
    (first, *rest) = spans()
    outer = first | {"span_id": "f" * 16}
    inner = first | {"parent_span_id": outer["span_id"]}
    path = tmp_path / "in.json"
    path.write_text(json.dumps({"spans": [outer, inner, *rest, inner]}))
    trace = imported(path)
    assert trace.num_requests == 6
    assert trace.head.dropped == {
        "chats that wrap another chat: one call, instrumented twice": 1,
        "calls in spans that came before": 1,
    }


def test_instants_in_another_unit_are_labelled_and_read_in_the_unit_that_the_person_says(tmp_path: Path) -> None:
    path, document = tmp_path / "in.json", otlp(list(spans()))
    path.write_text(json.dumps(document))
    right, rows = imported(path), document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    hint = "instants that are no date from 2000 to 2100: as ms they would be, which --time-unit ms says"
    for num_off in (1, len(rows)):
        for row in rows[:num_off]:
            row |= {name: row[name][:13] for name in ("startTimeUnixNano", "endTimeUnixNano")}
        path.write_text(json.dumps(document))
        assert f"{2 * num_off} x {hint}" in imported(path).head.labels
        if num_off == 1:
            assert [one.is_drawn for one in imported(path).recordings[0].requests] == [False, True, False]
    given = imported(path, time_unit_ns=NS_PER_MS)
    assert (content(given), given.head.labels) == (content(right), right.head.labels)


MESSAGE = [{"role": "assistant", "parts": [{"type": "text", "content": "word " * 400}], "finish_reason": "stop"}]


@pytest.mark.parametrize(
    "answer",
    [
        {"gen_ai.output.text": "word " * 400},
        {"gen_ai.output.messages": json.dumps(MESSAGE)},
        {"gen_ai.output.messages": MESSAGE},
    ],
)
def test_a_placeholder_beside_a_long_answer_is_estimated_and_labelled(tmp_path: Path, answer: dict[str, Any]) -> None:
    rows = list(spans())
    rows[0]["attributes"] |= {"gen_ai.usage.output_tokens": 1} | answer
    short = json.dumps([{"role": "assistant", "parts": [{"type": "text", "content": "Done."}]}])
    rows[1]["attributes"] |= {"gen_ai.usage.output_tokens": 2, "gen_ai.output.messages": short}
    (tmp_path / "in.json").write_text(json.dumps({"spans": rows}))
    trace = imported(tmp_path / "in.json")
    assert trace.recordings[0].requests[0].generate_tokens == 500
    assert any("placeholder" in label for label in trace.head.labels)


def test_an_answer_of_no_token_is_no_placeholder_and_hides_none(tmp_path: Path) -> None:
    flat = list(spans())[:3]
    flat[0]["attributes"] |= {"gen_ai.usage.output_tokens": 0}
    for num_short in (0, 1):
        flat[1]["attributes"] |= {"gen_ai.usage.output_tokens": 90 - 89 * num_short}
        (tmp_path / "in.json").write_text(json.dumps({"spans": [*flat, flat[0]]}))
        labels = imported(tmp_path / "in.json").head.labels
        assert "1 x answers of no token taken as 1 token" in labels
        assert sum("placeholder" in label for label in labels) == num_short


def test_an_image_in_a_message_is_no_text(tmp_path: Path) -> None:
    rows = list(spans())
    url = "data:image/png;base64," + "iVBORw0KGgo" * 1000
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}
    del rows[0]["attributes"]["gen_ai.usage.input_tokens"]
    rows[0]["attributes"]["gen_ai.input.messages"] = json.dumps([message])
    (tmp_path / "in.json").write_text(json.dumps({"spans": rows}))
    assert imported(tmp_path / "in.json").recordings[0].requests[0].prompt_tokens < 50


@pytest.mark.parametrize("num_sessions", [3])
def test_a_run_exported_as_otel_records_reads_back_as_what_was_sent(tmp_path: Path, num_sessions: int) -> None:
    table = {"name": "x", "backend": "sim", "base_seed": 1, "replicates": 1, "baseline": "a"}
    workload = {"num_sessions": num_sessions}
    spec = ExperimentSpec.model_validate({**table, "workload": workload, "condition": [{"name": "a"}]})
    (run,) = run_experiment(spec, runs_root=tmp_path / "runs").require_valid().runs
    paths = write_runs([run], named_format("otel"), tmp_path / "records", may_replace=False)
    trace = imported(*paths)
    sent = [request for session in run.plan.sessions for request in session.requests]
    assert trace.num_requests == len(sent)
    assert len(trace.recordings) == num_sessions
    lengths = sorted((one.prompt_tokens, one.generate_tokens) for each in trace.recordings for one in each.requests)
    assert lengths == sorted((request.prompt_tokens, request.generate_tokens) for request in sent)
    assert not trace.head.dropped
    assert not trace.head.broken
