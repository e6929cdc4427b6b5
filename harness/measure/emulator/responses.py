"""Answers: their JSON bodies and server-sent events, field for field as vLLM writes them, and their way to the client.

The fixed fields are recorded in ``recorded/answers.json``. Null, absent and zero differ: before 0.12 a usage without
reuse has ``prompt_tokens_details: null`` in a whole answer and no such field in a stream; since then zero in both.
Bytes go straight to the transport: writing never blocks and never waits.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from harness.clock import utc_now
from harness.measure.emulator.model import decode
from harness.measure.emulator.protocol import AnyRequest, ChatRequest
from harness.measure.emulator.recorded import recorded
from harness.measure.emulator.tools import ToolCall
from harness.model.engine.core import EngineRequest
from harness.stacks.rbln.rules.dialect import Dialect

DONE = b"data: [DONE]\n\n"
# Stand-ins in an event's template; what a client chose (id, model) comes before them.
TEXT_MARK, TOKENS_MARK = "\0text", -1


def event(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + compact(body) + b"\n\n"


def compact(body: Any) -> bytes:
    """JSON without blanks, as Starlette writes it."""
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(errors="replace")


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """UsageInfo with only the fields that were set."""
    total = prompt_tokens + completion_tokens
    return {"prompt_tokens": prompt_tokens, "total_tokens": total, "completion_tokens": completion_tokens}


class EmulatedAnswer:
    """The answer to one HTTP request, in the making.

    body: with the name of the model. request: of the engine. transport: where a stream goes; None: the answer goes out
    as a whole. call: of a tool, whose arguments hold its words; None: a text.
    """

    def __init__(
        self,
        body: AnyRequest,
        request: EngineRequest,
        dialect: Dialect,
        *,
        response_id: str,
        with_token_details: bool = True,
    ) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.transport: asyncio.Transport | None = None
        self.is_chunked = True
        self.finished = asyncio.Event()
        self._body, self._dialect, self._with_token_details = body, dialect, with_token_details
        self.call: ToolCall | None = None
        self._call_id = f"chatcmpl-tool-{response_id.rpartition('-')[2]}"
        self._is_called = False
        self._is_chat = isinstance(body, ChatRequest)
        self._head = {"id": response_id, "created": int(utc_now().timestamp()), "model": body.model}
        self._first_cached_tokens: int | None = None
        self._is_begun = False
        # What stands around the text and the tokens of an event of the stream.
        self._template: tuple[bytes, bytes, bytes] | None = None

    def push(self, new: list[int]) -> None:
        """More tokens, none for an abort; the last ones end the answer."""
        self.tokens += new
        if self.transport is not None:
            self.send(self._chunk(new))
        if self.request.finish_reason is not None:
            self.finished.set()

    def send(self, chunk: bytes) -> None:
        """Put bytes on the wire, in the framing of HTTP/1.1 when the response has no length."""
        if self.transport is None or self.transport.is_closing():
            return
        self.transport.write(b"%x\r\n%b\r\n" % (len(chunk), chunk) if self.is_chunked else chunk)

    def whole(self) -> dict[str, Any]:
        """The body of a request without ``stream``."""
        body = {
            **self._recorded(""),
            **self._head,
            "choices": [self._whole_choice()],
            "system_fingerprint": self._fingerprint,
            "usage": self._whole_usage(),
        }
        if self._is_chat and self._body.return_token_ids:
            body["prompt_token_ids"] = self.request.prompt.tolist()
        return body | dict.fromkeys(self._dialect.null_fields)

    def end_stream(self) -> None:
        """Send the usage event, when asked for, and the end of the stream."""
        events = DONE
        if self._body.include_usage:
            final, cached = usage(len(self.request.prompt), len(self.tokens)), self._first_cached_tokens or 0
            if self._with_token_details and (cached or self._dialect.has_usage_details):
                final["prompt_tokens_details"] = {"cached_tokens": cached}
                if self._is_chat and self._dialect.has_usage_details:
                    final["prompt_tokens_details"]["created_cache_tokens"] = 0
            shown = {"usage": final, "system_fingerprint": self._fingerprint}
            events = event({**self._recorded(" chunk"), **self._head, **shown}) + DONE
        self.send(events)

    @property
    def _fingerprint(self) -> str:
        return f"vllm-{self._dialect.vllm}-emulated"

    def _recorded(self, part: str) -> dict[str, Any]:
        return recorded("answers")[f"{'chat' if self._is_chat else 'completion'}{part}"]

    def _whole_choice(self) -> dict[str, Any]:
        shown, text = self._choice(" choice", self.tokens), decode(self.tokens)
        if self._is_chat:
            message = {**self._recorded(" message"), "content": text}
            if self.call is not None:
                arguments = self.call.before + _inside(text) + self.call.after
                function = {"name": self.call.name, "arguments": arguments}
                called = [{"id": self._call_id, "type": "function", "function": function}]
                message |= {"content": None, "tool_calls": called}
            elif not self._dialect.has_empty_tool_calls:
                del message["tool_calls"]
            return {**shown, "message": message}
        prompt = self.request.prompt.tolist() if self._body.return_token_ids else None
        return {**shown, "text": text, "prompt_token_ids": prompt}

    def _choice(self, part: str, tokens: list[int]) -> dict[str, Any]:
        """What a whole choice and one of an event have in common."""
        reason = self.request.finish_reason
        choice = {
            **self._recorded(part),
            "index": 0,
            "logprobs": None,
            "finish_reason": "tool_calls" if self.call is not None and reason in ("stop", "length") else reason,
            "token_ids": tokens if self._body.return_token_ids else None,
        }
        return choice if self.request.finish_reason is None else {**choice, "stop_reason": None}

    def _whole_usage(self) -> dict[str, Any]:
        cached = self.request.cached_tokens if self._with_token_details else 0
        shown = usage(len(self.request.prompt), len(self.tokens))
        if not self._dialect.has_usage_details:
            return {**shown, "prompt_tokens_details": {"cached_tokens": cached} if cached else None}
        created = 0 if self._is_chat else None
        details = {"cached_tokens": cached, "created_cache_tokens": created, "multimodal_tokens": None}
        if not self._with_token_details:
            details = None
        return {**shown, "prompt_tokens_details": details, "completion_tokens_details": None}

    def _chunk(self, new: list[int]) -> bytes:
        """The event of new tokens; a chat's first comes with one that opens it."""
        is_last, text = self.request.finish_reason is not None, decode(new)
        if self._first_cached_tokens is None:
            self._first_cached_tokens = self.request.cached_tokens
        if self._template is not None and not is_last:
            # Nearly every event of a stream: only text and tokens change, and a step sends one to every client.
            head, middle, tail = self._template
            written = json.dumps(text, ensure_ascii=False).encode(errors="replace")
            tokens = compact(new) if self._body.return_token_ids else b""
            return b"".join((head, written, middle, tokens, tail))
        opening = b""
        if self._is_chat and not self._is_begun:
            opening = self._opening()
        shown = self._event(text, new)
        if not is_last and self.call is None and not self._body.continuous_usage:
            head, _, rest = self._event(TEXT_MARK, [TOKENS_MARK]).rpartition(json.dumps(TEXT_MARK).encode())
            middle, _, tail = rest.partition(f"[{TOKENS_MARK}]".encode())
            self._template = (head, middle, tail)
        return opening + shown

    def _event(self, text: str, tokens: list[int]) -> bytes:
        shown = self._choice(" chunk choice", tokens)
        if self._is_chat:
            shown["delta"] = {"content": text} if self.call is None else self._called(text)
        else:
            shown["text"] = text
            if not self._is_begun:
                shown["prompt_token_ids"] = self.request.prompt.tolist() if self._body.return_token_ids else None
        self._is_begun = True
        body = {**self._recorded(" chunk"), **self._head, "choices": [shown]}
        if self.request.finish_reason is not None and not self._body.include_usage:
            body["system_fingerprint"] = self._fingerprint
        if self._body.continuous_usage:
            body["usage"] = usage(len(self.request.prompt), len(self.tokens))
        return event(body)

    def _called(self, text: str) -> dict[str, Any]:
        """The delta of a tool's call: its name with the first words of its arguments, then the others."""
        assert self.call is not None
        arguments = _inside(text) + (self.call.after if self.request.finish_reason is not None else "")
        shown: dict[str, Any] = {"index": 0, "function": {"arguments": arguments}}
        if not self._is_called:
            self._is_called = True
            function = {"name": self.call.name, "arguments": self.call.before + arguments}
            shown = {"index": 0, "id": self._call_id, "type": "function", "function": function}
        return {"tool_calls": [shown]}

    def _opening(self) -> bytes:
        """The event that opens a chat."""
        self._is_begun = True
        body = {**self._recorded(" opening"), **self._head}
        if self._body.return_token_ids:
            body["prompt_token_ids"] = self.request.prompt.tolist()
        if self._body.continuous_usage:
            body["usage"] = usage(len(self.request.prompt), 0)
        return event(body)


def _inside(text: str) -> str:
    """A text as it stands within a text of JSON."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
