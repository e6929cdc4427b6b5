"""What this machine can run, what is missing, and how to get it: one Check per fact.

A check never installs, changes or stores anything.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from harness.clock import NS_PER_MS, DeadlineTimer, MonotonicClock
from harness.errors import ServerError
from harness.measure.client.answer import NO_KERNEL_STAMP
from harness.measure.client.host import best_nice, can_be_real_time, has_run_delay
from harness.measure.client.receive_stamps import ANCILLARY_BYTES, enable_kernel_stamps, kernel_stamp_ns
from harness.measure.server.process import FREE_PORT_RANGE, free_port
from harness.measure.server.provenance import (
    CLOCK_SOURCE,
    clock_source,
    output_of,
    package_versions,
)
from harness.processes import num_cores

GIB = 1 << 30
AUTOGROUP = Path("/proc/sys/kernel/sched_autogroup_enabled")
HARNESS = "rbln-harness"
PYTHON_RANGE = ((3, 10), (3, 13))
GOOD_CLOCK_SOURCES = ("tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page")
# The kernel enables receive stamps shortly after the first socket asks, so the first segments may have none.
STAMP_ATTEMPTS = 50


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
    return [*_of_installation(), *_of_machine(runs), *_of_replay(), *_of_programs()]


def _of_installation() -> list[Check]:
    oldest, newest = PYTHON_RANGE
    libraries = required_libraries()
    missing = sorted(set(libraries) - package_versions(libraries).keys())
    return [
        Check(
            name="Python",
            ok=oldest <= sys.version_info[:2] <= newest,
            found=platform.python_version(),
            need=f"{oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}",
            how="Run make PYTHON=/path/to/python3.12 setup",
        ),
        Check(
            name="libraries",
            ok=not missing,
            found=f"{', '.join(missing)} absent" if missing else f"all {len(libraries)}",
            need="the packages of requirements.lock",
            how="Run make setup",
        ),
    ]


def _of_machine(runs: Path) -> list[Check]:
    cores, total_bytes = num_cores(), psutil.virtual_memory().total
    return [
        Check(
            name="processor cores",
            ok=cores >= 2,
            found=str(cores),
            need="2: one for the server, one for the replay",
            how="Use a machine or container with 2 cores; on one, lateness breaks the limits of a run",
        ),
        Check(
            name="memory",
            ok=total_bytes >= 2 * GIB * 0.95,
            found=f"{total_bytes / GIB:.1f} GiB",
            need="2 GiB for the emulator",
            how="Use a machine with more memory",
        ),
        check_disk(runs),
    ]


def _of_replay() -> list[Check]:
    """What sends on time and knows when a chunk came."""
    timer_problem, source = _problem(lambda: DeadlineTimer().close()), clock_source()
    has_stamps, is_run_delay_known = kernel_stamps_arrive(), has_run_delay()
    return [
        Check(
            name="timerfd",
            ok=not timer_problem,
            found=timer_problem or "works",
            need="deadlines without asyncio's millisecond steps",
            how="Use Linux",
        ),
        Check(
            name="kernel receive stamps",
            ok=has_stamps or None,
            found="arrive" if has_stamps else "do not arrive",
            need="a chunk's arrival apart from the client's own delay",
            how="Use a Linux kernel with SO_TIMESTAMPNS; without it the kernel_ns column stays empty",
        ),
        Check(
            name="priority of the replay",
            ok=can_be_real_time() or None,
            found=_priority(),
            need="reads on time beside a busy server (client.realtime)",
            how="Give this account a limit rtprio of 1 (ulimit -r) or nice of 35 (ulimit -e), or the container "
            "CAP_SYS_NICE",
        ),
        Check(
            name="a core for the client",
            ok=num_cores() > 1 or None,
            found=f"{num_cores()} usable cores",
            need="reads on time beside a busy server (client.own_core)",
            how="Give this account, container or task set a second core",
        ),
        Check(
            name="time spent waiting for a core",
            ok=is_run_delay_known or None,
            found="is told" if is_run_delay_known else "is not told",
            need="how early a chunk can have come that was read late",
            how="Use a Linux kernel with CONFIG_SCHED_INFO; without it the bounds of late reads are wider",
        ),
        Check(
            name="clock source",
            ok=source in GOOD_CLOCK_SOURCES or None,
            found=source or "unknown",
            need=f"one of {', '.join(GOOD_CLOCK_SOURCES)}",
            how=f"Write tsc to {CLOCK_SOURCE} where the machine offers it",
        ),
    ]


def _of_programs() -> list[Check]:
    """What servers and records need beside the harness."""
    port_problem, git = _problem(free_port), first_line_of("git", "--version")
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    return [
        Check(
            name="port on 127.0.0.1",
            ok=not port_problem,
            found=port_problem or "free",
            need=f"a free port from {FREE_PORT_RANGE[0]} to {FREE_PORT_RANGE[1]}",
            how="Close servers that are not needed",
        ),
        Check(
            name="git",
            ok=bool(git) or None,
            found=git or "absent",
            need="the commit in every run's provenance",
            how="Run sudo apt install git",
        ),
        Check(
            name="C compiler",
            ok=bool(compiler) or None,
            found=compiler or "absent",
            need="the real vLLM stack compiles kernels at run time; the emulator does not",
            how="Run sudo apt install build-essential",
        ),
    ]


def _priority() -> str:
    """What this account may do for the thread of the replay."""
    if can_be_real_time():
        return "SCHED_RR is allowed"
    nice = best_nice()
    if nice >= os.getpriority(os.PRIO_PROCESS, 0):
        return "SCHED_RR is not allowed, nor a better nice value"
    with suppress(OSError):
        if AUTOGROUP.read_text().strip() == "1":
            return f"SCHED_RR is not allowed; nice {nice} is, within a session (autogroup)"
    return f"SCHED_RR is not allowed; nice {nice} is"


def required_libraries() -> list[str]:
    """The packages that the harness needs with every Python, as its own metadata names them."""
    try:
        requirements = metadata.requires(HARNESS) or []
    except metadata.PackageNotFoundError:
        return [HARNESS]
    return [re.split(r"[^\w.-]", requirement)[0] for requirement in requirements if ";" not in requirement]


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


def _problem(attempt: Callable[[], object]) -> str:
    """Why ``attempt`` fails on this machine; "" when it works."""
    try:
        attempt()
    except (OSError, AttributeError, ServerError) as error:
        return str(error)
    return ""


def first_line_of(*command: str) -> str | None:
    """The first line a command prints, "" when it prints nothing, None when it is absent or fails."""
    output = output_of(*command)
    return output if output is None else output.partition("\n")[0].strip()


def kernel_stamps_arrive() -> bool:
    """Whether the kernel stamps what a TCP socket receives: tried with single bytes on a loopback connection."""
    clock = MonotonicClock()
    with (
        suppress(OSError),
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname(), timeout=5) as sender,
        listener.accept()[0] as receiver,
    ):
        receiver.settimeout(5)
        enable_kernel_stamps(receiver)
        for _ in range(STAMP_ATTEMPTS):
            sender.sendall(b"x")
            _, ancillary, _, _ = receiver.recvmsg(1, ANCILLARY_BYTES)
            if kernel_stamp_ns(ancillary) != NO_KERNEL_STAMP:
                return True
            # The kernel enables stamping in the background.
            clock.sleep_until_ns(clock.now_ns() + 5 * NS_PER_MS)
    return False
