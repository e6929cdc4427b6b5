"""The connections of an epoll replay: one per running session, opened before it is needed, replaced when stale.

Sockets do not block, and the kernel stamps what they receive. A connection that cannot be opened is None with a reason,
not an exception.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

from harness.clock import NS_PER_S, monotonic_ns
from harness.errors import ServerError, SpecError
from harness.measure.client.exchange import Exchange
from harness.measure.client.receive_stamps import ANCILLARY_BYTES, enable_kernel_stamps
from harness.measure.client.rows import ABSENT
from harness.measure.client.target import Endpoint

# For all that comes before a request can be sent, with TLS its handshake too.
CONNECT_TIMEOUT_S = 10
POLL_S = 0.05
RECEIVE_BYTES = 65_536
MAX_CONNECTING = 64
SEND_BUFFER_BYTES = 1 << 20
# Open files of the process besides its sessions: logs, records, libraries, helper processes.
SPARE_FILES = 256
Events: TypeAlias = Iterable[tuple[int, int]]
"""Descriptors with what epoll says of them."""


class Connection:
    """A socket, the session it serves, and the exchange it carries (None: idle).

    unsent: the part of the request that the kernel has not taken yet. has_end: the server said its end, or broke it.
    has_answered: it carried a whole answer before, and the server may close it at any time.
    """

    __slots__ = ("exchange", "fd", "has_answered", "is_connected", "session", "sock", "unsent")
    is_in_handshake = has_end = False

    def __init__(self, family: int, session: int) -> None:
        self.session = session
        self.sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self.fd = self.sock.fileno()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A prompt of 8,192 ids is 60 kB: with room for it, one call hands the whole request to the kernel.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        enable_kernel_stamps(self.sock)
        self.exchange: Exchange | None = None
        self.unsent: memoryview | None = None
        self.is_connected = self.has_answered = False

    def finish_connect(self) -> str:
        """Called at each event until it is connected: the text of an error, else empty."""
        code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        self.is_connected = code == 0
        return os.strerror(code) if code else ""

    def receive(self) -> tuple[bytes, list[tuple[int, int, bytes]], bool]:
        """What came, empty at its end; the kernel's stamp of it; whether more came by then than is shown.

        Raises OSError, BlockingIOError where nothing is to be shown yet.
        """
        data, ancillary, _, _ = self.sock.recvmsg(RECEIVE_BYTES, ANCILLARY_BYTES)
        return data, ancillary, False

    def on_wire(self, request: bytes) -> bytes:
        """The bytes that carry a request, to be sent at once. Raises OSError."""
        return request

    def send(self, data: bytes | memoryview) -> None:
        """Send bytes of the wire; what the kernel does not take stays in ``unsent``. Raises OSError."""
        try:
            taken = self.sock.send(data)
        except BlockingIOError:
            taken = 0
        self.unsent = None if taken == len(data) else memoryview(data)[taken:]

    def end_exchange(self) -> None:
        """Detach the exchange: it is over, or nothing more of it will come."""
        if self.exchange is not None:
            self.exchange.release()
            self.exchange = None

    def describe_progress(self) -> str:
        """How far the exchange came, for the error text of a row."""
        if self.is_in_handshake:
            return "no end of the TLS handshake"
        if self.exchange is None or not self.is_connected:
            return "no connection"
        if self.unsent is not None:
            return "request not fully sent"
        if self.exchange.first_byte_ns == ABSENT:
            return "no byte of the answer"
        return "in the middle of the answer" if self.exchange.has_head else "in the middle of the answer's head"

    def close(self) -> None:
        self.end_exchange()
        self.sock.close()


class ConnectionPool:
    """Open connections by descriptor and by session. Raises ServerError when the host's name cannot be resolved."""

    def __init__(self, epoll: select.epoll, endpoint: Endpoint) -> None:
        self._epoll = epoll
        self._family, self._address = address_of(endpoint)
        self._connection = Connection
        if endpoint.is_https:
            # Imported here: most replays need no TLS.
            from harness.measure.client.tls import tls_connection

            self._connection = tls_connection(endpoint)
        self.by_fd: dict[int, Connection] = {}
        self.of_session: dict[int, Connection] = {}
        self.problem = ""
        # In the order of their deadlines, because all have the same limit.
        self._connecting: deque[tuple[int, Connection]] = deque()
        self._sent: deque[tuple[int, Connection, Exchange]] = deque()

    def open(self, session: int) -> Connection | None:
        """Begin to connect for ``session``; None when that fails at once, and ``problem`` says why."""
        try:
            connection = self._connection(self._family, session)
        except OSError as error:
            self.problem = f"no more sockets ({error.strerror}) at {len(self.by_fd)} connections"
            return None
        code = connection.sock.connect_ex(self._address)
        if code not in {0, errno.EINPROGRESS}:
            self.problem = os.strerror(code)
            connection.sock.close()
            return None
        self.by_fd[connection.fd] = connection
        self.of_session[session] = connection
        self._epoll.register(connection.fd, select.EPOLLOUT)
        self._connecting.append((monotonic_ns() + CONNECT_TIMEOUT_S * NS_PER_S, connection))
        return connection

    def open_all(
        self, sessions: Sequence[int], take_events: Callable[[Events], None], is_stopped: Callable[[], bool]
    ) -> None:
        """Connect for all ``sessions``, a few at a time so that no listen backlog overflows.

        A session whose connection does not open within the limit tries once more when it is due; its row then has the
        reason.
        """
        give_up_ns = monotonic_ns() + CONNECT_TIMEOUT_S * NS_PER_S
        for place in range(0, len(sessions), MAX_CONNECTING):
            for session in sessions[place : place + MAX_CONNECTING]:
                self.open(session)
            while self._is_connecting() and monotonic_ns() < give_up_ns and not is_stopped():
                take_events(self._epoll.poll(POLL_S))

    def _is_connecting(self) -> bool:
        while self._connecting:
            connection = self._connecting[0][1]
            if not connection.is_connected and self.by_fd.get(connection.fd) is connection:
                return True
            self._connecting.popleft()
        return False

    def expect_end(self, connection: Connection, exchange: Exchange, limit_ns: int) -> None:
        """Time a sent exchange out at its limit; all exchanges of a pool have the same time."""
        self._sent.append((limit_ns, connection, exchange))

    def overdue(self, now_ns: int) -> Iterator[tuple[Connection, str]]:
        """Connections that are past a limit, and what is missing."""
        while self._is_connecting() and self._connecting[0][0] <= now_ns:
            connection = self._connecting.popleft()[1]
            yield connection, f"{connection.describe_progress()} within {CONNECT_TIMEOUT_S} s"
        while self._sent:
            limit_ns, connection, exchange = self._sent[0]
            if connection.exchange is exchange and limit_ns > now_ns:
                return
            self._sent.popleft()
            if connection.exchange is exchange:
                yield connection, f"no end within the limit ({connection.describe_progress()})"

    def watch_room(self, connection: Connection, *, is_wanted: bool) -> None:
        """Ask epoll, or no longer ask it, to report when the kernel has room for more of a request."""
        self._epoll.modify(connection.fd, select.EPOLLIN | (select.EPOLLOUT if is_wanted else 0))

    def hand_over(self, connection: Connection, session: int) -> None:
        """Let another session use an idle connection."""
        self._forget_session(connection)
        connection.session = session
        self.of_session[session] = connection

    def _forget_session(self, connection: Connection) -> None:
        if self.of_session.get(connection.session) is connection:
            del self.of_session[connection.session]

    def drop(self, connection: Connection) -> None:
        """Close a connection and forget it; nothing when that was done before."""
        if self.by_fd.get(connection.fd) is not connection:
            return  # another connection has its descriptor by now
        del self.by_fd[connection.fd]
        self._forget_session(connection)
        connection.close()

    def close(self) -> None:
        """Close everything."""
        for connection in list(self.by_fd.values()):
            self.drop(connection)


def address_of(endpoint: Endpoint) -> tuple[int, Any]:
    """(family, address) of the first address of a host that takes a connection, of the first where none does.

    Raises ServerError when the host's name cannot be resolved.
    """
    host, port = endpoint.host, endpoint.port
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ServerError(f"host name cannot be resolved ({error})", where=f"{host}:{port}") from error
    for family, _, _, _, address in addresses if len(addresses) > 1 else ():
        with suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.settimeout(CONNECT_TIMEOUT_S / len(addresses))
            sock.connect(address)
            return family, address
    return addresses[0][0], addresses[0][4]


def allow_sockets(count: int) -> None:
    """Raise this process's limit of open files as far as ``count`` sockets need; SpecError where that is forbidden."""
    needed = count + SPARE_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise SpecError(
            f"{count} sessions at once need {needed} open files, this system allows {hard}",
            where="replay",
            hint="Raise the hard limit of open files, or give the workload a lower concurrency",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
