"""What clients see: answers, streams, ids, usage and errors, in the shapes of vLLM 0.22."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.emulator_process import Emulator

pytestmark = pytest.mark.live
MODEL = "emulated-qwen3-4b"


def prompt_of(start: int, length: int) -> list[int]:
    """Token ids that no other test sends."""
    return [1000 + (start * 10_000 + place) % 140_000 for place in range(length)]


def test_an_unmodified_openai_client_completes(emulator: Emulator) -> None:
    import openai

    with openai.OpenAI(base_url=f"{emulator.address}/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == [MODEL]
        answer = client.completions.create(model=MODEL, prompt="Say something", max_tokens=7)
        assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (7, "length")
        chunks = list(
            client.completions.create(
                model=MODEL, prompt="Say something", max_tokens=7, stream=True, stream_options={"include_usage": True}
            )
        )
        assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == answer.choices[0].text
        assert chunks[-1].usage == answer.usage


def test_an_unmodified_openai_client_chats(emulator: Emulator) -> None:
    import openai

    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    with openai.OpenAI(base_url=f"{emulator.address}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=5)
        stream = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5, stream=True)
        deltas = [chunk.choices[0].delta for chunk in stream]
        assert deltas[0].role == "assistant"
        assert "".join(delta.content or "" for delta in deltas) == answer.choices[0].message.content
        with pytest.raises(openai.NotFoundError, match="does not exist"):
            client.chat.completions.create(model="another", messages=messages)


def test_the_same_prompt_gives_the_same_tokens_cached_or_not(emulator: Emulator) -> None:
    prompt = prompt_of(1, 300)
    first = emulator.complete(prompt, max_tokens=20, return_token_ids=True)
    second = emulator.complete(prompt, max_tokens=20, return_token_ids=True)
    assert first["choices"] == second["choices"]
    assert first["choices"][0]["prompt_token_ids"] == prompt
    assert len(first["choices"][0]["token_ids"]) == 20
    assert first["usage"]["prompt_tokens_details"] is None
    assert second["usage"]["prompt_tokens_details"] == {"cached_tokens": 256}


def test_token_details_are_absent_from_a_stream_without_reuse(emulator: Emulator) -> None:
    body = {"prompt": prompt_of(2, 200), "max_tokens": 2, "stream_options": {"include_usage": True}}
    cold, warm = (emulator.stream("/v1/completions", **body)[-1] for _ in range(2))
    assert cold["choices"] == []
    assert cold["usage"] == {"prompt_tokens": 200, "total_tokens": 202, "completion_tokens": 2}
    assert warm["usage"]["prompt_tokens_details"] == {"cached_tokens": 128}


def test_a_stream_has_one_event_per_token_and_the_prompt_once(emulator: Emulator) -> None:
    prompt = prompt_of(3, 50)
    events = emulator.stream(
        "/v1/completions", prompt=prompt, max_tokens=6, return_token_ids=True, stream_options={"include_usage": True}
    )
    choices = [event["choices"][0] for event in events[:-1]]
    assert [len(choice["token_ids"]) for choice in choices] == [1] * 6
    assert [choice["prompt_token_ids"] for choice in choices] == [prompt, *[None] * 5]
    assert [choice["finish_reason"] for choice in choices] == [*[None] * 5, "length"]
    assert all("usage" not in event for event in events[:-1])


def test_a_chat_stream_opens_with_the_role(emulator: Emulator) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    events = emulator.stream("/v1/chat/completions", messages=messages, max_tokens=2, return_token_ids=True)
    assert events[0]["object"] == "chat.completion.chunk"
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(events[0]["prompt_token_ids"]) > 5
    assert [len(event["choices"][0]["token_ids"]) for event in events[1:]] == [1, 1]
    assert events[-1]["system_fingerprint"]


def test_text_sent_back_reuses_what_was_generated_before(emulator: Emulator) -> None:
    prompt = "A question about step times. " * 8
    first = emulator.complete(prompt, max_tokens=40)
    again = emulator.complete(prompt + first["choices"][0]["text"] + " And then?", max_tokens=1)
    prompt_tokens = first["usage"]["prompt_tokens"]
    assert again["usage"]["prompt_tokens"] == prompt_tokens + 40 + len(" And then?")
    assert again["usage"]["prompt_tokens_details"] == {"cached_tokens": prompt_tokens // 128 * 128}


def test_a_salt_keeps_prefixes_apart(emulator: Emulator) -> None:
    prompt = prompt_of(7, 260)
    for salt, cached in (("one", None), ("two", None), ("one", {"cached_tokens": 256})):
        answer = emulator.complete(prompt, max_tokens=1, cache_salt=salt)
        assert answer["usage"]["prompt_tokens_details"] == cached


def test_max_tokens_defaults_to_16_for_completions(emulator: Emulator) -> None:
    assert emulator.complete("x")["usage"]["completion_tokens"] == 16


def test_response_ids_lead_to_the_ids_in_the_log(emulator: Emulator) -> None:
    header = {"X-Request-Id": "from-header"}
    ids = [
        emulator.client.post(path, json=body, headers=headers).json()["id"]
        for path, body, headers in (
            ("/v1/completions", {"prompt": "x", "max_tokens": 1, "request_id": "from-body"}, {}),
            ("/v1/completions", {"prompt": "x", "max_tokens": 1, "request_id": "from-body"}, header),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}, header),
        )
    ]
    assert ids == ["cmpl-from-body", "cmpl-from-header", "chatcmpl-from-header"]
    assert emulator.complete("x", max_tokens=1)["id"].startswith("cmpl-")


COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
BAD_REQUESTS: list[tuple[str, Any, int, str, str | None]] = [
    (COMPLETIONS, {"prompt": "x", "model": "other"}, 404, "NotFoundError", "model"),
    (CHAT, {"messages": [], "model": "other"}, 404, "NotFoundError", "model"),
    (COMPLETIONS, {}, 400, "Bad Request", None),
    (COMPLETIONS, {"prompt": ""}, 400, "Bad Request", None),
    (COMPLETIONS, {"prompt": []}, 400, "BadRequestError", None),
    (COMPLETIONS, {"prompt": {"a": 1}}, 400, "Bad Request", None),
    (COMPLETIONS, {"prompt": [-1]}, 400, "Bad Request", None),
    (COMPLETIONS, {"prompt": [10**6]}, 400, "BadRequestError", None),
    (COMPLETIONS, {"prompt": "x", "max_tokens": "many"}, 400, "Bad Request", None),
    (COMPLETIONS, {"prompt": "x", "max_tokens": -1}, 400, "BadRequestError", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 0}, 400, "BadRequestError", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "max_tokens": 9000}, 400, "BadRequestError", "max_tokens"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 9000},
        400,
        "BadRequestError",
        "max_completion_tokens",
    ),
    (COMPLETIONS, {"prompt": [7] * 8190, "max_tokens": 5}, 400, "BadRequestError", "input_tokens"),
    (COMPLETIONS, {"prompt": [7] * 8192, "max_tokens": None}, 400, "BadRequestError", "max_tokens"),
    (COMPLETIONS, {"prompt": "x", "min_tokens": 17}, 400, "BadRequestError", None),
    (COMPLETIONS, {"prompt": "x", "min_tokens": -1}, 400, "BadRequestError", None),
    (COMPLETIONS, {"prompt": "x", "temperature": -1}, 400, "BadRequestError", "temperature"),
    (COMPLETIONS, {"prompt": "x", "top_p": 0}, 400, "BadRequestError", "top_p"),
    (COMPLETIONS, {"prompt": "x", "cache_salt": ""}, 400, "Bad Request", None),
    (COMPLETIONS, {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "Bad Request", "stream_options"),
    (CHAT, {}, 400, "Bad Request", None),
    (CHAT, {"messages": []}, 400, "BadRequestError", None),
    (COMPLETIONS, {"prompt": "\ud800"}, 400, "BadRequestError", None),
    (COMPLETIONS, {"prompt": ["a", "b"]}, 400, "BadRequestError", "prompt"),
    (COMPLETIONS, [], 500, "InternalServerError", None),
    (COMPLETIONS, None, 400, "Bad Request", None),
    (CHAT, {"messages": "hi"}, 400, "Bad Request", None),
    (CHAT, {"messages": [{"content": "x"}]}, 400, "Bad Request", None),
    (COMPLETIONS, {"prompt": "x", "n": 2}, 400, "BadRequestError", "n"),
    (COMPLETIONS, {"prompt": "x", "stop": ["end"]}, 400, "BadRequestError", "stop"),
    (COMPLETIONS, {"prompt": "x", "stop_token_ids": [7]}, 400, "BadRequestError", "stop_token_ids"),
    (COMPLETIONS, {"prompt": "x", "logprobs": 0}, 400, "BadRequestError", "logprobs"),
    (COMPLETIONS, {"prompt": "x", "prompt_logprobs": 1}, 400, "BadRequestError", "prompt_logprobs"),
    (COMPLETIONS, {"prompt": "x", "echo": True, "stream": True}, 400, "BadRequestError", "echo"),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "logprobs": True}, 400, "BadRequestError", "logprobs"),
    (COMPLETIONS, {"prompt": "x", "truncate_prompt_tokens": 4}, 400, "BadRequestError", "truncate_prompt_tokens"),
    (CHAT, {"messages": [], "tools": []}, 400, "BadRequestError", None),
    (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "BadRequestError", None),
]


@pytest.mark.parametrize(("path", "body", "status", "kind", "param"), BAD_REQUESTS)
def test_a_bad_request_gets_the_status_and_shape_that_vllm_gives(
    emulator: Emulator, path: str, body: Any, status: int, kind: str, param: str | None
) -> None:
    answer = emulator.client.post(path, content=json.dumps(body), headers={"Content-Type": "application/json"})
    error = answer.json()["error"]
    assert answer.status_code == status
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == (kind, param, status)
    assert error["message"]


def test_tokenize_gives_the_tokens_that_usage_counts(emulator: Emulator) -> None:
    text = " abcd the 한 <|im_end|>"
    turns = [{"role": "user", "content": text}]
    for path, body in (("/v1/completions", {"prompt": text}), ("/v1/chat/completions", {"messages": turns})):
        counted = emulator.client.post(path, json={**body, "max_tokens": 1}).json()["usage"]["prompt_tokens"]
        answer = emulator.client.post("/tokenize", json={"model": MODEL, **body}).json()
        assert answer["count"] == len(answer["tokens"]) == counted
        assert set(answer) == {"count", "max_model_len", "tokens", "token_strs"}
    assert emulator.client.post("/tokenize", json={"prompt": ""}).status_code == 400
    assert emulator.client.post("/tokenize", json={"model": "another", "prompt": text}).status_code == 404


def test_unknown_paths_and_methods_are_starlettes(emulator: Emulator) -> None:
    missing, wrong = emulator.client.get("/v1/nothing"), emulator.client.get(COMPLETIONS)
    assert (missing.status_code, missing.json()) == (404, {"detail": "Not Found"})
    assert (wrong.status_code, wrong.json()) == (405, {"detail": "Method Not Allowed"})


def test_the_small_paths_answer(emulator: Emulator) -> None:
    assert emulator.client.get("/health").status_code == 200
    assert emulator.client.get("/health").content == b""
    assert emulator.client.get("/ping").status_code == emulator.client.post("/ping").status_code == 200
    assert emulator.client.get("/version").json() == {"version": "0.22.0"}
    assert emulator.client.get("/load").json() == {"server_load": 0}
    assert emulator.client.get("/v1/models").json()["data"][0]["max_model_len"] == 8192


@pytest.mark.parametrize(
    "content",
    [
        b'{"prompt": "x", "max_tokens": 1, "request_id": "a\\ud800\\nb"}',
        b'{"prompt": "x", "max_tokens": 1, "unknown": {"deep": [1]}}',
        b'{"prompt": "x", "max_tokens": 1, "temperature": 0.7, "seed": -5, "user": "me", "priority": 3}',
        b'{"prompt": ["\\u0000"], "max_tokens": 1, "stream": true, "request_id": "\\u0000text"}',
    ],
)
def test_odd_but_valid_bodies_are_answered(emulator: Emulator, content: bytes) -> None:
    answer = emulator.client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        *((content, "application/json", 500) for content in (b"3", b'"prompt"')),
        *((content, "application/json", 400) for content in (b"", b"[" * 100_000, b"{not json", b"\xff\xfe")),
        (b'{"prompt": "x"}', "text/plain", 400),
    ],
)
def test_what_is_no_request_is_an_error_and_the_server_goes_on(
    emulator: Emulator, content: bytes, kind: str, status: int
) -> None:
    answer = emulator.client.post(COMPLETIONS, content=content, headers={"Content-Type": kind})
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert emulator.client.get("/health").status_code == 200
