"""How fast and in how much memory the log parser reads a realistic log; printed by ``make bench``.

Memory is measured on a log made on the fly, so that it says what the parser keeps. No file, no server.
"""

from __future__ import annotations

import tracemalloc
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.figure import cpu_s
from harness.analysis.logs.parse import ParseCounts, parse_log

CHUNK_LINES = 500
LINES_PER_S_MARK = 200_000


class ParserBench(NamedTuple):
    """lines_per_s of one core's CPU time, by pass; split_per_s: those of a loop that only splits each line, after each
    pass. peak_bytes: most memory the parser held at once.
    """

    lines_per_s: tuple[float, ...]
    split_per_s: tuple[float, ...]
    peak_bytes: int
    lines: int
    events: int


def bench_parser(num_lines: int = 50_000, *, repeats: int = 6, log_format: str = "precise") -> ParserBench:
    """``repeats`` passes over ``num_lines`` lines, generation not counted.

    log_format: "precise" or "default". Memory is measured in a pass of its own: tracing slows the parser down.
    """
    chunks = list(log_chunks(num_lines, log_format))
    parsed, split, counts = list[float](), list[float](), ParseCounts()
    for _ in range(repeats):
        counts = ParseCounts()
        parsed.append(num_lines / cpu_s(lambda counts=counts: deque(parse_log(iter(chunks), counts), maxlen=0)))
        split.append(num_lines / cpu_s(lambda: _split(chunks)))
    tracemalloc.start()
    try:
        for _event in parse_log(log_chunks(num_lines // 10, log_format)):
            pass
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    return ParserBench(tuple(parsed), tuple(split), peak_bytes, counts.lines, counts.events)


def _split(chunks: list[bytes]) -> int:
    """The least that reading each line can be in plain Python: its text, cut at spaces."""
    return sum(len(line.decode().split(" ", 4)) for chunk in chunks for line in chunk.split(b"\n"))


def log_chunks(num_lines: int, log_format: str = "precise") -> Iterator[bytes]:
    """A log in the proportions of a busy run: mostly decode steps, then KV events and access lines."""
    for first in range(0, num_lines, CHUNK_LINES):
        yield b"".join(_line(i, log_format) for i in range(first, min(first + CHUNK_LINES, num_lines)))


def _line(i: int, log_format: str) -> bytes:
    micros = 1_751_364_000_000_000 + 9_137 * i
    message = _message(i)
    if log_format == "precise":
        logger = "vllm_rbln.v1.core.prefix_cache_manager.optimum_prefix_cache_manager"
        return f"{micros // 1_000_000}.{micros % 1_000_000:06d} 4242 DEBUG {logger} {message}\n".encode()
    second = micros // 1_000_000 % 60
    site = "v1/core/.../prefix_cache_manager/optimum_prefix_cache_manager.py:308"
    return f"(EngineCore pid=4242) [vllm-rbln] DEBUG 07-01 10:00:{second:02d} [{site}] {message}\n".encode()


def _message(i: int) -> str:
    kind, slot, request = i % 20, i % 8, f"cmpl-run-{i // 200}-{i % 16}-0-{i * 2654435761 % (1 << 32):08x}"
    if kind < 12:
        return f"[BUCKET] request_nums={i % 8 + 1} padded_batch_size=8"
    if kind < 14:
        blocks = list(range(i % 400, i % 400 + 10))
        return f"[PFX] [ALLOC] REQUEST={request} | OB_COUNT=1 OB=[{slot}] | IB_COUNT=10 IB={blocks}"
    if kind == 14:
        return f"[PFX] [EVICTION] OB={slot} | IB_COUNT=10 | FREE_BLOCKS_AFTER=1 | INACTIVE_MAPPINGS_AFTER=[1, 2]"
    if kind == 15:
        return f"[PFX] [FREE-REQUEST] REQUEST={request} | PREEMPTION=False | OUTER_BLOCKS=[{slot}]"
    if kind == 16:
        return (
            f"Iteration({i}): 0 context requests, 0 context tokens, 6 generation requests, 6 generation tokens, "
            "iteration elapsed time: 0.31 ms"
        )
    return f'127.0.0.1:{40000 + i % 999} - "POST /v1/completions HTTP/1.1" 200 OK'
