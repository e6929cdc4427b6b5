"""The report of GuideLLM (``benchmarks.json``): one benchmark, with every request.

Shape: guidellm/benchmark/schemas and guidellm/schemas of GuideLLM 0.8, report version 2. Seconds since 1970; latencies
in ms where their name says so.
"""

from __future__ import annotations

from typing import Any

from harness.clock import NS_PER_MS, NS_PER_S
from harness.measure.records import layout
from harness.present.export.formats import Format
from harness.present.export.measured import MeasuredRequest, MeasuredRun, Summary, in_unit, summary

GUIDELLM_VERSION = "0.8.1"
NO_ROOM = (
    "distributions of rates and concurrency within a run: the run's mean stands there as one value (count 1)",
    "finish reason, queueing by the server's log, and whether a prefix was reused or computed again",
    "gaps between tokens, and token instants but the first and the last",
    "instants finer than 0.24 us: they are seconds since 1970 as a 64-bit float",
)
_NAMES = {0.001: "p001", 0.01: "p01", 0.05: "p05", 0.1: "p10", 0.25: "p25", 0.5: "p50", 0.75: "p75", 0.9: "p90"}
_PERCENTILES = {**_NAMES, 0.95: "p95", 0.99: "p99", 0.999: "p999"}
# Figures by what a request is made of. The harness counts tokens alone.
_BY_CONTENT = {
    "text": ("tokens", "words", "characters"),
    "image": ("tokens", "images", "pixels", "bytes"),
    "video": ("tokens", "frames", "seconds", "bytes"),
    "audio": ("tokens", "samples", "seconds", "bytes"),
    "tool_call": ("tokens", "mixed_tokens", "count"),
}
_EMPTY = Summary(0, 0.0, 0.0, 0.0, 0.0, 0.0, dict.fromkeys(_PERCENTILES, 0.0))


def report(run: MeasuredRun) -> dict[str, Any]:
    """The run as a report of one benchmark. What the client left as planned is ``incomplete``."""
    trace = {"kind": "trace_synthetic", "source": {"kind": "json_file", "path": layout.PLAN}}
    target = f"http://{run.host}:{run.port}" if run.host else "none: simulated"
    first_s, last_s = run.start_ns / NS_PER_S, run.end_ns / NS_PER_S
    return {
        "metadata": {"version": 2, "guidellm_version": GUIDELLM_VERSION, "python_version": "", "platform": ""},
        "config": {
            "metadata": {"labels": run.metadata},
            "spec": {
                "backend": {"kind": "openai_http", "target": target, "model": run.model},
                "profile": {"kind": "replay"},
                "data": [trace],
            },
        },
        "benchmarks": [
            {
                "type_": "generative_benchmark",
                "config": {
                    "id_": run.run.manifest.seal,
                    "run_id": run.run.experiment,
                    "run_index": run.run.replicate,
                    "strategy": {"type_": "trace", "time_scale": 1.0, "schedule_turn": "idle_gap"},
                    "constraints": {},
                    "profile": {"kind": "replay"},
                    "requests": {"data": layout.PLAN, "plan_hash": run.run.manifest.plan_hash},
                    "backend": {"target": target, "model": run.model},
                    "environment": run.metadata,
                },
                "scheduler_state": {
                    "start_time": first_s,
                    "end_time": last_s,
                    "created_requests": len(run.window),
                    "processed_requests": len(run.window),
                    "successful_requests": len(run.answered),
                    "cancelled_requests": len(run.left),
                },
                "scheduler_metrics": _scheduler(run, first_s, last_s),
                "metrics": _metrics(run),
                "requests": {
                    "successful": [_request(run, request) for request in run.answered],
                    "incomplete": [_request(run, request) for request in run.left],
                    "errored": [],
                    "total": None,
                },
                "start_time": first_s,
                "end_time": last_s,
                "duration": run.span_s,
            }
        ],
    }


def _scheduler(run: MeasuredRun, first_s: float, last_s: float) -> dict[str, Any]:
    late = summary([request.sent_ns - request.due_ns for request in run.window], NS_PER_S)
    took = run.over_answered("e2e_ns", NS_PER_S)
    # GuideLLM writes -1 for a delay that it did not observe; here its workers and their queues do not exist.
    absent = ("queued_time", "resolve_start_delay", "resolve_targeted_start_delay", "request_start_delay")
    unseen = (*absent, "resolve_end_delay", "resolve_time", "finalized_delay", "processed_delay")
    return {
        **dict.fromkeys(("start_time", "request_start_time", "measure_start_time"), first_s),
        **dict.fromkeys(("measure_end_time", "request_end_time", "end_time"), last_s),
        "requests_made": _counts(run),
        **{f"{name}_avg": -1.0 for name in unseen},
        "request_targeted_start_delay_avg": -1.0 if late is None else late.mean,
        "request_time_avg": -1.0 if took is None else took.mean,
        "strategy_type": "trace",
    }


def _counts(run: MeasuredRun) -> dict[str, int]:
    return {"successful": len(run.answered), "incomplete": len(run.left), "errored": 0, "total": len(run.window)}


