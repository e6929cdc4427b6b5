"""What the host does to a replay: the time slice it grants, its stalls, and the CPU that everything else took.

A separate process of this module marks the stalls, so it loads no large package. Nothing is judged here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import platform
import resource
import select
import struct
import subprocess
import sys
from collections.abc import Collection, Generator
from typing import TYPE_CHECKING, Any

from harness.children import own_command
from harness.clock import NS_PER_MS, NS_PER_US, MonotonicClock, ScaledClock, monotonic_ns
from harness.errors import SpecError

if TYPE_CHECKING:
    import pyarrow as pa

    from harness.measure.records.schema import RowStream

# For single sends and receives. With 0.1 ms, the 99th percentile of lateness on a busy machine fell to a third.
SHORT_SLICE_NS = 100 * NS_PER_US
# The kernel's own bounds.
MAX_SLICE_NS = 100 * NS_PER_MS
# struct sched_attr, first version: size, policy, flags, nice, priority, runtime, deadline, period.
SCHED_ATTR = struct.Struct("IIQiIQQQ")
RUNTIME_FIELD = 5
SCHED_OTHER = 0
# Linux: the limit is 20 less the best nice value. Python has no name for it.
RLIMIT_NICE = 13
PREFERRED_NICE = -15
# (sched_setattr, sched_getattr): the C library has no wrappers for them.
SYSTEM_CALLS = {"x86_64": (314, 315), "aarch64": (274, 275)}

PERIOD_NS = 2 * NS_PER_MS
# Scheduling on a busy machine counts as a stall; timer slack (50 us) and Python (20 us) do not.
THRESHOLD_NS = 2 * NS_PER_MS
MAX_INTERVALS = 100_000
READY_TIMEOUT_S = 10.0
# Long, for a machine that is busy: a run without its stall marks is INVALID by default.
END_TIMEOUT_S = 20.0
MAX_KEPT_INTERVALS = 1_000


class SchedulerSlice:
    """The calling thread's time slice, restored after the ``with`` block. Use it in the thread that made it.

    A short slice starts sooner after a wake-up. From Linux 6.12 on a thread may ask for its own without privilege and
    without taking CPU time from others. Elsewhere nothing happens, and the audit says so.
    """

    def __enter__(self) -> SchedulerSlice:
        before = _get()
        is_fair = before is not None and before[1] == SCHED_OTHER
        self._before = list(before) if before is not None and is_fair else None
        return self

    def __exit__(self, *_exception: object) -> None:
        self.as_before()

    def as_before(self) -> None:
        """Restore the slice that the thread had, which other processes have too: for a burst of sends.

        A process that a send wakes takes this core over at once when its slice is shorter than the sender's, and cuts
        in soon when it is longer than a very short one; at equal slices it waits its turn.
        """
        if self._before is not None:
            _set(self._before)

    def ask(self, slice_ns: int) -> int | None:
        """Ask for a slice; what the kernel granted in ns, None when it granted none: older kernels ignore the field."""
        if self._before is None:
            return None
        asked = list(self._before)
        asked[RUNTIME_FIELD] = min(max(slice_ns, SHORT_SLICE_NS), MAX_SLICE_NS)
        _set(asked)
        after = _get()
        return asked[RUNTIME_FIELD] if after is not None and after[RUNTIME_FIELD] == asked[RUNTIME_FIELD] else None


def _call(which: int, *arguments: object) -> int:
    return ctypes.CDLL(None, use_errno=True).syscall(SYSTEM_CALLS[platform.machine()][which], *arguments)


def _get() -> tuple[int, ...] | None:
    if not sys.platform.startswith("linux") or platform.machine() not in SYSTEM_CALLS:
        return None
    buffer = ctypes.create_string_buffer(SCHED_ATTR.size)
    if _call(1, 0, buffer, SCHED_ATTR.size, 0) != 0:
        return None
    return SCHED_ATTR.unpack(buffer.raw)


def _set(fields: list[int]) -> None:
    fields[0] = SCHED_ATTR.size
    _call(0, 0, ctypes.create_string_buffer(SCHED_ATTR.pack(*fields), SCHED_ATTR.size), 0)


@contextlib.contextmanager
def real_time(is_wanted: bool) -> Generator[bool]:
    """SCHED_RR for the calling thread during the block, where it is wanted and allowed: it runs as soon as it wakes.

    Yields whether it was granted. Threads and processes that it starts meanwhile do not have it.
    """
    if not is_wanted or not can_be_real_time():
        yield False
        return
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    os.sched_setscheduler(
        0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(os.sched_get_priority_min(os.SCHED_RR))
    )
    try:
        yield True
    finally:
        os.sched_setscheduler(0, before, parameters)


def can_be_real_time() -> bool:
    """Whether this process may give its threads SCHED_RR; nothing is left changed."""
    if not hasattr(os, "sched_setscheduler"):
        return False
    before, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(os.sched_get_priority_min(os.SCHED_RR)))
        os.sched_setscheduler(0, before, parameters)
    except OSError:
        return False
    return True


@contextlib.contextmanager
def preferred(is_wanted: bool) -> Generator[int]:
    """A better nice value for the calling thread during the block, where it is wanted and allowed; yields its value.

    The fallback where SCHED_RR is not allowed. Where the kernel groups by session (autogroup), it counts only among the
    threads of one session, and a server that the harness starts has a session of its own.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    best = min(before, best_nice()) if is_wanted else before
    # Of this thread alone: Linux takes 0 for the calling thread.
    if best < before:
        os.setpriority(os.PRIO_PROCESS, 0, best)
    try:
        yield best
    finally:
        if best < before:
            os.setpriority(os.PRIO_PROCESS, 0, before)


