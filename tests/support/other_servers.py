"""Servers and gateways whose answers have the shape that others were recorded to send, one token a step."""

from __future__ import annotations

from functools import partial
from typing import Any

from tests.support.plain_server import PlainServer

CREATED = 1_795_626_591
TEXT, CHAT = ("/v1/completions",), ("/v1/chat/completions",)


def litellm_text(name: str, prompt_tokens: int, count: int) -> list[dict[str, Any]]:
    """litellm 1.108.7 before a vLLM: the finish reason in a chunk without text, the usage in another one."""
    base = {"id": f"cmpl-{name}", "object": "text_completion", "created": CREATED, "model": "emu"}
    chunks = [{**base, "choices": [{"index": 0, "text": " word"}]} for _ in range(count)]
    usage = {
        "completion_tokens": count,
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + count,
        "completion_tokens_details": {"reasoning_tokens": 0, "text_tokens": count},
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    end = {**base, "choices": [{"finish_reason": "length", "index": 0}]}
    return [*chunks, end, {**base, "choices": [{"index": 0}], "usage": usage}]


def litellm_chat(name: str, prompt_tokens: int, count: int) -> list[dict[str, Any]]:
    """litellm 1.108.7 before a vLLM, of chats: the usage comes beside an empty delta."""
    base = {"id": f"chatcmpl-{name}", "object": "chat.completion.chunk", "created": CREATED, "model": "emu"}
    role = {**base, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
    chunks = [{**base, "choices": [{"index": 0, "delta": {"content": " word"}}]} for _ in range(count)]
    end = {**base, "choices": [{"finish_reason": "length", "index": 0, "delta": {}}]}
    usage = {
        "completion_tokens": count,
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + count,
        "prompt_tokens_details": {"cached_tokens": 0, "created_cache_tokens": 0},
    }
    return [role, *chunks, end, {**base, "choices": [{"index": 0, "delta": {}}], "usage": usage}]


def llama_text(name: str, prompt_tokens: int, count: int) -> list[dict[str, Any]]:
    """llama.cpp's server: the last chunk has no text, but the finish reason, the usage and timings."""
    base = {
        "created": CREATED,
        "model": "gpt-3.5-turbo",
        "system_fingerprint": "b6881-8b11deea4",
        "object": "text_completion",
        "id": f"chatcmpl-{name}",
    }
    choice = {"text": " word", "index": 0, "logprobs": None, "finish_reason": None}
    usage = {"completion_tokens": count, "prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + count}
    timings = {"prompt_n": prompt_tokens, "prompt_ms": 203.378, "predicted_n": count, "predicted_ms": 933.63}
    last = {**base, "choices": [{**choice, "text": "", "finish_reason": "length"}], "usage": usage, "timings": timings}
    return [*({**base, "choices": [choice]} for _ in range(count)), last]


def llama_chat(name: str, prompt_tokens: int, count: int) -> list[dict[str, Any]]:
    """llama.cpp's server, of chats: the first delta's content is null, the usage stands beside no choice."""
    base = {
        "created": CREATED,
        "id": f"chatcmpl-{name}",
        "model": "gpt-3.5-turbo",
        "system_fingerprint": "b6881-8b11deea4",
        "object": "chat.completion.chunk",
    }

    def chunk(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"choices": [{"finish_reason": reason, "index": 0, "delta": delta}], **base}

    usage = {"completion_tokens": count, "prompt_tokens": prompt_tokens, "total_tokens": prompt_tokens + count}
    return [
        chunk({"role": "assistant", "content": None}),
        *(chunk({"content": " word"}) for _ in range(count)),
        chunk({}, "length"),
        {"choices": [], **base, "usage": usage, "timings": {"prompt_n": prompt_tokens, "predicted_n": count}},
    ]


def tgi_text(_name: str, prompt_tokens: int, count: int) -> list[dict[str, Any]]:
    """TGI: ids are empty, finish reasons too until the last token, which comes with the usage."""
    base = {"object": "text_completion", "id": "", "created": CREATED, "model": "org/model", "system_fingerprint": "3"}
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": ""}
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
    last = {**base, "choices": [{**choice, "finish_reason": "length"}], "usage": usage}
    return [*({**base, "choices": [choice]} for _ in range(count - 1)), last]


def tgi_chat(_name: str, prompt_tokens: int, count: int) -> list[dict[str, Any]]:
    """TGI, of chats: ids are empty, each delta has a role, the usage stands beside no choice."""
    base = {
        "object": "chat.completion.chunk",
        "id": "",
        "created": CREATED,
        "model": "org/model",
        "system_fingerprint": "3.0.1-sha",
    }
    delta = {"role": "assistant", "content": " word"}

    def chunk(reason: str | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        return {**base, "choices": [choice], "usage": None}

    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": count, "total_tokens": prompt_tokens + count}
    return [*(chunk(None) for _ in range(count - 1)), chunk("length"), {**base, "choices": [], "usage": usage}]


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
