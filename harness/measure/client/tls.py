"""TLS on a connection of the replay loop: records pass through memory, so that reads, sends and stamps stay the loop's.

What is decrypted has the kernel's stamp of the receive that completed its record. A request is encrypted before it is
stamped as sent.
"""

from __future__ import annotations

import errno
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from harness.measure.client.certificates import trusting_context
from harness.measure.client.connection import RECEIVE_BYTES, Connection
from harness.measure.client.target import Endpoint

# RFC 8446, 5.1: one byte of type, two of version, two of length.
RECORD_HEAD_BYTES = 5


def tls_connection(endpoint: Endpoint) -> Callable[[int, int], TlsConnection]:
    """Makes connections (family, session) to a server whose certificate must have the name of its host."""
    return partial(TlsConnection, trusting_context(endpoint.url), endpoint.host)


class TlsConnection(Connection):
    """A connection whose bytes are encrypted. is_connected: its handshake is complete."""

    __slots__ = ("_encrypted", "_error", "_record", "_tls", "_to_send", "has_end", "is_in_handshake")

    def __init__(self, context: ssl.SSLContext, host: str, family: int, session: int) -> None:
        super().__init__(family, session)
        self.is_in_handshake = self.has_end = False
        # Of a record that is broken, or None. It is raised behind what came before.
        self._error: ConnectionAbortedError | None = None
        # The beginning of a record that is not whole yet.
        self._record = b""
        self._encrypted, self._to_send = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._encrypted, self._to_send, server_hostname=host)

    def finish_connect(self) -> str:
        if not self.is_in_handshake:
            if problem := super().finish_connect():
                return problem
            self.is_connected, self.is_in_handshake = False, True
        problem = ""
        try:
            self._shake_hands()
            self.is_connected, self.is_in_handshake = True, False
        except ssl.SSLWantReadError:
            pass
        except OSError as error:
            problem = f"TLS handshake: {_words(error)}"
        self._flush()
        return problem

    def _shake_hands(self) -> None:
        """One step of the handshake. Raises SSLWantReadError until it is complete, another OSError where it fails."""
        with suppress(BlockingIOError):
            if not (data := self.sock.recv(RECEIVE_BYTES)):
                raise ConnectionAbortedError(errno.ECONNABORTED, "closed by the server")
            self._take(data)
        self._tls.do_handshake()

    def receive(self) -> tuple[bytes, list[tuple[int, int, bytes]], bool]:
        data, ancillary, _ = super().receive()
        if not data and not self.has_end:
            raise ConnectionAbortedError(errno.ECONNABORTED, "cut off by the server, TLS has not ended")
        is_cut = self._take(data)
        shown = self._decrypt()
        self._flush()
        if not shown and self._error is not None:
            raise self._error
        if not shown and not self.has_end:
            raise BlockingIOError
        if self.has_end:
            # The server may keep its side open. The kernel then reports an end behind what is shown now.
            with suppress(OSError):
                self.sock.shutdown(socket.SHUT_RD)
        return shown, ancillary, is_cut

    def _take(self, data: bytes) -> bool:
        """Keep encrypted bytes until they are read; whether they end within a record."""
        self._encrypted.write(data)
        data, place = self._record + data, 0
        while len(data) - place >= RECORD_HEAD_BYTES:
            size = RECORD_HEAD_BYTES + int.from_bytes(data[place + 3 : place + RECORD_HEAD_BYTES], "big")
            if len(data) - place < size:
                break
            place += size
        self._record = data[place:]
        return bool(self._record)

    def _decrypt(self) -> bytes:
        """What the whole records hold, to their end or to one that is broken."""
        parts: list[bytes] = []
        try:
            # OpenSSL takes no more from memory than the record that it reads.
            while self._encrypted.pending and not self.has_end:
                parts.append(self._tls.read(RECEIVE_BYTES))
                self.has_end = not parts[-1]
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            self._error, self.has_end = ConnectionAbortedError(errno.EPROTO, f"TLS: {_words(error)}"), True
        return b"".join(parts)

    def on_wire(self, request: bytes) -> bytes:
        left = memoryview(request)
        while left:
            left = left[self._tls.write(left) :]
        return self._waiting()

    def close(self) -> None:
        if self.is_connected and self.unsent is None:
            with suppress(OSError):
                self._tls.unwrap()
            self._flush()
        super().close()

    def _flush(self) -> None:
        """Send what TLS has to say. What breaks the connection meanwhile is met by the next receive."""
        if self._to_send.pending:
            with suppress(OSError):
                self.send(self._waiting())

    def _waiting(self) -> bytes:
        """What is to be sent: what the kernel did not take before, then what is encrypted."""
        unsent, self.unsent = self.unsent or b"", None
        return bytes(unsent) + self._to_send.read()


def _words(error: OSError) -> str:
    """An error without the line of Python's source that it names."""
    return (error.strerror or str(error)).partition(" (_ssl.c")[0]
