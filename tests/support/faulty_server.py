"""The null server with answers that are framed, cut or broken in named ways."""

from __future__ import annotations

import json
import socket
import struct
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from harness.clock import NS_PER_MS, monotonic_ns
from harness.measure.client.null_server import (
    DONE,
    LAST_CHUNK,
    STREAM_HEAD,
    NullServer,
    NullServerConfig,
    NullServerLoop,
    Peer,
    Request,
    Send,
    answer_documents,
    answer_ids,
    chunk,
    event_of,
    main,
    whole_response,
)

Framing = Literal["chunked", "length", "close"]
SPLIT_INTERVAL_NS = 2 * NS_PER_MS
ENGINE_IS_DEAD = {"error": {"message": "engine is dead", "type": "InternalServerError", "code": 500}}
# Faults that replace the answer: what is sent instead.
INSTEAD = {
    "half_open": b"",
    "slow_head": b"HTTP/1.1 200 OK\r\nContent-Ty",
    "garbage": b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n",
    "http_500": whole_response(ENGINE_IS_DEAD, "500 Internal Server Error"),
}


@dataclass(frozen=True, slots=True)
class FaultyConfig(NullServerConfig):
    """faults: by "<session>-<request>", the end of the request id. num_split_bytes: answers are sent in such pieces.

    idle_close_ns: close idle kept connections. keeps_bodies: stamps also hold each request's body and its answer's ids.
    """

    framing: Framing = "chunked"
    event_tokens: int = 1
    cached_tokens: int = 0
    num_split_bytes: int = 0
    idle_close_ns: int = 0
    keeps_bodies: bool = False
    faults: Mapping[str, str] = field(default_factory=dict)


def faulty_server(**options: Any) -> NullServer:
    """A null server with the options of FaultyConfig."""
    return NullServer(FaultyConfig(**options), [sys.executable, __file__])


class FaultyServer(NullServerLoop):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self._config = FaultyConfig(**options)
        self._closing = set[Peer]()
        self._idle_since_ns = dict[Peer, int]()

    def answer(self, peer: Peer, request: Request) -> None:
        config = self._config
        if config.keeps_bodies:
            request.stamp["body"] = request.body.decode()
            request.stamp["token_ids"] = answer_ids(request.fields)
        fault = config.faults.get("-".join(str(request.stamp["request_id"]).split("-")[-2:]), "")
        if fault == "close_at_once":
            self.close(peer)
            return
        if fault in INSTEAD:
            self.send(peer, [Send(0, INSTEAD[fault])])
            return
        if fault == "wrong_length":
            request.fields["max_tokens"] -= 1
        events = self._events(request, fault)
        data = self._framed(events, bool(request.fields.get("stream")))
        if fault in {"early_close", "reset"}:
            data = data[: len(data) // 2]
            self._closing.add(peer)
        if fault == "reset":
            peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        if config.framing == "close":
            self._closing.add(peer)
        size, now_ns = config.num_split_bytes or len(data), monotonic_ns()
        pieces = [data[first : first + size] for first in range(0, len(data), size)]
        self.send(peer, [Send(now_ns + place * SPLIT_INTERVAL_NS, piece) for place, piece in enumerate(pieces)])

    def _events(self, request: Request, fault: str) -> list[bytes]:
        documents = answer_documents(request, event_tokens=self._config.event_tokens)
        if self._config.cached_tokens:
            documents[-1]["usage"]["prompt_tokens_details"] = {"cached_tokens": self._config.cached_tokens}
        if fault == "no_usage":
            documents[-1]["usage"] = None
        if fault == "error_event":
            documents[1:-1] = [ENGINE_IS_DEAD]
        if fault == "no_token_ids":
            for document in documents:
                for choice in document["choices"]:
                    del choice["token_ids"]
        if not request.fields.get("stream"):
            events = [json.dumps(documents[0]).encode()]
        else:
            events = [event_of(document) for document in documents]
        if fault == "broken_document":
            # All numbers are there, but not in JSON.
            events[-1] = events[-1].rstrip() + b"]\n\n"
        return [*events, DONE] if request.fields.get("stream") else events

    def _framed(self, events: list[bytes], is_stream: bool) -> bytes:
        if self._config.framing == "chunked":
            return STREAM_HEAD + b"".join(map(chunk, events)) + LAST_CHUNK
        body = b"".join(events)
        kind = b"text/event-stream" if is_stream else b"application/json"
        ends = b"Connection: close" if self._config.framing == "close" else b"Content-Length: %d" % len(body)
        return b"HTTP/1.1 200 OK\r\nContent-Type: " + kind + b"\r\n" + ends + b"\r\n\r\n" + body

    def send_due(self, peer: Peer) -> None:
        super().send_due(peer)
        if not peer.sends:
            self._idle_since_ns[peer] = monotonic_ns()
            if peer in self._closing:
                self.close(peer)

    def send_timed(self) -> None:
        super().send_timed()
        if self._config.idle_close_ns:
            for peer, since_ns in list(self._idle_since_ns.items()):
                if not peer.sends and monotonic_ns() - since_ns > self._config.idle_close_ns:
                    del self._idle_since_ns[peer]
                    self.close(peer)


if __name__ == "__main__":
    main(sys.argv[1], FaultyServer)
