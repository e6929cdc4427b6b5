"""The emulator answers the same calls as the real stack: same status, same fields, same kinds of values, same errors.

Both servers run at once; what differs by nature (ids, times, texts, versions) is compared by its type only. Skipped
where the twin is not installed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from harness.analysis.logs.parse import ParseCounts, parse_log
from harness.extras.twin.backend import TwinBackend
from harness.extras.twin.environment import TwinEnvironment
from harness.measure.server.process import ServerProcess
from harness.model.spec import ServerSpec
from harness.runner.backends.base import ServerBackend
from harness.runner.backends.emulator import EmulatorBackend
from harness.runner.run import LaunchOptions
from harness.stacks.rbln.rules.kv_rules import AUTO, rule_set
from tests.support.cut_logs import assert_no_cut_invents_or_loses, kind_of
from tests.support.processes import serving

pytestmark = [
    pytest.mark.live,
    pytest.mark.timeout(600),
    # Each against the emulator in its own dialect.
    pytest.mark.parametrize("twin", ["0.12.0", "0.12.1a8", "0.11.1"], indirect=True, scope="module"),
]

SERVER = ServerSpec(start_timeout_s=300.0, stop_grace_s=30.0)
# Steps slow enough for the server's face to keep up: tokens that met in one event would hide a kind of event.
COSTS = """
name = "slow-steps"
artifact = "none"
source = "made up for this test"
[decode]
alpha_ms = 0.0
beta_ms_per_request = 0.0
f_ms = { 1 = 50.0, 2 = 50.0, 4 = 50.0, 8 = 50.0 }
[prefill]
per_call_ms = 5.0
per_call_us_per_token = 0.0
fitted_tokens = [1, 8192]
"""
PROMPT = list(range(1000, 1300))
SAME_VALUES = {
    *("index", "finish_reason", "object", "role", "completion_tokens", "cached_tokens", "type", "code", "param"),
}
WHOLE_LISTS = {"choices"}


@dataclass(frozen=True)
class Running:
    """A started server: where to send calls, which model to name, and its log so far."""

    base_url: str
    model: str
    log_path: Path

    def call(self, method: str, path: str, body: Any = None, raw: bytes | None = None) -> httpx.Response:
        if isinstance(body, dict) and body.get("model") == "MODEL":
            body = {**body, "model": self.model}
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        return httpx.request(method, self.base_url + path, content=content, headers=headers, timeout=60)


@pytest.fixture(scope="module")
def servers(twin: TwinEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Running]]:
    """The real stack and the emulator, in the stack's default log format."""
    backends: tuple[ServerBackend, ...] = (TwinBackend(folder=twin.folder), EmulatorBackend())
    costs = tmp_path_factory.mktemp("costs") / "slow.toml"
    costs.write_text(COSTS)
    rules = rule_set(AUTO, twin.version).name
    spec = SERVER.model_copy(update={"cost_model": str(costs), "rules": rules})
    with ExitStack() as stack:
        started: list[tuple[ServerProcess, Running]] = []
        for backend in backends:
            folder = tmp_path_factory.mktemp(backend.kind.name)
            launch = backend.launch(spec, LaunchOptions(0, folder))
            process = stack.enter_context(serving(launch, folder))
            url = f"http://{launch.host}:{launch.port}"
            started.append((process, Running(url, launch.model, folder / "server.log")))
        yield started[0][1], started[1][1]
        for process, _ in started:
            process.stop(grace_s=SERVER.stop_grace_s)


def shape(value: Any, name: str = "") -> Any:
    """A JSON value with leaves replaced by the names of their types, but for the fields whose values must agree."""
    if isinstance(value, dict):
        return {key: shape(part, key) for key, part in sorted(value.items())}
    if isinstance(value, list):
        return [shape(part) for part in (value if name in WHOLE_LISTS else value[:1])]
    return value if name in SAME_VALUES else type(value).__name__


