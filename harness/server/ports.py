"""Ports of this host: a free one, whether one is free, and who holds it.

Nothing is bound for longer than a look.
"""

from __future__ import annotations

import random
import socket
from contextlib import suppress

import psutil

from harness.errors import ServerError

# Below the range from which Linux draws ports for outgoing connections, so that no client of ours takes one by chance.
FREE_PORT_RANGE = (20_000, 32_000)


def free_port(host: str = "127.0.0.1") -> int:
    """A port of ``host`` that nobody listens on now, drawn at random below the kernel's own range."""
    generator = random.SystemRandom()
    for _ in range(1000):
        port = generator.randrange(*FREE_PORT_RANGE)
        if port_is_free(host, port):
            return port
    raise ServerError(f"no free port in {FREE_PORT_RANGE}", where=host, hint="Close servers that are not needed")


def port_is_free(host: str, port: int) -> bool:
    """Whether a server could bind ``port`` now. Connections in TIME_WAIT do not count, as for the server itself."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def require_port(host: str, port: int) -> int:
    """``port`` itself, or any free one for 0. Raises ServerError that names a busy port and its owner."""
    if port == 0:
        return free_port(host)
    if port_is_free(host, port):
        return port
    owner = port_owner(port)
    by = f" by pid {owner[0]} ({owner[1]})" if owner else ""
    raise ServerError(
        f"port {port} is in use{by}", where=f"{host}:{port}", hint="End that process, or set port = 0 for any free port"
    )


def port_owner(port: int) -> tuple[int, str] | None:
    """(pid, command) of the process that listens on ``port``; None when the kernel does not tell."""
    for connection in psutil.net_connections("tcp"):
        is_listener = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
        if is_listener and connection.pid is not None:
            with suppress(psutil.Error):
                return connection.pid, psutil.Process(connection.pid).name()
    return None


def url_host(host: str) -> str:
    """``host`` as it stands in a URL: an IPv6 address gets brackets."""
    return f"[{host}]" if ":" in host else host
