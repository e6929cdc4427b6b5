"""HTTP: the paths, status codes and headers of vLLM's OpenAI-compatible server.

Handlers turn a body into engine requests and wait. They never see the schedule. When a client disconnects, its engine
requests are aborted.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from http import HTTPStatus
from typing import Any

import numpy as np
from aiohttp import HttpVersion11, web
from prometheus_client import CONTENT_TYPE_LATEST

from harness.clock import NS_PER_MS, utc_now
from harness.measure.emulator import logs
from harness.measure.emulator.config import EmulatorConfig
from harness.measure.emulator.driver import RealTimeDriver
from harness.measure.emulator.model import ContextHash, StopConditions, keyed_answer, plan_answer, words_in
from harness.measure.emulator.protocol import (
    AnyRequest,
    ApiError,
    ChatRequest,
    CompletionRequest,
    checked_prompt,
    parse_request,
    server_error,
)
from harness.measure.emulator.recorded import recorded
from harness.measure.emulator.responses import EmulatedAnswer, compact
from harness.measure.emulator.tools import script_of, scripted_call
from harness.model.engine.blocks import PIN_FACTOR
from harness.model.engine.core import EngineRequest

MAX_BODY_BYTES = 64 * 1024 * 1024
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def random_id() -> str:
    """vLLM's random_uuid: 16 hex digits."""
    return uuid.uuid4().hex[:16]


