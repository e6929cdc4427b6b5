"""Waits for a server that is starting: nobody listens yet, or it, or the proxy before it, says that it is not ready."""

from __future__ import annotations

from collections.abc import Callable

from harness.clock import NS_PER_S, Clock
from harness.measure.client.target import Endpoint
from harness.measure.server.life import HEALTH, MODELS, get_at

# A port that nobody listens on yet, and one whose forwarder (a container's, ssh's) has nobody behind it yet.
NOBODY_YET = ("ConnectionRefusedError", "ConnectionResetError", "Server disconnected")
NOT_READY = (502, 503, 504)
POLL_NS = NS_PER_S


def not_ready(endpoint: Endpoint) -> str:
    """Why a server cannot be measured yet, where waiting may help: "" where it can, or where waiting does not help."""
    for path in (MODELS, HEALTH):
        reply = get_at(endpoint, path)
        if any(sign in reply.error for sign in NOBODY_YET):
            return reply.error
        if reply.status in NOT_READY:
            return f"GET {path} gives status {reply.status}"
    return ""


def wait_until_ready(endpoint: Endpoint, limit_s: float, on_wait: Callable[[str, float], object], clock: Clock) -> None:
    """Ask a server once a second until it is ready, or until ``limit_s`` have passed, which is no error here.

    on_wait: called with why it is not ready, and the seconds so far, after each time that it was asked in vain.
    """
    start_ns = clock.now_ns()
    while limit_s and (why := not_ready(endpoint)):
        waited_ns = clock.now_ns() - start_ns
        if waited_ns >= limit_s * NS_PER_S:
            return
        on_wait(why, waited_ns / NS_PER_S)
        clock.sleep_until_ns(clock.now_ns() + POLL_NS)
