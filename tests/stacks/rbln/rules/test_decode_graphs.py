"""Decode graphs of vllm-rbln's native path are those that its own runner makes, where the twin has it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.extras.twin.environment import TwinEnvironment
from harness.stacks.rbln.rules.decode_graphs import decode_queries
from tests.support.command_line import harness
from tests.support.vllm_graphs import cut_out

BUCKETS = (1, 2, 4, 8)


@pytest.mark.parametrize("twin", ["0.12.0", "0.12.1a8"], indirect=True)
def test_each_size_is_compiled_for_each_query_length_of_the_method(twin: TwinEnvironment) -> None:
    (file,) = twin.folder.glob("lib/python3*/site-packages/vllm_rbln/v1/worker/rbln_model_runner.py")
    runner = cut_out(file, "RBLNModelRunner", ("uses_fixed_decode_window", "run_model_graphs"), {})
    for method in ("ngram", "suffix", "medusa", "eagle", "eagle3", "mtp", "dflash", None):
        made: list[tuple[int, int]] = []

        def dummy_run(num_requests: int, query: int, is_prefill: bool, made: Any = made) -> None:
            if not is_prefill:
                made.append((num_requests, query))

        runner(
            speculative_config=method and SimpleNamespace(method=method, num_speculative_tokens=3),
            bucketing_manager=SimpleNamespace(decode_batch_buckets=BUCKETS),
            max_num_tokens=128,
            specialized_moe_decode=False,
            _dummy_run=dummy_run,
        ).run_model_graphs()
        queries = decode_queries(method, 3 if method else 0)
        assert made == [(size, query) for size in BUCKETS for query in queries], method


def test_the_table_counts_the_graphs_of_a_method_with_and_without_drafts() -> None:
    words = ("server", "sizes", "demo", "--set", "num_speculative_tokens=3", "--set", "method=ngram")
    done = harness(*words)
    assert done.returncode == 0, done.stderr
    assert "vllm-rbln, 4 sizes in requests, 8 decode graphs" in done.stdout
    assert "tokens, 1 a request  tokens, 4 a request" in done.stdout
    folded = " ".join(done.stdout.split())
    assert "about 9 min 54 s by the model of Qwen3-4B on 4 NPUs, whose native path was never timed" in folded
    eagle = harness(*words[:-1], "method=eagle3").stdout
    assert "4 sizes in requests, 4 decode graphs" in eagle
    assert "to compile them: about 5 min 49 s by the model" in eagle
