"""What this machine can run, what is missing, and how to get it: one Check per fact.

A check never installs, changes or stores anything.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from harness.client.kernel_stamps import ANCILLARY_BYTES, SO_TIMESTAMPNS, enable_kernel_stamps
from harness.clock import NS_PER_MS, DeadlineTimer, MonotonicClock
from harness.errors import ServerError
from harness.server.process import FREE_PORT_RANGE, free_port
from harness.server.provenance import clock_source, memory_bytes, usable_cores

GIB = 1 << 30
PYTHON_RANGE = ((3, 10), (3, 14))
LIBRARIES = (
    "numpy",
    "numba",
    "pyarrow",
    "duckdb",
    "pydantic",
    "httpx",
    "aiohttp",
    "httptools",
    "psutil",
    "tomli-w",
    "unidiff",
    "prometheus-client",
    "jinja2",
    "matplotlib",
    "rich",
    "typer",
)
GOOD_CLOCK_SOURCES = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
# The kernel enables receive stamps shortly after the first socket asks, so the first segments may have none.
STAMP_ATTEMPTS = 50
COMMAND_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the doctor: what was found, and what is needed.

    ok: True when fine, False when a run would fail or mislead, None when optional and absent. how: what to do when it
    is not fine, an imperative sentence.
    """

    name: str
    ok: bool | None
    found: str
    need: str
    how: str


def run_checks(runs: Path = Path("runs")) -> list[Check]:
    """Checks for every backend. runs: folder of the sealed runs."""
    return [
        check_python(),
        check_libraries(),
        check_cores(),
        check_memory(),
        check_disk(runs),
        check_timerfd(),
        check_kernel_stamps(),
        check_clock_source(),
        check_ports(),
        check_git(),
        check_c_compiler(),
    ]


def check_python() -> Check:
    oldest, newest = PYTHON_RANGE
    return Check(
        name="Python",
        ok=oldest <= sys.version_info[:2] <= newest,
        found=platform.python_version(),
        need=f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}",
        how="Run make PYTHON=/path/to/python3.12 setup",
    )


def check_libraries() -> Check:
    missing = [name for name in LIBRARIES if version_of(name) is None]
    return Check(
        name="libraries",
        ok=not missing,
        found=f"{', '.join(missing)} absent" if missing else f"all {len(LIBRARIES)}",
        need="the packages of requirements.lock",
        how="Run make setup",
    )


def check_cores() -> Check:
    cores = usable_cores()
    return Check(
        name="processor cores",
        ok=cores >= 2,
        found=str(cores),
        need="2: one for the server, one for the replay",
        how="Use a machine or container with 2 cores; on one, lateness breaks the limits of a run",
    )


def check_memory() -> Check:
    total_bytes = memory_bytes()
    return Check(
        name="memory",
        ok=None if total_bytes is None else total_bytes >= 2 * GIB * 0.95,
        found="unknown" if total_bytes is None else f"{total_bytes / GIB:.1f} GiB",
        need="2 GiB for the emulator",
        how="Use a machine with more memory",
    )


def check_disk(runs: Path) -> Check:
    """Free space and write access at the folder of runs, or at its nearest parent that exists."""
    folder = next(parent for parent in (runs.absolute(), *runs.absolute().parents) if parent.is_dir())
    free_bytes = shutil.disk_usage(folder).free
    is_writable = os.access(folder, os.W_OK)
    return Check(
        name="disk for runs",
        ok=is_writable and free_bytes >= GIB,
        found=f"{free_bytes / GIB:.1f} GiB free at {folder}" + ("" if is_writable else ", not writable"),
        need="1 GiB, writable",
        how="Choose another folder with --runs, or free some space",
    )


def check_timerfd() -> Check:
    try:
        DeadlineTimer().close()
    except (OSError, AttributeError) as error:
        reason = str(error)
    else:
        reason = ""
    return Check(
        name="timerfd",
        ok=not reason,
        found=reason or "works",
        need="deadlines without asyncio's millisecond steps",
        how='Use Linux, or set client name = "aiohttp"',
    )


def check_kernel_stamps() -> Check:
    """Whether the kernel stamps what a TCP socket receives, tried on a loopback connection."""
    try:
        works = kernel_stamps_arrive()
    except OSError:
        works = False
    return Check(
        name="kernel receive stamps",
        ok=works or None,
        found="arrive" if works else "do not arrive",
        need="a chunk's arrival apart from the client's own delay",
        how="Use a Linux kernel with SO_TIMESTAMPNS; without it the kernel_ns column stays empty",
    )


def check_clock_source() -> Check:
    source = clock_source()
    return Check(
        name="clock source",
        ok=True if source in GOOD_CLOCK_SOURCES else None,
        found=source or "unknown",
        need=f"one of {', '.join(GOOD_CLOCK_SOURCES)}",
        how="Write tsc to /sys/devices/system/clocksource/clocksource0/current_clocksource where the machine offers it",
    )


def check_ports() -> Check:
    try:
        found, ok = f"{free_port()} is free", True
    except ServerError as error:
        found, ok = str(error), False
    return Check(
        name="port on 127.0.0.1",
        ok=ok,
        found=found,
        need=f"a free port from {FREE_PORT_RANGE[0]} to {FREE_PORT_RANGE[1]}",
        how="Close servers that are not needed",
    )


def check_git() -> Check:
    version = first_line_of("git", "--version")
    return Check(
        name="git",
        ok=True if version else None,
        found=version or "absent",
        need="the commit in every run's provenance",
        how="Run sudo apt install git",
    )


def check_c_compiler() -> Check:
    path = next((found for name in ("cc", "gcc", "clang") if (found := shutil.which(name))), None)
    return Check(
        name="C compiler",
        ok=True if path else None,
        found=path or "absent",
        need="the real vLLM stack compiles kernels at run time; the emulator does not",
        how="Run sudo apt install build-essential",
    )


def version_of(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def first_line_of(*command: str) -> str | None:
    """The first line a command prints, "" when it prints nothing, None when it is absent or fails."""
    try:
        done = subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.decode("utf-8", "replace").splitlines()
    return lines[0].strip() if lines else ""


def kernel_stamps_arrive() -> bool:
    """Send single bytes over a loopback connection until one arrives with a kernel stamp."""
    clock = MonotonicClock()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        with socket.create_connection(listener.getsockname(), timeout=5) as sender:
            receiver, _ = listener.accept()
            with receiver:
                receiver.settimeout(5)
                enable_kernel_stamps(receiver)
                for _ in range(STAMP_ATTEMPTS):
                    sender.sendall(b"x")
                    _, ancillary, _, _ = receiver.recvmsg(1, ANCILLARY_BYTES)
                    if any(level == socket.SOL_SOCKET and kind == SO_TIMESTAMPNS for level, kind, _ in ancillary):
                        return True
                    # The kernel enables stamping in the background.
                    clock.sleep_until_ns(clock.now_ns() + 5 * NS_PER_MS)
    return False
