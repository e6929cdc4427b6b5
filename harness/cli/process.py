"""What the process of a command needs before and after it: streams that take every word, memory, a calm collector."""

from __future__ import annotations

import codecs
import gc
import io
import mmap
import os
import resource
import sys

# Address space that numpy takes with one thread of OpenBLAS and its buffer: 120 MiB, and room for the rest.
_BLAS_BYTES = 144 << 20
# What an ASCII terminal shows instead of the other letters of the tables.
_IN_ASCII = {
    "\u00d7": "x",
    "\u2013": "-",
    "\u2212": "-",
    "\u2020": "+",
    "\u2264": "<=",
    "\u2265": ">=",
    "\u03c4": "tau",
    "\u2192": "->",
}


def prepare_process() -> None:
    """Streams that take every word, and a collector of garbage that leaves a short command alone."""
    _open_closed_streams()
    codecs.register_error("in-ascii", _in_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that knows ASCII alone still gets every word.
            stream.reconfigure(errors="in-ascii")
    # What imports make stays: looking through it for cycles, over and over, takes a tenth of a short command's time.
    gc.set_threshold(500_000)
    # Arrow's own pool keeps what it frees: a long run would hold 60 MB more.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")


def take_blas_memory() -> None:
    """Under a limit of memory, let numpy's BLAS take its buffer while there is room: without, it tries for ever."""
    if resource.getrlimit(resource.RLIMIT_AS)[0] == resource.RLIM_INFINITY:
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    mmap.mmap(-1, _BLAS_BYTES).close()
    import numpy as np

    np.linalg.inv(np.eye(2))


def let_memory_go() -> None:
    """As the process ends, its memory goes as a whole: the interpreter's last search for cycles finds nothing to do.

    Not where DuckDB is loaded: its bindings print every type and function that this search did not free.
    """
    if "duckdb" not in sys.modules:
        gc.freeze()


def _open_closed_streams() -> None:
    """What the shell closed (``>&-``) leads nowhere: else the next file that is opened would take its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or os.fdopen(0, encoding="utf-8", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", encoding="utf-8", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", encoding="utf-8", closefd=False)


def _in_ascii(error: UnicodeError) -> tuple[str, int]:
    """An error handler of encodings: the letter's word in ASCII, or a question mark."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_IN_ASCII.get(letter, "?") for letter in error.object[error.start : error.end]), error.end
