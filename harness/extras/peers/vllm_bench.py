"""The result file of ``vllm bench serve --save-detailed``.

Shape: vllm/benchmarks/serve.py of vLLM 0.33. Times in seconds, their summaries in ms.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

import numpy as np

from harness.clock import NS_PER_MS, NS_PER_S
from harness.present.export.formats import Format
from harness.present.export.measured import MeasuredRequest, MeasuredRun

NO_ROOM = (
    "cached prompt tokens, session and turn of a request, its finish reason",
    "requests that the client left as planned: they are counted as failed",
    "request_rate and burstiness are null: sessions wait for their answers and tools, no rate is set",
    "max_output_tokens_per_s (peak of one second), which the harness does not compute",
)


def result_file(run: MeasuredRun) -> dict[str, Any]:
    """The run as one result; a request that the client left has an error, no tokens and no times, as failures have."""
    requests, answered = run.window, run.answered
    return {
        "date": datetime.fromtimestamp(run.start_ns / NS_PER_S, timezone.utc).strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": "openai",
        "backend": "openai",
        "label": f"{run.run.experiment}/{run.run.label}",
        "model_id": run.model,
        "tokenizer_id": run.model,
        "num_prompts": len(requests),
        **{f"harness_{key}": value for key, value in run.metadata.items()},
        "request_rate": None,
        "burstiness": None,
        "max_concurrency": None,
        "duration": run.span_s,
        "completed": len(answered),
        "failed": len(requests) - len(answered),
        "total_input_tokens": run.prompt_tokens,
        "total_output_tokens": run.output_tokens,
        "request_throughput": run.rate("requests_per_s") or 0.0,
        "request_goodput": run.rate("goodput_per_s"),
        "output_throughput": run.rate("tokens_per_s") or 0.0,
        "total_token_throughput": (run.prompt_tokens + run.output_tokens) / run.span_s if run.span_s else 0.0,
        "input_lens": [request.prompt_tokens for request in requests],
        "output_lens": [request.output_tokens if request.is_answered else 0 for request in requests],
        "ttfts": [(request.ttft_ns or 0.0) / NS_PER_S for request in requests],
        "itls": [(request.itl_ns / NS_PER_S).tolist() for request in requests],
        "latencies": [(request.e2e_ns or 0.0) / NS_PER_S for request in requests],
        "start_times": [(request.sent_ns - run.start_ns) / NS_PER_S for request in requests],
        "queue_times": [(request.sent_ns - request.due_ns) / NS_PER_S for request in requests],
        "generated_texts": [""] * len(requests),
        "errors": ["" if request.is_answered else "aborted by the client, as planned" for request in requests],
        "max_concurrent_requests": _most_at_once(requests),
        **_summaries(run),
    }


def _summaries(run: MeasuredRun) -> dict[str, float]:
    summaries: dict[str, float] = {}
    for name, attribute in (("ttft", "ttft_ns"), ("tpot", "tpot_ns"), ("itl", "itl_ns"), ("e2el", "e2e_ns")):
        if (known := run.over_answered(attribute, NS_PER_MS)) is not None:
            summaries |= {
                f"mean_{name}_ms": known.mean,
                f"median_{name}_ms": known.at(0.5),
                f"std_{name}_ms": known.std,
                f"p90_{name}_ms": known.at(0.9),
                f"p99_{name}_ms": known.at(0.99),
            }
    return summaries


def _most_at_once(requests: list[MeasuredRequest]) -> int:
    """The most requests in flight at one instant."""
    changes = sorted(change for request in requests for change in ((request.sent_ns, 1), (request.done_ns, -1)))
    return int(np.cumsum([change for _, change in changes]).max()) if changes else 0


FORMAT = Format("vllm-bench", NO_ROOM, {"result.json": result_file})
