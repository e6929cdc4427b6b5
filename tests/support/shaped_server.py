"""A server whose answers have the shape that another server or gateway was recorded to send, one token a step."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from harness.clock import NS_PER_MS, MonotonicClock

STEP_NS = 2 * NS_PER_MS
CLOCK = MonotonicClock()
CREATED = 1_795_626_591
Events = Callable[[str, int, int], list[dict[str, Any]]]


@dataclass(frozen=True)
class Shape:
    """What a server says. events: from the request's id, its prompt tokens and the tokens to make. chat: its path is
    that of chats. models: as it lists them. pages: its answers to GET, by path. words_key: the text in POST /tokenize;
    "": it has none. key: that it wants. together: tokens that leave in one piece. version: of HTTP."""

    events: Events
    chat: bool = False
    models: Sequence[dict[str, Any]] = ({"id": "model", "object": "model"},)
    pages: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    words_key: str = ""
    key: str = ""
    together: int = 1
    version: str = "1.1"
    data: bytes = b"data: "


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


LITELLM_PAGES = {"/health": (200, "{}")}
LLAMA_PAGES = {
    "/health": (200, '{"status":"ok"}'),
    "/metrics": (501, '{"error":{"code":501,"message":"This server does not support metrics endpoint."}}'),
}
TGI_PAGES = {"/health": (200, ""), "/metrics": (200, "# TYPE tgi_queue_size gauge\ntgi_queue_size 0\n")}


class ShapedServer:
    """``shape`` on a loopback port. asked: the bodies of the requests for answers."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.asked: list[dict[str, Any]] = []
        self.url = ""

    async def get(self, request: web.Request) -> web.StreamResponse:
        """A page."""
        if self.shape.key and request.headers.get("Authorization") != f"Bearer {self.shape.key}":
            return web.Response(status=401, text='{"error": {"message": "No api key passed in."}}')
        if request.path == "/v1/models":
            return web.json_response({"object": "list", "data": list(self.shape.models)})
        status, text = self.shape.pages.get(request.path, (404, '{"detail": "Not Found"}'))
        return web.Response(status=status, text=text)

    async def post(self, request: web.Request) -> web.StreamResponse:
        """An answer, or the tokens of a text."""
        shape, body = self.shape, await request.json()
        if shape.words_key and request.path == "/tokenize":
            words = list(range(len(str(body[shape.words_key]).split())))
            return web.json_response(
                {"tokens": words} if shape.words_key == "content" else [{"id": word} for word in words]
            )
        if request.path != ("/v1/chat/completions" if shape.chat else "/v1/completions"):
            return web.json_response({"error": {"message": "File Not Found"}}, status=404)
        if isinstance(body.get("prompt"), list) and shape.events is not llama_text:
            return web.json_response({"error": {"message": "prompt: expected a string"}}, status=422)
        self.asked.append(body)
        texts = [body["prompt"]] if not shape.chat else [each["content"] for each in body["messages"]]
        prompt_tokens = sum(len(text.split() if isinstance(text, str) else text) for text in texts)
        events = shape.events(str(len(self.asked)), prompt_tokens, int(body["max_tokens"]))
        pieces = [shape.data + json.dumps(event).encode() + b"\n\n" for event in events]
        pieces.append(shape.data + b"[DONE]\n\n")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        if shape.version == "1.0":
            response.force_close()
        else:
            response.enable_chunked_encoding()
        await response.prepare(request)
        for first in range(0, len(pieces), shape.together):
            held = pieces[first : first + shape.together]
            # A token takes a step, whoever collects them.
            await CLOCK.wait_until_ns(CLOCK.now_ns() + STEP_NS * len(held))
            await response.write(b"".join(held))
        await response.write_eof()
        return response


@contextmanager
def shaped_server(shape: Shape) -> Generator[ShapedServer]:
    """A server of that shape, in a thread of the test's own process."""
    server, loop, is_ready = ShapedServer(shape), asyncio.new_event_loop(), threading.Event()
    app = web.Application(client_max_size=1 << 26)
    app.router.add_get("/{path:.*}", server.get)
    app.router.add_post("/{path:.*}", server.post)
    runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start() -> None:
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        server.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        is_ready.set()

    def serve() -> None:
        loop.run_until_complete(start())
        loop.run_forever()
        loop.run_until_complete(runner.cleanup())
        loop.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    is_ready.wait()
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
