"""A server that answers at once and stamps what it sees: the client's own lateness is measured against it.

It answers as a completions server does (token ids, usage, streamed or whole), on request at a steady token rate. It has
no scheduler and no model.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
import os
import re
import select
import shlex
import socket
import subprocess
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from harness.children import own_command
from harness.clock import NS_PER_S, monotonic_ns, realtime_minus_monotonic_ns
from harness.errors import ServerError
from harness.measure.client.receive_stamps import ANCILLARY_BYTES, enable_kernel_stamps, kernel_stamp_ns

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
PROMPT = re.compile(rb'"prompt":\s*\[([^\]]*)\]')
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"
# Longest wait for events.
POLL_S = 0.05
RECEIVE_BYTES = 1 << 18
SEND_BUFFER_BYTES = 1 << 20
BACKLOG = 4096
START_TIMEOUT_S = 20.0
STOP_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class NullServerConfig:
    """How the server answers. token_interval_ns: wall ns between events of a stream, 0: everything at once."""

    token_interval_ns: int = 0
    keeps_stamps: bool = True


class Send(NamedTuple):
    """Bytes to send at an instant (CLOCK_MONOTONIC ns, 0: now). stamp: notes the instant of the send."""

    at_ns: int
    data: bytes
    stamp: dict[str, Any] | None = None


@dataclass(slots=True, eq=False)
class Peer:
    """A connection: what arrived of a request and when, and what waits to be sent."""

    sock: socket.socket
    received: bytes = b""
    arrived_ns: int = 0
    kernel_ns: int = 0
    sends: deque[Send] = field(default_factory=deque)


class Request(NamedTuple):
    """A completion request. fields: its JSON without the token ids of the prompt. stamp: what the server notes."""

    fields: dict[str, Any]
    body: bytes
    num_prompt_tokens: int
    stamp: dict[str, Any]


class NullServerLoop:
    """The loop: one thread, epoll, a heap of timed sends."""

    def __init__(self, *, token_interval_ns: int = 0, keeps_stamps: bool = True) -> None:
        self._token_interval_ns = token_interval_ns
        self._keeps_stamps = keeps_stamps
        self.stamps: list[dict[str, Any]] = []
        self.peers: dict[int, Peer] = {}
        # (instant, tie-breaker, peer)
        self._timed: list[tuple[int, int, Peer]] = []
        self._count = itertools.count()
        self._realtime_offset_ns = realtime_minus_monotonic_ns()
        self.listener = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
        self.listener.setblocking(False)
        # Accepted sockets inherit the option.
        enable_kernel_stamps(self.listener)
        self._epoll = select.epoll()
        self._epoll.register(self.listener, select.EPOLLIN)
        # A terminal on standard input never closes, and epoll refuses files: then only a signal ends the server.
        if not os.isatty(0):
            with contextlib.suppress(OSError):
                self._epoll.register(0, select.EPOLLIN)

    def serve(self) -> None:
        """Answer until standard input is closed or the process is ended."""
        while True:
            timeout_s = POLL_S
            if self._timed:
                timeout_s = min(POLL_S, max(0.0, (self._timed[0][0] - monotonic_ns()) / NS_PER_S))
            for fd, _ in self._epoll.poll(timeout_s):
                if fd == self.listener.fileno():
                    self._accept()
                elif fd == 0:
                    if not os.read(0, 4096):
                        return
                elif (peer := self.peers.get(fd)) is not None:
                    self._receive(peer)
            self.send_timed()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
                self.peers[sock.fileno()] = Peer(sock)
                self._epoll.register(sock, select.EPOLLIN)

    def _receive(self, peer: Peer) -> None:
        try:
            data, ancillary, _, _ = peer.sock.recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self.close(peer)
            return
        if not peer.received:
            peer.arrived_ns = monotonic_ns()
            peer.kernel_ns = kernel_stamp_ns(ancillary) - self._realtime_offset_ns if ancillary else 0
        peer.received += data
        head_end = peer.received.find(b"\r\n\r\n")
        if head_end < 0:
            return
        head = peer.received[:head_end]
        match = CONTENT_LENGTH.search(head)
        end = head_end + 4 + (int(match[1]) if match else 0)
        if len(peer.received) >= end:
            body = peer.received[head_end + 4 : end]
            peer.received = peer.received[end:]
            if head.startswith(b"GET"):
                document = {"requests": self.stamps} if head.startswith(b"GET /stamps") else {"status": "ok"}
                self.send(peer, [Send(0, whole_response(document))])
            else:
                self.answer(peer, self._request(peer, body))

    def _request(self, peer: Peer, body: bytes) -> Request:
        prompt = PROMPT.search(body)
        # Reading the ids of a long prompt as JSON would take milliseconds.
        fields = json.loads(body if prompt is None else body[: prompt.start(1)] + body[prompt.end(1) :])
        num_prompt_tokens = len(fields["prompt"].split()) if prompt is None else prompt[1].count(b",") + 1
        stamp = {
            "request_id": fields.get("request_id", ""),
            "kernel_ns": peer.kernel_ns,
            "received_ns": peer.arrived_ns,
            "chunk_ns": [],
        }
        if self._keeps_stamps:
            self.stamps.append(stamp)
        return Request(fields, body, num_prompt_tokens, stamp)

    def answer(self, peer: Peer, request: Request) -> None:
        """Send the answer to a request, or begin to."""
        documents = answer_documents(request)
        if not request.fields.get("stream"):
            self.send(peer, [Send(0, whole_response(documents[0]), request.stamp)])
            return
        parts = [chunk(event) for event in [*map(event_of, documents), DONE]]
        parts[0] = STREAM_HEAD + parts[0]
        parts[-1] += LAST_CHUNK
        interval_ns = self._token_interval_ns
        if not interval_ns:
            self.send(peer, [Send(0, b"".join(parts), request.stamp)])
            return
        start_ns = monotonic_ns()
        # Usage and [DONE] follow the last token at once, as the real server's do.
        last = len(parts) - 3
        self.send(
            peer,
            [
                Send(start_ns + interval_ns * (min(place, last) + 1), part, request.stamp if place <= last else None)
                for place, part in enumerate(parts)
            ],
        )

    def send(self, peer: Peer, sends: Iterable[Send]) -> None:
        """Send in this order, each at its instant."""
        peer.sends.extend(sends)
        self.send_due(peer)

    def send_due(self, peer: Peer) -> None:
        """Send what is due to a peer; the rest is taken up at its instant."""
        while peer.sends:
            at_ns, data, stamp = peer.sends[0]
            now_ns = monotonic_ns()
            if at_ns > now_ns:
                heapq.heappush(self._timed, (at_ns, next(self._count), peer))
                return
            peer.sends.popleft()
            if stamp is not None:
                stamp["chunk_ns"].append(now_ns)
            try:
                peer.sock.sendall(data)
            except OSError:
                self.close(peer)
                return

    def send_timed(self) -> None:
        """Send what has become due to any peer."""
        while self._timed and self._timed[0][0] <= monotonic_ns():
            _, _, peer = heapq.heappop(self._timed)
            self.send_due(peer)

    def close(self, peer: Peer) -> None:
        """Close a connection; what waited to be sent is dropped."""
        peer.sends.clear()
        self.peers.pop(peer.sock.fileno(), None)
        peer.sock.close()


def answer_documents(request: Request) -> list[dict[str, Any]]:
    """The answer as JSON documents: one with everything, or one per token of a stream, the last with the usage."""
    fields = request.fields
    name = f"cmpl-{fields.get('request_id', 'none')}"
    ids = answer_ids(fields)
    usage = {
        "prompt_tokens": request.num_prompt_tokens,
        "completion_tokens": len(ids),
        "total_tokens": request.num_prompt_tokens + len(ids),
    }
    base = {"id": name, "object": "text_completion", "created": 0, "model": fields.get("model", "")}
    if not fields.get("stream"):
        return [{**base, "choices": [_choice(ids, is_last=True)], "usage": usage}]
    events = [{**base, "choices": [_choice([token], is_last=place == len(ids))]} for place, token in enumerate(ids, 1)]
    return [*events, {**base, "choices": [], "usage": usage}]


def answer_ids(fields: dict[str, Any]) -> list[int]:
    """Token ids that differ from request to request, so that a mix-up between answers shows."""
    seed = sum(f"cmpl-{fields.get('request_id', 'none')}".encode())
    return [1000 + (seed * 31 + place * 7) % 9000 for place in range(int(fields["max_tokens"]))]


def _choice(ids: list[int], *, is_last: bool) -> dict[str, Any]:
    return {"index": 0, "text": " x" * len(ids), "finish_reason": "length" if is_last else None, "token_ids": ids}


def event_of(document: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(document).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    """A piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def whole_response(document: dict[str, Any]) -> bytes:
    """A response with Content-Length."""
    body = json.dumps(document).encode()
    head = f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class NullServer:
    """The null server in a separate process, for the life of a ``with`` block.

    command: another server program, which takes the configuration as JSON and prints its port.
    """

    def __init__(self, config: NullServerConfig | None = None, command: Sequence[str] | None = None) -> None:
        self._config = config or NullServerConfig()
        self._command = command or own_command(f"{__name__}:main")
        self.host = "127.0.0.1"
        self.port = 0

    def __enter__(self) -> NullServer:
        self._process = subprocess.Popen(
            [*self._command, json.dumps(asdict(self._config))],
            stdout=subprocess.PIPE,
            # Held open: the server ends when this process ends, in whatever way.
            stdin=subprocess.PIPE,
            # The harness alone answers Ctrl-C.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.__exit__()
            raise ServerError("the null server did not start", hint=f"Run it by hand: {shlex.join(self._command)}")
        self.port = int(json.loads(line)["port"])
        return self

    def __exit__(self, *_exception: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(STOP_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def pid(self) -> int:
        """Process id of the server."""
        return self._process.pid

    def stamps(self) -> dict[str, dict[str, Any]]:
        """What the server saw, by request id, in CLOCK_MONOTONIC ns.

        kernel_ns, received_ns: arrival of the request's head, by the kernel and by the server. chunk_ns: just before
        the send of each event that holds tokens.
        """
        return {stamp["request_id"]: stamp for stamp in self._stamps()}

    def arrivals_ns(self) -> list[int]:
        """When each request's head arrived, by the kernel's stamp where there is one; CLOCK_MONOTONIC ns, in order."""
        return [stamp["kernel_ns"] or stamp["received_ns"] for stamp in self._stamps()]

    def _stamps(self) -> list[dict[str, Any]]:
        # Imported here: the server's process, which starts before each run, does not need it.
        from http.client import HTTPConnection, HTTPException

        connection = HTTPConnection(self.host, self.port, timeout=START_TIMEOUT_S)
        try:
            connection.request("GET", "/stamps")
            return json.loads(connection.getresponse().read())["requests"]
        except (OSError, HTTPException, ValueError, KeyError) as error:
            status = self._process.poll()
            ended = f"ended (exit status {status})" if status is not None else "does not answer"
            raise ServerError(
                f"the null server {ended}: {type(error).__name__}",
                hint="Something stopped the process that measures this client; run again",
            ) from error
        finally:
            connection.close()


def main(config: str = "{}", server_class: type[NullServerLoop] = NullServerLoop) -> None:
    """Serve on a loopback port, printed as a line of JSON, until ended. config: a ``NullServerConfig`` as JSON."""
    server = server_class(**json.loads(config))
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        # Past Python's buffer, which would be flushed, and complain, when nobody listens any more.
        os.write(1, json.dumps({"port": server.listener.getsockname()[1]}).encode() + b"\n")
        server.serve()
