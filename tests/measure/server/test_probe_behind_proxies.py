"""Servers behind proxies, and servers of other forms: figures are valid, or a refusal or finding names the cause."""

from __future__ import annotations

import math
import shutil
import socket
import subprocess
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.analysis.serving import latencies
from harness.errors import HarnessError
from harness.measure.client.target import endpoint_of
from harness.measure.records.run import SealedRun
from harness.measure.records.store import RunStore
from harness.measure.server.probe import Needs, probe
from harness.measure.server.process import free_port
from harness.model.spec import ExperimentSpec, ServerSpec
from harness.runner import run_experiment
from tests.support.emulator_process import Emulator, end, start_ready
from tests.support.experiments import A_MINUTE_MS, SHORT_PROMPTS, one_condition
from tests.support.plain_server import PlainServer, plain_server
from tests.support.processes import NO_PORT

pytestmark = [pytest.mark.live, pytest.mark.same_everywhere]
KEY = "NAME_OF_A_KEY"
TOKENS = 16
# A third of the time in which the emulator makes an answer. A proxy that collects it holds its first token for nearly
# all of that; a client that a busy machine wakes late must not look like one.
HELD_MS = 40.0


def experiment(url: str, **keys: Any) -> ExperimentSpec:
    """One run of two sessions of two requests."""
    tokens = {"prompt_tokens": SHORT_PROMPTS, "generate_tokens": {"distribution": "fixed", "value": TOKENS}}
    workload, server = {**tokens, **keys.pop("workload", {})}, {"url": url, **keys.pop("server", {})}
    return one_condition("behind", "attached", workload=workload, server=server, **keys)


def one_run(root: Path, spec: ExperimentSpec) -> SealedRun:
    run_experiment(spec, runs_root=root)
    (run,) = RunStore(root).sealed("behind")
    return run


def codes(run: SealedRun, severity: str) -> set[str]:
    return {finding.code for finding in run.manifest.findings if finding.severity == severity}


# Answers have the shape that other servers and gateways were recorded to send, one token a step.
CREATED = 1_795_626_591
OF_TGI = {"id": "", "created": CREATED, "model": "org/model", "system_fingerprint": "3.0.1-sha"}
OF_LLAMA = {"created": CREATED, "model": "gpt-3.5-turbo", "system_fingerprint": "b6881-8b11deea4"}
TEXT, CHAT = ("/v1/completions",), ("/v1/chat/completions",)