def _request(run: MeasuredRun, request: MeasuredRequest) -> dict[str, Any]:
    tokens = request.token_ns.tolist()
    first, last = (tokens[0] / NS_PER_S, tokens[-1] / NS_PER_S) if tokens else (None, None)
    sent, done = request.sent_ns / NS_PER_S, request.done_ns / NS_PER_S
    return {
        "type_": "generative_request_stats",
        "request_id": request.request_id,
        "response_id": request.response_id or None,
        "info": {
            "request_id": request.request_id,
            "conversation_id": f"{run.run.label}/s{request.session}",
            "turn_index": request.turn,
            "history_len": request.turn,
            "status": "completed" if request.is_answered else "cancelled",
            "scheduler_start_time": run.start_ns / NS_PER_S,
            "timings": {
                "targeted_start": request.due_ns / NS_PER_S,
                "predecessor_completed": request.trigger_ns / NS_PER_S if request.turn else None,
                "resolve_start": sent,
                "request_start": sent,
                "first_request_iteration": in_unit(request.head_ns, NS_PER_S),
                "first_token_iteration": first,
                "first_output_token_iteration": first,
                "last_token_iteration": last,
                "last_request_iteration": done,
                "request_iterations": len(tokens),
                "token_iterations": len(tokens),
                "request_end": done,
                "resolve_end": done,
            },
            "error": None if request.is_answered else "aborted by the client, as planned",
        },
        "input_metrics": {"text_tokens": request.prompt_tokens, "cached_tokens": request.cached_tokens},
        "output_metrics": {"text_tokens": request.output_tokens},
        "request_latency": done - sent,
        "prompt_tokens": request.prompt_tokens,
        "cached_tokens": request.cached_tokens,
        "output_tokens": request.output_tokens,
        "time_to_first_token_ms": in_unit(request.ttft_ns, NS_PER_MS),
        "inter_token_latency_ms": in_unit(request.tpot_ns, NS_PER_MS),
    }


def _metrics(run: MeasuredRun) -> dict[str, Any]:
    answered, span_ns = run.answered, run.end_ns - run.start_ns
    prompt_tokens, all_tokens = run.prompt_tokens, run.prompt_tokens + run.output_tokens
    busy_ns = sum(request.done_ns - request.sent_ns for request in answered)
    firsts = run.over_answered("ttft_ns", NS_PER_MS)
    distributions = {
        "requests_per_second": summary([run.rate("requests_per_s")]),
        "request_concurrency": summary([busy_ns / span_ns if span_ns else None]),
        "request_latency": run.over_answered("e2e_ns", NS_PER_S),
        "request_dispatch_delay": summary([request.sent_ns - request.due_ns for request in answered], NS_PER_S),
        "request_streaming_iterations_count": summary([len(request.token_ns) for request in answered]),
        "prompt_token_count": run.over_answered("prompt_tokens"),
        "output_token_count": run.over_answered("output_tokens"),
        "total_token_count": summary([request.prompt_tokens + request.output_tokens for request in answered]),
        "time_to_first_token_ms": firsts,
        "time_to_first_output_token_ms": firsts,
        "time_per_output_token_ms": summary(map(_whole_by_tokens_ms, answered)),
        "inter_token_latency_ms": run.over_answered("tpot_ns", NS_PER_MS),
        "time_to_last_round_trip_ms": None,
        "avg_round_trip_time_ms": None,
        "prompt_tokens_per_second": summary([prompt_tokens / span_ns * NS_PER_S if span_ns else None]),
        "output_tokens_per_second": summary([run.rate("tokens_per_s")]),
        "tokens_per_second": summary([all_tokens / span_ns * NS_PER_S if span_ns else None]),
        "output_tokens_per_iteration": None,
        "iter_tokens_per_iteration": None,
    }
    nothing = _distribution(_EMPTY)
    return {
        "request_totals": _counts(run),
        **{
            name: {"successful": block, "incomplete": nothing, "errored": nothing, "total": block}
            for name, known in distributions.items()
            for block in [_distribution(known or _EMPTY)]
        },
        **{kind: dict.fromkeys(keys) for kind, keys in _BY_CONTENT.items()},
        "slo_attainment": None if run.figures is None else run.figures.good_share,
    }


def _whole_by_tokens_ms(request: MeasuredRequest) -> float | None:
    """From the send to the last token, by the tokens, as GuideLLM defines its time per output token."""
    if not len(request.token_ns) or not request.output_tokens:
        return None
    return (int(request.token_ns[-1]) - request.sent_ns) / NS_PER_MS / request.output_tokens


def _distribution(known: Summary) -> dict[str, Any]:
    return {
        "mean": known.mean,
        "median": known.at(0.5),
        "mode": known.at(0.5),
        "variance": known.std**2,
        "std_dev": known.std,
        "min": known.low,
        "max": known.high,
        "count": known.count,
        "total_sum": known.total,
        "percentiles": {name: known.at(q) for q, name in _PERCENTILES.items()},
    }


FORMAT = Format("guidellm", NO_ROOM, {"benchmarks.json": report})