def stream_shape(shapes: list[Any]) -> dict[int, list[Any]]:
    """By choice (-1: of no choice), what kinds of events came, in order.

    When a server's face is behind its engine, tokens meet in one event: equal neighbours count once, and how many
    tokens an event reports before the last one is not compared beyond that it grows.
    """
    kinds: dict[int, list[Any]] = {}
    reported: dict[int, int] = {}
    for part in shapes:
        choices = part["choices"] if isinstance(part, dict) else []
        index = choices[0]["index"] if choices else -1
        if choices and part.get("usage") and choices[0]["finish_reason"] is None:
            num_tokens = part["usage"]["completion_tokens"]
            assert num_tokens > reported.get(index, 0)
            reported[index] = num_tokens
            part["usage"]["completion_tokens"] = "int"
        of_choice = kinds.setdefault(index, [])
        if not of_choice or of_choice[-1] != part:
            of_choice.append(part)
    return kinds


def body_shape(response: httpx.Response) -> Any:
    """The shape of a JSON body, or of every event of a stream; None for an empty or plain body."""
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
        shapes = [shape(json.loads(event)) if event != "[DONE]" else event for event in events]
        return stream_shape(shapes)
    try:
        return shape(response.json())
    except ValueError:
        return None


COMPLETION = {"model": "MODEL", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
CHAT = {"model": "MODEL", "messages": [{"role": "user", "content": "mago"}], "max_tokens": 3, "ignore_eos": True}
STREAM = {"stream": True, "stream_options": {"include_usage": True}, "max_tokens": 8}
GOOD: dict[str, tuple[str, str, Any]] = {
    "health": ("GET", "/health", None),
    "ping": ("GET", "/ping", None),
    "version": ("GET", "/version", None),
    "models": ("GET", "/v1/models", None),
    "completion": ("POST", "/v1/completions", COMPLETION),
    "completion again, from cache": ("POST", "/v1/completions", COMPLETION),
    "the longest prompt": ("POST", "/v1/completions", {**COMPLETION, "prompt": [7] * 8191, "max_tokens": 1}),
    "completion with token ids": ("POST", "/v1/completions", {**COMPLETION, "return_token_ids": True}),
    "streamed completion": ("POST", "/v1/completions", {**COMPLETION, **STREAM, "return_token_ids": True}),
    "streamed completion without usage": ("POST", "/v1/completions", {**COMPLETION, "stream": True, "max_tokens": 8}),
    "text completion": ("POST", "/v1/completions", {**COMPLETION, "prompt": "mago de fibo"}),
    "chat": ("POST", "/v1/chat/completions", CHAT),
    "streamed chat": ("POST", "/v1/chat/completions", {**CHAT, **STREAM}),
}
BAD: dict[str, tuple[str, str, Any]] = {
    "no such path": ("GET", "/v1/nothing", None),
    "wrong method": ("GET", "/v1/completions", None),
    "no such model": ("POST", "/v1/completions", {**COMPLETION, "model": "nobody"}),
    "no prompt": ("POST", "/v1/completions", {"model": "MODEL", "max_tokens": 5}),
    "empty prompt": ("POST", "/v1/completions", {**COMPLETION, "prompt": []}),
    "prompt too long": ("POST", "/v1/completions", {**COMPLETION, "prompt": [7] * 9000}),
    "prompt as long as the slot": ("POST", "/v1/completions", {**COMPLETION, "prompt": [7] * 8192, "max_tokens": 1}),
    "prompt and answer longer than the slot": ("POST", "/v1/completions", {**COMPLETION, "prompt": [7] * 8190}),
    "answer too long": ("POST", "/v1/completions", {**COMPLETION, "max_tokens": 9000}),
    "max_tokens is text": ("POST", "/v1/completions", {**COMPLETION, "max_tokens": "many"}),
    "negative max_tokens": ("POST", "/v1/completions", {**COMPLETION, "max_tokens": -1}),
    "no tokens at all": ("POST", "/v1/completions", {**COMPLETION, "max_tokens": 0}),
    "temperature below zero": ("POST", "/v1/completions", {**COMPLETION, "temperature": -1}),
    "top_p of two": ("POST", "/v1/completions", {**COMPLETION, "top_p": 2}),
    "token outside the vocabulary": ("POST", "/v1/completions", {**COMPLETION, "prompt": [10**7]}),
    "negative token": ("POST", "/v1/completions", {**COMPLETION, "prompt": [-5]}),
    "prompt is a number": ("POST", "/v1/completions", {**COMPLETION, "prompt": 7}),
    "stream options without a stream": (
        "POST",
        "/v1/completions",
        {**COMPLETION, "stream_options": {"include_usage": True}},
    ),
    "min_tokens above max_tokens": ("POST", "/v1/completions", {**COMPLETION, "min_tokens": 9}),
    "no messages": ("POST", "/v1/chat/completions", {"model": "MODEL", "max_tokens": 3}),
    "empty messages": ("POST", "/v1/chat/completions", {**CHAT, "messages": []}),
    "message without a role": ("POST", "/v1/chat/completions", {**CHAT, "messages": [{"content": "x"}]}),
}


@pytest.mark.parametrize("name", GOOD)
def test_good_calls_get_answers_of_the_same_shape(servers: tuple[Running, Running], name: str) -> None:
    real, emulated = (server.call(*GOOD[name]) for server in servers)

    assert (emulated.status_code, body_shape(emulated)) == (real.status_code, body_shape(real))
    assert real.status_code == 200
    assert emulated.headers.get("content-type") == real.headers.get("content-type")


@pytest.mark.parametrize("name", BAD)
def test_bad_calls_are_refused_alike(servers: tuple[Running, Running], name: str) -> None:
    real, emulated = (server.call(*BAD[name]) for server in servers)

    assert (emulated.status_code, body_shape(emulated)) == (real.status_code, body_shape(real))
    assert real.status_code >= 400
    if "error" in (body_shape(real) or {}):
        assert emulated.json()["error"]["type"] == real.json()["error"]["type"]


def test_a_body_that_is_no_json_is_refused_alike(servers: tuple[Running, Running]) -> None:
    real, emulated = (server.call("POST", "/v1/completions", raw=b'{"model": ') for server in servers)

    assert (emulated.status_code, body_shape(emulated)) == (real.status_code, body_shape(real))


def test_the_emulator_has_the_metrics_that_the_harness_reads_with_the_real_labels(
    servers: tuple[Running, Running],
) -> None:
    real, emulated = (metric_shapes(server.call("GET", "/metrics").text) for server in servers)

    own = {name: labels for name, labels in emulated.items() if name.startswith("vllm:")}
    assert own
    assert {name: labels for name, labels in own.items() if real.get(name) != labels} == {}


def metric_shapes(text: str) -> dict[str, tuple[str, frozenset[str]]]:
    """Type and label names of every metric family in a scrape."""
    types = dict(re.findall(r"^# TYPE (\S+) (\S+)$", text, re.MULTILINE))
    labels: dict[str, frozenset[str]] = {}
    for name, inside in re.findall(r"^([\w:]+)(?:\{(.*)\})? \S+$", text, re.MULTILINE):
        labels[name] = frozenset(re.findall(r'(\w+)="', inside))
    family = re.compile(r"_(?:total|created|bucket|count|sum|info)$")
    return {name: (types.get(name, types.get(family.sub("", name), "")), keys) for name, keys in labels.items()}


def test_the_default_log_of_the_real_stack_is_read_whole_and_cut_anywhere(servers: tuple[Running, Running]) -> None:
    """An overlay shortens the file part of its lines."""
    for name in ("completion", "completion again, from cache", "the longest prompt"):
        assert servers[0].call(*GOOD[name]).status_code == 200
    content = servers[0].log_path.read_bytes()
    counts = ParseCounts()

    whole = list(parse_log([content], counts))

    assert counts.unread == 0, counts.unread_samples
    assert {kind_of(event) for event in whole} >= {"BucketEvent", "alloc", "free_request"}
    cuts = assert_no_cut_invents_or_loses(content)
    assert {kind_of(event) for event in whole} - set(cuts) <= {kind_of(whole[-1])}
