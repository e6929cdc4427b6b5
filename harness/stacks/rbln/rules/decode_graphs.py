"""Decode graphs of vllm-rbln's native path: each compiled size once for each number of tokens a request.

Never run on a device by this project. Source: vllm-rbln 0.12.0 and 0.12.1a8, v1/worker/rbln_model_runner.py
(run_model_graphs, uses_fixed_decode_window, _prepare_inputs).
"""

from __future__ import annotations

FIXED_WINDOW = frozenset({"eagle", "eagle3", "mtp"})
"""Ways to draft with which every decode step computes all tokens of a request, whether or not it has drafts."""


def decode_queries(method: str | None, num_drafts: int) -> tuple[int, ...]:
    """Tokens of each request in a decode step, ascending: of a step without drafts, and of one with any."""
    if not num_drafts:
        return (1,)
    return (1 + num_drafts,) if method in FIXED_WINDOW else (1, 1 + num_drafts)
