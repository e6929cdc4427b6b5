"""Every format against the peer's classes, where the package is installed: what it reads is what was measured.

Tried with vLLM 0.33.0, AIPerf 0.13.0, GuideLLM 0.8.1, inference-perf 0.7.0 and opentelemetry-proto 1.45.2.
"""

from __future__ import annotations

import importlib
import json
import warnings
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from harness.clock import NS_PER_MS, NS_PER_S
from harness.errors import SpecError
from harness.measure.records.run import SealedRun
from harness.model.traces.recording import RecordedRequest, Recording, TraceHead, write_trace
from harness.present.export import FORMATS, MeasuredRun, measured, named_format, write_runs
from harness.runner import run_experiment
from tests.support.experiments import small_experiment

US = 0.001
"""Seconds since 1970 as a 64-bit float are rounded to 0.24 us; in ms."""


def module_of_a_peer(name: str) -> Any:
    """A module of a peer; the test is skipped where the peer is not installed."""
    pytest.importorskip(name.partition(".")[0])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SealedRun:
    """Three sessions of two requests, and a session whose first answer the client leaves after seven tokens."""
    root = tmp_path_factory.mktemp("export")
    left = RecordedRequest(None, (), 0, "none", 600, 0, 300, abort_after_tokens=7)
    then = RecordedRequest(0, (0,), 7_000_000, "tool", 640, 600, 20)
    last = RecordedRequest(1, (1,), 5_000_000, "tool", 700, 640, 30)
    head = TraceHead("leaver", "made", "together", 0, {}, {}, ())
    trace = write_trace(root / "leaver.jsonl", head, [Recording("a", 0, (left, then, last))])
    spec = small_experiment(
        backend="sim",
        workload={"source": "trace", "trace": str(trace)},
        condition=[{"name": "base"}],
        slo={"ttft_ms": 10_000.0},
    )
    (only,) = run_experiment(spec, runs_root=root / "runs").require_valid().runs
    return only


@pytest.fixture(scope="module")
def taken(run: SealedRun) -> MeasuredRun:
    return measured(run)


def exported(run: SealedRun, form: str, folder: Path) -> Path:
    """The folder of the run's files."""
    write_runs([run], FORMATS[form], folder, may_replace=False)
    return folder / run.label if FORMATS[form].of_run else folder


def test_the_run_has_answered_requests_and_one_that_the_client_left(taken: MeasuredRun) -> None:
    assert [request.status for request in taken.requests] == ["aborted", "ok", "ok"]
    assert taken.requests[0].output_tokens == 7
    assert len(taken.requests[1].token_ns) == 20


@pytest.mark.parametrize("form", FORMATS)
def test_every_file_says_that_no_npu_was_measured(run: SealedRun, form: str, tmp_path: Path) -> None:
    exported(run, form, tmp_path)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) == len(FORMATS[form].names([run]))
    for path in files:
        assert b"no accelerator was measured" in path.read_bytes(), path.name


def test_an_unknown_format_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(SpecError, match=r"unknown format 'xml'.*parquet.*vllm-bench"):
        named_format("xml")


def test_vllm_reads_every_request_of_a_result(run: SealedRun, taken: MeasuredRun, tmp_path: Path) -> None:
    result = json.loads((exported(run, "vllm-bench", tmp_path) / "result.json").read_text())
    keys = ("ttfts", "itls", "latencies", "start_times", "input_lens", "output_lens", "errors", "queue_times")
    assert {len(result[key]) for key in keys} == {3}
    assert (result["completed"], result["failed"]) == (2, 1)
    for place, request in enumerate(taken.answered, start=1):
        assert result["ttfts"][place] == pytest.approx(request.ttft_ns / NS_PER_S)
        last_ns = int(request.token_ns[-1]) - request.sent_ns
        assert result["ttfts"][place] + sum(result["itls"][place]) == pytest.approx(last_ns / NS_PER_S)
    plot = module_of_a_peer("vllm.benchmarks.plot")
    rows = [
        {
            "start_time": result["start_times"][place],
            "ttft": result["ttfts"][place],
            "itl": result["itls"][place],
            "latency": result["latencies"][place],
            "prompt_len": result["input_lens"][place],
            "output_tokens": result["output_lens"][place],
        }
        for place in range(3)
    ]
    segments = plot.construct_timeline_data(rows, [0.025, 0.05], ["fast", "medium", "slow"])
    assert len(segments) == 3 + sum(len(gaps) for gaps in result["itls"])


def test_vllm_finds_throughput_and_users_of_a_result(run: SealedRun, tmp_path: Path) -> None:
    pareto = module_of_a_peer("vllm.benchmarks.sweep.plot_pareto")
    result = json.loads((exported(run, "vllm-bench", tmp_path) / "result.json").read_text())
    records, num_skipped = pareto._prepare_records([result], user_count_var=None, gpu_count_var=None)
    assert num_skipped == 0
    assert records[0]["tokens_per_user"] == pytest.approx(result["output_throughput"])


