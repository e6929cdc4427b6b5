"""Spans of a run: what they hold, and what a collector receives of them."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from harness.errors import HarnessError, SpecError
from harness.extras.otel.spans import _post, batches, collector_headers, post_spans, spans_of, traces_url
from harness.present.export import MeasuredRun, measured
from harness.runner import run_experiment
from tests.support.experiments import small_experiment
from tests.support.raw_server import Asked, RawServer, Reply, whole


def simulated(folder: Any, **workload: Any) -> MeasuredRun:
    shape = {
        "prompt_tokens": {"distribution": "uniform", "low": 200, "high": 400},
        "generate_tokens": {"distribution": "uniform", "low": 2, "high": 6},
        "wait_cap_s": 2.0,
    }
    spec = small_experiment(backend="sim", workload={**shape, **workload}, condition=[{"name": "base"}])
    (run,) = run_experiment(spec, runs_root=folder / "runs").require_valid().runs
    return measured(run)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> MeasuredRun:
    """A thousand requests in fifty sessions."""
    return simulated(tmp_path_factory.mktemp("otel"), num_sessions=50, requests_per_session=20)


class Collector(RawServer):
    """Takes spans as a collector does: parsed by the classes of the protocol where they are installed."""

    def __init__(self) -> None:
        super().__init__(self._take)
        self.status, self.answer = 200, dict[str, Any]()
        self.spans: list[Any] = []
        self.parse: Any = spans_of_json

    def _take(self, asked: Asked) -> Reply:
        if asked.path == "/v1/traces" and asked.header("content-type") == "application/json" and self.status == 200:
            self.spans += self.parse(asked.body)
        return Reply([whole(json.dumps(self.answer), status=self.status)])


def spans_of_json(body: bytes) -> list[Any]:
    return [
        span["spanId"]
        for resource in json.loads(body)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
    ]


def with_ids_in_base64(value: Any) -> Any:
    """OTLP JSON has ids in hexadecimal; protobuf's JSON form has bytes in base64."""
    if isinstance(value, dict):
        return {
            key: base64.b64encode(bytes.fromhex(inner)).decode()
            if key in {"traceId", "spanId", "parentSpanId"}
            else with_ids_in_base64(inner)
            for key, inner in value.items()
        }
    return [with_ids_in_base64(inner) for inner in value] if isinstance(value, list) else value


def spans_by_protobuf(body: bytes) -> list[Any]:
    service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    json_format = pytest.importorskip("google.protobuf.json_format")
    request = json_format.ParseDict(with_ids_in_base64(json.loads(body)), service.ExportTraceServiceRequest())
    return [span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans]


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        yield server


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    return {item["key"]: next(iter(item["value"].values())) for item in span["attributes"]}


def test_a_run_has_a_span_for_each_session_request_and_tool_wait(run: MeasuredRun) -> None:
    spans = spans_of(run)
    waits = sum(1 for one in run.requests if one.wait_ns and one.turn < 19)
    kinds = Counter(attributes(span)["gen_ai.operation.name"] for span in spans)
    assert kinds == {"invoke_agent": 50, "text_completion": 1000, "execute_tool": waits}
    assert len({span["spanId"] for span in spans}) == len(spans)
    assert {len(span["traceId"]) for span in spans} == {32}
    sessions = {span["spanId"]: span for span in spans if "parentSpanId" not in span}
    assert len(sessions) == 50
    for span in spans:
        if "parentSpanId" in span:
            parent = sessions[span["parentSpanId"]]
            assert int(parent["startTimeUnixNano"]) <= int(span["startTimeUnixNano"])
            assert int(span["endTimeUnixNano"]) <= int(parent["endTimeUnixNano"])


