"""The way back to the client: each new token of a request becomes bytes on its connection, or waits for the rest.

Writing never blocks and never waits: bytes go straight to the transport, so that a step's tokens leave in one go.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from aiohttp import HttpVersion11, web

from harness.emulator.core import EngineRequest
from harness.emulator.responses import Answer
from harness.emulator.tokens import decode


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
