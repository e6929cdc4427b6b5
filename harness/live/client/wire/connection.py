"""One kept-alive connection: a non-blocking socket whose receives the kernel stamps.

It only connects and closes; what goes over it is the compiled loop's business. Next: ``pool`` owns the connections.
"""

from __future__ import annotations

import errno
import os
import socket
from typing import Any

from harness.live.client.kernel_stamps import enable_kernel_stamps

SEND_BUFFER_BYTES = 1 << 20


class Connection:
    """A socket, the session it serves, and the row that waits for it to be connected (-1: none)."""

    __slots__ = ("fd", "is_connected", "pending_row", "session", "sock")

    def __init__(self, family: int, session: int) -> None:
        self.session = session
        self.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.fd = self.sock.fileno()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A prompt of 8,192 ids is 60 kB: with room for it, one call hands the whole request to the kernel.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        enable_kernel_stamps(self.sock)
        self.is_connected = False
        self.pending_row = -1

    def start_connect(self, address: tuple[Any, ...]) -> str:
        """Begin to connect; the error's text when that fails at once."""
        code = self.sock.connect_ex(address)
        return "" if code in {0, errno.EINPROGRESS} else os.strerror(code)

    def finish_connect(self) -> str:
        """Called when writable: the error's text, or empty when connected."""
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.is_connected = code == 0
        return os.strerror(code) if code else ""

    def close(self) -> None:
        """Close the socket."""
        self.sock.close()
