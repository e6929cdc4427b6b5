"""Files that a person or a stranger gives: only regular files are opened, and no more is unpacked than a limit."""

from __future__ import annotations

import errno
import gzip
import io
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from harness.errors import SpecError

MAX_UNPACKED_BYTES = 16 << 30
READ_BYTES = 1 << 20


def open_regular(path: Path) -> IO[bytes]:
    """A regular file to read from; OSError for a folder, and for a pipe or a device, which may never end."""
    # Without O_NONBLOCK, opening a pipe waits until somebody writes to it.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        raise OSError(errno.EINVAL, "not a regular file; give a pipe as -", str(path))
    return open(descriptor, "rb")


def open_unpacked(path: Path) -> IO[bytes]:
    """A regular file, unpacked where it is gzip or zstd; reading more than MAX_UNPACKED_BYTES is a SpecError."""
    stream = open_regular(path)
    magic = stream.read(4)
    stream.seek(0)
    unpacked = stream
    if magic.startswith(b"\x1f\x8b"):
        unpacked = cast("IO[bytes]", gzip.GzipFile(fileobj=stream))
    elif magic == b"\x28\xb5\x2f\xfd":
        import pyarrow as pa

        unpacked = cast("IO[bytes]", pa.CompressedInputStream(stream, "zstd"))
    return io.BufferedReader(_Limited(unpacked, stream, str(path)), READ_BYTES)


def too_large(where: str) -> SpecError:
    """The error of a file that holds more than MAX_UNPACKED_BYTES."""
    return SpecError(f"holds more than {MAX_UNPACKED_BYTES} bytes unpacked", where=where, hint="Split it")


@contextmanager
def standard_input_as_file() -> Generator[Path]:
    """All of standard input in a temporary file; more than MAX_UNPACKED_BYTES is a SpecError."""
    with tempfile.TemporaryDirectory(prefix="harness-stdin-") as folder:
        path = Path(folder) / "stdin"
        with open(path, "wb") as file:
            shutil.copyfileobj(_Limited(sys.stdin.buffer, sys.stdin.buffer, "standard input"), file, READ_BYTES)
        yield path


class _Limited(io.RawIOBase):
    """A stream that refuses to give more than MAX_UNPACKED_BYTES. file: closed with it."""

    def __init__(self, stream: IO[bytes], file: IO[bytes], where: str) -> None:
        self._stream = stream
        self._file = file
        self._where = where
        self._num_bytes = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        content = self._stream.read(len(buffer))
        self._num_bytes += len(content)
        if self._num_bytes > MAX_UNPACKED_BYTES:
            raise too_large(self._where)
        memoryview(buffer)[: len(content)] = content
        return len(content)

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()
