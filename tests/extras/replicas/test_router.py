"""The harness's router as a process: what it passes on, what it says of who answered, and runs on one that runs."""

from __future__ import annotations

import json
import socket
import subprocess
from collections import Counter
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest

from harness.analysis import run_figures
from harness.analysis.logs.replicas import engines_of
from harness.children import own_command
from harness.extras.replicas.figures import figures_of_sealed
from harness.extras.replicas.router import RouterConfig, keys_of
from harness.measure.records import layout
from harness.measure.server.process import free_port
from harness.model.plan.blocks import token_block_keys
from harness.runner import run_experiment
from tests.runner.backends.test_attached import attached
from tests.support.emulator_process import Emulator, end, start_ready
from tests.support.processes import NO_PORT, WITHIN_S, comes_true

live = pytest.mark.live


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def routing(folder: Path, urls: list[str], policy: str) -> Generator[str]:
    """The address of a router that answers; it ends with the block, and in order."""
    started_with = RouterConfig(
        "127.0.0.1", free_port(), tuple(urls), policy, "X-Session-Id", str(folder / layout.ROUTED)
    )
    config = folder / f"{policy}.json"
    config.write_text(json.dumps(started_with._asdict()))
    process = subprocess.Popen(own_command("harness.extras.replicas.router:main", config))
    try:
        assert comes_true(lambda: process.poll() is not None or listens(started_with.port))
        assert process.poll() is None, "the router ended by itself"
        yield f"http://{started_with.host}:{started_with.port}"
    finally:
        process.terminate()
        code = process.wait(WITHIN_S)
    assert code == 0


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the replicas' step logs."""
    return tmp_path_factory.mktemp("steps")


@pytest.fixture(scope="module")
def replicas(steps: Path) -> Iterator[list[Emulator]]:
    paged = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "num_gpu_blocks": 600}
    both = [
        start_ready(
            steps / f"server-{number}", server=paged, time_scale=1.0, step_log_path=str(steps / f"steps-{number}.jsonl")
        )
        for number in range(2)
    ]
    yield both
    for each in both:
        end(each)


@pytest.fixture(scope="module")
def router(replicas: list[Emulator], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    addresses = [each.address for each in replicas]
    with routing(tmp_path_factory.mktemp("router"), addresses, "session-affinity") as url:
        yield url


@pytest.fixture(scope="module")
def in_turns(replicas: list[Emulator], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    addresses = [each.address for each in replicas]
    with routing(tmp_path_factory.mktemp("router"), addresses, "round-robin") as url:
        yield url


@live
def test_a_session_stays_where_its_first_request_went_and_the_answer_says_where(router: str) -> None:
    body = {"prompt": [1, 2, 3], "max_tokens": 2}
    with httpx.Client(base_url=router, timeout=WITHIN_S) as client:
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
    nobody = f"http://127.0.0.1:{NO_PORT}"
    with routing(tmp_path, [nobody, nobody], "round-robin") as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": [1], "max_tokens": 1}, timeout=WITHIN_S)
    assert answer.status_code == 502
    assert "replica 0 does not answer" in answer.json()["error"]["message"]
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
def test_replicas_that_run_already_have_their_cost_from_their_step_logs(
    in_turns: str, replicas: list[Emulator], steps: Path, tmp_path: Path, names_replicas: bool
) -> None:
    server = {
        "url": in_turns,
        "replica_urls": tuple(each.address for each in replicas),
        "step_log": str(steps / "steps-{replica}.jsonl"),
        "cost_model": "emulated-gpu",
        **({"replica_header": "X-Replica"} if names_replicas else {}),
    }
    spec = attached(in_turns, server=server, workload={"num_sessions": 4}, condition=[{"name": "base"}])
    (run,) = run_experiment(spec, runs_root=tmp_path).require_valid().runs
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


@live
def test_swapped_names_are_noticed_where_each_replica_serves_as_many_requests(
    in_turns: str, replicas: list[Emulator], tmp_path: Path
) -> None:
    swapped = [each.address for each in reversed(replicas)]
    server = {"url": in_turns, "replica_urls": swapped, "replica_header": "X-Replica"}
    lengths = {"distribution": "uniform", "low": 20, "high": 400}
    workload = {"num_sessions": 2, "prompt_tokens": lengths, "generate_tokens": {**lengths, "high": 60}}
    spec = attached(in_turns, server=server, workload=workload, condition=[{"name": "base"}])
    (run,) = run_experiment(spec, runs_root=tmp_path).runs
    (reason,) = run.invalid_reasons
    assert reason.startswith("replicas-disagree: prompt tokens by replica: "), reason


@live
def test_replicas_that_run_already_with_other_settings_are_told_apart(
    router: str, replicas: list[Emulator], tmp_path: Path
) -> None:
    larger = {"rules": "vllm-paged", "cost_model": "emulated-gpu", "num_gpu_blocks": 900, "max_num_seqs": 4}
    other = start_ready(tmp_path / "other", server=larger, time_scale=1.0)
    try:
        server = {"url": router, "replica_urls": (replicas[0].address, other.address)}
        spec = attached(router, server=server, workload={"num_sessions": 1}, condition=[{"name": "base"}])
        (run,) = run_experiment(spec, runs_root=tmp_path / "runs").runs
    finally:
        end(other)
    reasons = {reason.partition(":")[0]: reason for reason in run.invalid_reasons}
    assert "replica 1 has" in reasons["replicas-differ"]
    assert "max_num_seqs 4 for 8" in reasons["replicas-differ"]
