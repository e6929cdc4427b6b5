"""A plain OpenAI-compatible server in a thread of the test's own process: what it knows beyond the basics is chosen."""

from __future__ import annotations

import json
import re
import ssl
import threading
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

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
    model, version, metrics: as it states them, the last at metrics_path. on_answer: called with the server before each
    completion."""

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
    version: str = ""
    metrics: str = METRICS
    metrics_path: str = "/metrics"
    on_answer: Callable[[PlainServer], object] | None = None
    max_model_len: int = 0
    cached_tokens: int = 0
    repeats: str = ""
    asked: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    url: str = ""


def _handler_of(server: PlainServer) -> type[BaseHTTPRequestHandler]:
    """What answers the requests of ``server``."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        # The body leaves at once, not when the client has acknowledged the head, 40 ms later.
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            if self._is_refused():
                return
            self._send(*_page(server, self.path.removeprefix(server.prefix)))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if self._is_refused():
                return
            self._send(*_reply(server, self.path.removeprefix(server.prefix), body))

        def _is_refused(self) -> bool:
            if server.key and self.headers.get("Authorization") != f"Bearer {server.key}":
                self._send(401, json.dumps({"error": {"message": "Incorrect API key provided"}}))
                return True
            return False

        def _send(self, status: int, body: str) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body.encode())))
            if server.repeats:
                self.send_header("X-Replica", server.repeats)
            self.end_headers()
            with suppress(ConnectionError):  # a client that left
                self.wfile.write(body.encode())

        def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
            del code, size

    return Handler


@contextmanager
def plain_server(server: PlainServer) -> Generator[PlainServer]:
    """``server``, listening on a loopback port."""

    with ThreadingHTTPServer(("127.0.0.1", 0), _handler_of(server)) as listening:
        if server.certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(server.certificate)
            listening.socket = context.wrap_socket(listening.socket, server_side=True)
        scheme = "http" if server.certificate is None else "https"
        server.url = f"{scheme}://127.0.0.1:{listening.server_address[1]}{server.prefix}"
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            listening.shutdown()
            thread.join()


def _page(server: PlainServer, path: str) -> tuple[int, str]:
    """Status and body of the answer to a GET."""
    if path == "/health":
        return server.health, ""
    limit = {"max_model_len": server.max_model_len} if server.max_model_len else {}
    bodies = {"/v1/models": json.dumps({"object": "list", "data": [{"id": server.model, **limit}]})}
    bodies |= {server.metrics_path: server.metrics} if server.has_metrics else {}
    bodies |= {"/version": json.dumps({"version": server.version})} if server.version else {}
    return (200, bodies[path]) if path in bodies else (404, '{"detail": "Not Found"}')


def _reply(server: PlainServer, path: str, body: dict[str, Any]) -> tuple[int, str]:
    """Status and body of the answer to a request."""
    if path == "/tokenize" and server.tokenizes:
        server.num_tokenized += 1
        if server.tokenized:
            return 200, server.tokenized
        if server.text_key != "prompt":
            body = {"prompt": body.get(server.text_key, "")}
        ids = _ids_of(server, body)
        if server.ids_as_objects:
            return 200, json.dumps([{"id": each, "text": "", "start": 0, "stop": 0} for each in ids])
        return 200, json.dumps({"count": len(ids), "max_model_len": 8192, "tokens": ids})
    if path not in server.paths:
        return 404, '{"detail": "Not Found"}'
    server.asked.append(body)
    if server.on_answer is not None:
        server.on_answer(server)
    if server.fails and len(server.asked) > server.num_good:
        return 400, json.dumps({"error": {"message": f"{server.fails} {len(server.asked)}"}})
    return 200, "".join(f"data: {event}\n\n" for event in _events(server, body))


def _events(server: PlainServer, body: dict[str, Any]) -> list[str]:
    """The events of a stream that honours max_tokens; usage comes last."""
    is_chat = "messages" in body
    name, count = (
        f"{'chatcmpl' if is_chat else 'cmpl'}-{len(server.asked)}{server.repeats}",
        int(body.get("max_tokens") or body["max_completion_tokens"]),
    )
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