def json_answer(body: dict[str, Any], *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON response with the headers that Starlette gives it."""
    response = web.Response(body=compact(body), status=status, headers=headers)
    response.headers["Content-Type"] = "application/json"
    return response


class Api:
    """The routes of one server."""

    def __init__(self, driver: RealTimeDriver, config: EmulatorConfig) -> None:
        self._driver, self._config = driver, config
        self._log, self._metrics = driver.reporter.log, driver.reporter.metrics
        self._num_open = 0
        self._tools = script_of(config.tools)
        self._faults = random.Random(config.seed)

    def application(self) -> web.Application:
        """The aiohttp application."""
        app = web.Application(middlewares=[self._errors], client_max_size=MAX_BODY_BYTES)
        app.on_response_prepare.append(self._log_access)
        add = app.router.add_route
        add("POST", "/v1/completions", partial(self._generate, CompletionRequest))
        add("POST", "/v1/chat/completions", partial(self._generate, ChatRequest))
        add("POST", "/tokenize", self._tokenize)
        add("GET", "/v1/models", self._models)
        add("GET", "/health", self._health)
        add("GET", "/ping", self._health)
        add("POST", "/ping", self._health)
        add("GET", "/version", self._version)
        add("GET", "/load", self._load)
        add("GET", "/metrics", self._metrics_page)
        add("GET", "/openapi.json", self._schema)
        if self._config.dev_mode and self._config.server.is_paged:
            add("POST", "/reset_prefix_cache", self._reset_prefix_cache)
        return app

    # -- answers ------------------------------------------------------------------------------------------------

    async def _generate(self, kind: type[AnyRequest], http: web.Request) -> web.StreamResponse:
        content = await http.read()
        # The request is here: the emulator's own work on it is no time of the model.
        arrival_ns = self._driver.now_ns()
        body = parse_request(kind, content, http.headers.get("Content-Type", ""))
        self._refuse_other_models(body)
        body.model = self._config.model
        if self._faults.random() < self._config.fault.http_500_rate:
            raise server_error("Internal server error")
        size, vocabulary = self._config.server.slot_tokens, self._config.vocab_size
        prompt, max_tokens = checked_prompt(body, size, vocabulary, has_tools=bool(self._tools))
        answer = self._answer_to(http, body, prompt, max_tokens)
        answer.request.arrival_ns = arrival_ns
        self._num_open += 1
        try:
            if body.stream:
                return await self._stream(http, answer)
            self._driver.submit(answer)
            await answer.finished.wait()
            return json_answer(answer.whole())
        finally:
            self._num_open -= 1
            self._driver.forget(answer)

    def _refuse_other_models(self, body: AnyRequest) -> None:
        if body.model and body.model != self._config.model:
            message = f"The model `{body.model}` does not exist."
            raise ApiError(message, "model", kind="NotFoundError", status=HTTPStatus.NOT_FOUND)

    def _answer_to(self, http: web.Request, body: AnyRequest, prompt: list[int], max_tokens: int) -> EmulatedAnswer:
        """The answer to a body, with the engine request that makes it; nothing is submitted yet."""
        is_chat = isinstance(body, ChatRequest)
        base_id = http.headers.get("X-Request-Id") or body.request_id or random_id()
        response_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{base_id}"
        # A completion names the place of its prompt, of which it has one.
        external_id = response_id if is_chat else f"{response_id}-0"
        call = None
        if isinstance(body, ChatRequest):
            num_answers = sum(message.role == "assistant" for message in body.messages)
            call = scripted_call(self._tools, body.called_tools, num_answers)
            if call is None and body.output_limit[0] is None:
                end = "" if self._config.eos_rate else "; --eos-rate ends answers by chance"
                self._log.line(logs.LONG_ANSWER, f"{response_id} has no max_tokens: it has {max_tokens} tokens{end}")
        answer = EmulatedAnswer(
            body,
            self._request(body, prompt, max_tokens if call is None else min(max_tokens, call.num_tokens), external_id),
            self._metrics.dialect,
            response_id=response_id,
            with_token_details=self._config.enable_prompt_tokens_details,
        )
        answer.call = call
        return answer

    def _request(self, body: AnyRequest, prompt: list[int], max_tokens: int, external_id: str) -> EngineRequest:
        tokens = np.asarray(prompt, dtype=np.int32)
        context = ContextHash.of(tokens, self._config.seed, words_in(self._config.vocab_size))
        conditions = StopConditions(
            body.min_tokens, 0.0 if body.ignore_eos else self._config.eos_rate, self._config.fault.early_stop
        )
        planned = plan_answer(context, max_tokens, conditions)
        keys, answer = keyed_answer(self._driver.reporter.engine, tokens, context, planned)
        if body.cache_salt is not None:
            # Any fixed 62-bit number per salt keeps its hashes apart from all others.
            keys = keys ^ np.int64(random.Random(body.cache_salt).getrandbits(62))
        return EngineRequest(
            handle=self._driver.core.new_handle(),
            engine_id=f"{external_id}-{uuid.uuid4().hex[:8]}",
            external_id=external_id,
            prompt=tokens,
            max_tokens=max_tokens,
            block_keys=keys,
            planned_tokens=planned.num_tokens,
            planned_reason=planned.reason,
            answer=answer,
            keep_ns=round(PIN_FACTOR * (body.keep_kv_ms or 0) * NS_PER_MS),
        )

    async def _stream(self, http: web.Request, answer: EmulatedAnswer) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        answer.is_chunked = http.version >= HttpVersion11
        if answer.is_chunked:
            response.enable_chunked_encoding()
        await response.prepare(http)
        answer.transport = http.transport
        self._driver.submit(answer)
        await answer.finished.wait()
        answer.end_stream()
        await response.write_eof()
        return response

    # -- the rest -----------------------------------------------------------------------------------------------

    async def _models(self, _http: web.Request) -> web.Response:
        created = int(utc_now().timestamp())
        answers = recorded("answers")
        permission = {**answers["model permission"], "id": f"modelperm-{random_id()}", "created": created}
        name = {"id": self._config.model, "root": self._config.model}
        size = {"max_model_len": self._config.server.slot_tokens, "permission": [permission]}
        card = {**answers["model"], **name, "created": created, **size}
        return json_answer({"object": "list", "data": [card]})

    async def _tokenize(self, http: web.Request) -> web.Response:
        """The ids of a ``prompt`` or of the ``messages`` of a chat, as vLLM's path of that name gives them."""
        content, kind = await http.read(), http.headers.get("Content-Type", "")
        is_chat = b'"messages"' in content
        body: AnyRequest = parse_request(ChatRequest if is_chat else CompletionRequest, content, kind)
        self._refuse_other_models(body)
        (tokens, *_) = body.prompts(words_in(self._config.vocab_size))
        size = self._config.server.slot_tokens
        return json_answer({"count": len(tokens), "max_model_len": size, "tokens": tokens, "token_strs": None})

    async def _health(self, _http: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, _http: web.Request) -> web.Response:
        return json_answer({"version": self._metrics.dialect.vllm})

    async def _load(self, _http: web.Request) -> web.Response:
        return json_answer({"server_load": self._num_open})

    async def _schema(self, _http: web.Request) -> web.Response:
        """The fields of its requests, as FastAPI describes those of vLLM."""
        schemas = {kind.__name__: kind.model_json_schema() for kind in (CompletionRequest, ChatRequest)}
        return json_answer({"openapi": "3.1.0", "components": {"schemas": schemas}})

    async def _reset_prefix_cache(self, _http: web.Request) -> web.Response:
        self._driver.core.reset_prefix_cache()
        return web.Response()

    async def _metrics_page(self, _http: web.Request) -> web.Response:
        # Rendering takes milliseconds: on this thread it would hold up a step.
        body = await asyncio.get_running_loop().run_in_executor(None, self._metrics.render)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    # -- around every request -----------------------------------------------------------------------------------

    @web.middleware
    async def _errors(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            return await handler(request)
        except ApiError as error:
            return json_answer(error.body(self._metrics.dialect), status=error.status)
        except web.HTTPException as error:
            # vLLM leaves unknown paths and methods to Starlette, whose bodies look like this.
            headers = {name: value for name, value in error.headers.items() if name == "Allow"}
            return json_answer({"detail": error.reason}, status=error.status, headers=headers)
        except Exception as error:
            self._log.line(logs.REQUEST_FAULT, f"Exception caught. {type(error).__name__}: {error}")
            fault = server_error(str(error))
            return json_answer(fault.body(self._metrics.dialect), status=fault.status)

    async def _log_access(self, http: web.Request, response: web.StreamResponse) -> None:
        response.headers["server"] = "uvicorn"
        response.headers["vary"] = "Origin"
        peer: Any = http.transport.get_extra_info("peername") if http.transport else None
        address = f"{peer[0]}:{peer[1]}" if peer else "-"
        phrase = HTTPStatus(response.status).phrase
        version = f"{http.version.major}.{http.version.minor}"
        self._log.plain(
            f'INFO:     {address} - "{http.method} {http.path_qs} HTTP/{version}" {response.status} {phrase}'
        )
