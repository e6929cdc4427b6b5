"""What the head of a response says about where its body ends; each distinct head is parsed once, by httptools.

Two heads of equal bytes mean the same, so a run parses a handful of them. A head that is in any way unusual is left to
the full parser, piece by piece. Next: ``core`` looks for the end that the head promised.
"""

from __future__ import annotations

import contextlib
from typing import NamedTuple

import httptools

HEAD_END = b"\r\n\r\n"
MAX_KEPT_HEADS = 256
MIN_FINAL_STATUS = 200


class Framing(NamedTuple):
    """How a body ends. length: bytes of the body, 0 when it is chunked."""

    status: int
    length: int
    is_kept_alive: bool


class _HeadReader:
    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value.strip().lower()))

    def on_headers_complete(self) -> None:
        self.is_complete = True


class KnownHeads:
    """The framings of the heads seen so far."""

    def __init__(self) -> None:
        self._framings: dict[bytes, Framing | None] = {}

    @property
    def num_kept(self) -> int:
        """Heads remembered now, at most ``MAX_KEPT_HEADS``."""
        return len(self._framings)

    def framing(self, head: bytes) -> Framing | None:
        """What ``head`` (up to and with its blank line) promises; None when only the full parser can tell.

        Raises httptools.HttpParserError when it is no HTTP.
        """
        try:
            return self._framings[head]
        except KeyError:
            if len(self._framings) >= MAX_KEPT_HEADS:
                self._framings.clear()
            found = self._framings[head] = read_framing(head)
            return found


def read_framing(head: bytes) -> Framing | None:
    """The framing of a final answer with one Content-Length or a plain chunked body; None for everything else."""
    reader = _HeadReader()
    parser = httptools.HttpResponseParser(reader)
    with contextlib.suppress(httptools.HttpParserUpgrade):  # the status says so too
        parser.feed_data(head)
    status = parser.get_status_code()
    if not reader.is_complete or status < MIN_FINAL_STATUS:
        return None
    lengths = [value for name, value in reader.headers if name == b"content-length"]
    encodings = [value for name, value in reader.headers if name == b"transfer-encoding"]
    connection = [value for name, value in reader.headers if name == b"connection"]
    if not head.startswith(b"HTTP/1.1 ") or connection not in ([], [b"keep-alive"], [b"close"]):
        return None
    is_kept_alive = connection != [b"close"]
    if encodings == [b"chunked"] and not lengths:
        return Framing(status, 0, is_kept_alive)
    if not encodings and len(lengths) == 1 and lengths[0].isdigit() and int(lengths[0]):
        return Framing(status, int(lengths[0]), is_kept_alive)
    return None
