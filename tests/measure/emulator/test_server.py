"""Start, stop and wrong behaviour on request: exit codes, one clear line, nothing left hanging."""

from __future__ import annotations

import gzip
import re
import signal
import socket
import threading
from pathlib import Path

import httpx
import pytest

from benchmarks.emulator import wait_for_address
from harness.analysis.logs.parse import ParseCounts, parse_log
from harness.errors import SpecError
from harness.measure.emulator.config import config_from_arguments
from harness.stacks.rbln.rules.log_grammar import KvCopyFailedEvent
from tests.support.emulator_process import SCALE, Emulator, Start, run_to_exit, start_forked_process, start_process
from tests.support.processes import WITHIN_S, comes_true

pytestmark = pytest.mark.live
PROMPT = {"prompt": "go on", "max_tokens": 4000}


def wait_for(server: Emulator, text: str) -> None:
    """Return when the server's log has ``text``."""
    assert comes_true(lambda: text in server.log_so_far or server.process.poll() is not None)
    assert text in server.log_so_far, server.log_so_far


def in_background(server: Emulator, **body: object) -> tuple[threading.Thread, list[httpx.Response | Exception]]:
    """Send a completion from a thread; its answer arrives in the list."""
    answers: list[httpx.Response | Exception] = []

    def send() -> None:
        try:
            answers.append(server.client.post("/v1/completions", json={**PROMPT, **body}))
        except httpx.HTTPError as error:
            answers.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    return thread, answers


def test_sigterm_without_a_timeout_aborts_what_runs_and_exits_0(start_emulator: Start) -> None:
    server = start_emulator(time_scale=1.0)
    thread, answers = in_background(server)
    wait_for(server, "[BUCKET]")
    assert server.stop() == 0
    thread.join()
    assert answers[0].json()["choices"][0]["finish_reason"] == "abort"
    for line in ("Shutdown initiated (timeout=0)", "Aborting 1 requests", "Shutdown complete"):
        assert line in server.log


def test_sigterm_with_a_timeout_drains_what_runs(start_emulator: Start) -> None:
    server = start_emulator("--shutdown-timeout", "30")
    thread, answers = in_background(server, max_tokens=300)
    wait_for(server, "[BUCKET]")
    assert server.stop() == 0
    thread.join()
    assert answers[0].json()["usage"]["completion_tokens"] == 300
    assert "Draining 1 in-flight requests (timeout=30s)" in server.log


def test_a_second_signal_ends_at_once(start_emulator: Start) -> None:
    server = start_emulator("--shutdown-timeout", "600", "--fault", "hang-after-steps=3")
    thread, _ = in_background(server)
    wait_for(server, "[BUCKET]")
    server.process.terminate()
    wait_for(server, "Draining")
    server.process.terminate()
    assert server.process.wait(WITHIN_S) == 128 + signal.SIGTERM
    thread.join()


def test_ctrl_c_is_a_normal_stop(tmp_path: Path) -> None:
    process, log_path = start_process(tmp_path)
    wait_for_address(process, log_path)
    process.send_signal(signal.SIGINT)
    assert process.wait(WITHIN_S) == 0


def test_a_client_that_goes_away_frees_its_slot(start_emulator: Start) -> None:
    server = start_emulator(time_scale=1.0)
    with server.client.stream("POST", "/v1/completions", json={**PROMPT, "stream": True}) as answer:
        next(answer.iter_lines())
    wait_for(server, "[PFX] [FREE-REQUEST]")
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:request_success_total", finished_reason="abort") == 0
    assert server.complete("still here", max_tokens=1)["usage"]["completion_tokens"] == 1


def test_a_busy_port_is_one_line_and_a_failure(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, text = run_to_exit(tmp_path, "--port", str(port))
    assert code == 1
    assert re.fullmatch(
        rf"harness server emulator: 127\.0\.0\.1:{port}: cannot bind \(Address already in use\)\. .*\n", text
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--decode-buckets", "1,2"], "max_num_seqs"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--time-scale", "0"], "time_scale"),
        (["--fault", "explode"], "unknown fault 'explode'"),
        (["--config", "no-such-folder/config.json"], "no-such-folder/config.json"),
    ],
)
def test_a_bad_flag_is_named(flags: list[str], named: str) -> None:
    with pytest.raises(SpecError, match=re.escape(named)):
        config_from_arguments(flags)


def test_asynchronous_scheduling_is_a_switch_as_of_vllm() -> None:
    flags = ["--rules", "vllm-paged"]
    given = [config_from_arguments([*flags, flag]) for flag in ("--async-scheduling", "--no-async-scheduling")]
    assert [config.server.async_scheduling for config in given] == [True, False]


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--decode-buckets", "1,2,x"], "server.decode_buckets"),
        (["--cost-model", "no-such-model"], "no-such-model"),
        (["--trace", "no-such-folder/trace.jsonl"], "no-such-folder/trace.jsonl"),
    ],
)
def test_a_bad_configuration_is_one_line_that_names_it(tmp_path: Path, flags: list[str], named: str) -> None:
    code, text = run_to_exit(tmp_path, "--port", "0", *flags)
    assert code == 2
    assert named in text
    assert text.count("\n") == 1


def test_unknown_and_malformed_config_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    for content, named in (
        ('{"prot": 1}', "prot: unknown key"),
        ("{", "not valid JSON"),
        ("[]", "one JSON object"),
        ('{"server": 3}', "server"),
    ):
        path.write_text(content)
        with pytest.raises(SpecError, match=re.escape(named)):
            config_from_arguments(["--config", str(path)])


