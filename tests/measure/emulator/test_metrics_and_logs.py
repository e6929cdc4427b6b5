"""What the server says about itself: metrics, log lines, step trace and answers agree with each other."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from harness.model.engine import EngineConfig, Scheduler, load_cost_model
from harness.model.engine.core import EngineCore, EngineRequest
from harness.model.plan.blocks import token_block_keys
from tests.support.emulator_process import Emulator, Start
from tests.support.processes import comes_true

pytestmark = pytest.mark.live

VLLM_FAMILIES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:cache_config_info": "gauge",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:num_preemptions": "counter",
    "vllm:prompt_tokens": "counter",
    "vllm:prompt_tokens_by_source": "counter",
    "vllm:prompt_tokens_cached": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:request_success": "counter",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
}
DEFAULT_LINE = re.compile(
    r"\((APIServer|EngineCore) pid=\d+\) (?:INFO:     |(?:\[vllm-rbln\] )?(?:DEBUG|INFO|WARNING) "
    r"\d\d-\d\d \d\d:\d\d:\d\d \[[a-z_0-9./]+\.py:\d+\] ).+"
)
PRECISE_LINE = re.compile(r"(?:INFO:     |\d+\.\d{6} \d+ (?:DEBUG|INFO|WARNING) [a-z_.0-9]+ ).+")


def survival(server: Emulator, num_background: int) -> int:
    """The survival experiment, one request at a time; cached tokens of the target's re-arrival."""
    target = list(range(1000, 3000))
    answer = server.complete(target, max_tokens=8, return_token_ids=True)["choices"][0]["token_ids"]
    for index in range(num_background):
        start = 10_000 + 2000 * index
        server.complete(list(range(start, start + 2000)), max_tokens=8)
    details = server.complete([*target, *answer], max_tokens=8)["usage"]["prompt_tokens_details"]
    return 0 if details is None else details["cached_tokens"]


def test_metric_families_have_vllms_names_and_types(emulator: Emulator) -> None:
    families = {
        family.name: family.type for family in text_string_to_metric_families(emulator.client.get("/metrics").text)
    }
    assert {name: families.get(name) for name in VLLM_FAMILIES} == VLLM_FAMILIES


def test_metrics_log_and_answers_agree_when_a_slot_is_lost(start_emulator: Start) -> None:
    # 7 background requests on 8 slots: the target's slot is gone, its hashes are not (a false hit).
    server = start_emulator()
    assert survival(server, 7) == 0
    assert server.metric("vllm:prompt_tokens_cached_total") == 0
    assert server.metric("vllm:prefix_cache_hits_total") == 1920
    assert server.metric("vllm:prompt_tokens_total") == 8 * 2000 + 2008
    assert server.metric("vllm:prompt_tokens_by_source_total", source="local_compute") == 8 * 2000 + 2008
    assert server.metric("vllm:generation_tokens_total") == 9 * 8
    assert server.metric("vllm:request_success_total", finished_reason="length") == 9
    assert server.metric("vllm:iteration_tokens_total_count") == 9 * 8
    assert server.metric("vllm:request_prefill_kv_computed_tokens_sum") == 8 * 2000 + 2008
    assert server.metric("vllm:cache_config_info", num_gpu_blocks="1026", block_size="128") == 1
    assert server.stop() == 0
    assert server.log.count("[PFX] [EVICTION]") == 2
    assert "[PFX] [CACHE-PARTIAL]" in server.log
    assert "REUSED=0/1920 tokens (0.0%) | MISSED=1920 tokens (100.0%)" in server.log


