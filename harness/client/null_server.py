"""A server that does nothing, at once, and stamps it: the floor a client's own lateness is measured against.

It speaks the same wire form as a completions server (token ids, usage, streaming or not, any body framing), can answer
at a steady token rate, and can break answers in named ways. No scheduler, no model.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import re
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from harness.client.kernel_stamps import ANCILLARY_BYTES, enable_kernel_stamps
from harness.clock import NS_PER_S, monotonic_ns, realtime_minus_monotonic_ns
from harness.errors import ServerError

Framing = Literal["chunked", "length", "close"]
Fault = Literal[
    "close_at_once",
    "early_close",
    "reset",
    "half_open",
    "slow_head",
    "http_500",
    "wrong_length",
    "no_usage",
    "no_token_ids",
    "error_event",
    "garbage",
    "broken_document",
]
CONTENT_LENGTH = re.compile(rb"\r\ncontent-length:\s*(\d+)", re.IGNORECASE)
PROMPT = re.compile(rb'"prompt":\s*\[([^\]]*)\]')
START_TIMEOUT_S = 20.0
STOP_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class NullServerConfig:
    """How the server answers. ``faults``: by "<session>-<request>", the end of the request id.

    token_interval_ns: wall ns between events, 0: everything at once. event_tokens: token ids per event.
    num_split_bytes: when positive, answers are sent in pieces of this many bytes, 2 ms apart. idle_close_ns: close idle
    kept connections. keeps_bodies: stamps also hold each request's body and the ids it was answered with.
    """

    port: int = 0
    framing: Framing = "chunked"
    token_interval_ns: int = 0
    event_tokens: int = 1
    cached_tokens: int = 0
    num_split_bytes: int = 0
    idle_close_ns: int = 0
    keeps_stamps: bool = True
    keeps_bodies: bool = False
    faults: dict[str, Fault] = field(default_factory=dict)


@dataclass(slots=True)
class _Peer:
    sock: socket.socket
    received: bytes = b""
    arrived_ns: int = 0
    kernel_ns: int = 0
    idle_since_ns: int = 0
    is_busy: bool = False
    closes_after: bool = False
    out: list[tuple[int, bytes, dict[str, Any] | None]] = field(default_factory=list)


class _Server:
    """The loop: one thread, epoll, a heap of timed sends."""

    def __init__(self, config: NullServerConfig) -> None:
        self.config = config
        self.stamps: list[dict[str, Any]] = []
        self.peers: dict[int, _Peer] = {}
        self.timed: list[tuple[int, int, int]] = []
        self.offset_ns = realtime_minus_monotonic_ns()
        self.listener = socket.create_server(("127.0.0.1", config.port), backlog=4096)
        self.listener.setblocking(False)
        # Accepted sockets inherit the option.
        enable_kernel_stamps(self.listener)
        self.epoll = select.epoll()
        self.epoll.register(self.listener, select.EPOLLIN)
        # A terminal or /dev/null on standard input is no owner to outlive; epoll refuses files.
        if not os.isatty(0):
            with contextlib.suppress(OSError):
                self.epoll.register(0, select.EPOLLIN)

    def serve(self) -> None:
        """Answer until standard input is closed or the process is ended."""
        while True:
            timeout_s = 0.05
            if self.timed:
                timeout_s = max(0.0, (self.timed[0][0] - monotonic_ns()) / NS_PER_S)
            for fd, _ in self.epoll.poll(min(timeout_s, 0.05)):
                if fd == self.listener.fileno():
                    self._accept()
                elif fd == 0:
                    if not os.read(0, 4096):
                        return
                else:
                    self._receive(fd)
            self._send_timed()
            if self.config.idle_close_ns:
                self._close_idle()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while True:
                sock, _ = self.listener.accept()
                sock.setblocking(False)
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
                self.peers[sock.fileno()] = _Peer(sock)
                self.epoll.register(sock, select.EPOLLIN)

    def _receive(self, fd: int) -> None:
        peer = self.peers.get(fd)
        if peer is None:
            return
        try:
            data, ancillary, _, _ = peer.sock.recvmsg(1 << 18, ANCILLARY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        if not data:
            self._close(fd)
            return
        if not peer.received:
            peer.arrived_ns = monotonic_ns()
            peer.kernel_ns = 0
            if ancillary:
                seconds, nanoseconds = struct.unpack("qq", ancillary[0][2])
                peer.kernel_ns = seconds * NS_PER_S + nanoseconds - self.offset_ns
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
            self._answer(fd, peer, head, body)

    def _answer(self, fd: int, peer: _Peer, head: bytes, body: bytes) -> None:
        peer.is_busy = True
        if head.startswith(b"GET"):
            document = {"requests": self.stamps} if b"/stamps" in head[:30] else {"status": "ok"}
            self._queue(fd, peer, 0, _whole("200 OK", json.dumps(document).encode()))
            return
        start, _, rest = body.partition(b'"prompt":')
        prompt = PROMPT.search(body)
        fields = json.loads(start + b'"prompt":0' + rest[rest.index(b"]") + 1 :]) if prompt else json.loads(body)
        num_prompt = prompt[1].count(b",") + 1 if prompt else len(str(fields["prompt"]).split())
        stamp = {
            "request_id": fields.get("request_id", ""),
            "kernel_ns": peer.kernel_ns,
            "received_ns": peer.arrived_ns,
            "chunk_ns": [],
        }
        if self.config.keeps_stamps:
            self.stamps.append(stamp)
        if self.config.keeps_bodies:
            stamp["body"] = body.decode()
            stamp["token_ids"] = _token_ids(_name(fields), int(fields["max_tokens"]))
        fault = self.config.faults.get("-".join(str(stamp["request_id"]).split("-")[-2:]))
        self._queue_answer(fd, peer, fields, num_prompt, stamp, fault)

    def _queue_answer(
        self, fd: int, peer: _Peer, fields: dict[str, Any], num_prompt: int, stamp: dict[str, Any], fault: Fault | None
    ) -> None:
        if fault == "half_open":
            return
        if fault == "slow_head":
            self._queue(fd, peer, 0, b"HTTP/1.1 200 OK\r\nContent-Ty")
            return
        if fault == "close_at_once":
            self._close(fd)
            return
        if fault == "garbage":
            self._queue(fd, peer, 0, b"SSH-2.0-OpenSSH_9.2p1\r\n\r\n")
            return
        if fault == "http_500":
            error = {"error": {"message": "engine is dead", "type": "InternalServerError", "code": 500}}
            self._queue(fd, peer, 0, _whole("500 Internal Server Error", json.dumps(error).encode()))
            return
        events = list(_events(fields, num_prompt, self.config, fault))
        if not fields.get("stream"):
            self._queue(fd, peer, 0, self._framed_whole(events[0]), stamp)
        else:
            self._queue_stream(fd, peer, events, stamp)
        peer.closes_after = self.config.framing == "close"
        if fault in {"early_close", "reset"}:
            last = len(peer.out) - 1
            at_ns, data, _ = peer.out[last]
            peer.out[last] = (at_ns, data[: len(data) // 2], stamp)
            peer.closes_after = True
            if fault == "reset":
                peer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._send_due(fd, peer)

    def _framed_whole(self, body: bytes) -> bytes:
        if self.config.framing == "chunked":
            return _stream_head("chunked") + _chunk(body) + b"0\r\n\r\n"
        if self.config.framing == "close":
            return _stream_head("close") + body
        return _whole("200 OK", body)

    def _queue_stream(self, fd: int, peer: _Peer, events: list[bytes], stamp: dict[str, Any]) -> None:
        frame = _chunk if self.config.framing == "chunked" else bytes
        lead = (
            _stream_head(self.config.framing)
            if self.config.framing != "length"
            else _length_head(sum(map(len, events)))
        )
        tail = b"0\r\n\r\n" if self.config.framing == "chunked" else b""
        interval_ns = self.config.token_interval_ns
        if not interval_ns:
            self._queue(fd, peer, 0, lead + b"".join(map(frame, events)) + tail, stamp, send=False)
            return
        start_ns = monotonic_ns()
        num_token_events = len(events) - 2
        for place, event in enumerate(events):
            # Usage and [DONE] follow the last token at once, as the real server's do.
            at_ns = start_ns + interval_ns * (min(place, num_token_events - 1) + 1)
            data = (lead if place == 0 else b"") + frame(event) + (tail if place == len(events) - 1 else b"")
            self._queue(fd, peer, at_ns, data, stamp if place < num_token_events else None, send=False)

    def _queue(
        self, fd: int, peer: _Peer, at_ns: int, data: bytes, stamp: dict[str, Any] | None = None, *, send: bool = True
    ) -> None:
        size = self.config.num_split_bytes
        if size:
            for place, begin in enumerate(range(0, len(data), size)):
                part_ns = (at_ns or monotonic_ns()) + place * 2_000_000
                peer.out.append((part_ns, data[begin : begin + size], stamp if begin == 0 else None))
        else:
            peer.out.append((at_ns, data, stamp))
        if send:
            self._send_due(fd, peer)

    def _send_due(self, fd: int, peer: _Peer) -> None:
        while peer.out:
            at_ns, data, stamp = peer.out[0]
            now_ns = monotonic_ns()
            if at_ns > now_ns:
                heapq.heappush(self.timed, (at_ns, fd, id(peer)))
                return
            del peer.out[0]
            if stamp is not None:
                stamp["chunk_ns"].append(now_ns)
            try:
                peer.sock.sendall(data)
            except OSError:
                self._close(fd)
                return
        peer.is_busy = False
        peer.idle_since_ns = monotonic_ns()
        if peer.closes_after:
            self._close(fd)

    def _send_timed(self) -> None:
        while self.timed and self.timed[0][0] <= monotonic_ns():
            _, fd, identity = heapq.heappop(self.timed)
            peer = self.peers.get(fd)
            if peer is not None and id(peer) == identity:
                self._send_due(fd, peer)

    def _close_idle(self) -> None:
        now_ns = monotonic_ns()
        for fd, peer in list(self.peers.items()):
            if not peer.is_busy and peer.idle_since_ns and now_ns - peer.idle_since_ns > self.config.idle_close_ns:
                self._close(fd)

    def _close(self, fd: int) -> None:
        peer = self.peers.pop(fd, None)
        if peer is not None:
            peer.sock.close()


def _events(fields: dict[str, Any], num_prompt: int, config: NullServerConfig, fault: Fault | None) -> Iterator[bytes]:
    """The whole answer as one JSON body, or as server-sent events."""
    name = _name(fields)
    count = int(fields["max_tokens"]) - (1 if fault == "wrong_length" else 0)
    ids = _token_ids(name, count)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": count,
        "total_tokens": num_prompt + count,
    }
    if config.cached_tokens:
        usage["prompt_tokens_details"] = {"cached_tokens": config.cached_tokens}
    base = {"id": name, "object": "text_completion", "created": 0, "model": fields.get("model", "")}
    sent_usage = None if fault == "no_usage" else usage
    # Everything is said, but not in JSON: what only looks for numbers is content.
    base_end = b"]" if fault == "broken_document" else b""
    if not fields.get("stream"):
        choice = _choice(ids, True, fault)
        yield json.dumps({**base, "choices": [choice], "usage": sent_usage}).encode() + base_end
        return
    step = config.event_tokens
    for begin in range(0, count, step):
        if fault == "error_event" and begin:
            yield b'data: {"error":{"message":"engine is dead","type":"InternalServerError","code":500}}\n\n'
            break
        choice = _choice(ids[begin : begin + step], begin + step >= count, fault)
        yield b"data: " + json.dumps({**base, "choices": [choice]}).encode() + b"\n\n"
    yield b"data: " + json.dumps({**base, "choices": [], "usage": sent_usage}).encode() + base_end + b"\n\n"
    yield b"data: [DONE]\n\n"


def _name(fields: dict[str, Any]) -> str:
    return f"cmpl-{fields.get('request_id', 'none')}"


def _token_ids(name: str, count: int) -> list[int]:
    """Ids that differ from request to request, so that a mix-up between answers shows."""
    seed = sum(name.encode())
    return [1000 + (seed * 31 + place * 7) % 9000 for place in range(count)]


def _choice(ids: list[int], is_last: bool, fault: Fault | None) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": 0, "text": " x" * len(ids), "finish_reason": "length" if is_last else None}
    if fault != "no_token_ids":
        choice["token_ids"] = ids
    return choice


def _stream_head(framing: Framing) -> bytes:
    how = b"Transfer-Encoding: chunked" if framing == "chunked" else b"Connection: close"
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + how + b"\r\n\r\n"


def _length_head(length: int) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: %d\r\n\r\n" % length


def _whole(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class NullServer:
    """The null server in a process of its own, for the life of a ``with`` block. ``stamps()``: what it saw."""

    def __init__(self, config: NullServerConfig | None = None, command: list[str] | None = None) -> None:
        self._config = config or NullServerConfig()
        self._command = command or [sys.executable, "-m", "harness.client.null_server"]
        self.host = "127.0.0.1"
        self.port = 0

    def __enter__(self) -> NullServer:
        self._process = subprocess.Popen(
            [*self._command, json.dumps(asdict(self._config))],
            stdout=subprocess.PIPE,
            # Held open for its life: it ends when this process does, however that happens.
            stdin=subprocess.PIPE,
            # A Ctrl-C in the terminal is the harness's to answer.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_TIMEOUT_S)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.__exit__()
            raise ServerError(
                "the null server did not start", hint="Run `python -m harness.client.null_server` by hand"
            )
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
        """What it saw, by request id, in CLOCK_MONOTONIC ns.

        kernel_ns, received_ns: arrival of the request's head, by the kernel and by the server. chunk_ns: just before
        the send of each event that holds tokens.
        """
        return {stamp["request_id"]: stamp for stamp in self._stamps()}

    def arrivals_ns(self) -> list[int]:
        """When each request's head arrived, by the kernel where it says so; CLOCK_MONOTONIC ns, in order of arrival."""
        return [stamp["kernel_ns"] or stamp["received_ns"] for stamp in self._stamps()]

    def _stamps(self) -> list[dict[str, Any]]:
        # Not in the server's own process, which starts before each run, and for which it would be half of that time.
        import httpx

        try:
            answer = httpx.get(f"http://{self.host}:{self.port}/stamps", trust_env=False)
            return answer.json()["requests"]
        except (httpx.HTTPError, ValueError, KeyError) as error:
            status = self._process.poll()
            ended = f"ended (exit status {status})" if status is not None else "does not answer"
            raise ServerError(
                f"the null server {ended}: {type(error).__name__}",
                hint="Something stopped the process that measures this client; run again",
            ) from error


def main(arguments: list[str]) -> None:
    """Serve on a loopback port, which is printed as one JSON line, until ended."""
    config = NullServerConfig(**(json.loads(arguments[0]) if arguments else {}))
    server = _Server(config)
    with contextlib.suppress(KeyboardInterrupt, BrokenPipeError):
        # Past Python's buffer, which would be flushed, and complain, when nobody listens any more.
        os.write(1, json.dumps({"port": server.listener.getsockname()[1]}).encode() + b"\n")
        server.serve()


if __name__ == "__main__":
    main(sys.argv[1:])
