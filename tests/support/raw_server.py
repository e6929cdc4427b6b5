"""A server that answers with the very bytes a test gives it, in the pieces it gives them, and keeps what it was asked.

It runs in threads of the test's own process.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import struct
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from harness.model.plan.model import Plan
from harness.model.plan.tokens import TokenStreams

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
TIMEOUT_S = 120.0


class Asked(NamedTuple):
    """One request as it came. Token ids that answer it: ``ids``."""

    path: str
    session: int
    request: int
    fields: dict[str, Any]
    head: bytes = b""

    def header(self, name: str) -> str | None:
        """The only value of a header; None where it is absent."""
        lines = (line.partition(b":") for line in self.head.split(b"\r\n")[1:])
        values = [value.strip().decode() for key, _, value in lines if key.strip().lower() == name.lower().encode()]
        assert len(values) < 2, values
        return values[0] if values else None

    @property
    def ids(self) -> list[int]:
        """Ids that differ from request to request."""
        first = 1000 + 100 * self.session + 10 * self.request
        length = self.fields.get("max_tokens") or self.fields["max_completion_tokens"]
        return list(range(first, first + int(length)))

    @property
    def num_prompt_tokens(self) -> int:
        prompt = self.fields["prompt"]
        return len(prompt.split()) if isinstance(prompt, str) else len(prompt)


# What happens after the bytes that were given.
KEEP, CLOSE, RESET, HANG = "keep", "close", "reset", "hang"


class Reply(NamedTuple):
    """Pieces, each sent by a call of its own, and what becomes of the connection then."""

    pieces: Iterable[bytes]
    after: str = KEEP


class RawServer:
    """Serves on a loopback port for the life of a ``with`` block; ``asked``: every request, in order of arrival."""

    def __init__(self, answer: Callable[[Asked], Reply]) -> None:
        self._answer = answer
        self.asked: list[Asked] = []
        self.host = "127.0.0.1"
        self._ended = threading.Event()
        self._open: set[socket.socket] = set()

    def __enter__(self) -> RawServer:
        self._listener = socket.create_server((self.host, 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._ended.set()
        # A blocked accept is woken by the shutdown, not by the close.
        for sock in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while not self._ended.is_set():
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            peer.settimeout(TIMEOUT_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.add(peer)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()

    def _serve(self, peer: socket.socket) -> None:
        with peer:
            try:
                self._talk(peer)
            except (OSError, ValueError):
                return
            finally:
                self._open.discard(peer)

    def _talk(self, peer: socket.socket) -> None:
        received = b""
        while True:
            while b"\r\n\r\n" not in received:
                data = peer.recv(65_536)
                if not data:
                    return
                received += data
            head, _, rest = received.partition(b"\r\n\r\n")
            match = CONTENT_LENGTH.search(head)
            length = int(match[1]) if match else 0
            while len(rest) < length:
                rest += peer.recv(65_536)
            body, received = rest[:length], rest[length:]
            fields = json.loads(body) if body else {}
            _, session, request = ("0-" + str(fields.get("request_id", "0-0"))).rsplit("-", 2)
            asked = Asked(head.split(b" ", 2)[1].decode(), int(session), int(request), fields, head)
            self.asked.append(asked)
            pieces, after = self._answer(asked)
            for piece in pieces:
                peer.sendall(piece)
            if after == HANG:
                self._ended.wait(TIMEOUT_S)
            if after == RESET:
                peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            if after != KEEP:
                return


def events(asked: Asked, *, ids: list[int] | None = None) -> list[bytes]:
    """A well-formed stream that answers a request, event by event."""
    ids = asked.ids if ids is None else ids
    base = {"id": f"cmpl-{asked.fields['request_id']}", "object": "text_completion", "created": 0, "model": "null"}
    documents: list[dict[str, Any]] = []
    for place, token_id in enumerate(ids):
        reason = "length" if place == len(ids) - 1 else None
        choice = {"index": 0, "text": " x", "token_ids": [token_id], "finish_reason": reason}
        documents.append({**base, "choices": [choice]})
    usage = {"prompt_tokens": asked.num_prompt_tokens, "completion_tokens": len(ids)}
    documents.append({**base, "choices": [], "usage": usage})
    return [*(b"data: %b\n\n" % json.dumps(document).encode() for document in documents), b"data: [DONE]\n\n"]


CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(parts: Iterable[bytes], *, extension: bytes = b"", trailer: bytes = b"") -> list[bytes]:
    """A chunked body, one chunk a part, and the last chunk with its trailer."""
    return [*(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts), b"0\r\n" + trailer + b"\r\n"]


def expected_prompts(plan: Plan, generated: dict[int, list[list[int]]]) -> list[list[int]]:
    """The prompts that a plan asks for, in plan order, when the server answers with these ids by session."""
    streams = TokenStreams(plan)
    return [
        streams.prompt(item.index, request, generated).tolist()
        for item in plan.sessions
        for request in range(len(item.requests))
    ]
