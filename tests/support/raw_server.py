"""A server that answers with the very bytes a test gives it, in the pieces it gives them, and keeps what it was asked.

It runs in threads of the test's own process, and imports the stdlib alone: scripts of tests serve by it too.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

if TYPE_CHECKING:
    from typing_extensions import Self

TIMEOUT_S = 120.0
CHUNKED_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass(frozen=True)
class Asked:
    """One request as it came. head: with its request line. Token ids that answer it: ``ids``."""

    head: bytes
    body: bytes = b""

    @property
    def method(self) -> str:
        return self.head.split(b" ", 1)[0].decode()

    @property
    def path(self) -> str:
        return self.head.split(b" ", 2)[1].decode()

    def header(self, name: str) -> str | None:
        """The only value of a header; None where it is absent."""
        lines = (line.partition(b":") for line in self.head.split(b"\r\n")[1:])
        values = [value.strip().decode("latin-1") for key, _, value in lines if key.lower() == name.lower().encode()]
        assert len(values) < 2, values
        return values[0] if values else None

    @cached_property
    def fields(self) -> dict[str, Any]:
        return json.loads(self.body) if self.body else {}

    @property
    def session(self) -> int:
        return int(self._of_request_id(-2))

    @property
    def request(self) -> int:
        return int(self._of_request_id(-1))

    def _of_request_id(self, place: int) -> str:
        return f"0-{self.fields.get('request_id', '0-0')}".split("-")[place]

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


class Listener:
    """A loopback port for the life of a ``with`` block; a thread serves each connection."""

    host: str = "127.0.0.1"
    port: int = 0

    def _serve(self, peer: socket.socket) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._open = set[socket.socket]()
        self._listener = socket.create_server((self.host, self.port), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_exception: object) -> None:
        # A blocked accept is woken by the shutdown, not by the close.
        for sock in (self._listener, *list(self._open)):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                peer, _ = self._listener.accept()
            except OSError:
                return
            peer.settimeout(TIMEOUT_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._open.add(peer)
            threading.Thread(target=self._serve, args=(peer,), daemon=True).start()


class RawServer(Listener):
    """``asked``: every request, in order of arrival."""

    def __init__(self, answer: Callable[[Asked], Reply], port: int = 0) -> None:
        self._answer, self.port = answer, port
        self.asked: list[Asked] = []
        self._ended = threading.Event()

    def __exit__(self, *_exception: object) -> None:
        self._ended.set()
        super().__exit__()

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def _serve(self, peer: socket.socket) -> None:
        with contextlib.suppress(OSError), peer:
            try:
                self._talk(peer)
            except ValueError:
                peer.sendall(whole("", status=400))
            finally:
                self._open.discard(peer)

    def _talk(self, peer: socket.socket) -> None:
        with peer.makefile("rb") as came:
            while (asked := read_request(came)) is not None:
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


def read_request(came: BinaryIO) -> Asked | None:
    """The next request; None where it does not come whole. ValueError: it is no HTTP."""
    lines = [came.readline()]
    while lines[-1] != b"\r\n":
        if not lines[-1]:
            return None
        if not lines[-1].endswith(b"\r\n"):
            raise ValueError("no HTTP")
        lines.append(came.readline())
    asked = Asked(b"".join(lines[:-1]))
    length = int(asked.header("Content-Length") or 0)
    body = came.read(length) if asked.header("Transfer-Encoding") is None else b"".join(chunks_of(came))
    return Asked(asked.head, body) if len(body) >= length else None


def chunks_of(came: BinaryIO) -> Iterator[bytes]:
    """The parts of a chunked body."""
    while size := int(came.readline(), 16):
        yield came.read(size)
        came.readline()
    came.readline()


def endless(first: bytes, piece: bytes, every_s: float = 0.0) -> Iterator[bytes]:
    """The first bytes, then the same piece for ever: at once, or one each ``every_s``."""
    yield first
    while True:
        threading.Event().wait(every_s)
        yield piece


def whole(body: bytes | str, *headers: bytes, status: int = 200) -> bytes:
    """An answer with its length."""
    content = body if isinstance(body, bytes) else body.encode()
    first = b"HTTP/1.1 %d %b" % (status, HTTPStatus(status).phrase.encode())
    return b"\r\n".join([first, *headers, b"Content-Length: %d" % len(content), b"", content])


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


def answered(asked: Asked) -> Reply:
    """The well-formed answer to a request, as a stream or whole."""
    if asked.fields["stream"]:
        return Reply([CHUNKED_HEAD, *chunked(events(asked))])
    choice = {"index": 0, "text": " x" * len(asked.ids), "token_ids": asked.ids, "finish_reason": "length"}
    usage = {"prompt_tokens": asked.num_prompt_tokens, "completion_tokens": len(asked.ids)}
    return Reply([whole(json.dumps({"id": f"cmpl-{asked.fields['request_id']}", "choices": [choice], "usage": usage}))])


def chunked(parts: Iterable[bytes], *, extension: bytes = b"", trailer: bytes = b"") -> list[bytes]:
    """A chunked body, one chunk a part, and the last chunk with its trailer."""
    return [*(b"%x%b\r\n%b\r\n" % (len(part), extension, part) for part in parts), b"0\r\n" + trailer + b"\r\n"]
