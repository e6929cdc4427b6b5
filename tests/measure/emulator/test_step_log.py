"""An emulated server with paged KV memory: metrics, answers and its step log agree with each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from harness.extras.sessions.commands import replay_files
from harness.stacks.vllm.step_log import draft_figures, load_step_log
from tests.support.emulator_process import Emulator, Start
from tests.support.processes import comes_true

pytestmark = pytest.mark.live

SERVER = {
    "rules": "vllm-paged",
    "cost_model": "emulated-gpu",
    "max_num_seqs": 3,
    "decode_buckets": [1, 2],
    "slot_tokens": 2048,
    "num_gpu_blocks": 200,
    "max_num_batched_tokens": 256,
}


@pytest.fixture
def step_log(tmp_path: Path) -> Path:
    return tmp_path / "steps.jsonl"


@pytest.fixture
def server(start_emulator: Start, step_log: Path) -> Emulator:
    return start_emulator(server=SERVER, step_log_path=str(step_log))


def test_an_answer_is_reused_with_its_prompt_in_whole_blocks(server: Emulator) -> None:
    prompt = list(range(1000, 1100))
    answer = server.complete(prompt, max_tokens=60, ignore_eos=True, return_token_ids=True)["choices"][0]["token_ids"]

    again = server.complete([*prompt, *answer, 7, 8, 9], max_tokens=2, ignore_eos=True)

    # 159 tokens were computed: nine blocks of 16.
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 144
    assert server.metric("vllm:prefix_cache_hits_total") == 144
    assert server.metric("vllm:prefix_cache_queries_total") == 100 + 163
    assert server.metric("vllm:prompt_tokens_total") == 100 + 163
    assert server.metric("vllm:generation_tokens_total") == 62
    assert server.metric("vllm:cache_config_info", block_size="16", num_gpu_blocks="200") == 1


def test_its_step_log_is_read_as_that_of_a_real_server(server: Emulator, step_log: Path) -> None:
    def complete(user: int) -> None:
        server.complete(list(range(2000 * user + 1000, 2000 * user + 1600)), max_tokens=30, ignore_eos=True)

    with ThreadPoolExecutor(3) as users:
        list(users.map(complete, range(3)))
    assert server.stop() == 0

    log = load_step_log(step_log)

    assert (log.num_damaged, log.unseen) == (0, ())
    assert log.settings == {
        "max_num_seqs": 3,
        "slot_tokens": 2048,
        "decode_buckets": [1, 2],
        "prefix_caching": True,
        "num_gpu_blocks": 200,
        "block_size": 16,
        "max_num_batched_tokens": 256,
        "long_prefill_tokens": 0,
        "async_scheduling": False,
    }
    steps = log.steps.to_pylist()
    assert sum(step["generated_tokens"] for step in steps) == 90
    assert sum(step["context_tokens"] for step in steps) == sum(step["prompt_tokens"] for step in steps) == 1800
    assert max(step["unpadded_tokens"] for step in steps) <= 256
    assert {(step["n"], step["b"]) for step in log.decode_steps.to_pylist()} <= {(1, 1), (2, 2), (3, 3)}
    assert set(log.eager_by_n) <= {3}
    assert "[BUCKET]" not in server.log


def test_a_client_that_leaves_gives_its_blocks_back(server: Emulator) -> None:
    with server.client.stream(
        "POST", "/v1/completions", json={"prompt": list(range(500)), "max_tokens": 1500, "stream": True}
    ) as answer:
        next(answer.iter_lines())

    assert comes_true(lambda: not server.metric("vllm:num_requests_running"))
    assert server.complete([5] * 20, max_tokens=1)["usage"]["completion_tokens"] == 1
    assert server.metric("vllm:kv_cache_usage_perc") == 0


@pytest.mark.parametrize("is_async", [False, True])
def test_with_drafts_its_metrics_steps_and_sessions_agree_with_each_other_and_with_the_rules(
    start_emulator: Start, step_log: Path, is_async: bool
) -> None:
    drafts = {
        "num_speculative_tokens": 3,
        "speculative_method": "eagle3",
        "synthetic_acceptance_rates": [0.8, 0.6, 0.4],
    }
    sizes = {"decode_buckets": [4, 8], "async_scheduling": is_async}
    sessions = step_log.with_name("sessions.jsonl")
    files = {"step_log_path": str(step_log), "sessions_path": str(sessions)}
    server = start_emulator(server=SERVER | drafts | sizes, **files)

    def complete(user: int) -> None:
        prompt = list(range(2000 * user + 1000, 2000 * user + 1160))
        for _ in range(2):
            answer = server.complete(prompt, max_tokens=60, ignore_eos=True)
            assert answer["usage"]["completion_tokens"] == 60

    with ThreadPoolExecutor(3) as users:
        list(users.map(complete, range(3)))
    assert server.metric("vllm:generation_tokens_total") == 360
    counted = [
        server.metric(f"vllm:spec_decode_num_{name}_total") for name in ("drafts", "draft_tokens", "accepted_tokens")
    ]
    first = server.metric("vllm:spec_decode_num_accepted_tokens_per_pos_total", position="0")
    assert server.stop() == 0

    log = load_step_log(step_log)
    figures = draft_figures(log)
    assert [figures.num_drafts, figures.draft_tokens, figures.accepted_tokens] == counted
    assert figures.accepted_at[0] == first
    assert (log.num_damaged, log.unseen, log.acceptance) == (0, (), "synthetic")
    # What it recorded is what vLLM's rules decide, from the requests alone.
    found, _ = replay_files([sessions], step_log)
    assert (found.num_steps > 40, dict(found.kinds), found.num_free_differ) == (True, {}, 0)