def best_nice() -> int:
    """The best nice value that this process may give its threads; its present one where it may not improve it.

    Nothing is left changed.
    """
    before = os.getpriority(os.PRIO_PROCESS, 0)
    soft, _ = resource.getrlimit(RLIMIT_NICE) if sys.platform.startswith("linux") else (0, 0)
    for nice in (PREFERRED_NICE, *([] if soft <= 0 else [20 - soft])):
        if nice >= before:
            continue
        try:
            os.setpriority(os.PRIO_PROCESS, 0, nice)
            os.setpriority(os.PRIO_PROCESS, 0, before)
        except OSError:
            continue
        return nice
    return before


def cores_for_clients(num_processes: int) -> tuple[int, ...]:
    """A core for each client process: the last of those that this process may use.

    Raises SpecError where none would be left for a server.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) <= num_processes:
        raise SpecError(
            f"the machine gives {len(cores)}, and {num_processes} would leave none for a server",
            where="client.own_core",
            hint="Give this process more cores, or leave client.own_core out",
        )
    return tuple(cores[-num_processes:])


@contextlib.contextmanager
def on_cores(cores: Collection[int]) -> Generator[set[int]]:
    """Keep the calling thread, and what it starts during the block, on these cores; empty: where it is.

    Yields an empty set: nobody is busy beside them.
    """
    if not cores:
        yield set()
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield set()
    finally:
        os.sched_setaffinity(0, before)


class RunDelay:
    """How long the thread that made it waited for a core although it could have run. Use it in that thread alone."""

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            self._file = None
        self._total_ns = 0
        self.since_last_ns()

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def since_last_ns(self) -> int | None:
        """The time since the last call (about 3 us); None where the system does not tell."""
        if self._file is None:
            return None
        before_ns, self._total_ns = self._total_ns, int(os.pread(self._file, 64, 0).split()[1])
        return self._total_ns - before_ns


def has_run_delay() -> bool:
    """Whether the system tells how long a thread waited for a core."""
    with contextlib.closing(RunDelay()) as delay:
        return delay.since_last_ns() is not None


class StallMeter:
    """Watches from ``with`` entry to its end; afterwards ``intervals`` are [start_ns, duration_ns] pairs, clock ns."""

    def __init__(self, clock: ScaledClock) -> None:
        self._clock = clock
        self.scale = clock.scale
        self.intervals: list[list[int]] = []
        self.cpu_s = 0.0
        self.is_complete = False

    def __enter__(self) -> StallMeter:
        self._process = subprocess.Popen(
            own_command(f"{__name__}:watch_in_process"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # The harness alone answers Ctrl-C.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        # Wait for the end of its start-up, which would disturb the measurement.
        ready, _, _ = select.select([self._process.stdout], [], [], READY_TIMEOUT_S)
        if ready:
            self._process.stdout.readline()
        return self

    @property
    def pid(self) -> int:
        """Process id of the watching process."""
        return self._process.pid

    def __exit__(self, *_exception: object) -> None:
        try:
            output, _ = self._process.communicate(timeout=END_TIMEOUT_S)
            report = json.loads(output)
        except (subprocess.TimeoutExpired, ValueError):
            # The measurement is kept without stall marks; ``is_complete`` stays False.
            self._process.kill()
            self._process.communicate()
            return
        to_clock = self._clock.from_monotonic_ns
        self.intervals = [[to_clock(start), to_clock(start + late) - to_clock(start)] for start, late in report["late"]]
        self.cpu_s = report["cpu_s"]
        self.is_complete = True


def watch() -> None:
    """Note late wakings until standard input is closed, then print them."""
    clock = MonotonicClock()
    late: list[tuple[int, int]] = []
    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    deadline_ns = monotonic_ns() + PERIOD_NS
    _write_line("ready")
    while not poller.poll(0):
        clock.sleep_until_ns(deadline_ns)
        now_ns = monotonic_ns()
        if now_ns - deadline_ns > THRESHOLD_NS and len(late) < MAX_INTERVALS:
            late.append((deadline_ns, now_ns - deadline_ns))
        deadline_ns = now_ns + PERIOD_NS
    _write_line(json.dumps({"late": late, "cpu_s": _own_cpu_s()}))


def _write_line(line: str) -> None:
    """Write past Python's buffer, so that nothing is left to flush when the harness was killed."""
    left = line.encode() + b"\n"
    with contextlib.suppress(BrokenPipeError):
        while left:
            left = left[os.write(1, left) :]