def send_together(server: Emulator, bodies: list[dict[str, Any]]) -> None:
    threads = [
        threading.Thread(target=server.client.post, args=("/v1/completions",), kwargs={"json": body}) for body in bodies
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_bucket_lines_are_the_decode_steps_of_the_trace(start_emulator: Start) -> None:
    server = start_emulator(server={"max_num_seqs": 4, "decode_buckets": [1, 4]})
    bodies: list[dict[str, Any]] = [
        {"prompt": [1000 * n + place for place in range(50)], "max_tokens": 5 + n} for n in range(1, 7)
    ]
    send_together(server, bodies)
    assert server.stop() == 0
    logged = re.findall(r"\[BUCKET\] request_nums=(\d+) padded_batch_size=(\d+)", server.log)
    steps = [(str(step["n"]), str(step["b"])) for step in server.trace if step["kind"] == "DECODE"]
    assert logged == steps
    assert sum(step["n"] for step in server.trace if step["kind"] == "DECODE") == sum(
        body["max_tokens"] - 1 for body in bodies
    )
    assert sum(step["kind"] == "PREFILL" for step in server.trace) == 6


def test_steps_follow_each_other_without_a_gap_while_there_is_work(start_emulator: Start) -> None:
    server = start_emulator()
    # The first answer lasts until the others have come.
    send_together(server, [{"prompt": [1000 + n] * 40, "max_tokens": 30 if n else 2000} for n in range(8)])
    assert server.stop() == 0
    steps = [step for step in server.trace if step["kind"] in ("PREFILL", "DECODE")]
    stalls = sum(step["kind"] == "STALL" for step in server.trace)
    gaps = sum(after["start_ns"] != before["start_ns"] + before["duration_ns"] for before, after in pairwise(steps))
    assert gaps == stalls
    assert all(step["emitted_ns"] >= step["woken_ns"] >= step["start_ns"] + step["duration_ns"] for step in steps)


def test_default_log_lines_have_the_real_stacks_head(start_emulator: Start) -> None:
    server = start_emulator(log_requests=True)
    server.complete("x", max_tokens=2, request_id="abc")
    assert server.stop() == 0
    lines = server.log.splitlines()
    assert all(DEFAULT_LINE.fullmatch(line) for line in lines), lines
    assert "Received request cmpl-abc-0: params: " in server.log
    assert re.search(r"Added request cmpl-abc-0-[0-9a-f]{8}\.", server.log)
    assert re.search(
        r"\(EngineCore pid=\d+\) \[vllm-rbln\] DEBUG .* "
        r"\[vllm_rbln/\.\.\./prefix_cache_manager/optimum_prefix_cache_manager\.py:308\] \[PFX\] \[ALLOC\] "
        r"REQUEST=cmpl-abc-0-[0-9a-f]{8} \| OB_COUNT=1 OB=\[0\] \| IB_COUNT=1 IB=\[1\]\n",
        server.log,
    )


def test_precise_log_lines_carry_microseconds_pid_and_logger(start_emulator: Start) -> None:
    server = start_emulator(log_format="precise")
    server.complete("x", max_tokens=2)
    assert server.stop() == 0
    assert all(PRECISE_LINE.fullmatch(line) for line in server.log.splitlines())
    assert re.search(
        r"\d+\.\d{6} \d+ DEBUG vllm_rbln\.model_executor\.models\.optimum\.model_base "
        r"\[BUCKET\] request_nums=1 padded_batch_size=1\n",
        server.log,
    )


def test_info_level_hides_the_observed_decisions(start_emulator: Start) -> None:
    server = start_emulator("--log-level", "INFO")
    server.complete("x", max_tokens=2)
    assert server.stop() == 0
    assert "[PFX]" not in server.log
    assert "[BUCKET]" not in server.log
    assert "Application startup complete." in server.log


def test_live_steps_are_a_function_of_the_arrivals_alone(start_emulator: Start) -> None:
    server = start_emulator(server={"max_num_seqs": 3, "decode_buckets": [1, 2, 3]})
    prompts = {f"request-{n}": [1000 * n + place for place in range(100 + 40 * n)] for n in range(1, 9)}
    bodies: list[dict[str, Any]] = [
        {"prompt": prompts[name], "max_tokens": 3 + index, "request_id": name} for index, name in enumerate(prompts)
    ]
    with ThreadPoolExecutor(4) as pool:
        # Each prompt twice: the second time it may find its slot alive, or gone.
        answers = list(pool.map(lambda body: server.complete(**body), bodies * 2))
    assert {answer["usage"]["completion_tokens"] for answer in answers} == set(range(3, 11))
    assert server.stop() == 0
    again = EngineCore(Scheduler(EngineConfig(3, (1, 2, 3), 3), load_cost_model("paper")))
    for record in server.trace:
        if record["kind"] == "STALL":
            continue
        for name, arrival_ns in record["arrivals"]:
            max_tokens = 2 + int(name.split("-")[2])
            again.submit(same_request(again, name, prompts[name[5:-2]], max_tokens, arrival_ns))
        start = again.start_step(record["start_ns"])
        step = start.step
        assert [request.external_id for request in start.requests] == record["requests"]
        assert (step.kind, step.num_seqs, step.bucket) == (record["kind"], record["n"], record["b"])
        assert (step.cached_tokens, step.duration_ns) == (record["cached_tokens"], record["duration_ns"])
        again.end_step()
    assert not again.has_work


def same_request(core: EngineCore, name: str, prompt: list[int], max_tokens: int, arrival_ns: int) -> EngineRequest:
    tokens = np.asarray(prompt, dtype=np.int32)
    request = EngineRequest(core.new_handle(), name, name, tokens, max_tokens, token_block_keys(tokens), max_tokens)
    request.arrival_ns = arrival_ns
    return request


def test_the_periodic_line_comes_every_ten_model_seconds(start_emulator: Start) -> None:
    server = start_emulator()
    server.complete([7] * 1000, max_tokens=200)
    assert comes_true(lambda: "Engine 000: " in server.log_so_far)
    assert server.stop() == 0
    assert re.search(
        r"\[v1/metrics/loggers\.py:271\] Engine 000: Avg prompt throughput: \d+\.\d tokens/s, "
        r"Avg generation throughput: \d+\.\d tokens/s, Running: \d reqs, Waiting: 0 reqs, "
        r"CPU KV cache usage: \d\.\d%, Prefix cache hit rate: 0\.0%\n",
        server.log,
    )
