"""Each release speaks in its own way; the answers here are those that the real stack gave on the twin.

``tests/extras/twin/test_twin_shapes`` holds whole answers to the real ones where a twin is installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from harness.extras.twin.environment import known_stacks
from harness.stacks.rbln.launch.launch_log import read_launch
from harness.stacks.rbln.rules.dialect import DIALECTS, dialect_of
from harness.stacks.rbln.rules.kv_rules import NEWEST_STABLE, RULE_SETS
from tests.support.emulator_process import Emulator, end, start_ready

pytestmark = pytest.mark.live
PROMPT = list(range(1000, 1300))


@pytest.fixture(scope="module", params=["vendor-0.12.0", "vendor-0.12.1"])
def newer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Emulator]:
    """A server of a release with vLLM 0.30 or later."""
    server = start_ready(tmp_path_factory.mktemp("emulator"), server={"rules": request.param})
    yield server
    end(server)


def test_every_rule_set_has_a_dialect_and_computed_ones_speak_as_the_newest_stable() -> None:
    newest = dialect_of(RULE_SETS[NEWEST_STABLE])
    assert {name: dialect_of(rules).vllm for name, rules in RULE_SETS.items()} == {
        "vendor-0.11.1": "0.22.0",
        "vendor-0.11.2": "0.24.0",
        "vendor-0.12.0": "0.30.0",
        "vendor-0.12.1": "0.31.0",
        "upstream-lru": newest.vllm,
        "paper": newest.vllm,
        "paper+dummy": newest.vllm,
        "vllm-paged-0.30": newest.vllm,
        "vllm-paged": newest.vllm,
        "rbln-native-0.12": newest.vllm,
    }


def test_dialects_name_the_vllm_that_the_twin_of_the_release_installs() -> None:
    pinned = {stack.version.split("a")[0]: stack.vllm for stack in known_stacks()}
    assert {release: dialect.vllm for release, dialect in DIALECTS.items()} == pinned


def test_from_0_30_on_usage_says_null_and_zero_and_answers_end_in_more_nulls(newer: Emulator) -> None:
    cold, warm = (newer.complete(PROMPT, max_tokens=2, ignore_eos=True) for _ in range(2))
    for answer, cached in ((cold, 0), (warm, 256)):
        assert answer["usage"]["prompt_tokens_details"] == {
            "cached_tokens": cached,
            "created_cache_tokens": None,
            "multimodal_tokens": None,
        }
        assert answer["usage"]["completion_tokens_details"] is None
        assert list(answer)[-3:] == ["kv_transfer_params", "ec_transfer_params", "metrics"]
    body = {"prompt": PROMPT[:200], "max_tokens": 2, "stream_options": {"include_usage": True}}
    usage = newer.stream("/v1/completions", **{**body, "prompt": [7] * 100})[-1]["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}


def test_from_0_30_on_a_chat_lists_no_calls_and_its_stream_always_has_details(newer: Emulator) -> None:
    messages = [{"role": "user", "content": "hi"}]
    answer = newer.client.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 2}).json()
    assert "tool_calls" not in answer["choices"][0]["message"]
    options = {"include_usage": True}
    events = newer.stream("/v1/chat/completions", messages=messages, max_tokens=2, stream_options=options)
    assert events[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 0, "created_cache_tokens": 0}


@pytest.mark.parametrize(
    ("body", "kind", "param"),
    [
        ({"max_tokens": 5}, "BadRequestError", "prompt"),
        ({"prompt": [-5]}, "Bad Request", "body.prompt.0"),
        ({"prompt": 7}, "Bad Request", "body.prompt"),
        ({"prompt": "x", "max_tokens": "many"}, "Bad Request", "body.max_tokens"),
        ({"prompt": "x", "temperature": -1}, "BadRequestError", "temperature"),
    ],
)
def test_from_0_30_on_an_error_names_its_field(newer: Emulator, body: dict[str, Any], kind: str, param: str) -> None:
    error = newer.client.post("/v1/completions", json=body).json()["error"]
    assert (error["type"], error["param"]) == (kind, param)


def test_from_0_30_on_a_message_without_a_role_is_the_first_kinds_fault(newer: Emulator) -> None:
    error = newer.client.post("/v1/chat/completions", json={"messages": [{"content": "x"}]}).json()["error"]
    assert error["param"] == "body.messages.0.ChatCompletionDeveloperMessageParam.role"


def test_from_0_30_on_the_pool_is_told_and_preemptions_have_a_histogram(newer: Emulator) -> None:
    text = newer.client.get("/metrics").text
    assert 'kv_cache_size_tokens="65664"' in text
    assert "vllm:request_num_preemptions_bucket" in text
    assert "CPU KV cache size: 65,664 tokens, Maximum concurrency" in newer.log_so_far
    facts = read_launch(newer.log_so_far.splitlines())
    assert facts.pool_tokens == 65664
    assert facts.version == newer.client.get("/version").json()["version"]


@pytest.mark.parametrize("release", ["0.12.0", "0.12.1a8"])
def test_the_version_is_read_from_the_engines_line_where_the_servers_is_a_logo(release: str) -> None:
    vllm = {"0.12.0": "0.30.0", "0.12.1a8": "0.31.0"}[release]
    lines = [
        "(APIServer pid=1) INFO 11-22 02:02:09 [api_utils.py:347]  ▄▄ ▄█ █     █     █ ▀▄▀ █  version " + vllm,
        f"(EngineCore pid=2) INFO 11-22 02:02:39 [core.py:123] Initializing a V1 LLM engine (v{vllm}) with config: "
        "model='x', max_seq_len=8192, enable_prefix_caching=True",
    ]
    assert read_launch(lines).version == vllm