def usage_of(prompt_tokens: int, count: int, **more: Any) -> dict[str, Any]:
    return {"completion_tokens": count, "prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + count, **more}


def litellm_text(name: str, prompt_tokens: int, count: int) -> list[dict[str, Any]]:
    """litellm 1.108.7 before a vLLM: the finish reason in a chunk without text, the usage in another one."""
    base = {"id": f"cmpl-{name}", "object": "text_completion", "created": CREATED, "model": "emu"}
    chunks = [{**base, "choices": [{"index": 0, "text": " word"}]} for _ in range(count)]
    details = {"completion_tokens_details": {"reasoning_tokens": 0, "text_tokens": count}}
    usage = usage_of(prompt_tokens, count, **details, prompt_tokens_details={"cached_tokens": 0})
    end = {**base, "choices": [{"finish_reason": "length", "index": 0}]}
    return [*chunks, end, {**base, "choices": [{"index": 0}], "usage": usage}]


def litellm_chat(name: str, prompt_tokens: int, count: int) -> list[dict[str, Any]]:
    """litellm 1.108.7 before a vLLM, of chats: the usage comes beside an empty delta."""
    base = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": CREATED, "model": "emu"}
    role = {**base, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    chunks = [{**base, "choices": [{"index": 0, "delta": {"content": " word"}}]} for _ in range(count)]
    end = {**base, "choices": [{"finish_reason": "length", "index": 0, "delta": {}}]}
    usage = usage_of(prompt_tokens, count, prompt_tokens_details={"cached_tokens": 0, "created_cache_tokens": 0})
    return [role, *chunks, end, {**base, "choices": [{"index": 0, "delta": {}}], "usage": usage}]


def llama_text(name: str, prompt_tokens: int, count: int) -> list[dict[str, Any]]:
    """llama.cpp's server: the last chunk has no text, but the finish reason, the usage and timings."""
    base = {**OF_LLAMA, "object": "text_completion", "id": f"chatcmpl-{name}"}
    choice = {"text": " word", "index": 0, "logprobs": None, "finish_reason": None}
    timings = {"prompt_n": prompt_tokens, "prompt_ms": 203.378, "predicted_n": count, "predicted_ms": 933.63}
    last = {**base, "choices": [{**choice, "text": "", "finish_reason": "length"}], "timings": timings}
    chunks = [{**base, "choices": [choice]} for _ in range(count)]
    return [*chunks, {**last, "usage": usage_of(prompt_tokens, count)}]


def llama_chat(name: str, prompt_tokens: int, count: int) -> list[dict[str, Any]]:
    """llama.cpp's server, of chats: the first delta's content is null, the usage stands beside no choice."""
    base = {**OF_LLAMA, "object": "chat.completion.chunk", "id": f"chatcmpl-{name}"}

    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"choices": [{"finish_reason": reason, "index": 0, "delta": delta}], **base}

    words = [chunk({"content": " word"}) for _ in range(count)]
    last = {"choices": [], **base, "timings": {"prompt_n": prompt_tokens, "predicted_n": count}}
    first = chunk({"role": "assistant", "content": None})
    return [first, *words, chunk({}, "length"), {**last, "usage": usage_of(prompt_tokens, count)}]


def tgi_text(_name: str, prompt_tokens: int, count: int) -> list[dict[str, Any]]:
    """TGI: ids are empty, finish reasons too until the last token, which comes with the usage."""
    base = {**OF_TGI, "object": "text_completion"}
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": ""}
    last = {**base, "choices": [{**choice, "finish_reason": "length"}], "usage": usage_of(prompt_tokens, count)}
    return [*({**base, "choices": [choice]} for _ in range(count - 1)), last]


def tgi_chat(_name: str, prompt_tokens: int, count: int) -> list[dict[str, Any]]:
    """TGI, of chats: ids are empty, each delta has a role, the usage stands beside no choice."""
    base = {**OF_TGI, "object": "chat.completion.chunk"}
    delta = {"role": "assistant", "content": " word"}

    def chunk(reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**base, "choices": [choice], "usage": None}

    last = {**base, "choices": [], "usage": usage_of(prompt_tokens, count)}
    return [*(chunk(None) for _ in range(count - 1)), chunk("length"), last]


LITELLM = partial(
    PlainServer, model="emu", other_models=("other",), health=200, key="sk-1", takes_ids=False, together=1
)
LLAMA = partial(
    PlainServer,
    health=200,
    pages={"/metrics": (501, '{"error":{"code":501,"message":"This server does not support metrics endpoint."}}')},
    tokenizes=True,
    text_key="content",
    together=1,
)
TGI = partial(
    PlainServer,
    health=200,
    has_metrics=True,
    metrics="# TYPE tgi_queue_size gauge\ntgi_queue_size 0\n",
    tokenizes=True,
    text_key="inputs",
    ids_as_objects=True,
    takes_ids=False,
    together=1,
    data=b"data:",
)
OTHERS = {
    "litellm": partial(LITELLM, paths=TEXT, events=litellm_text),
    "litellm chat": partial(LITELLM, paths=CHAT, events=litellm_chat),
    "llama.cpp": partial(LLAMA, paths=TEXT, events=llama_text),
    "llama.cpp chat": partial(LLAMA, paths=CHAT, events=llama_chat),
    "TGI": partial(TGI, paths=TEXT, events=tgi_text),
    "TGI chat": partial(TGI, paths=CHAT, events=tgi_chat),
    "HTTP/1.0": partial(LLAMA, paths=TEXT, events=llama_text, is_old=True),
}


@pytest.mark.parametrize("name", OTHERS)
def test_answers_of_other_servers_give_valid_figures(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, "sk-1")
    with plain_server(OTHERS[name]()) as server:
        run = one_run(
            tmp_path,
            experiment(
                server.url,
                workload={"prompt_form": "chat" if server.paths == CHAT else "text"},
                limits={"needs_metrics": server.has_metrics},
                server={"api_key_env": KEY if server.key else ""},
            ),
        )
    assert codes(run, "invalid") == set()
    figures = latencies(run)
    assert len(figures.turn) == 4
    assert not any(map(math.isnan, (*figures.ttft_ns, *figures.tpot_ns)))
    # What a late client reads together with the first token has no gap.
    assert 4 <= len(figures.itl_ns) <= 4 * (TOKENS - 1)
    expected = {"tolerated-id-absent"} if name.startswith("TGI") else set[str]()
    assert {code for code in codes(run, "info") if code.startswith("tolerated-")} == expected


def test_conditions_may_ask_different_models_of_one_gateway(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "sk-1")
    keys: dict[str, Any] = {"workload": {"prompt_form": "text"}, "limits": {"needs_metrics": False}}

    def of_models(url: str, second: str) -> ExperimentSpec:
        conditions = [{"name": "first"}, {"name": "second", "server": {"model": second}}]
        return experiment(url, server={"api_key_env": KEY}, condition=conditions, **keys)

    with plain_server(OTHERS["litellm"]()) as server:
        run_experiment(of_models(server.url, "other"), runs_root=tmp_path).require_valid()
        assert {body["model"] for body in server.asked} == {"emu", "other"}
        with pytest.raises(HarnessError, match="lists no model 'absent', but emu, other") as refused:
            run_experiment(of_models(server.url, "absent"), runs_root=tmp_path / "absent")
    assert "Set server.model" in str(refused.value)
    assert list(RunStore(tmp_path / "absent").sealed("behind")) == []


def held(run: SealedRun) -> str:
    return next((each.evidence for each in run.manifest.findings if each.code == "first-token-held"), "")


@pytest.mark.parametrize("together", [6, 1000])
def test_a_proxy_that_collects_tokens_makes_the_run_invalid(tmp_path: Path, together: int) -> None:
    collecting = LLAMA(events=llama_text, together=together)
    with plain_server(collecting) as server:
        report = probe(endpoint_of(ServerSpec(url=server.url)), Needs(prompt_form="text", metrics=False))
        limits = {"needs_metrics": False, "first_token_held_ms": 5.0}
        run = one_run(tmp_path, experiment(server.url, workload={"prompt_form": "text"}, limits=limits))
    assert any("came together: a proxy may collect them" in note for note in report.notes)
    assert codes(run, "invalid") == {"first-token-held"}
    assert held(run).startswith("in 4 of 4 answers the first token came together with later ones: a proxy")
    with plain_server(collecting) as server:
        limits = {"needs_metrics": False, "first_token_held_ms": A_MINUTE_MS}
        again = one_run(tmp_path / "kept", experiment(server.url, workload={"prompt_form": "text"}, limits=limits))
    assert codes(again, "invalid") == set()


# -- real proxies, where this machine has them -------------------------------------------------------------------


@pytest.fixture(scope="module")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    if not any(map(shutil.which, ("nginx", "haproxy"))):
        pytest.skip("neither nginx nor haproxy is installed")
    started = start_ready(tmp_path_factory.mktemp("server"), time_scale=1.0)
    yield started
    end(started)


def accepts(port: int) -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def proxy(command: list[str], port: int, log: Path) -> Generator[str]:
    """A proxy process on a port of loopback; its URL."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
        try:
            while not accepts(port):
                assert process.poll() is None, log.read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def nginx(folder: Path, upstream: str, *lines: str) -> Any:
    """nginx before ``upstream``, with these directives in its location."""
    program = shutil.which("nginx")
    if program is None:
        pytest.skip("nginx is not installed")
    port, settings = free_port(), "\n".join(f"      {line};" for line in lines)
    temporary = "\n".join(
        f"  {name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    config = folder / "nginx.conf"
    config.write_text(
        f"daemon off;\npid {folder}/nginx.pid;\nerror_log {folder}/error.log;\n"
        "events {}\nhttp {\n  access_log off;\n"
        f"{temporary}\n  server {{\n    listen 127.0.0.1:{port};\n    location / {{\n      proxy_pass {upstream};\n"
        f"{settings}\n    }}\n  }}\n}}\n"
    )
    return proxy([program, "-c", str(config), "-p", str(folder)], port, folder / "nginx.log")


def haproxy(folder: Path, upstream: str, *lines: str) -> Any:
    """HAProxy before ``upstream``, with these lines in its defaults."""
    program = shutil.which("haproxy")
    if program is None:
        pytest.skip("haproxy is not installed")
    port, settings = free_port(), "\n".join(f"  {line}" for line in lines)
    config = folder / "haproxy.cfg"
    config.write_text(
        f"defaults\n  mode http\n  timeout connect 5s\n  timeout client 60s\n  timeout server 60s\n{settings}\n"
        f"frontend front\n  bind 127.0.0.1:{port}\n  default_backend back\n"
        f"backend back\n  server one {upstream.removeprefix('http://')}\n"
    )
    return proxy([program, "-f", str(config)], port, folder / "haproxy.log")


PASSING = {
    "nginx, HTTP/1.0": (nginx, ("proxy_buffering off",)),
    "nginx, HTTP/1.1": (nginx, ("proxy_buffering off", "proxy_http_version 1.1", 'proxy_set_header Connection ""')),
    "nginx, gzip on": (nginx, ("proxy_buffering off", "gzip on", "gzip_types *", "gzip_min_length 1")),
    "nginx, no kept connections": (nginx, ("proxy_buffering off", "keepalive_timeout 0")),
    "HAProxy": (haproxy, ("option http-no-delay",)),
    "HAProxy, closing": (haproxy, ("option http-no-delay", "option http-buffer-request", "option httpclose")),
}
COLLECTING = {
    "nginx": (nginx, ()),
    "HAProxy": (haproxy, ()),
    "HAProxy, closing": (haproxy, ("option http-buffer-request", "option httpclose")),
}


@pytest.mark.parametrize("name", PASSING)
def test_behind_a_proxy_that_passes_chunks_on_figures_are_valid(emulator: Emulator, tmp_path: Path, name: str) -> None:
    start, lines = PASSING[name]
    with start(tmp_path, emulator.address, *lines) as url:
        run = one_run(tmp_path / "runs", experiment(url, limits={"first_token_held_ms": HELD_MS}))
    assert codes(run, "invalid") == set()
    assert 4 <= len(latencies(run).itl_ns) <= 4 * (TOKENS - 1)
    assert held(run) == ""


@pytest.mark.parametrize("name", COLLECTING)
def test_behind_a_proxy_that_collects_chunks_the_run_is_invalid(emulator: Emulator, tmp_path: Path, name: str) -> None:
    start, lines = COLLECTING[name]
    # nginx sends when 4 KiB are there: the answer is longer.
    longer = {"generate_tokens": {"distribution": "fixed", "value": 40}}
    with start(tmp_path, emulator.address, *lines) as url:
        run = one_run(tmp_path / "runs", experiment(url, workload=longer, limits={"first_token_held_ms": 5.0}))
    assert "first-token-held" in codes(run, "invalid")


def test_a_proxy_without_its_server_is_refused_as_one(emulator: Emulator, tmp_path: Path) -> None:
    del emulator
    for start, status in ((nginx, 502), (haproxy, 503)):
        folder = tmp_path / start.__name__
        folder.mkdir()
        with (
            start(folder, f"http://127.0.0.1:{NO_PORT}") as url,
            pytest.raises(HarnessError, match=f"status {status} .*A proxy answers, and reaches no server behind it"),
        ):
            run_experiment(experiment(url), runs_root=folder / "runs")


def test_a_request_that_the_proxy_finds_too_large_is_told_with_the_setting(emulator: Emulator, tmp_path: Path) -> None:
    with nginx(tmp_path, emulator.address, "proxy_buffering off", "client_max_body_size 1k") as url:
        run = one_run(tmp_path / "runs", experiment(url))
    (failed,) = [finding for finding in run.manifest.findings if finding.code == "request-failed"]
    assert "413 Request Entity Too Large" in failed.evidence
    assert "<" not in failed.evidence
    assert "nginx: client_max_body_size" in failed.hint


def test_compressed_answers_are_refused_with_the_way_on(emulator: Emulator, tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    gzip = ("gzip on", "gzip_types *", "gzip_min_length 1", "gzip_proxied any", "proxy_http_version 1.1")
    outer = ("proxy_set_header Accept-Encoding gzip", "proxy_http_version 1.1")
    with (
        nginx(tmp_path / "inner", emulator.address, *gzip) as inner,
        nginx(tmp_path, inner, *outer) as url,
        pytest.raises(HarnessError, match=r"answers are compressed.*Turn compression off in the proxy"),
    ):
        run_experiment(experiment(url), runs_root=tmp_path / "runs")
