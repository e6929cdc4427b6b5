"""Runs tests as if on other machines: ``python -m tools.any_machine PYTEST_WORDS...``; what a verdict must not hang on.

Each row of ``MACHINES`` is one run of pytest. What this kernel or user does not permit is named in one line and left
out. As a plug-in of pytest it shows each process of the tests the number of cores in ``SEEN_CORES``.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

TEN_YEARS_S = 10 * 365 * 24 * 3600


class Machine(NamedTuple):
    """up_s: what the clocks show at the start. user: its number, in a namespace; it has no name. files: at most open.

    variables: of the environment; HOME is absent where they have none.
    """

    name: str
    up_s: int
    user: int
    files: int
    cores: int
    variables: dict[str, str]


MACHINES = (
    Machine("young", 5, 54321, 256, 64, {"LANG": "C", "LC_ALL": "C", "TZ": "Asia/Kathmandu"}),
    # Nobody can write in /proc, root neither.
    Machine("old", TEN_YEARS_S, 0, 20_000, 2, {"LANG": "tr_TR.UTF-8", "LC_ALL": "tr_TR.UTF-8", "HOME": "/proc"}),
)


def namespaces(machine: Machine) -> list[str]:
    """The words before a command for its user and clocks, without those that are not permitted here."""
    as_user = ["--user", f"--map-user={machine.user}", f"--map-group={machine.user}"]
    up_s = int(float(Path("/proc/uptime").read_text(encoding="ascii").split()[0]))
    offset = str(machine.up_s - up_s)
    with_clocks = ["--time", "--monotonic", offset, "--boottime", offset]
    kept: list[str] = []
    for what, words in (("user", as_user), ("clocks", with_clocks)):
        tried = ["unshare", "--fork", *kept, *words]
        done = subprocess.run([*tried, "true"], capture_output=True, text=True, check=False) if UNSHARE else None
        if done is not None and done.returncode == 0:
            kept += words
        else:
            why = (done.stderr.strip().splitlines() or ["no reason given"])[-1] if done else "there is no unshare"
            print(f"any-machine: {machine.name}: {what} of its own not permitted: {why}", flush=True)
    return ["unshare", "--fork", *kept] if kept else []


UNSHARE = shutil.which("unshare")


def run_on(machine: Machine, words: list[str]) -> int:
    """The exit status of pytest with these words on that machine."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    files = machine.files if hard == resource.RLIM_INFINITY else min(machine.files, hard)
    print(f"== as on another machine: {machine.name}, {machine.up_s:,} s up, user {machine.user}, {files} files")
    inherited = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    with tempfile.TemporaryDirectory(prefix="any-machine-") as folder:
        own = {"TMPDIR": folder, "SEEN_CORES": str(machine.cores)}
        return subprocess.run(
            [*namespaces(machine), sys.executable, "-m", "pytest", "-p", "tools.any_machine", *words],
            env={**inherited, **machine.variables, **own},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard)),
            check=False,
        ).returncode


def pytest_configure() -> None:
    """This process sees so many cores; it runs on those that are there."""
    num_cores = int(os.environ["SEEN_CORES"])
    there, settle = os.sched_getaffinity(0), os.sched_setaffinity
    seen = {0: set(range(num_cores))}

    def keep_on(process: int, cores: object) -> None:
        seen[process] = set(cores)  # type: ignore[call-overload]
        settle(process, seen[process] & there or there)

    os.cpu_count = lambda: num_cores
    os.sched_getaffinity = lambda process: set(seen.get(process, seen[0]))  # type: ignore[assignment]
    os.sched_setaffinity = keep_on  # type: ignore[assignment]


if __name__ == "__main__":
    sys.exit(max(run_on(machine, sys.argv[1:]) for machine in MACHINES))
