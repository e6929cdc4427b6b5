"""Constructed samples of every file of steps, named after what their format was read from."""

from __future__ import annotations

import json

from harness.stacks.vllm.step_log import COLUMNS, FORMAT


def rbln_shape(n: int, b: int, *, query: int = 1, prefill: int = 0, idle: int = 0, route: str = "LOCAL") -> str:
    """A debug line of vllm-rbln 0.12.0's native path."""
    return (
        "DEBUG 11-23 10:00:00 [rbln_model_runner.py:3389] RBLN batch: dp_rank=0 "
        f"route={route} prefill={prefill} idle={idle} in=(num_reqs={n} query_len={query}) -> "
        f"(num_reqs_padded={b} query_len={query} num_tokens_padded=None)"
    )


def lines(*values: object) -> bytes:
    """Values as JSON lines."""
    return "".join(json.dumps(value) + "\n" for value in values).encode()


def vllm_step(at_ns: int, n: int, b: int, mode: str = "FULL") -> list[object]:
    """A decode step of vLLM's step log, format 1."""
    known = {"at_ns": at_ns, "running": n, "unpadded_tokens": n, "padded_tokens": b, "runtime_mode": mode}
    known |= {"generated_tokens": n, "prompt_tokens": 0, "logger_ns": 900}
    return [known.get(name) for name in COLUMNS]


VLLM_HEADER = {
    "vllm_step_log": FORMAT,
    "columns": COLUMNS,
    "vllm": "0.30.0",
    "absent": [],
    "effective": {"cudagraph_metrics": True, "cudagraph_mode": "FULL_AND_PIECEWISE"},
}
SAMPLES = {
    "vLLM 0.30.0": lines(VLLM_HEADER, vllm_step(1, 3, 4), vllm_step(2, 3, 4), vllm_step(3, 9, 9, "NONE")),
    "vllm-rbln 0.12.0, native": "\n".join(
        [
            "INFO 11-23 10:00:00 [api_server.py:1] started",
            rbln_shape(8, 8, idle=1),
            rbln_shape(1, 1, query=128, prefill=1),
            rbln_shape(3, 4),
            rbln_shape(5, 8),
            "DEBUG 11-23 10:00:01 [rbln_model_runner.py:3381] RBLN batch: dp_rank=1 route=ALL_IDLE -> nothing to run",
            "",
        ]
    ).encode(),
}
