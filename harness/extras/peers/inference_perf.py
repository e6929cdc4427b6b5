"""The reports of inference-perf: the summary, the same as stage 0, and a record a request.

Shape: inference_perf/reportgen/base.py and inference_perf/apis/base.py of inference-perf 0.7. Times in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.clock import NS_PER_S
from harness.present.export.formats import Format
from harness.present.export.measured import MeasuredRequest, MeasuredRun, Summary, in_unit, summary

NO_ROOM = (
    "queueing by the server's log, and whether a prefix was reused or computed again",
    "the date: instants are seconds from the first send of the measurement window, as a clock without a date has them",
)


def records(run: MeasuredRun) -> list[dict[str, Any]]:
    """``per_request_lifecycle_metrics.json``."""
    return [_record(run, request) for request in run.window]


def _record(run: MeasuredRun, request: MeasuredRequest) -> dict[str, Any]:
    usage: dict[str, Any] = {"prompt_tokens": request.prompt_tokens, "completion_tokens": request.output_tokens}
    if request.cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": request.cached_tokens}
    names = {"condition": run.run.label, "session": str(request.session), "turn": str(request.turn)}
    is_answered = request.is_answered
    return {
        "start_time": (request.sent_ns - run.start_ns) / NS_PER_S,
        "end_time": (request.done_ns - run.start_ns) / NS_PER_S,
        "request": "",
        "info": {
            "request_metrics": {"text": {"input_tokens": request.prompt_tokens}},
            "response_metrics": {
                "output_tokens": request.output_tokens,
                "server_usage": usage,
                "chunk_times": [],
                "output_token_times": [(at_ns - run.start_ns) / NS_PER_S for at_ns in request.token_ns.tolist()],
            },
            "extra_info": {
                **run.metadata,
                "request_id": request.request_id,
                "response_id": request.response_id,
                "finish_reason": request.finish_reason,
                "due_time": (request.due_ns - run.start_ns) / NS_PER_S,
            },
            "lora_adapter": None,
            "labels": names,
            "input_tokens": request.prompt_tokens,
        },
        "error": None if is_answered else {"error_type": "aborted", "error_msg": "aborted by the client, as planned"},
        **({"computed_metrics": _computed(request)} if is_answered else {}),
    }


def _computed(request: MeasuredRequest) -> dict[str, Any]:
    gaps = (request.itl_ns / NS_PER_S).tolist()
    return {
        "request_latency": in_unit(request.e2e_ns, NS_PER_S),
        "normalized_time_per_output_token": _normalized(request),
        "time_to_first_token": in_unit(request.ttft_ns, NS_PER_S),
        "time_per_output_token": in_unit(request.tpot_ns, NS_PER_S),
        "inter_token_latency": sum(gaps) / len(gaps) if gaps else None,
        "inter_token_latencies": gaps,
        "input_tokens": request.prompt_tokens,
        "output_tokens": request.output_tokens,
        "ttft_slo_sec": None,
        "tpot_slo_sec": None,
    }


def _normalized(request: MeasuredRequest) -> float:
    """The whole latency by the tokens of the answer, as inference-perf defines it."""
    return (request.e2e_ns or 0.0) / NS_PER_S / request.output_tokens if request.output_tokens else 0.0


def summary_file(run: MeasuredRun) -> dict[str, Any]:
    """``summary_lifecycle_metrics.json`` and ``stage_0_lifecycle_metrics.json``: one run has one stage."""
    window, answered, left, figures = run.window, run.answered, run.left, run.figures
    num_input, num_output, span_s = run.prompt_tokens, run.output_tokens, run.span_s
    send_s = (max((request.sent_ns for request in window), default=0) - run.start_ns) / NS_PER_S
    # inference-perf divides by the span from the first start to the last end, failed requests among them.
    output_len = _block(run.over_answered("output_tokens"))
    rates = {"input": num_input, "output": num_output, "total": num_input + num_output}
    successes: dict[str, Any] = {
        "count": len(answered),
        "latency": {
            "request_latency": _block(run.over_answered("e2e_ns", NS_PER_S)),
            "normalized_time_per_output_token": _block(summary(map(_normalized, answered))),
            "time_per_output_token": _block(run.over_answered("tpot_ns", NS_PER_S)),
            "time_to_first_token": _block(run.over_answered("ttft_ns", NS_PER_S)),
            "inter_token_latency": _block(run.over_answered("itl_ns", NS_PER_S)),
        },
        "throughput": {
            **{f"{name}_tokens_per_sec": tokens / span_s if span_s else 0.0 for name, tokens in rates.items()},
            "requests_per_sec": len(answered) / span_s if span_s else 0.0,
        },
        "prompt_tokens": _prompt_tokens(answered),
        "output_len": output_len,
        "output_tokens": {"total": num_output, **(output_len or {})},
        "token_count_mismatches": 0,
    }
    if figures is not None and figures.goodput_per_s is not None and figures.good_share is not None:
        successes["goodput_metrics"] = {
            "goodput_percentage": 100 * figures.good_share,
            "request_goodput": figures.goodput_per_s.mean,
            "good_requests": round(figures.good_share * len(answered)),
            "total_requests": len(answered),
        }
    return {
        "benchmark_time_seconds": span_s,
        "load_summary": {
            "count": len(window),
            "schedule_delay": _block(summary([request.sent_ns - request.due_ns for request in window], NS_PER_S)),
            "send_duration": send_s,
            "requested_rate": None,
            "achieved_rate": len(window) / send_s if send_s else 0.0,
        },
        "successes": successes,
        "failures": {
            "count": len(left),
            "request_latency": _block(summary([request.done_ns - request.sent_ns for request in left], NS_PER_S)),
            "prompt_tokens": _prompt_tokens(left),
            "by_label": {"aborted": {"count": len(left), "messages": []}} if left else {},
        },
        "harness": run.metadata,
    }


def _prompt_tokens(requests: Sequence[MeasuredRequest]) -> dict[str, Any]:
    total = sum(request.prompt_tokens for request in requests)
    cached = sum(request.cached_tokens or 0 for request in requests)
    block = _block(summary([request.prompt_tokens for request in requests])) or {}
    return {"total": total, "cached": cached, "uncached": total - cached, **block}


def _block(known: Summary | None) -> dict[str, float] | None:
    if known is None:
        return None
    percentiles = {"median" if q == 0.5 else f"p{100 * q:g}": value for q, value in known.percentiles.items()}
    return {"mean": known.mean, "min": known.low, "max": known.high, **percentiles}


FORMAT = Format(
    "inference-perf",
    NO_ROOM,
    {
        "summary_lifecycle_metrics.json": summary_file,
        "stage_0_lifecycle_metrics.json": summary_file,
        "per_request_lifecycle_metrics.json": records,
    },
)
