"""The artifacts of AIPerf: ``profile_export.jsonl``, a line a request, and the summary ``profile_export_aiperf.json``.

Shape: aiperf/common/models/record_models.py and export_models.py of AIPerf 0.13, schema 1.4. AIPerf calls the mean time
per output token of a request ``inter_token_latency`` and its gaps ``inter_chunk_latency``.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from harness.clock import NS_PER_MS, NS_PER_S
from harness.present.export.formats import Format
from harness.present.export.measured import MeasuredRequest, MeasuredRun, Summary, in_unit

SCHEMA_VERSION = "1.4"
NO_ROOM = (
    "finish reason and id of a response",
    "queueing by the server's log, and whether a prefix was reused or computed again",
)
CANCELLED = {"code": 499, "type": "RequestCancellationError", "message": "aborted by the client, as planned"}
_PERCENTILES = {f"p{percent}": percent / 100 for percent in (1, 5, 10, 25, 50, 75, 90, 95, 99)}


def records(run: MeasuredRun) -> list[dict[str, Any]]:
    """The lines of ``profile_export.jsonl``."""
    return [_record(run, request) for request in run.window]


def _record(run: MeasuredRun, request: MeasuredRequest) -> dict[str, Any]:
    agent = f"{run.run.label}/s{request.session}"
    return {
        "metadata": {
            "session_num": request.session,
            "x_request_id": request.request_id,
            "x_correlation_id": agent,
            "conversation_id": agent,
            "turn_index": request.turn,
            "credit_issued_ns": request.due_ns,
            "request_start_ns": request.sent_ns,
            "request_ack_ns": request.head_ns,
            "request_end_ns": request.done_ns,
            "worker_id": "rbln-harness",
            "record_processor_id": "rbln-harness",
            "benchmark_phase": "profiling",
            "was_cancelled": not request.is_answered,
            "cancellation_time_ns": None if request.is_answered else request.done_ns,
            "harness_origin": run.metadata["origin"],
        },
        "metrics": _metrics(request),
        "error": None if request.is_answered else CANCELLED,
    }


def _metrics(request: MeasuredRequest) -> dict[str, dict[str, Any]]:
    values: dict[str, tuple[Any, str]] = {
        "input_sequence_length": (request.prompt_tokens, "tokens"),
        "output_sequence_length": (request.output_tokens, "tokens"),
        "requested_osl": (request.max_tokens, "tokens"),
        "usage_prompt_cache_read_tokens": (request.cached_tokens, "tokens"),
        "time_to_first_token": (in_unit(request.ttft_ns, NS_PER_MS), "ms"),
        "inter_token_latency": (in_unit(request.tpot_ns, NS_PER_MS), "ms"),
        "inter_chunk_latency": ((request.itl_ns / NS_PER_MS).tolist() or None, "ms"),
        "request_latency": (in_unit(request.e2e_ns, NS_PER_MS), "ms"),
    }
    return {name: {"value": value, "unit": unit} for name, (value, unit) in values.items() if value is not None}


def summary_file(run: MeasuredRun) -> dict[str, Any]:
    """``profile_export_aiperf.json``: figures over the answered requests."""
    scalars: dict[str, tuple[float | None, str]] = {
        "request_count": (len(run.answered), "requests"),
        "error_request_count": (len(run.window) - len(run.answered), "requests"),
        "benchmark_duration": (run.span_s, "sec"),
        "request_throughput": (run.rate("requests_per_s"), "requests/sec"),
        "output_token_throughput": (run.rate("tokens_per_s"), "tokens/sec"),
        "goodput": (run.rate("goodput_per_s"), "requests/sec"),
        "total_isl": (run.prompt_tokens, "tokens"),
        "total_osl": (run.output_tokens, "tokens"),
    }
    distributions = {
        "time_to_first_token": (run.over_answered("ttft_ns", NS_PER_MS), "ms"),
        "inter_token_latency": (run.over_answered("tpot_ns", NS_PER_MS), "ms"),
        "inter_chunk_latency": (run.over_answered("itl_ns", NS_PER_MS), "ms"),
        "request_latency": (run.over_answered("e2e_ns", NS_PER_MS), "ms"),
        "input_sequence_length": (run.over_answered("prompt_tokens"), "tokens"),
        "output_sequence_length": (run.over_answered("output_tokens"), "tokens"),
        "usage_prompt_cache_read_tokens": (run.over_answered("cached_tokens"), "tokens"),
    }
    return {
        "schema_version": SCHEMA_VERSION,
        "benchmark_id": run.run.manifest.seal,
        **{name: {"unit": unit, "avg": value} for name, (value, unit) in scalars.items() if value is not None},
        **{name: _distribution(known, unit) for name, (known, unit) in distributions.items() if known is not None},
        "run_info": {
            "benchmark_id": run.run.manifest.seal,
            "random_seed": run.run.spec.base_seed,
            "trial": run.run.replicate,
            "run_label": f"{run.run.experiment}/{run.run.label}",
            "variation_label": run.run.condition,
            "variation_values": run.run.manifest.factors,
        },
        "was_cancelled": False,
        "is_complete": True,
        "start_time": _date(run.start_ns),
        "end_time": _date(run.end_ns),
        "harness": run.metadata,
    }


def _distribution(known: Summary, unit: str) -> dict[str, Any]:
    return {
        "unit": unit,
        "avg": known.mean,
        **{name: known.at(q) for name, q in _PERCENTILES.items()},
        "min": known.low,
        "max": known.high,
        "std": known.std,
        "count": known.count,
        "sum": known.total,
    }


def _date(at_ns: int) -> str:
    return datetime.fromtimestamp(at_ns / NS_PER_S, timezone.utc).isoformat()


FORMAT = Format("aiperf", NO_ROOM, {"profile_export.jsonl": records, "profile_export_aiperf.json": summary_file})
