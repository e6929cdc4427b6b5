"""TLS before a plain server of the tests, with a certificate of their own, and what it may do otherwise than well."""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import tempfile
from collections.abc import Generator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple, Protocol

from tests.support.raw_server import Listener

RECEIVE_BYTES = 65_536


class Served(Protocol):
    """A server that is there: one of tests/support, or a null server."""

    @property
    def host(self) -> str: ...

    @property
    def port(self) -> int: ...


@cache
def certificate(name: str = "IP:127.0.0.1,DNS:localhost") -> Path:
    """A certificate for a host. The file ``key_and.pem`` beside it has its key too, for a server."""
    if shutil.which("openssl") is None:
        import pytest  # benchmarks need no more than the run-time libraries

        pytest.skip("no openssl to make a certificate")
    folder = tempfile.mkdtemp(prefix="harness-certificate-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    key, made = Path(folder) / "key_and.pem", Path(folder) / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=a test", "-addext", f"subjectAltName={name}"),
            *("-keyout", str(key), "-out", str(made)),
        ],
        check=True,
        capture_output=True,
    )
    key.write_text(key.read_text() + made.read_text())
    return made


def key_and_certificate(made: Path) -> Path:
    return made.with_name("key_and.pem")


@contextlib.contextmanager
def trusting(made: Path) -> Generator[None]:
    """This process, and those that it starts, trust a certificate."""
    before = os.environ.get("SSL_CERT_FILE")
    os.environ["SSL_CERT_FILE"] = str(made)
    try:
        yield
    finally:
        del os.environ["SSL_CERT_FILE"]
        if before is not None:
            os.environ["SSL_CERT_FILE"] = before


@dataclass
class TlsFront(Listener):
    """Speaks TLS before a plain server.

    piece_bytes: encrypted bytes are sent in such pieces; 0: as they are. ends: says the end of TLS before it closes.
    closes: closes the socket then. behind: "end" or "garbage", with the first of an answer in one send; it closes then.
    is_mute, leaves: it answers no handshake, and stays or not. newest: of the versions
    that it speaks.
    """

    server: Served
    made: Path
    piece_bytes: int = 0
    ends: bool = True
    closes: bool = True
    behind: str = ""
    is_mute: bool = False
    leaves: bool = False
    newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3

    def __enter__(self) -> TlsFront:
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(key_and_certificate(self.made))
        self._context.maximum_version = self.newest
        self._context.set_alpn_protocols(["http/1.1"])
        # What each client asked for: the name of the host, and the protocol that was agreed on.
        self.names: list[str | None] = []
        self.protocols: list[str | None] = []
        self._context.sni_callback = lambda _tls, name, _context: self.names.append(name)
        return super().__enter__()

    def _serve(self, peer: socket.socket) -> None:
        if self.is_mute:
            return
        if self.leaves:
            with peer:
                peer.recv(RECEIVE_BYTES)
            return
        with (
            # The test may end meanwhile, and close both.
            contextlib.suppress(OSError, ValueError),
            peer,
            socket.create_connection((self.server.host, self.server.port)) as inner,
        ):
            inner.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._relay(_Side(self._context, peer, self.piece_bytes), inner)
        self._open.discard(peer)

    def _relay(self, outer: _Side, inner: socket.socket) -> None:
        outer.shake_hands()
        self.protocols.append(outer.tls.selected_alpn_protocol())
        while True:
            ready, _, _ = select.select([outer.sock, inner], [], [], 0 if outer.has_more else None)
            if outer.sock in ready or outer.has_more:
                request = outer.receive()
                if request is None:
                    return
                inner.sendall(request)
            if inner in ready:
                try:
                    answer = inner.recv(RECEIVE_BYTES)
                except ConnectionResetError:
                    outer.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return
                if not answer:
                    if self.ends:
                        outer.end()
                    if self.closes or outer.receive() is None:
                        return
                outer.send(answer, self.behind)
                if self.behind:
                    outer.read_to_end()
                    return


class _Side:
    """The server's side of a TLS connection."""

    def __init__(self, context: ssl.SSLContext, sock: socket.socket, piece_bytes: int) -> None:
        self.sock, self._piece_bytes = sock, piece_bytes
        self._came, self._goes = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._came, self._goes, server_side=True)

    def shake_hands(self) -> None:
        while True:
            try:
                self.tls.do_handshake()
            except ssl.SSLWantReadError:
                self._flush()
                if not self._wait():
                    raise ConnectionAbortedError from None
            else:
                self._flush()
                return

    @property
    def has_more(self) -> bool:
        """Whether more came with the handshake."""
        return bool(self._came.pending)

    def receive(self) -> bytes | None:
        """What came; None at the end."""
        if not self.has_more and not self._wait():
            return None
        parts: list[bytes] = []
        with contextlib.suppress(ssl.SSLWantReadError):
            while part := self.tls.read(RECEIVE_BYTES):
                parts.append(part)
            return b"".join(parts) or None
        return b"".join(parts)

    def read_to_end(self) -> None:
        """Closed with a part of the request unread, the socket would reset the connection."""
        self.sock.shutdown(socket.SHUT_WR)
        while self.sock.recv(RECEIVE_BYTES):
            pass

    def send(self, data: bytes, behind: str = "") -> None:
        while data:
            data = data[self.tls.write(data) :]
        if behind == "end":
            with contextlib.suppress(ssl.SSLWantReadError):
                self.tls.unwrap()
        self._flush(b"no record of TLS" if behind == "garbage" else b"")

    def end(self) -> None:
        with contextlib.suppress(ssl.SSLWantReadError):
            self.tls.unwrap()
        self._flush()

    def _wait(self) -> bool:
        data = self.sock.recv(RECEIVE_BYTES)
        self._came.write(data)
        return bool(data)

    def _flush(self, behind: bytes = b"") -> None:
        data = self._goes.read() + behind
        size = self._piece_bytes or max(1, len(data))
        for place in range(0, len(data), size):
            self.sock.sendall(data[place : place + size])


@contextlib.contextmanager
def over(scheme: str, server: Served) -> Generator[Served]:
    """A plain server as it is ("http"), or behind TLS with a certificate that is trusted ("https")."""
    if scheme == "http":
        yield server
        return
    with trusting(certificate()), TlsFront(server, certificate()) as front:
        yield front


class Front(NamedTuple):
    """Where a process speaks TLS."""

    host: str
    port: int


@contextlib.contextmanager
def tls_process(server: Served) -> Generator[Served]:
    """TLS before a plain server, in a process of its own, with a certificate that is trusted."""
    made = certificate()
    command = [sys.executable, "-m", __name__, server.host, str(server.port), str(made)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process, trusting(made):
        try:
            yield Front(server.host, int(process.stdout.readline()))
        finally:
            process.kill()


if __name__ == "__main__":
    with TlsFront(Front(sys.argv[1], int(sys.argv[2])), Path(sys.argv[3])) as serving:
        print(serving.port, flush=True)
        sys.stdin.read()
