"""A clock for tests: waiting moves it, nothing else does."""

from __future__ import annotations

import asyncio


class VirtualClock:
    """A clock that jumps."""

    scale = 1.0

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def sleep_until_ns(self, deadline_ns: int) -> None:
        self._now_ns = max(self._now_ns, deadline_ns)

    async def wait_until_ns(self, deadline_ns: int) -> None:
        self._now_ns = max(self._now_ns, deadline_ns)
        await asyncio.sleep(0)  # noqa: TID251  # no time passes: other tasks get their turn
