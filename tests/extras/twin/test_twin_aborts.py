"""Clients that leave while the real stack serves others: the engine frees, queues and evicts as the stack does.

Also requests with two choices, which the stack runs as two. Skipped where the twin is not installed.
"""

from __future__ import annotations

import json
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from harness.extras.twin.backend import TwinBackend
from harness.extras.twin.environment import TwinEnvironment
from harness.model.engine import EngineConfig
from harness.model.spec import ServerSpec
from harness.runner.run import LaunchOptions
from tests.support.processes import serving
from tests.support.twin_follow import Asked, follow, log_messages

pytestmark = [pytest.mark.live, pytest.mark.timeout(600)]

SERVER = ServerSpec(
    max_num_seqs=4, decode_buckets=(1, 2, 4), kv_slots=4, start_timeout_s=300.0, stop_grace_s=10.0, patch="overlay"
)
NUM_REQUESTS, NUM_CLIENTS = 24, 10


def request_of(number: int) -> tuple[Asked, int, int]:
    """What client request ``number`` asks for, of how many choices, and after how many events its client leaves (0:
    never)."""
    chosen = random.Random(number)
    # Three families of prompts, so that some is reused.
    prompt = [300 + (1000 * (number % 3) + place) % 1500 for place in range(chosen.randint(100, 1500))]
    leaves = chosen.randint(1, 25) if number % 3 == 0 else 0
    return Asked(prompt, chosen.randint(1, 60)), 2 if number % 5 == 4 else 1, leaves


def send(url: str, model: str, number: int) -> None:
    """Read the answer's events, or leave in the middle."""
    asked, num_choices, leaves = request_of(number)
    body = {"model": model, "prompt": asked.prompt, "max_tokens": asked.max_tokens, "n": num_choices}
    body |= {"temperature": 1, "ignore_eos": True, "stream": True}
    headers = {"X-Request-Id": f"client-{number}-"}
    with httpx.stream("POST", url, json=body, headers=headers, timeout=300) as answer:
        assert answer.status_code == 200
        events = (line for line in answer.iter_lines() if line)
        for count, _ in enumerate(events, start=1):
            if count == leaves:
                return


def test_the_engine_follows_a_server_whose_clients_leave(twin: TwinEnvironment, tmp_path: Path) -> None:
    del twin
    launch = TwinBackend().launch(SERVER, LaunchOptions(0, tmp_path))
    with serving(launch, tmp_path) as process:
        url = f"http://{launch.host}:{launch.port}/v1/completions"
        with ThreadPoolExecutor(NUM_CLIENTS) as clients:
            for job in [clients.submit(send, url, launch.model, number) for number in range(NUM_REQUESTS)]:
                job.result()
        process.stop(grace_s=SERVER.stop_grace_s)

    trace = [json.loads(line) for line in (tmp_path / "device_trace.jsonl").read_text().splitlines()]
    messages = log_messages((tmp_path / "server.log").read_text())
    followed = follow(trace, messages, EngineConfig.from_server(SERVER), asked_by)

    assert not followed.difference, followed.difference
    assert followed.arrivals == sum(request_of(number)[1] for number in range(NUM_REQUESTS))
    assert followed.aborts > 0
    assert followed.queued_admissions > 0
    assert followed.reuses > 0
    assert followed.evictions > 0
    print(f"{followed.text()}, compared and equal")


def asked_by(engine_id: str) -> Asked:
    """What the request behind an engine's id asked for."""
    match = re.search(r"cmpl-client-(\d+)--", engine_id)
    assert match, engine_id
    return request_of(int(match[1]))[0]
