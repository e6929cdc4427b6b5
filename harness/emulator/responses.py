"""Answers: their JSON bodies and server-sent events, field for field as vLLM writes them, and their way to the client.

The fixed fields are recorded in ``recorded/answers.json``. Null, absent and zero differ: before 0.12 a usage without
reuse has ``prompt_tokens_details: null`` in a whole answer and no such field in a stream; since then zero in both.
Bytes go straight to the transport: writing never blocks and never waits.
"""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

from aiohttp import HttpVersion11, web

from harness.emulator.core import EngineRequest
from harness.emulator.model import FinishReason, WantedLogprobs, decode
from harness.emulator.protocol import EchoMode
from harness.emulator.recorded import recorded
from harness.stack.rbln.rules.dialect import Dialect

DONE = b"data: [DONE]\n\n"
# Stand-ins in an event's template; what a client chose (id, model) comes before them.
TEXT_MARK, TOKENS_MARK = "\0text", -1


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + compact(body) + b"\n\n"


def compact(body: dict[str, Any]) -> bytes:
    """JSON without blanks, as Starlette writes it."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """UsageInfo with only the fields that were set."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


@dataclass(slots=True)
class Answer:
    """The answer to one HTTP request, in the requested shape.

    requests: one per choice, all choices of a prompt together.
    """

    dialect: Dialect
    response_id: str
    created: int
    model: str
    is_chat: bool
    requests: list[EngineRequest]
    num_choices: int = 1
    echo: EchoMode = ""
    logprobs: WantedLogprobs | None = None
    return_token_ids: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    with_token_details: bool = True
    first_cached_tokens: int | None = None
    last_cached_tokens: int = 0
    prompts_shown: set[int] = field(default_factory=set)
    templates: dict[int, tuple[bytes, bytes, bytes]] = field(default_factory=dict)

    @property
    def fingerprint(self) -> str:
        return f"vllm-{self.dialect.vllm}-emulated"

    def finished(self, index: int) -> None:
        """Engine request ``index`` ended. Of a prompt's choices, the usage shows the reuse of the last to end."""
        if index >= len(self.requests) - self.num_choices:
            self.last_cached_tokens = self.requests[index].cached_tokens

    # -- whole answers ------------------------------------------------------------------------------------------

    def whole(self, texts: list[str], tokens: list[list[int]]) -> dict[str, Any]:
        """The body of a request without ``stream``; one text and token list per engine request, in order."""
        choices = [
            self._whole_choice(index, request, texts[index], tokens[index])
            for index, request in enumerate(self.requests)
        ]
        body = {
            **self._recorded(""),
            "id": self.response_id,
            "created": self.created,
            "model": self.model,
            "choices": choices,
            "system_fingerprint": self.fingerprint,
            "usage": self._whole_usage(sum(map(len, tokens))),
        }
        if self.is_chat and self.return_token_ids:
            body["prompt_token_ids"] = self.requests[0].prompt.tolist()
        return body | dict.fromkeys(self.dialect.null_fields)

    def _recorded(self, part: str) -> dict[str, Any]:
        answers = recorded("answers")
        return answers[f"{'chat' if self.is_chat else 'completion'}{part}"]

    def _whole_choice(self, index: int, request: EngineRequest, text: str, tokens: list[int]) -> dict[str, Any]:
        choice = {
            **self._recorded(" choice"),
            "index": index,
            "logprobs": self._logprobs(tokens),
            "finish_reason": request.finish_reason,
            "stop_reason": request.stop_reason,
            "token_ids": tokens if self.return_token_ids else None,
        }
        if self.is_chat:
            message = {**self._recorded(" message"), "content": text}
            if not self.dialect.has_empty_tool_calls:
                del message["tool_calls"]
            return {**choice, "message": message}
        prompt = request.prompt.tolist() if self.return_token_ids else None
        return {**choice, "text": self._with_echo(request, text), "prompt_token_ids": prompt}

    def _whole_usage(self, completion_tokens: int) -> dict[str, Any]:
        # With several prompts vLLM sums the tokens but reports the reuse of the last prompt alone.
        cached = self.last_cached_tokens if self.with_token_details else 0
        shown = usage(self._prompt_tokens(), completion_tokens)
        if not self.dialect.has_usage_details:
            return {**shown, "prompt_tokens_details": {"cached_tokens": cached} if cached else None}
        created = 0 if self.is_chat else None
        details = {"cached_tokens": cached, "created_cache_tokens": created, "multimodal_tokens": None}
        if not self.with_token_details:
            details = None
        return {**shown, "prompt_tokens_details": details, "completion_tokens_details": None}

    # -- streams ------------------------------------------------------------------------------------------------

    def chunk(self, index: int, text: str, tokens: list[int], num_generated: int, text_before: int = 0) -> bytes:
        """The event of new tokens of engine request ``index``; a chat's first comes with one that opens each choice.

        num_generated: tokens of this engine request so far, these included. text_before: characters of it so far.
        """
        request = self.requests[index]
        if self.first_cached_tokens is None:
            self.first_cached_tokens = request.cached_tokens
        is_plain = not self.continuous_usage and self.logprobs is None
        if is_plain and index in self.prompts_shown and request.finish_reason is None:
            return self._plain_chunk(index, text, tokens)
        events = b""
        if self.is_chat and not self.prompts_shown:
            events = b"".join(self._chat_opening(choice) for choice in range(self.num_choices))
        choice = self._chunk_choice(index, text, tokens, request, text_before)
        return events + event(self._chunk_body(choice, index, num_generated, request.finish_reason))

    def _plain_chunk(self, index: int, text: str, tokens: list[int]) -> bytes:
        # Nearly every event of a stream: only text and tokens change, and a step sends one to every client.
        pieces = self.templates.get(index)
        if pieces is None:
            choice = self._chunk_choice(index, TEXT_MARK, [TOKENS_MARK], self.requests[index])
            whole = event(self._chunk_body(choice, index, 0, None))
            head, _, rest = whole.rpartition(json.dumps(TEXT_MARK).encode())
            middle, _, tail = rest.partition(f"[{TOKENS_MARK}]".encode())
            pieces = self.templates[index] = (head, middle, tail)
        head, middle, tail = pieces
        written = json.dumps(text, ensure_ascii=False).encode(errors="replace")
        if not self.return_token_ids:
            return head + written + middle
        return b"".join((head, written, middle, json.dumps(tokens, separators=(",", ":")).encode(), tail))

    def last_chunk(self, completion_tokens: int) -> bytes:
        """The usage event, when asked for, and the end of the stream."""
        if not self.include_usage:
            return DONE
        final = usage(self._prompt_tokens(), completion_tokens)
        cached = self.first_cached_tokens or 0
        if self.with_token_details and self.dialect.has_usage_details and self.is_chat:
            final["prompt_tokens_details"] = {"cached_tokens": cached, "created_cache_tokens": 0}
        elif self.with_token_details and (cached or self.dialect.has_usage_details):
            final["prompt_tokens_details"] = {"cached_tokens": cached}
        body = {**self._head(), "choices": [], "usage": final, "system_fingerprint": self.fingerprint}
        return event(body) + DONE

    def _head(self) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self.is_chat else "text_completion"
        return {"id": self.response_id, "object": kind, "created": self.created, "model": self.model}

    def _chunk_choice(
        self, index: int, text: str, tokens: list[int], request: EngineRequest, text_before: int = 0
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens, text_before)
        token_ids = tokens if self.return_token_ids else None
        finish_reason = request.finish_reason
        if self.is_chat:
            choice = {"index": index, "delta": {"content": text}, "logprobs": logprobs, "finish_reason": finish_reason}
            if finish_reason is not None:
                choice["stop_reason"] = request.stop_reason
            return {**choice, "token_ids": token_ids}
        prompt_ids = None
        if index not in self.prompts_shown:
            self.prompts_shown.add(index)
            prompt_ids = request.prompt.tolist() if self.return_token_ids or self.echo else None
            text = self._with_echo(request, text)
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
            "stop_reason": request.stop_reason if finish_reason is not None else None,
            "prompt_token_ids": prompt_ids,
            "token_ids": token_ids,
        }

    def _chunk_body(
        self, choice: dict[str, Any], index: int, num_generated: int, finish_reason: FinishReason | None
    ) -> dict[str, Any]:
        body = {**self._head(), "choices": [choice]}
        if self.continuous_usage:
            body["usage"] = usage(len(self.requests[index].prompt), num_generated)
        if finish_reason is not None and not self.include_usage:
            body["system_fingerprint"] = self.fingerprint
        return body

    def _chat_opening(self, index: int) -> bytes:
        self.prompts_shown.add(index)
        request = self.requests[index]
        opening = {
            "index": index,
            "delta": {"role": "assistant", "content": ""},
            "logprobs": None,
            "finish_reason": None,
        }
        body = {**self._head(), "choices": [opening]}
        if self.continuous_usage:
            body["usage"] = usage(len(request.prompt), 0)
        prompt = request.prompt.tolist() if self.return_token_ids else None
        return event({**body, "prompt_token_ids": prompt, "prompt_text": None})

    def _prompt_tokens(self) -> int:
        return sum(len(request.prompt) for request in self.requests[:: self.num_choices])

    def _logprobs(self, tokens: list[int], text_before: int = 0) -> dict[str, Any] | None:
        return None if self.logprobs is None else self.logprobs.of(tokens, text_before)

    def _with_echo(self, request: EngineRequest, text: str) -> str:
        """The prompt's text before the answer's, when asked for; with token ids, vLLM shows it as those only."""
        if not self.echo:
            return text
        prompt = "" if self.return_token_ids else decode(request.prompt.tolist(), skip_special_tokens=False)
        return prompt if self.echo == "alone" else prompt + text


