"""A proxy in a process of its own that stamps what passes: what a client should have seen, beside what it says.

It passes bytes on unchanged. A request has come with its last byte (the kernel's stamp), an event leaves when it is
handed to the kernel. Nothing is parsed but where requests and events begin.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from harness.clock import NS_PER_MS, monotonic_ns, realtime_minus_monotonic_ns
from harness.errors import ServerError
from harness.measure.client.answer import NO_KERNEL_STAMP
from harness.measure.client.host import real_time
from harness.measure.client.receive_stamps import ANCILLARY_BYTES, enable_kernel_stamps, kernel_stamp_ns

RECEIVE_BYTES = 1 << 18
EVENT_START = b"data:"
REQUEST_ID = b"x-request-id:"
END_TIMEOUT_S = 30.0


@dataclass(slots=True)
class Passage:
    """A request as it passed; CLOCK_MONOTONIC ns. event_ns: of each event, its departure to the client."""

    request_id: str = ""
    arrived_ns: int = 0
    event_ns: list[int] = field(default_factory=list[int])
    ended_ns: int = 0
    is_generation: bool = False


class Seen(NamedTuple):
    """A request of a completion that passed. tokens: events with tokens, as the server sends one for each token."""

    request_id: str
    arrived_ns: int
    token_ns: list[int]
    ended_ns: int

    @property
    def ttft_ms(self) -> float:
        return (self.token_ns[0] - self.arrived_ns) / NS_PER_MS

    @property
    def tpot_ms(self) -> float:
        return (self.token_ns[-1] - self.token_ns[0]) / NS_PER_MS / max(1, len(self.token_ns) - 1)

    @property
    def e2e_ms(self) -> float:
        return (self.ended_ns - self.arrived_ns) / NS_PER_MS


class _Pair:
    """The two sockets of one connection, and the request that it carries."""

    def __init__(self, client: socket.socket, upstream: tuple[str, int]) -> None:
        self.client = client
        self.server = socket.create_connection(upstream)
        for each in (client, self.server):
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        enable_kernel_stamps(client)
        self.passage = Passage()
        self.has_answer = False


class Wire:
    """The relay. ``run`` ends when standard input does; ``passages`` are the requests in order of arrival."""

    def __init__(self, listener: socket.socket, upstream: tuple[str, int]) -> None:
        self._listener, self._upstream = listener, upstream
        self._offset_ns = realtime_minus_monotonic_ns()
        self._pairs: dict[int, _Pair] = {}
        self.passages: list[Passage] = []

    def run(self) -> None:
        with select.epoll() as self._epoll:
            self._epoll.register(0, select.EPOLLIN | select.EPOLLHUP)
            self._epoll.register(self._listener, select.EPOLLIN)
            while True:
                for fd, _ in self._epoll.poll():
                    if fd == 0:
                        return
                    if fd == self._listener.fileno():
                        self._accept()
                    elif fd in self._pairs:
                        self._pass_on(self._pairs[fd], fd)

    def _accept(self) -> None:
        pair = _Pair(self._listener.accept()[0], self._upstream)
        for each in (pair.client, pair.server):
            self._pairs[each.fileno()] = pair
            self._epoll.register(each, select.EPOLLIN)

    def _pass_on(self, pair: _Pair, fd: int) -> None:
        try:
            if fd == pair.client.fileno():
                data, ancillary, _, _ = pair.client.recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES)
                self._note_request(pair, data, kernel_stamp_ns(ancillary))
                pair.server.sendall(data)
            else:
                data = pair.server.recv(RECEIVE_BYTES)
                _note_answer(pair, data)
                pair.client.sendall(data)
        except OSError:
            data = b""
        if not data:
            for each in (pair.client, pair.server):
                del self._pairs[each.fileno()]
                each.close()

    def _note_request(self, pair: _Pair, data: bytes, kernel_ns: int) -> None:
        if not data:
            return
        if pair.has_answer or not pair.passage.arrived_ns:
            pair.passage, pair.has_answer = Passage(), False
            self.passages.append(pair.passage)
            head = data.partition(b"\r\n\r\n")[0].lower()
            pair.passage.is_generation = head.startswith(b"post ") and b"completions" in head.partition(b"\r\n")[0]
            pair.passage.request_id = head.partition(REQUEST_ID)[2].partition(b"\r\n")[0].strip().decode("latin-1")
        is_stamped = kernel_ns != NO_KERNEL_STAMP
        pair.passage.arrived_ns = kernel_ns - self._offset_ns if is_stamped else monotonic_ns()


def _note_answer(pair: _Pair, data: bytes) -> None:
    """Stamp the events of a piece of an answer, right before it is sent on."""
    now_ns = monotonic_ns()
    pair.has_answer = True
    # A server hands over whole events.
    pair.passage.event_ns += [now_ns] * data.count(EVENT_START)
    pair.passage.ended_ns = now_ns


@dataclass
class WireProcess:
    """The proxy's process. ``seen`` once it has ended."""

    process: subprocess.Popen[str]
    url: str
    passages: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    def seen(self, num_tokens: int) -> list[Seen]:
        """The completions that passed, in order of arrival. num_tokens: of each answer; later events carry none."""
        return [
            Seen(each["request_id"], each["arrived_ns"], each["event_ns"][:num_tokens], each["ended_ns"])
            for each in self.passages
            if each["is_generation"] and each["event_ns"]
        ]


@contextmanager
def wire(server_url: str) -> Generator[WireProcess]:
    """A proxy before the server at ``server_url``, until the block ends; then ``passages`` are filled."""
    command = [sys.executable, "-m", "benchmarks.wire", server_url]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = process.stdout.readline().strip()
    if not port:
        raise ServerError("the stamping proxy did not start", where=server_url, hint="Run its command by hand")
    known = WireProcess(process, f"http://127.0.0.1:{port}")
    try:
        yield known
        printed, _ = process.communicate(timeout=END_TIMEOUT_S)
        known.passages += json.loads(printed)
    finally:
        process.kill()
        process.wait()


def main(arguments: Sequence[str]) -> None:
    """The proxy's process: prints its port, then at the end what passed."""
    address = urlsplit(arguments[0])
    upstream = (address.hostname or "127.0.0.1", address.port or 80)
    # Beside busy processes a witness that waits for a core would move what it witnesses.
    with socket.create_server(("127.0.0.1", 0)) as listener, real_time(True):
        sys.stdout.write(f"{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        relay = Wire(listener, upstream)
        relay.run()
    fields = ("request_id", "arrived_ns", "event_ns", "ended_ns", "is_generation")
    json.dump([{name: getattr(each, name) for name in fields} for each in relay.passages], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1:])