def test_a_server_that_hangs_still_answers_health(start_emulator: Start) -> None:
    server = start_emulator("--fault", "hang-after-steps=2")
    thread, _ = in_background(server)
    wait_for(server, "[BUCKET]")
    assert server.client.get("/health").status_code == 200
    assert server.stop() == 0
    thread.join()
    assert [step["kind"] for step in server.trace if step["kind"] != "STALL"] == ["PREFILL", "DECODE"]


def test_a_crash_on_request_is_logged_and_leaves_a_whole_trace(start_emulator: Start) -> None:
    server = start_emulator("--fault", "crash-after-steps=5")
    thread, answers = in_background(server)
    assert server.process.wait(WITHIN_S) == 1
    thread.join()
    assert isinstance(answers[0], httpx.HTTPError)
    assert "EngineCore encountered a fatal error." in server.log
    assert [step["index"] for step in server.trace if step["kind"] != "STALL"] == [0, 1, 2, 3]


def test_a_copy_that_fails_makes_a_full_prefill_that_only_the_log_tells_of(start_emulator: Start) -> None:
    server = start_emulator("--fault", "copy-fails-at=0")
    prompt = list(range(1000, 1300))
    first = server.complete(prompt, max_tokens=2, ignore_eos=True)
    again = server.complete(prompt, max_tokens=2, ignore_eos=True)
    # Every counter keeps the hit, and the answer is the one that a whole prefill gives.
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 256
    assert server.metric("vllm:prompt_tokens_cached_total") == 256
    assert again["choices"][0]["text"] == first["choices"][0]["text"]
    assert server.complete(prompt, max_tokens=2, ignore_eos=True)["usage"] == again["usage"]
    assert server.stop() == 0
    prefills = [step for step in server.trace if step["kind"] == "PREFILL"]
    assert [(step["cached_tokens"], step["computed_tokens"]) for step in prefills] == [(0, 300), (256, 300), (256, 44)]
    events = list(parse_log([server.log_path.read_bytes()], counts := ParseCounts()))
    (failed,) = [event for event in events if isinstance(event, KvCopyFailedEvent)]
    assert len(failed.request_ids) == 1
    assert counts.unread == 0


def test_before_0_12_a_copy_that_fails_ends_the_server(start_emulator: Start) -> None:
    server = start_emulator("--fault", "copy-fails-at=0", "--rules", "vendor-0.11.1")
    prompt = list(range(1000, 1300))
    server.complete(prompt, max_tokens=2)
    with pytest.raises(httpx.HTTPError):
        server.client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2})
    assert server.process.wait(WITHIN_S) == 1
    assert "KvCopyError" in server.log


def test_never_ready_never_listens_and_stops_when_told(tmp_path: Path) -> None:
    process, log_path = start_forked_process(tmp_path, "--fault", "never-ready")
    assert comes_true(lambda: "init engine" in log_path.read_text())
    assert "Starting vLLM server" not in log_path.read_text()
    process.terminate()
    assert process.wait(WITHIN_S) == 0


def test_a_server_that_starts_slowly_is_ready_and_early_stop_breaks_the_promise_of_min_tokens(
    start_emulator: Start,
) -> None:
    server = start_emulator("--fault", "slow-start-s=0.1", "--fault", "early-stop=3")
    answer = server.complete("x", max_tokens=10, min_tokens=10, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 7


def test_http_500_comes_at_the_rate_asked(start_emulator: Start) -> None:
    server = start_emulator("--fault", "http-500-rate=0.5", "--seed", "3")
    answers = [server.client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}) for _ in range(40)]
    failed = [answer for answer in answers if answer.status_code == 500]
    assert 5 < len(failed) < 35
    assert failed[0].json()["error"]["type"] == "InternalServerError"


def test_eos_comes_only_when_asked_for(start_emulator: Start) -> None:
    server = start_emulator("--eos-rate", "0.2")
    stopped = server.complete("x", max_tokens=500)
    assert stopped["choices"][0]["finish_reason"] == "stop"
    assert stopped["usage"]["completion_tokens"] < 500
    assert server.complete("x", max_tokens=50, ignore_eos=True)["usage"]["completion_tokens"] == 50


def test_scaled_time_is_model_time_in_metrics_and_trace(start_emulator: Start) -> None:
    server = start_emulator()
    server.complete("x", max_tokens=11)
    decode_s = server.metric("vllm:request_decode_time_seconds_sum")
    assert server.stop() == 0
    kinds = [step["kind"] for step in server.trace]
    decoding = server.trace[kinds.index("PREFILL") + 1 :]
    modelled_ns = sum(step["duration_ns"] for step in decoding if step["kind"] == "DECODE")
    # A stalled host moves the schedule. A stall after the last step moves nothing of this request.
    last = len(decoding) - kinds[::-1].index("DECODE")
    moved_ns = sum(step["moved_ns"] for step in decoding[:last] if step["kind"] == "STALL")
    assert SCALE > 1
    assert decode_s * 1e9 == pytest.approx(modelled_ns + moved_ns, abs=1e3)


def test_a_body_that_unpacks_to_a_gigabyte_is_refused_unpacked_by_nobody(start_emulator: Start) -> None:
    server = start_emulator()
    bomb = gzip.compress(b" " * (64 << 20), compresslevel=1)
    refused = server.client.post("/v1/completions", content=bomb, headers={"Content-Encoding": "gzip"})
    assert refused.status_code == 400
    assert server.client.get("/health").status_code == 200


@pytest.mark.same_everywhere
def test_a_connection_that_asks_nothing_is_closed_before_its_first_request_and_after_one(start_emulator: Start) -> None:
    url = start_emulator(idle_timeout_s=0.1).client.base_url
    for asks in (b"", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET /health HT"):
        with socket.create_connection((url.host, url.port or 0), timeout=WITHIN_S) as idle:
            idle.sendall(asks)
            while idle.recv(4096):
                pass
