"""The harness's router as a process: what it passes on, what it says of who answered, and runs on one that runs."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx
import numpy as np
import pytest

from harness.clock import MonotonicClock
from harness.extras.replicas.figures import figures_of_sealed
from harness.extras.replicas.router import Door, keys_of
from harness.judge.analysis import run_figures
from harness.judge.analysis.logs.core_requests import engines_of
from harness.measure.records import layout
from harness.measure.server.process import free_port
from harness.model.plan.blocks import token_block_keys
from harness.runner import run_experiment
from tests.runner.backends.test_attached import attached
from tests.support.emulator_process import Emulator, end, start_ready

live = pytest.mark.live


def started(folder: Path, urls: list[str], policy: str) -> tuple[subprocess.Popen[bytes], str]:
    """A router that answers, and its address."""
    door = Door("127.0.0.1", free_port(), tuple(urls), policy, "X-Session-Id", str(folder / layout.ROUTED))
    config = folder / f"{policy}.json"
    config.write_text(json.dumps(door._asdict()))
    process = subprocess.Popen([sys.executable, "-m", "harness.extras.replicas.router", str(config)])
    clock = MonotonicClock()
    give_up_ns = clock.now_ns() + 30 * 10**9
    while clock.now_ns() < give_up_ns and process.poll() is None:
        with closing(socket.socket()) as probe:
            if probe.connect_ex((door.host, door.port)) == 0:
                return process, f"http://{door.host}:{door.port}"
    raise AssertionError("the router does not listen")


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Emulator]]:
    both = [start_ready(tmp_path_factory.mktemp(f"server{number}"), time_scale=4.0) for number in range(2)]
    yield both
    for each in both:
        end(each)


@pytest.fixture
def router(replicas: list[Emulator], tmp_path: Path) -> Iterator[str]:
    process, url = started(tmp_path, [each.address for each in replicas], "session-affinity")
    yield url
    process.terminate()
    assert process.wait(20) == 0


@live
def test_a_session_stays_where_its_first_request_went_and_the_answer_says_where(router: str) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 2}
    with httpx.Client(base_url=router, timeout=30) as client:
        answers = [
            client.post("/v1/completions", json=body, headers={"X-Session-Id": name}) for name in ("a", "b", "a", "b")
        ]
        assert [answer.status_code for answer in answers] == [200] * 4
        places = [answer.headers["X-Replica"] for answer in answers]
        assert places[:2] == places[2:]
        assert set(places) == {"0", "1"}
        assert client.get("/v1/models").json()["object"] == "list"
        wrong = client.post("/v1/completions", json={"prompt": 5})
        assert wrong.status_code == 400
        assert client.get("/nowhere").status_code == 404
        events = client.post("/v1/completions", json={**body, "stream": True}).text
        assert events.endswith("data: [DONE]\n\n")


@live
def test_a_replica_that_does_not_answer_is_an_error_of_the_request(tmp_path: Path) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    process, url = started(tmp_path, [nobody, nobody], "round-robin")
    answer = httpx.post(f"{url}/v1/completions", json={"prompt": [1], "max_tokens": 1}, timeout=30)
    process.terminate()
    assert answer.status_code == 502
    assert "replica 0 does not answer" in answer.json()["error"]["message"]
    assert process.wait(20) == 0
    lines = [json.loads(line) for line in (tmp_path / layout.ROUTED).read_text().splitlines()]
    assert [line[1] for line in lines] == ["route", "done"]


@live
def test_a_router_that_runs_already_is_measured_and_its_header_tells_who_answered(
    router: str, replicas: list[Emulator], tmp_path: Path
) -> None:
    addresses = tuple(each.address for each in replicas)
    server = {"url": router, "replica_urls": addresses, "replica_header": "X-Replica"}
    spec = attached(router, server=server, workload={"num_sessions": 4}, condition=[{"name": "base"}])
    (run,) = run_experiment(spec, runs_root=tmp_path).runs
    assert run.is_valid, run.invalid_reasons
    served = engines_of(run)
    assert len(served) == run.table("requests").num_rows
    assert {*served.values()} == {0, 1}
    labels = run.table("metrics")["labels"].to_pylist()
    assert any('replica="0"' in text for text in labels)
    assert any('replica="1"' in text for text in labels)
    figures = run_figures(run)
    assert figures.a is None
    assert figures.b_ns > 0


@pytest.mark.same_everywhere
def test_keys_of_a_prompt_name_its_blocks() -> None:
    tokens = list(range(300))
    expected = token_block_keys(np.array(tokens, dtype=np.int32)).tolist()
    assert keys_of(json.dumps({"prompt": tokens}).encode()) == expected
    text = "agents " * 400
    longer = keys_of(json.dumps({"prompt": text + "more"}).encode())
    assert len(longer) == len(text) // 512
    assert keys_of(json.dumps({"prompt": text}).encode()) == longer
    assert keys_of(json.dumps({"messages": [{"role": "user", "content": text}]}).encode())
    for broken in (b"", b"[1, 2]", b"{", b'{"prompt": 5}', b"\xff"):
        assert keys_of(broken) == []


@live
@pytest.mark.parametrize("names_replicas", [True, False])
def test_replicas_that_run_already_have_their_cost_from_their_step_logs(tmp_path: Path, names_replicas: bool) -> None:
    paged = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "num_gpu_blocks": 600}
    both = [
        start_ready(tmp_path, server=paged, time_scale=1.0, step_log_path=str(tmp_path / f"steps-{number}.jsonl"))
        for number in range(2)
    ]
    addresses = tuple(each.address for each in both)
    process, url = started(tmp_path, list(addresses), "round-robin")
    try:
        server = {
            "url": url,
            "replica_urls": addresses,
            "step_log": str(tmp_path / "steps-{replica}.jsonl"),
            "cost_model": "emulated-gpu",
            **({"replica_header": "X-Replica"} if names_replicas else {}),
        }
        spec = attached(url, server=server, workload={"num_sessions": 4}, condition=[{"name": "base"}])
        (run,) = run_experiment(spec, runs_root=tmp_path / "runs").require_valid().runs
    finally:
        process.terminate()
        process.wait(20)
        for each in both:
            end(each)
    codes = {finding.code: finding.severity for finding in run.manifest.findings}
    if not names_replicas:
        # The step log of an emulator names no request, and the counters of two busy replicas tell nothing.
        assert codes["replica-unknown"] == "warning"
        assert (engines_of(run), run_figures(run).a) == ({}, None)
        return
    assert "replica-unknown" not in codes
    assert Counter(engines_of(run).values()) == {0: 4, 1: 4}
    assert all(seconds > 0 for seconds in figures_of_sealed(run).device_s)
    assert run_figures(run).a is not None
