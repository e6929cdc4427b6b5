"""The harness's own router: one address for several servers, in a process of its own.

Completions go where a ``Policy`` says; every other path goes to the first server. Bodies pass unchanged and as they
come; a request whose client leaves is left at its server too. Nothing is repeated: a server that does not answer is an
error of the request.
"""

from __future__ import annotations

import asyncio
import gc
import json
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

import numpy as np
from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector, web

from harness.clock import MonotonicClock
from harness.errors import escape_controls
from harness.extras.replicas.policies import BLOCK_TOKENS, Policy, PrefixAware, RoutedRequest, policy_named
from harness.model.plan.blocks import token_block_keys
from harness.model.spec.server import REPLICA_HEADER

ROUTED_PATHS = ("/v1/completions", "/v1/chat/completions")
# Of one connection, not of what passes through it. Source: RFC 9110, 7.6.1.
_HOP_BY_HOP = frozenset(
    ("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host")
)
_MAX_BODY_BYTES = 1 << 30
# Characters of text that stand for a block, about as long as one of tokens.
_BLOCK_BYTES = 512
_KEEP_ALIVE_S = 75.0


class RouterConfig(NamedTuple):
    """What the router is started with, as a JSON file. urls: of the servers. routed_path: file of its decisions."""

    host: str
    port: int
    urls: Sequence[str]
    policy: str
    session_header: str
    routed_path: str


class Decisions:
    """The file of decisions: a line [instant, "route", request, session, replica] and [instant, "done", request,
    replica] each, in the order in which the policy saw them. Instants in CLOCK_MONOTONIC ns.

    A prefix-aware decision has two members more: the prompt's whole blocks, and how many leading ones of them each
    replica was sent before.
    """

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._clock = MonotonicClock()

    def write(self, *words: Any) -> None:
        """A line with the instant of now."""
        self._file.write(json.dumps([self._clock.now_ns(), *words], separators=(",", ":")) + "\n")


class RouterApp:
    """The routes of the router."""

    def __init__(self, config: RouterConfig, policy: Policy, decisions: Decisions) -> None:
        self._config, self._policy, self._decisions = config, policy, decisions
        self._http: ClientSession | None = None

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(client_max_size=_MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._connections)
        app.router.add_route("GET", "/health", self._health)
        for path in ROUTED_PATHS:
            app.router.add_route("POST", path, self._routed)
        app.router.add_route("*", "/{path:.*}", self._to_the_first)
        return app

    async def _connections(self, _app: web.Application) -> AsyncIterator[None]:
        timeout = ClientTimeout(total=None, sock_connect=10.0)
        async with ClientSession(
            connector=TCPConnector(limit=0), timeout=timeout, auto_decompress=False, trust_env=False
        ) as session:
            self._http = session
            yield

    async def _health(self, _request: web.Request) -> web.Response:
        return web.Response()

    async def _to_the_first(self, request: web.Request) -> web.StreamResponse:
        return await self._passed_on(request, await request.read(), 0)

    async def _routed(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        session = request.headers.get(self._config.session_header, "") if self._config.session_header else ""
        name = request.headers.get("X-Request-Id", "")
        keys = keys_of(body) if self._policy.reads_prompts else ()
        replica = self._policy.route(RoutedRequest(session, keys))
        read = (len(keys), self._policy.matched) if isinstance(self._policy, PrefixAware) else ()
        self._decisions.write("route", name, session, replica, *read)
        try:
            return await self._passed_on(request, body, replica)
        finally:
            self._policy.finished(replica)
            self._decisions.write("done", name, replica)

    async def _passed_on(self, request: web.Request, body: bytes, replica: int) -> web.StreamResponse:
        assert self._http is not None, "the application has started"
        headers = [(name, value) for name, value in request.headers.items() if name.lower() not in _HOP_BY_HOP]
        url, response = self._config.urls[replica] + request.path_qs, None
        try:
            async with self._http.request(
                request.method, url, data=body or None, headers=headers, allow_redirects=False
            ) as answer:
                kept = [(name, value) for name, value in answer.headers.items() if name.lower() not in _HOP_BY_HOP]
                response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=kept)
                response.headers[REPLICA_HEADER] = str(replica)
                await response.prepare(request)
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
                return response
        except (ClientError, OSError) as error:
            text = f"replica {replica} does not answer: {type(error).__name__}: {error}"
            sys.stderr.write(escape_controls(f"{text}\n"))
            if response is not None:
                # An answer that has begun can only be cut off.
                raise
            return web.json_response({"error": {"message": text, "code": 502}}, status=502)


def keys_of(body: bytes) -> list[int]:
    """Keys of the blocks of a prompt, each of all that comes before it too; none of a body that cannot be read.

    Of token ids blocks of ``BLOCK_TOKENS``; of text as many bytes as such a block has letters.
    """
    try:
        table = json.loads(body)
        prompt = table.get("prompt", table.get("messages"))
    except (ValueError, AttributeError, RecursionError):
        return []
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return token_block_keys(np.array(prompt, dtype=np.int64).astype(np.int32), BLOCK_TOKENS).tolist()
    text = prompt if isinstance(prompt, str) else json.dumps(prompt) if prompt else ""
    letters = np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int32)
    return token_block_keys(letters, _BLOCK_BYTES).tolist()


async def serve(config: RouterConfig) -> None:
    """Answer until a signal ends it."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    with Path(config.routed_path).open("a", buffering=1, encoding="utf-8") as file:
        router = RouterApp(config, policy_named(config.policy, len(config.urls)), Decisions(file))
        runner = web.AppRunner(
            router.application(),
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=1.0,
            keepalive_timeout=_KEEP_ALIVE_S,
            auto_decompress=False,
        )
        await runner.setup()
        # Objects of the start live until exit. Each collection of them would cost milliseconds.
        gc.collect()
        gc.freeze()
        await web.TCPSite(runner, config.host, config.port, backlog=2048).start()
        sys.stderr.write(
            escape_controls(f"{config.policy} to {', '.join(config.urls)} on http://{config.host}:{config.port}\n")
        )
        with suppress(asyncio.CancelledError):
            await stop.wait()
        await runner.cleanup()


def main(config: str) -> None:
    """Route until ended. config: a file with a ``RouterConfig`` as JSON."""
    table = json.loads(Path(config).read_text(encoding="utf-8"))
    asyncio.run(serve(RouterConfig(*(table[name] for name in RouterConfig._fields))))
