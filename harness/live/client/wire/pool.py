"""The connections of an epoll replay: one per running session, opened before they are needed, replaced when stale.

A connection that cannot be had is no exception but None and a reason; nothing is sent or received here. Next:
``replay`` lets the compiled loop send on them.
"""

from __future__ import annotations

import resource
import select
import socket
from collections import deque
from collections.abc import Callable, Sequence

from harness.clock import NS_PER_S, monotonic_ns
from harness.errors import ServerError, SpecError
from harness.live.client.wire.connection import Connection
from harness.live.client.wire.layout import ABSENT, MODE_ABSENT, MODE_CONNECTING, MODE_IDLE
from harness.live.client.wire.tables import SharedTables

CONNECT_TIMEOUT_NS = 10 * NS_PER_S
POLL_S = 0.05
MAX_CONNECTING = 64
# Open files of the process beside its sessions: logs, records, libraries, helper processes.
SPARE_FILES = 256


class ConnectionPool:
    """Open connections by descriptor and by session. Raises ServerError when the host's name cannot be resolved."""

    def __init__(self, epoll: select.epoll, host: str, port: int, tables: SharedTables) -> None:
        """tables: where the compiled loop finds the connections, which this pool keeps up to date."""
        self._epoll = epoll
        self._tables = tables
        try:
            self._family, _, _, _, self._address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        except OSError as error:
            raise ServerError(f"host name cannot be resolved ({error})", where=f"{host}:{port}") from error
        self.by_fd: dict[int, Connection] = {}
        self.of_session: dict[int, Connection] = {}
        self.problem = ""
        # In order of their deadlines, since all have the same limit.
        self._connecting: deque[tuple[int, Connection]] = deque()

    def open(self, session: int) -> Connection | None:
        """Begin to connect for ``session``; None when that fails at once, and ``problem`` says why."""
        try:
            connection = Connection(self._family, session)
        except OSError as error:
            self.problem = f"no more sockets ({error.strerror}) at {len(self.by_fd)} connections"
            return None
        self.problem = connection.start_connect(self._address)
        if self.problem:
            connection.close()
            return None
        self.by_fd[connection.fd] = connection
        self.of_session[session] = connection
        self._tables.make_room_for(connection.fd)
        self._tables.forget(connection.fd)
        self._tables.connections[connection.fd].mode = MODE_CONNECTING
        self._serve(connection, session)
        self._epoll.register(connection.fd, select.EPOLLOUT)
        self._connecting.append((monotonic_ns() + CONNECT_TIMEOUT_NS, connection))
        return connection

    def open_all(
        self, sessions: Sequence[int], on_writable: Callable[[Connection], None], is_stopped: Callable[[], bool]
    ) -> None:
        """Connect for all ``sessions``, a few at a time so that no listen backlog overflows.

        What cannot be had within the limit is left out: its session tries once more when it is due, and then has a row
        that says so.
        """
        give_up_ns = monotonic_ns() + CONNECT_TIMEOUT_NS
        for place in range(0, len(sessions), MAX_CONNECTING):
            for session in sessions[place : place + MAX_CONNECTING]:
                self.open(session)
            while self._is_connecting() and monotonic_ns() < give_up_ns and not is_stopped():
                for fd, _ in self._epoll.poll(POLL_S):
                    if (connection := self.by_fd.get(fd)) is not None:
                        on_writable(connection)

    def _is_connecting(self) -> bool:
        while self._connecting and not self._is_waiting(self._connecting[0][1]):
            self._connecting.popleft()
        return bool(self._connecting)

    def _is_waiting(self, connection: Connection) -> bool:
        return not connection.is_connected and self.by_fd.get(connection.fd) is connection

    def overdue(self, now_ns: int) -> list[Connection]:
        """Connections that did not come about within the limit."""
        late: list[Connection] = []
        while self._is_connecting() and self._connecting[0][0] <= now_ns:
            late.append(self._connecting.popleft()[1])
        return late

    def _serve(self, connection: Connection, session: int) -> None:
        self._tables.connections[connection.fd].session = session
        self._tables.sessions[session].fd = connection.fd

    def is_idle(self, connection: Connection) -> bool:
        """True when it could carry a request."""
        return self._tables.connections[connection.fd].mode == MODE_IDLE

    def become_idle(self, connection: Connection) -> None:
        """Connected: ready for a first request."""
        self._epoll.modify(connection.fd, select.EPOLLIN)
        self._tables.connections[connection.fd].mode = MODE_IDLE

    def watch_room(self, connection: Connection, *, is_wanted: bool) -> None:
        """Ask, or no longer ask, to be told when the kernel has room for more of a request."""
        self._epoll.modify(connection.fd, select.EPOLLIN | (select.EPOLLOUT if is_wanted else 0))

    def hand_over(self, connection: Connection, session: int) -> None:
        """Let another session use an idle connection."""
        self._forget_session(connection)
        connection.session = session
        self.of_session[session] = connection
        self._serve(connection, session)

    def _forget_session(self, connection: Connection) -> None:
        if self.of_session.get(connection.session) is connection:
            del self.of_session[connection.session]
            self._tables.sessions[connection.session].fd = ABSENT

    def drop(self, connection: Connection) -> None:
        """Close a connection and forget it; nothing when that was done before."""
        if self.by_fd.get(connection.fd) is not connection:
            return  # its number may be another's by now
        del self.by_fd[connection.fd]
        self._forget_session(connection)
        self._tables.end_exchange(connection.fd, MODE_ABSENT)
        connection.close()

    def close(self) -> None:
        """Close everything."""
        for connection in list(self.by_fd.values()):
            self.drop(connection)


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