def test_a_request_names_its_tokens_its_first_chunk_and_its_conversation(run: MeasuredRun) -> None:
    request = run.requests[1]
    span = next(span for span in spans_of(run) if attributes(span).get("harness.turn") == "1")
    found = attributes(span)
    assert found["gen_ai.usage.output_tokens"] == str(request.output_tokens)
    assert found["gen_ai.usage.cache_read.input_tokens"] == str(request.cached_tokens)
    assert found["gen_ai.response.time_to_first_chunk"] == pytest.approx(request.ttft_ns / 1e9)
    assert found["gen_ai.conversation.id"] == "base/0/s0"


def test_exporting_again_gives_the_same_spans(run: MeasuredRun) -> None:
    assert spans_of(measured(run.run)) == spans_of(run)


def test_a_collector_receives_every_span_of_a_thousand_requests(run: MeasuredRun, collector: Collector) -> None:
    assert post_spans(run, f"{collector.url}/v1/traces") == len(collector.spans)
    assert sorted(collector.spans) == sorted(span["spanId"] for span in spans_of(run))


def test_the_protocols_classes_read_every_span(run: MeasuredRun, collector: Collector) -> None:
    pytest.importorskip("opentelemetry.proto")
    collector.parse = spans_by_protobuf
    assert post_spans(run, f"{collector.url}/v1/traces") == len(collector.spans) > 1000
    assert sorted(span.span_id.hex() for span in collector.spans) == sorted(span["spanId"] for span in spans_of(run))
    assert all(span.start_time_unix_nano < span.end_time_unix_nano or span.kind == 1 for span in collector.spans)


@pytest.fixture
def _no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused batch is sent again at once."""
    monkeypatch.setattr("harness.extras.otel.spans._WAITS_S", (0, 0))


@pytest.mark.usefixtures("_no_waits")
@pytest.mark.parametrize(
    ("status", "answer", "words"),
    [
        (503, {}, "did not take the spans .*503"),
        (200, {"partialSuccess": {"rejectedSpans": "3", "errorMessage": "full"}}, "rejected 3 spans .full."),
    ],
)
def test_spans_that_a_collector_refuses_are_an_error(
    run: MeasuredRun, collector: Collector, status: int, answer: dict[str, Any], words: str
) -> None:
    collector.status, collector.answer = status, answer
    with pytest.raises(HarnessError, match=words):
        post_spans(run, f"{collector.url}/v1/traces")


def test_headers_of_the_usual_variable_are_sent_and_a_wrong_one_shows_no_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20secret, x-team = npu")
    assert collector_headers() == {"Authorization": "Bearer secret", "x-team": "npu"}
    for wrong in ("x-team=npu,secret", "x-team=npu,token=secret%0A"):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", wrong)
        with pytest.raises(SpecError, match="its part 2 is not NAME=VALUE") as refused:
            collector_headers()
        assert "secret" not in str(refused.value)
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_HEADERS")
    assert collector_headers() == {}


@pytest.mark.usefixtures("_no_waits")
def test_a_batch_that_was_refused_for_a_moment_is_sent_again(run: MeasuredRun) -> None:
    statuses = iter([503, 429, 200])
    with RawServer(lambda _asked: Reply([whole("{}", status=next(statuses))])) as server:
        _post(f"{server.url}/v1/traces", {}, next(batches(run)))
    assert len(server.asked) == 3
    assert len({asked.body for asked in server.asked}) == 1


@pytest.mark.usefixtures("_no_waits")
def test_no_collector_is_one_line_with_the_next_move(run: MeasuredRun) -> None:
    with Collector() as gone:
        url = f"{gone.url}/v1/traces"
    with pytest.raises(HarnessError, match=r"did not take the spans.*leave --otlp out"):
        post_spans(run, url)


def test_a_collectors_address_gets_the_path_for_spans() -> None:
    assert traces_url("http://collector:4318") == "http://collector:4318/v1/traces"
    assert traces_url("https://host/otlp/traces") == "https://host/otlp/traces"
    with pytest.raises(SpecError, match="no address of a collector"):
        traces_url("collector:4318")