def test_aiperf_reads_records_and_summary(run: SealedRun, taken: MeasuredRun, tmp_path: Path) -> None:
    folder = exported(run, "aiperf", tmp_path)
    lines = (folder / "profile_export.jsonl").read_text().splitlines()
    text = (folder / "profile_export_aiperf.json").read_text()
    assert json.loads(text)["request_count"] == {"unit": "requests", "avg": 2}
    records = module_of_a_peer("aiperf.common.models.record_models")
    read = [records.MetricRecordInfo.model_validate_json(line) for line in lines]
    for line, request in zip(read, taken.requests, strict=True):
        assert (line.metadata.session_num, line.metadata.turn_index) == (request.session, request.turn)
        assert line.metadata.request_start_ns == request.sent_ns
        assert "no accelerator was measured" in line.metadata.harness_origin
        assert line.metadata.was_cancelled is not request.is_answered
        if request.is_answered:
            assert line.metrics["request_latency"].value * NS_PER_MS == pytest.approx(request.e2e_ns)
            assert len(line.metrics["inter_chunk_latency"].value) == request.output_tokens - 1
    summary = module_of_a_peer("aiperf.common.models.export_models").JsonExportData.model_validate_json(text)
    assert summary.schema_version == summary.SCHEMA_VERSION
    assert summary.request_throughput.avg == pytest.approx(taken.figures and taken.figures.requests_per_s.mean)
    assert summary.time_to_first_token.count == 2


def test_aiperf_knows_every_metric_that_a_record_names(run: SealedRun, tmp_path: Path) -> None:
    lines = (exported(run, "aiperf", tmp_path) / "profile_export.jsonl").read_text().splitlines()
    registry = module_of_a_peer("aiperf.metrics.metric_registry").MetricRegistry
    for name, metric in json.loads(lines[-1])["metrics"].items():
        known = registry.get_class(name)
        assert metric["unit"] == str(known.display_unit or known.unit)


def test_guidellm_computes_from_the_instants_what_the_harness_measured(
    run: SealedRun, taken: MeasuredRun, tmp_path: Path
) -> None:
    path = exported(run, "guidellm", tmp_path) / "benchmarks.json"
    (written,) = json.loads(path.read_text())["benchmarks"]
    assert written["metrics"]["request_totals"] == {"successful": 2, "incomplete": 1, "errored": 0, "total": 3}
    report = module_of_a_peer("guidellm.benchmark.schemas").GenerativeBenchmarksReport.load_file(path)
    (benchmark,) = report.benchmarks
    assert "no NPU" in report.config.metadata.labels["origin"]
    for read, request in zip(benchmark.requests.successful, taken.answered, strict=True):
        assert read.time_to_first_token_ms == pytest.approx(request.ttft_ns / NS_PER_MS, abs=US)
        assert read.inter_token_latency_ms == pytest.approx(request.tpot_ns / NS_PER_MS, abs=US)
        assert (read.prompt_tokens, read.output_tokens) == (request.prompt_tokens, request.output_tokens)
        assert read.cached_tokens == request.cached_tokens
    (left,) = benchmark.requests.incomplete
    assert left.info.status == "cancelled"
    assert left.output_tokens == 7


def test_inference_perf_finds_nothing_wrong_with_its_reports(run: SealedRun, tmp_path: Path) -> None:
    folder = exported(run, "inference-perf", tmp_path)
    reports = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert len(reports["per_request_lifecycle_metrics"]) == 3
    check = module_of_a_peer("inference_perf.reportgen.validation")
    files = [check.ReportFile(name=name, contents=contents) for name, contents in reports.items()]
    findings = check.validate_reports(files).contents
    assert sorted(findings["reports"]) == sorted(f"{name}.json" for name in reports)
    assert all(not found for group in findings["reports"].values() for found in group.values())
    assert findings["global"] == {"warnings": [], "errors": []}


def test_inference_perf_computes_from_the_records_what_the_summary_says(run: SealedRun, tmp_path: Path) -> None:
    folder = exported(run, "inference-perf", tmp_path)
    apis = module_of_a_peer("inference_perf.apis")
    base = module_of_a_peer("inference_perf.reportgen.base")
    metrics = [
        apis.RequestLifecycleMetric(
            scheduled_time=row["info"]["extra_info"]["due_time"],
            start_time=row["start_time"],
            end_time=row["end_time"],
            request_data=row["request"],
            info={**row["info"], "response_metrics": apis.StreamedResponseMetrics(**row["info"]["response_metrics"])},
            error=row["error"],
        )
        for row in json.loads((folder / "per_request_lifecycle_metrics.json").read_text())
    ]
    again = base.summarize_requests(metrics, [0.1, 1, 5, 10, 25, 50, 75, 90, 95, 99, 99.9]).model_dump()
    written = json.loads((folder / "summary_lifecycle_metrics.json").read_text())
    for name, block in written["successes"]["latency"].items():
        assert block == pytest.approx(again["successes"]["latency"][name]), name
    for name, rate in written["successes"]["throughput"].items():
        assert rate == pytest.approx(again["successes"]["throughput"][name]), name
    assert written["successes"]["prompt_tokens"] == pytest.approx(again["successes"]["prompt_tokens"])


def test_tables_have_a_row_a_request_and_parquet_has_every_token(
    run: SealedRun, taken: MeasuredRun, tmp_path: Path
) -> None:
    table = pq.read_table(exported(run, "parquet", tmp_path / "parquet") / "requests.parquet")
    assert [len(tokens) for tokens in table.column("token_ns").to_pylist()] == [7, 20, 30]
    assert table.column("ttft_ns").to_pylist() == [request.ttft_ns for request in taken.requests]
    assert table.schema.field("ttft_ns").metadata[b"unit"] == b"ns"
    lines = (exported(run, "csv", tmp_path / "csv") / "requests.csv").read_text().splitlines()
    assert len(lines) == 4
    assert "token_ns" not in lines[0]
