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
from collections.abc import Callable, Iterator
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
from harness.measure.server.provenance import CLOCK_SOURCE, clock_source, output_of, package_versions
from harness.model.spec import load_toml
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
    is not fine, an imperative sentence. meanwhile: a command that works although it is not fine, in words.
    """

    name: str
    ok: bool | None
    found: str
    need: str
    how: str
    meanwhile: str = ""


def run_checks(runs: Path = Path("runs")) -> list[Check]:
    """Checks for every backend. runs: folder of the sealed runs. What each needs: doctor.toml."""
    words, values = (
        load_toml(Path(__file__).with_suffix(".toml")),
        {
            "python": " to ".join(f"{major}.{minor}" for major, minor in PYTHON_RANGE),
            "clock_sources": ", ".join(GOOD_CLOCK_SOURCES),
            "clock_source": CLOCK_SOURCE,
            "ports": " to ".join(map(str, FREE_PORT_RANGE)),
        },
    )
    return [
        Check(name, ok, found, **{key: text.format(**values) for key, text in words[name].items()})
        for name, ok, found in (*_of_installation(), *_of_machine(runs), *_of_replay(), *_of_programs())
    ]


Seen = tuple[str, bool | None, str]
"""The name of a check, ``ok`` and ``found``."""


def _of_installation() -> Iterator[Seen]:
    oldest, newest = PYTHON_RANGE
    libraries = required_libraries()
    missing = sorted(set(libraries) - package_versions(libraries).keys())
    yield "Python", oldest <= sys.version_info[:2] <= newest, platform.python_version()
    yield "libraries", not missing, f"{', '.join(missing)} absent" if missing else f"all {len(libraries)}"


def _of_machine(runs: Path) -> Iterator[Seen]:
    cores, total_bytes = num_cores(), psutil.virtual_memory().total
    yield "processor cores", cores >= 2, str(cores)
    yield "memory", total_bytes >= 2 * GIB * 0.95, f"{total_bytes / GIB:.1f} GiB"
    # At the folder, or at its nearest parent that exists.
    folder = next(parent for parent in (runs.absolute(), *runs.absolute().parents) if parent.is_dir())
    free_bytes, is_writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK)
    found = f"{free_bytes / GIB:.1f} GiB free at {folder}" + ("" if is_writable else ", not writable")
    yield "disk for runs", is_writable and free_bytes >= GIB, found


def _of_replay() -> Iterator[Seen]:
    """What sends on time and knows when a chunk came."""
    timer_problem, source = _problem(lambda: DeadlineTimer().close()), clock_source()
    yield "timerfd", not timer_problem, timer_problem or "works"
    has_stamps, is_run_delay_known = kernel_stamps_arrive(), has_run_delay()
    yield "kernel receive stamps", has_stamps or None, "arrive" if has_stamps else "do not arrive"
    yield "priority of the replay", can_be_real_time() or None, _priority()
    yield "a core for the client", num_cores() > 1 or None, f"{num_cores()} usable cores"
    told = "is told" if is_run_delay_known else "is not told"
    yield "time spent waiting for a core", is_run_delay_known or None, told
    yield "clock source", source in GOOD_CLOCK_SOURCES or None, source or "unknown"


def _of_programs() -> Iterator[Seen]:
    """What servers and records need beside the harness."""
    port_problem, git = _problem(free_port), first_line_of("git", "--version")
    compiler = next((path for name in ("cc", "gcc", "clang") if (path := shutil.which(name))), None)
    yield "port on 127.0.0.1", not port_problem, port_problem or "free"
    yield "git", bool(git) or None, git or "absent"
    yield "C compiler", bool(compiler) or None, compiler or "absent"


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
