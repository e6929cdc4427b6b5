"""A run that is being written, at a glance: what its log and its scrapes say so far, read from their ends.

Figures for waiting people and for no record; a run that is not there yet shows nothing. Nothing here talks to a
server.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from harness.analysis.logs.parse import parse_log
from harness.clock import NS_PER_S
from harness.inputs import open_regular
from harness.measure.records import layout
from harness.stacks.rbln.rules.log_grammar import BucketEvent

# Enough for some hundred lines of a log, and for several scrapes.
TAIL_BYTES = 1 << 16
SCRAPE_TAIL_BYTES = 1 << 18
# What the client's own process notes beside each scrape.
REARRIVAL_P99_MS, START_SPREAD_MS = "rearrival_p99_ms", "start_spread_ms"
# What only a server that stands in for a device is started with.
STAND_INS = {layout.SERVER_CONFIG: "emulated", layout.TWIN_SETTINGS: "on the twin"}


@dataclass(frozen=True, slots=True)
class Glance:
    """What is known of a running run. num_seqs, bucket: of its latest decode step; None: not seen.

    num_finished, num_running, num_waiting: requests, as the server counts them. tokens_per_s: generated between the
    latest two scrapes, per second of the run's clock. rearrival_p99_ms, start_spread_ms: how late the client was so
    far, wall ms, of the requests that have finished. stand_in: what stands in for a device; "": nothing.
    """

    num_seqs: int | None = None
    bucket: int | None = None
    num_finished: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    tokens_per_s: float | None = None
    rearrival_p99_ms: float | None = None
    start_spread_ms: float | None = None
    stand_in: str = ""

    def in_words(self) -> str:
        """One line: what is waited for, n and bucket, rate, and how late the client was so far."""
        parts = [f"{self.num_running} run"] + ([f"{self.num_waiting} wait for a slot"] if self.num_waiting else [])
        if self.num_running is None:
            parts = ["the server is starting"]
        elif not self.num_running and not self.num_waiting:
            parts = ["sessions wait for tools" if self.num_finished else "no request has begun"]
        if self.num_running and self.num_seqs is not None:
            parts.append(f"{self.num_seqs} in bucket {self.bucket}")
        if self.tokens_per_s is not None:
            parts.append(f"{self.tokens_per_s:,.0f} tokens/s")
        if self.rearrival_p99_ms is not None:
            parts.append(f"late p99 {_short(self.rearrival_p99_ms)}")
        elif self.start_spread_ms is not None:
            parts.append(f"start spread {_short(self.start_spread_ms)}")
        return ", ".join(parts)


def _short(ms: float) -> str:
    return f"{ms:.3g} ms" if ms >= 0.1 else f"{ms * 1000:.2g} us"


def glance(folder: Path) -> Glance:
    """What lies in the folder of a run that is being written; empty where nothing is readable yet."""
    step = None
    for event in parse_log([_tail(folder / layout.SERVER_LOG, TAIL_BYTES)]):
        step = event if isinstance(event, BucketEvent) else step
    lines = _tail(folder / layout.SCRAPES, SCRAPE_TAIL_BYTES).splitlines()
    scrapes = [scrape for line in lines if (scrape := _scrape(line)) is not None]
    n, b = (None, None) if step is None else (step.num_seqs, step.bucket)
    stand_in = next((words for name, words in STAND_INS.items() if (folder / name).is_file()), "")
    if not scrapes:
        return Glance(n, b, stand_in=stand_in)
    (_, now, late), rate = scrapes[-1], None
    if len(scrapes) > 1 and (passed_ns := scrapes[-1][0] - scrapes[-2][0]) > 0:
        rate = (now["generation_tokens_total"] - scrapes[-2][1]["generation_tokens_total"]) * NS_PER_S / passed_ns
    return Glance(
        n,
        b,
        int(now["request_success_total"]),
        int(now["num_requests_running"]),
        int(now["num_requests_waiting"]),
        rate,
        late.get(REARRIVAL_P99_MS),
        late.get(START_SPREAD_MS),
        stand_in,
    )


_NAMES: tuple[str, ...] = (
    "generation_tokens_total",
    "request_success_total",
    "num_requests_running",
    "num_requests_waiting",
)


def _scrape(line: bytes) -> tuple[int, dict[str, float], dict[str, float]] | None:
    """(instant, sums by name, lateness so far) of one scrape; None for a line that was cut or has no answer."""
    try:
        row = json.loads(line)
        sums = dict.fromkeys(_NAMES, 0.0)
        for sample in str(row["body"]).splitlines():
            name, _, value = sample.rpartition(" ")
            name = name.partition("{")[0].removeprefix("vllm:")
            if name in sums:
                sums[name] += float(value)
        late = {name: float(row[name]) for name in (REARRIVAL_P99_MS, START_SPREAD_MS) if name in row}
        is_readable = row["body"] and all(map(math.isfinite, (*sums.values(), *late.values())))
        return (int(row["at_ns"]), sums, late) if is_readable else None
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _tail(path: Path, num_bytes: int) -> bytes:
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - num_bytes))
            return file.read(num_bytes)
    except OSError:
        return b""
