"""Provenance of a run: code, packages, machine, clocks and command, as plain JSON.

Facts that cannot be read are absent, never guessed. The environment is not recorded, so no secret can be.
"""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from harness.clock import realtime_minus_monotonic_ns, utc_now
from harness.model.spec.changes import recorded_command
from harness.processes import num_cores

SOURCE_ROOT = Path(__file__).resolve().parents[3]
# Packages that can change a figure: the harness's libraries, and the serving stack where it is installed.
PACKAGES = (
    "rbln-harness",
    "numpy",
    "numba",
    "pyarrow",
    "duckdb",
    "pydantic",
    "httpx",
    "aiohttp",
    "httptools",
    "prometheus-client",
    "vllm",
    "vllm-rbln",
    "optimum-rbln",
    "rebel-compiler",
    "torch",
    "transformers",
)
COMMAND_TIMEOUT_S = 10.0
CLOCK_SOURCE = "/sys/devices/system/clocksource/clocksource0/current_clocksource"


def capture(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Code, machine, clocks and command at this moment.

    argv: default this process's. The program is named without its folder, which is private and changes nothing.
    """
    program, *arguments = sys.argv if argv is None else argv
    return {
        "captured_at_utc": utc_now().isoformat(timespec="seconds"),
        "argv": [Path(program).name, *recorded_command(arguments)],
        "python": {
            "version": platform.python_version(),
            "implementation": platform.python_implementation(),
            "compiler": platform.python_compiler(),
        },
        **deepcopy(_code_facts()),
        "host": host_facts(),
        "clock": clock_facts(),
    }


@lru_cache(maxsize=1)
def _code_facts() -> dict[str, Any]:
    """The code that this process loaded. Read once: a file that changes later is not what runs."""
    return {"packages": package_versions(), "source": source_facts()}


def package_versions(names: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Installed versions; a package that is not installed is absent."""
    versions: dict[str, str] = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def source_facts(root: Path = SOURCE_ROOT) -> dict[str, Any]:
    """A hash of the source files; with commit, branch and changes where ``root`` is a git checkout."""
    facts: dict[str, Any] = {"sha256": source_sha256(root / "harness")}
    top = _git(root, "rev-parse", "--show-toplevel")
    # An installed copy may lie inside another project's repository.
    if top is None or Path(top).resolve() != root.resolve():
        return facts
    status = _git(root, "status", "--porcelain")
    facts["git_commit"] = _git(root, "rev-parse", "HEAD")
    facts["git_branch"] = _git(root, "rev-parse", "--abbrev-ref", "HEAD")
    facts["git_is_dirty"] = None if status is None else bool(status)
    facts["git_changed"] = [line[3:] for line in (status or "").splitlines()][:50]
    return facts


def source_sha256(package: Path) -> str:
    """SHA-256 over the relative names and contents of all Python files below ``package``, sorted by name."""
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def host_facts() -> dict[str, Any]:
    """The machine: kernel, processor, memory, and settings that change its speed."""
    facts: dict[str, Any] = {
        "hostname": platform.node(),
        "kernel": f"{platform.system()} {platform.release()}",
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "cpu_usable": num_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average_1min": round(os.getloadavg()[0], 2),
    }
    optional = {
        "os": _field("/etc/os-release", "PRETTY_NAME", "="),
        "cpu_model": _field("/proc/cpuinfo", "model name", ":"),
        "cpu_governor": _governors(),
        "cgroup_cpu_max": read_line("/sys/fs/cgroup/cpu.max"),
    }
    return facts | {key: value for key, value in optional.items() if value is not None}


def clock_facts() -> dict[str, Any]:
    """Facts about the clocks, in ns; runs with the same boot_id share the zero of the monotonic clock."""
    facts: dict[str, Any] = {
        "monotonic_resolution_ns": round(time.clock_getres(time.CLOCK_MONOTONIC) * 1e9),
        "realtime_minus_monotonic_ns": realtime_minus_monotonic_ns(),
        "clock_source": clock_source(),
        "boot_id": read_line("/proc/sys/kernel/random/boot_id"),
    }
    return {key: value for key, value in facts.items() if value is not None}


def clock_source() -> str | None:
    """The kernel's clock source: tsc is fast, hpet and acpi_pm cost microseconds a read."""
    return read_line(CLOCK_SOURCE)


def read_line(path: str) -> str | None:
    """The first line of a small file, or None when it is absent, unreadable or empty."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return lines[0].strip() if lines else None


def _field(path: str, key: str, separator: str) -> str | None:
    """The value of the first ``key<separator>value`` line."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, value = line.partition(separator)
        if name.strip() == key:
            return value.strip().strip('"')
    return None


def _governors() -> str | None:
    """The scaling governors of all cores, as one word when they agree."""
    paths = Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cpufreq/scaling_governor")
    governors = {line for path in paths if (line := read_line(str(path)))}
    return ",".join(sorted(governors)) or None


def _git(root: Path, *arguments: str) -> str | None:
    # Without this variable, status may take the index lock during somebody's commit.
    return output_of("git", "-C", str(root), *arguments, variables={"GIT_OPTIONAL_LOCKS": "0"})


def output_of(*command: str, variables: Mapping[str, str] | None = None) -> str | None:
    """What a command prints, without the last newline; None when it is absent, fails or takes too long."""
    try:
        done = subprocess.run(
            command,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=COMMAND_TIMEOUT_S,
            env={**os.environ, **(variables or {})},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace").rstrip("\n")
