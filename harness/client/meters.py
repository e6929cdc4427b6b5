"""What a replay took and what disturbed it: its CPU, the CPU of everything else, requests touched by host stalls.

Facts for the audit; nothing is judged.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from harness.clock import NS_PER_MS
from harness.records.schema import RowStream

if TYPE_CHECKING:
    from harness.client.stall import StallMeter

MAX_KEPT_INTERVALS = 1_000


class CpuMeter:
    """CPU seconds since it was made, by this process and by everything else on the machine."""

    def __init__(self) -> None:
        self._own_s, (self._busy_s, self._steal_s) = _own_cpu_s(), _machine_cpu_s()

    def read(self, children_s: float = 0.0) -> dict[str, float]:
        """``cpu_s``: this process; ``cpu_others_s``: all others, a local server included; ``steal_s``: taken by the
        host.

        children_s: CPU seconds of the harness's own helper processes, which are neither.
        """
        own_s = _own_cpu_s() - self._own_s
        busy_s, steal_s = _machine_cpu_s()
        return {
            "cpu_s": round(own_s, 4),
            "cpu_helpers_s": round(children_s, 4),
            "cpu_others_s": round(max(0.0, busy_s - self._busy_s - own_s - children_s), 4),
            "steal_s": round(steal_s - self._steal_s, 4),
        }


def _own_cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _machine_cpu_s() -> tuple[float, float]:
    """Busy and stolen CPU seconds of the whole machine; zeros where the system does not say."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return 0.0, 0.0
    user, nice, system, _idle, _iowait, irq, softirq, steal = (int(field) for field in fields[:8])
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) * tick_s, steal * tick_s


def stall_facts(stalls: StallMeter, requests: pa.Table) -> dict[str, Any]:
    """What the stall meter marked during a replay, and which requests it touched; only the longest marks are
    kept and compared.

    stall_intervals_ns: [start, duration] in clock ns, in time order. stalled_sends: [session, request] of those that
    were due but not yet sent during a mark. num_stalled_requests: those with a mark anywhere between due and done;
    touching_stall_max_ms: the longest such mark, wall.
    """
    longest = sorted(stalls.intervals, key=lambda interval: -interval[1])[:MAX_KEPT_INTERVALS]
    due, sent, done = (
        np.asarray(requests[name].fill_null(-1).to_numpy(), dtype=np.int64) for name in ("due_ns", "sent_ns", "done_ns")
    )
    is_held = np.zeros(len(due), dtype=np.bool_)
    is_touched = np.zeros(len(due), dtype=np.bool_)
    longest_touching_ns = 0
    for start_ns, duration_ns in longest:
        has_begun = (due < start_ns + duration_ns) & (sent >= 0)
        touches = has_begun & (done > start_ns)
        is_held |= has_begun & (sent > start_ns)
        is_touched |= touches
        if touches.any():
            longest_touching_ns = max(longest_touching_ns, duration_ns)
    session, request = requests["session"].to_numpy(), requests["request"].to_numpy()
    held = np.flatnonzero(is_held)[:MAX_KEPT_INTERVALS]
    return {
        "is_stall_meter_complete": stalls.is_complete,
        "num_stalls": len(stalls.intervals),
        "stall_max_ms": (longest[0][1] if longest else 0) / stalls.scale / NS_PER_MS,
        "touching_stall_max_ms": longest_touching_ns / stalls.scale / NS_PER_MS,
        "stall_intervals_ns": sorted(longest),
        "num_stalled_requests": int(is_touched.sum()),
        "stalled_sends": [[int(session[row]), int(request[row])] for row in held],
        "stall_meter_cpu_s": stalls.cpu_s,
    }


def stamp_facts(chunks: RowStream, scale: float) -> dict[str, Any]:
    """How long received data waited in the kernel for this client: shows a client that was frozen or had no CPU.

    chunks: CHUNKS schema, of a clock of that scale. stamp_lag_max_ms: wall, None where no chunk has a kernel stamp.
    """
    lags_ns: list[int] = []
    for batch in chunks.batches():
        stamped = batch.filter(batch["kernel_ns"].is_valid())
        if stamped.num_rows:
            lags_ns.append(int((stamped["received_ns"].to_numpy() - stamped["kernel_ns"].to_numpy()).max()))
    return {"stamp_lag_max_ms": max(lags_ns) / scale / NS_PER_MS if lags_ns else None}


def pause_facts(pauses_ns: list[list[int]], requests: pa.Table, scale: float) -> dict[str, Any]:
    """The longest time in which a client did nothing while a request was due or under way, ms of wall time.

    pauses_ns: [start, duration] in clock ns. Unlike the lag of stamps, every client can tell it.
    """
    due, done = (requests[name].fill_null(-1).to_numpy() for name in ("due_ns", "done_ns"))
    is_sent = requests["sent_ns"].is_valid().to_numpy()
    touching = [
        duration_ns
        for start_ns, duration_ns in pauses_ns
        if (is_sent & (due < start_ns + duration_ns) & (done > start_ns)).any()
    ]
    return {"client_pause_max_ms": max(touching, default=0) / scale / NS_PER_MS}