class CpuMeter:
    """CPU seconds since it was made, by this process and by everything else on the machine."""

    def __init__(self) -> None:
        self._own_s, (self._busy_s, self._steal_s) = _own_cpu_s(), _machine_cpu_s()

    def read(self, children_s: float = 0.0) -> dict[str, float]:
        """CPU seconds of this process, of all others (a local server included), and those the hypervisor took.

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
    # Imported here: the process that watches for stalls does not need it.
    import psutil

    times = psutil.cpu_times()._asdict()
    busy_s = sum(times.get(name, 0.0) for name in ("user", "nice", "system", "irq", "softirq"))
    return busy_s, times.get("steal", 0.0)


def stall_facts(stalls: StallMeter, requests: pa.Table) -> dict[str, Any]:
    """The stalls of a replay and the requests that they touched. Only the longest stalls are kept and compared.

    stall_intervals_ns: [start, duration] in clock ns, in time order. stalled_sends: [session, request] of those that
    were due but not yet sent during a mark. num_stalled_requests: those with a mark anywhere between due and done;
    touching_stall_max_ms: the longest such mark, wall.
    """
    import numpy as np

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

    pauses_ns: [start, duration] in clock ns. Every client can measure it, unlike the lag of stamps.
    """
    due, done = (requests[name].fill_null(-1).to_numpy() for name in ("due_ns", "done_ns"))
    is_sent = requests["sent_ns"].is_valid().to_numpy()
    touching = [
        duration_ns
        for start_ns, duration_ns in pauses_ns
        if (is_sent & (due < start_ns + duration_ns) & (done > start_ns)).any()
    ]
    return {"client_pause_max_ms": max(touching, default=0) / scale / NS_PER_MS}


def watch_in_process() -> None:
    """``watch`` with the same slice as the replay, so that the marks show what would have delayed the replay."""
    with SchedulerSlice() as turns:
        turns.ask(SHORT_SLICE_NS)
        watch()
