"""Bytes to a file descriptor from a thread of their own, so that a slow reader never delays a step.

Bytes keep their order; ``close`` writes what is left. Nothing is dropped: the queue grows while the reader sleeps.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading


class BackgroundWriter:
    """Appends bytes to ``fd`` in order, from one daemon thread; writing never blocks the caller."""

    def __init__(self, fd: int, *, name: str) -> None:
        self._fd = fd
        self._chunks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def write(self, chunk: bytes) -> None:
        """Queue ``chunk``; it is written within milliseconds."""
        self._chunks.put(chunk)

    def close(self, timeout_s: float = 5.0) -> None:
        """Write what is queued and stop; a reader that takes nothing for ``timeout_s`` loses the rest."""
        self._chunks.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        is_last = False
        while not is_last:
            chunks = [self._chunks.get()]
            while not self._chunks.empty():
                chunks.append(self._chunks.get())
            is_last = None in chunks
            pending = memoryview(b"".join(chunk for chunk in chunks if chunk is not None))
            # A reader that went away (EPIPE) must not kill the server, as it would not kill vLLM.
            with contextlib.suppress(OSError):
                while pending:
                    pending = pending[os.write(self._fd, pending) :]
