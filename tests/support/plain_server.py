"""A plain OpenAI-compatible server in threads of the test's own process: what it knows beyond the basics is chosen."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from harness.clock import NS_PER_MS
from tests.support.processes import clock
from tests.support.raw_server import CHUNKED_HEAD, CLOSE, Asked, RawServer, Reply, chunked, whole
from tests.support.tls import TlsFront

STEP_NS = 2 * NS_PER_MS
Events = Callable[[str, int, int], list[dict[str, Any]]]
METRICS = '# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 0.0\n'


@dataclass
class PlainServer:
    """What it knows, and what it was asked. key: without it every path says 401.
    fails: words of every completion after num_good ones. paths: of the endpoints that it knows. is_other: each event
    has an id of its own and an error that is null, and no [DONE] ends a stream. health: status of /health.
    tokenizer: whether a token is a word, up to five letters of it, a byte, or, of words from n to z, their first letter
    and the rest. tokenizes: whether it knows /tokenize, with the text in text_key, and ids listed as TGI does;
    tokenized: its answer instead; num_tokenized: such requests.
    cached_tokens: of every prompt, as usage has them; 0: not stated.
    repeats: what it adds to a header and to the names in its answers.
    model, version, metrics: as it states them, the last at metrics_path; pages: what else a GET gets, by path.
    on_answer: called with the server before each completion. events: of an answer, from its id, its prompt tokens and
    the tokens to make. together: so many events leave in one piece, a step for each; 0: the whole answer at once.
    is_old: it speaks HTTP/1.0. data: begins each event. certificate: it speaks TLS."""

    paths: tuple[str, ...] = ("/v1/completions",)
    gives_token_ids: bool = False
    has_metrics: bool = False
    key: str = ""
    prefix: str = ""
    fails: str = ""
    num_good: int = 0
    certificate: Path | None = None
    is_other: bool = False
    tokenizer: Literal["words", "pieces", "bytes", "mixed"] = "words"
    tokenizes: bool = False
    text_key: str = "prompt"
    ids_as_objects: bool = False
    tokenized: str = ""
    num_tokenized: int = 0
    health: int = 404
    model: str = "plain"
    other_models: tuple[str, ...] = ()
    pages: dict[str, tuple[int, str]] = field(default_factory=dict[str, tuple[int, str]])
    takes_ids: bool = True
    events: Events | None = None
    together: int = 0
    is_old: bool = False
    data: bytes = b"data: "
    version: str = ""
    metrics: str = METRICS
    metrics_path: str = "/metrics"
    on_answer: Callable[[PlainServer], object] | None = None
    max_model_len: int = 0
    cached_tokens: int = 0
    repeats: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    url: str = ""


@contextmanager
def plain_server(server: PlainServer) -> Generator[PlainServer]:
    """``server``, listening on a loopback port."""
    with ExitStack() as opened:
        raw = opened.enter_context(RawServer(lambda asked: _reply(server, asked)))
        server.url = f"{raw.url}{server.prefix}"
        if server.certificate is not None:
            front = opened.enter_context(TlsFront(raw, server.certificate))
            server.url = f"https://{front.host}:{front.port}{server.prefix}"
        yield server


def _reply(server: PlainServer, asked: Asked) -> Reply:
    if server.key and asked.header("Authorization") != f"Bearer {server.key}":
        return _whole(server, 401, json.dumps({"error": {"message": "Incorrect API key provided"}}))
    path = asked.path.removeprefix(server.prefix)
    if asked.method == "GET":
        return _whole(server, *_page(server, path))
    if path == "/tokenize" and server.tokenizes:
        return _whole(server, 200, _tokens(server, asked.fields))
    if path not in server.paths:
        return _whole(server, 404, '{"detail": "Not Found"}')
    return _completion(server, asked.fields)


def _completion(server: PlainServer, body: dict[str, Any]) -> Reply:
    if not server.takes_ids and isinstance(body.get("prompt"), list):
        return _whole(server, 422, '{"error": {"message": "prompt: expected a string"}}')
    server.asked.append(body)
    if server.on_answer is not None:
        server.on_answer(server)
    if server.fails and len(server.asked) > server.num_good:
        return _whole(server, 400, json.dumps({"error": {"message": f"{server.fails} {len(server.asked)}"}}))
    parts = [server.data + event.encode() + b"\n\n" for event in _events(server, body)]
    if not server.together:
        return _whole(server, 200, b"".join(parts))
    if server.is_old:
        return Reply(_in_steps(server, b"HTTP/1.0 200 OK\r\n\r\n", [*parts, b""]), CLOSE)
    return Reply(_in_steps(server, CHUNKED_HEAD, chunked(parts)))


def _whole(server: PlainServer, status: int, body: str | bytes) -> Reply:
    repeated = [b"X-Replica: " + server.repeats.encode()] if server.repeats else []
    return Reply([whole(body, *repeated, status=status)])


def _in_steps(server: PlainServer, head: bytes, parts: Sequence[bytes]) -> Iterator[bytes]:
    """The head, then ``together`` parts at once, each a step after the one before; the last is no event."""
    yield head
    *events, end = parts
    for first in range(0, len(events), server.together):
        held = events[first : first + server.together]
        clock.sleep_until_ns(clock.now_ns() + STEP_NS * len(held))
        yield b"".join(held)
    yield end


def _page(server: PlainServer, path: str) -> tuple[int, str]:
    """Status and body of the answer to a GET."""
    if path == "/health":
        return server.health, ""
    limit = {"max_model_len": server.max_model_len} if server.max_model_len else {}
    models = [{"id": model, **limit} for model in (server.model, *server.other_models)]
    bodies = {"/v1/models": json.dumps({"object": "list", "data": models})}
    bodies |= {server.metrics_path: server.metrics} if server.has_metrics else {}
    bodies |= {"/version": json.dumps({"version": server.version})} if server.version else {}
    return (200, bodies[path]) if path in bodies else server.pages.get(path, (404, '{"detail": "Not Found"}'))


def _tokens(server: PlainServer, body: dict[str, Any]) -> str:
    """The answer to /tokenize."""
    server.num_tokenized += 1
    if server.tokenized:
        return server.tokenized
    if server.text_key != "prompt":
        body = {"prompt": body.get(server.text_key, "")}
    ids = _ids_of(server, body)
    if server.ids_as_objects:
        return json.dumps([{"id": each, "text": "", "start": 0, "stop": 0} for each in ids])
    return json.dumps({"count": len(ids), "max_model_len": 8192, "tokens": ids})


def _events(server: PlainServer, body: dict[str, Any]) -> list[str]:
    """The events of a stream that honours max_tokens; usage comes last."""
    is_chat = "messages" in body
    name, count = (
        f"{'chatcmpl' if is_chat else 'cmpl'}-{len(server.asked)}{server.repeats}",
        int(body.get("max_tokens") or body["max_completion_tokens"]),
    )
    if server.events is not None:
        return [*map(json.dumps, server.events(name, len(_ids_of(server, body)), count)), "[DONE]"]
    events: list[dict[str, Any]] = []
    if is_chat:
        events.append({"id": name, "choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]})
    for token in range(count):
        words = {"delta": {"content": " word"}} if is_chat else {"text": " word"}
        choice: dict[str, Any] = {"index": 0, "finish_reason": None, **words}
        if server.gives_token_ids:
            choice["token_ids"] = [1000 + token]
        events.append({"id": name, "choices": [choice]})
    events[-1]["choices"][0]["finish_reason"] = f"length{server.repeats}"
    usage: dict[str, Any] = {"prompt_tokens": len(_ids_of(server, body)), "completion_tokens": count}
    if server.cached_tokens:
        usage["prompt_tokens_details"] = {"cached_tokens": server.cached_tokens}
    events.append({"id": name, "choices": [], "usage": usage})
    if server.is_other:
        return [json.dumps({**event, "id": f"{name}-{place}", "error": None}) for place, event in enumerate(events)]
    return [*map(json.dumps, events), "[DONE]"]


def _ids_of(server: PlainServer, body: dict[str, Any]) -> list[int]:
    """The ids of a prompt; of a chat those of its contents, and three of a template for each message."""
    if "messages" in body:
        of_messages = [(1, 2, *_ids_of_text(server, message["content"]), 3) for message in body["messages"]]
        return [token for ids in of_messages for token in ids]
    prompt = body["prompt"]
    return _ids_of_text(server, prompt) if isinstance(prompt, str) else prompt


_PIECES = {"words": r"\n|\S+", "pieces": r"\n|\S{1,5}", "mixed": r"\n|\b[a-m]\S*|\b[n-z]|\S+"}


def _ids_of_text(server: PlainServer, text: str) -> list[int]:
    """A byte each; or a word or piece each, and each line's end."""
    if server.tokenizer == "bytes":
        return list(text.encode())
    return [zlib.crc32(piece.encode()) for piece in re.findall(_PIECES[server.tokenizer], text)]