@dataclass(slots=True, eq=False)
class ClientStream:
    """One HTTP request's answer in the making. ``text_limits``: characters each engine request may show, -1 for all."""

    answer: Answer
    text_limits: list[int]
    finished: asyncio.Future[None]
    transport: asyncio.Transport | None = None
    is_chunked: bool = True
    tokens: list[list[int]] = field(default_factory=list)
    text_lengths: list[int] = field(default_factory=list)
    num_open: int = 0

    def __post_init__(self) -> None:
        self.num_open = len(self.answer.requests)
        self.tokens = [[] for _ in self.answer.requests]
        self.text_lengths = [0] * self.num_open

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.tokens))

    def push(self, request: EngineRequest, token: int | None) -> None:
        """One more token of one engine request, None for an abort that brings none; ends the answer at the last."""
        index = self.answer.requests.index(request)
        new = [] if token is None else [token]
        self.tokens[index] += new
        if self.transport is not None:
            text_before = self.text_lengths[index]
            text = self._new_text(index, new)
            self.send(self.answer.chunk(index, text, new, len(self.tokens[index]), text_before))
        if request.finish_reason is not None:
            self.answer.finished(index)
            self.num_open -= 1
            if self.num_open == 0 and not self.finished.done():
                self.finished.set_result(None)

    def send(self, chunk: bytes) -> None:
        """Put bytes on the wire, in the framing of HTTP/1.1 when the response has no length."""
        if self.transport is None or self.transport.is_closing():
            return
        self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self.is_chunked else chunk)

    def texts(self) -> list[str]:
        """The text of every engine request, cut where a stop text begins."""
        pairs = zip(self.tokens, self.text_limits, strict=True)
        return [decode(tokens)[: None if limit < 0 else limit] for tokens, limit in pairs]

    def _new_text(self, index: int, new: list[int]) -> str:
        text, limit = decode(new), self.text_limits[index]
        if limit >= 0:
            text = text[: max(0, limit - self.text_lengths[index])]
        self.text_lengths[index] += len(text)
        return text


async def open_stream(request: web.Request) -> tuple[web.StreamResponse, asyncio.Transport | None, bool]:
    """Send the head of an event stream; returns the response, its transport, and whether it is chunked."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
    is_chunked = request.version >= HttpVersion11
    if is_chunked:
        response.enable_chunked_encoding()
    await response.prepare(request)
    return response, request.transport, is_chunked
